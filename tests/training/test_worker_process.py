"""Runs in one worker process give the bits of runs in processes of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from steepen.data import Dataset
from steepen.launch.base import LaunchContext
from steepen.launch.local import LocalLauncher
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore

ARMS = ("untied-grow", "vanilla", "loop-2")


def result(run: RunDirectory) -> tuple[float, float, str]:
    """Validation loss, train loss and a digest of the final weights and optimizer state."""
    record = run.record()
    assert record is not None
    state = max(run.checkpoints.iterdir()) / "state.safetensors"
    return record.validation_loss, record.train_loss, hashlib.sha256(state.read_bytes()).hexdigest()


def test_runs_in_one_process_equal_runs_in_their_own(
    tiny_data: Dataset, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    specs = [make_spec(arm, steps=6) for arm in ARMS]
    found: list[list[tuple[float, float, str]]] = []
    for name, batches in (("shared", [specs]), ("own", [[spec] for spec in specs])):
        store = RunStore(tmp_path / name)
        launcher = LocalLauncher(LaunchContext(tiny_data.directory, store, {"device": "cpu"}), 1)
        for batch in batches:
            assert all(outcome.record is not None for outcome in launcher.launch(batch))
            launcher.close()
        found.append([result(store.run(spec)) for spec in specs])
    assert found[0] == found[1]
    assert len(set(found[0])) == len(ARMS)
