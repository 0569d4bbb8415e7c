"""Runs of experiment trackers as tables: one file per tracker, read through its own library."""
