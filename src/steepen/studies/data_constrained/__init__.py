"""Studies of repeated data."""
