"""Specs to records, wherever they run: content-hashed specs, records, and the store of run directories."""
