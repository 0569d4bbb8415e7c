"""Fixtures for runs."""

from __future__ import annotations

from run_fixtures import spec, store, trainer

__all__ = ["spec", "store", "trainer"]
