"""The tiny data set and specs of runs that take a second."""

from __future__ import annotations

from training_fixtures import make_spec, tiny_data, whole_run

__all__ = ["make_spec", "tiny_data", "whole_run"]
