"""Fixtures every room's tests may use."""

from __future__ import annotations

import os

# One thread per worker, and none that spins while it waits: the suite runs a worker per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton's kernels then run on its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def reference_data() -> Callable[[str], Path]:
    """Finds optional reference data (public measurements, corpora); skips the test where it is absent.

    The suite is complete without it. Point STEEPEN_REFERENCE_DATA at a copy to run these tests too.
    """
    root = Path(os.environ.get("STEEPEN_REFERENCE_DATA", REPOSITORY.parent / "shared"))

    def find(relative: str) -> Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"reference data {relative} is not here (set STEEPEN_REFERENCE_DATA to its folder)")
        return path

    return find
