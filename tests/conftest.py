"""Thread settings and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal

# A shell that starts the suite in the background, or under nohup, lets it ignore these; tests send them.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Without it, tables in a pipe are as wide as their content. The suite's worker processes inherit one that
# readline, which pytest imports, has set.
os.environ.pop("COLUMNS", None)

# One thread per test process, which sleeps while it waits: the suite runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# No test asserts a run time: a busy machine would fail it.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

if not torch.cuda.is_available():  # run Triton kernels on its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Only a power cut shows whether a file was synced, and no test cuts the power. A training run of a quarter of
# a second syncs ten times, and waits for the disk. The processes that tests start and kill do sync.
os.fsync = lambda fd: None

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep every n-th test, from the k-th on, where STEEPEN_TEST_PART is "k/n" (tools/test_on_gpu.py)."""
    first, _, step = os.environ.get("STEEPEN_TEST_PART", "0/1").partition("/")
    items[:] = items[int(first) :: int(step)]


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections, each of which would go through 600,000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def reference_data() -> Callable[[str], Path]:
    """Return a function that finds optional reference data (measurements, corpora), or skips the test.

    Set STEEPEN_REFERENCE_DATA to a directory with the data to run these tests.
    """
    root = Path(os.environ.get("STEEPEN_REFERENCE_DATA", REPOSITORY.parent / "shared"))

    def find(relative: str) -> Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"reference data {relative} not found (set STEEPEN_REFERENCE_DATA to its directory)")
        return path

    return find
