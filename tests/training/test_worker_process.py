"""A run gives the same bits in a process of its own and in one that trained others before."""

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


def test_runs_do_not_depend_on_what_their_process_trained_before(
    tiny_data: Dataset, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """Each order of the arms has a process of its own, in which the first run is alone."""
    specs = [make_spec(arm, steps=6) for arm in ARMS]
    found: list[dict[str, tuple[float, float, str]]] = []
    for name, ordered in (("forwards", specs), ("backwards", specs[::-1])):
        store = RunStore(tmp_path / name)
        launcher = LocalLauncher(LaunchContext(tiny_data.directory, store, {"device": "cpu"}), 1)
        assert all(outcome.record is not None for outcome in launcher.launch(ordered))
        launcher.close()
        found.append({spec.hash: result(store.run(spec)) for spec in specs})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(ARMS)
