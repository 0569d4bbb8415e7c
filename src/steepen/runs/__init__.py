"""Run specs and their hashes, run records, and the store of run directories."""
