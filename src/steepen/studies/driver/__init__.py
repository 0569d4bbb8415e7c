"""Drives a study: runs the specs it yields, sends records back, journals, dry runs."""
