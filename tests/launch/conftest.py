"""Fixtures for runs."""

from __future__ import annotations

from run_fixtures import context, local, spec, store, trainer

__all__ = ["context", "local", "spec", "store", "trainer"]
