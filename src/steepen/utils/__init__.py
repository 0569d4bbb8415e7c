"""Helpers every package may use: files, locks, JSON, numbers, progress."""
