"""Nested models of two ladders, F-tests between them, bootstrap and diagnostics."""
