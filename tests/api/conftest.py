"""Fixtures of runs and of tiny training."""

from __future__ import annotations

from run_fixtures import spec, store, trainer
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "spec", "store", "tiny_data", "trainer"]
