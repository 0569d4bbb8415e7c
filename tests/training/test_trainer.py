"""The trainer: record, checkpoints, training time, rejected runs and failures."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.data import Dataset
from steepen.errors import SteepenError, UsageError
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunLost, RunStore
from steepen.training import checkpoint as checkpoints
from steepen.training import trackers
from steepen.training import trainer as training_run
from steepen.training.metrics import TrainingTimer
from steepen.training.run import train
from steepen.training.stopping import Diverged
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import OutOfMemory

QUIET = TrainOptions(device="cpu", quiet=True, checkpoint_every=3, validate_every=4)
MakeSpec = Callable[..., RunSpec]


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_last_n_checkpoints_are_retained_during_a_run(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    original = checkpoints.prune

    def watched(folder: Path, keep_last: int, keep_every: int | None) -> None:
        original(folder, keep_last, keep_every)
        seen.append([c.step for c in checkpoints.list_checkpoints(folder)])

    monkeypatch.setattr(checkpoints, "prune", watched)
    options = replace(QUIET, checkpoint_every=2, keep_last=3)
    train(make_spec("vanilla", steps=10), tiny_data, RunStore(tmp_path), options)
    assert seen == [[2], [2, 4], [2, 4, 6], [4, 6, 8], [6, 8, 10], [10]]


def test_training_time_counts_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("steepen.training.metrics.time.perf_counter", lambda: now[0])
    clock = TrainingTimer(torch.device("cpu"), 5.0)
    clock.start()
    now[0] = 2.0
    assert clock.lap() == 2.0
    now[0] = 3.0
    clock.pause()
    now[0] = 100.0  # validation, a checkpoint
    clock.start()
    now[0] = 104.0
    clock.pause()
    assert clock.seconds == 5.0 + 3.0 + 4.0


def test_nan_weights_are_never_saved(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec("vanilla"), RunStore(tmp_path)
    original, count = Optimizer.step, 0

    def ruinous(self: Optimizer, factor: float, step: int | None = None) -> torch.Tensor:
        nonlocal count
        norm = original(self, factor, step)
        count += 1
        if count == 6:
            self.parameters["embedding"].data.fill_(float("inf"))
        return norm

    monkeypatch.setattr(Optimizer, "step", ruinous)
    with pytest.raises(Diverged, match=r"weights.*00000003"):
        train(spec, tiny_data, store, QUIET)
    assert [c.step for c in checkpoints.list_checkpoints(store.run(spec).checkpoints)] == [3]


def test_wait_returns_the_record_of_another_process(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make_spec("vanilla", steps=3), RunStore(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        with store.run(spec).lock():
            second = pool.submit(train, spec, tiny_data, store, replace(QUIET, wait=True))
            time.sleep(0.3)
            assert not second.done()
        assert second.result(timeout=60).tokens == 768


def test_finished_spec_is_never_trained_twice(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec("vanilla", steps=3), RunStore(tmp_path)
    first = train(spec, tiny_data, store, QUIET)
    assert first.peak_memory_bytes is None  # only a GPU's is known
    monkeypatch.setattr(Optimizer, "step", None)  # a step would now fail
    store.run(spec).lock_file.unlink()
    before = files_of(store.root)
    assert train(spec, tiny_data, store, QUIET) == first
    assert files_of(store.root) == before  # as on a file system that cannot be written to
    # What only describes the arm, or how a run is carried out, makes no new run; a seed does.
    described = replace(spec, arm=replace(spec.arm, title="Another name", about="x"))
    assert described.hash == spec.hash != replace(spec, seed=1).hash


def test_nan_loss_stops_with_step_data_position_and_checkpoint(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = make_spec("vanilla"), RunStore(tmp_path)
    original, count = Network.forward, 0

    def forward(self: Network, *words: Any, **options: Any) -> torch.Tensor:
        nonlocal count
        count += torch.is_grad_enabled()
        loss = original(self, *words, **options)
        return loss * float("nan") if count == 8 else loss

    write = checkpoints.write_checkpoint

    def write_slowly(*words: Any) -> object:
        time.sleep(0.3)  # the step fails meanwhile
        return write(*words)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_slowly)
    monkeypatch.setattr(Network, "forward", forward)
    with pytest.raises(Diverged) as error:
        train(spec, tiny_data, store, replace(QUIET, log_every=5))
    message = str(error.value)
    assert "at step 8 " in message and "sequences 56 to 63" in message and "checkpoints/00000006" in message
    failure = json.loads((store.run(spec).path / "failure.json").read_text())
    assert failure["kind"] == "Diverged"
    # What was saved is good: with the cause gone, the same call finishes the run.
    monkeypatch.setattr(Network, "forward", original)
    assert train(spec, tiny_data, store, QUIET).resumed == 1


def test_out_of_memory_in_the_optimizer_is_reported(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Optimizer, factor: float, step: int | None = None) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate…")

    monkeypatch.setattr(Optimizer, "step", step)
    with pytest.raises(OutOfMemory, match="smaller `micro_batch`"):
        train(make_spec("vanilla"), tiny_data, RunStore(tmp_path), QUIET)


def test_checkpoints_are_retained_by_policy(make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path) -> None:
    spec = make_spec()
    train(spec, tiny_data, RunStore(tmp_path), replace(QUIET, checkpoint_every=1, keep_every=4))
    kept = {
        c.step: c.training_progress().kind
        for c in checkpoints.list_checkpoints(RunStore(tmp_path).run(spec).checkpoints)
    }
    assert kept == {4: "regular", 6: "growth", 8: "regular", 12: "final"}


def test_record_has_every_field_that_analysis_reads(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make_spec(), RunStore(tmp_path)
    record = train(spec, tiny_data, store, QUIET)
    again = RunRecord.from_dict(json.loads(store.run(spec).record_file.read_text()))
    assert again == record and record.spec == spec and record.run == spec.hash
    assert [score.step for score in record.validation_scores] == [4, 8, 12]
    assert record.validation_loss == record.validation_scores[-1].loss
    counts = record.parameters
    assert counts.stored > counts.initial_stored and counts.compute_active > counts.initial_compute_active
    assert counts.initial_compute_active < counts.mean_compute_active < counts.compute_active
    assert record.flops == pytest.approx(
        sum(record.flops_by_term[t] for t in ("matmul", "attention", "head"))
    )
    assert 0 < record.seconds_training < record.seconds_total
    assert record.versions["torch"] == torch.__version__ and record.hardware["device"] == "cpu"


def test_data_with_another_identity_is_rejected(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla")
    other = replace(spec, data=replace(spec.data, identity="0" * 64))
    with pytest.raises(UsageError, match="asks for data 0000000000000000"):
        train(other, tiny_data, RunStore(tmp_path), QUIET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 1_000_000}, "prepare more data"),
        ({"validation_tokens": 10}, "at least one context is needed"),
        ({"validation_tokens": 10**9}, "larger `val_tokens`"),
    ],
)
def test_too_little_data_is_rejected_and_leaves_no_files(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(replace(make_spec("vanilla"), **changes), tiny_data, RunStore(tmp_path / "runs"), QUIET)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [{}, {"fused": True, "compile": True}])
def test_run_this_device_cannot_execute_leaves_no_files(
    options: dict[str, Any], make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec() if options else replace(make_spec(), precision="fp8")
    with pytest.raises(UsageError, match="--fused needs" if options else "fp8 needs a CUDA GPU"):
        train(spec, tiny_data, RunStore(tmp_path / "runs"), TrainOptions(device="cpu", quiet=True, **options))
    assert not list(tmp_path.rglob("*.json"))


def test_altered_shard_is_named_and_the_run_is_marked_failed(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(tiny_data.directory, tmp_path / "data"))
    shard = data / "train_00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000] + b"\xff" * (len(whole) - 1000))  # the run reads the first tokens
    spec, store = make_spec("vanilla"), RunStore(tmp_path / "runs")
    with pytest.raises(SteepenError, match=rf"{shard} was altered.*`steepen data verify {data}`") as error:
        train(spec, Dataset.open(data), store, QUIET)
    assert store.run(spec).failure() == ("SteepenError", str(error.value))
    shard.write_bytes(whole)
    train(spec, Dataset.open(data), store, QUIET)
    assert store.run(spec).failure() is None


def test_internal_error_marks_the_run_failed_not_interrupted(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Optimizer, factor: float, step: int | None = None) -> torch.Tensor:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(Optimizer, "step", step)
    spec, store = make_spec("vanilla"), RunStore(tmp_path)
    with pytest.raises(IndexError):
        train(spec, tiny_data, store, QUIET)
    assert store.run(spec).failure() == (
        "IndexError",
        "internal error: IndexError: index out of range in self.",
    )


def test_tracker_that_fails_does_not_stop_the_run(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    logged: list[int] = []

    class Fragile:
        def __init__(self, spec: RunSpec, directory: Path) -> None: ...

        def log(self, step: int, values: dict[str, float]) -> None:
            logged.append(step)
            if step == 3:
                raise ConnectionError("the network is down")

        def close(self) -> None: ...

    monkeypatch.setitem(trackers.__dict__["_KINDS"], "wandb", Fragile)
    options = replace(QUIET, quiet=False, track=("wandb", "tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as where it is not installed
    train(make_spec("vanilla", steps=6), tiny_data, RunStore(tmp_path), options)
    said = capfd.readouterr().err
    assert logged == [1, 2, 3]
    assert "the tracker wandb failed" in said and "the tracker tensorboard failed" in said


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_run_whose_directory_is_lost_says_so_and_leaves_nothing_behind(
    how: str,
    make_spec: Callable[..., RunSpec],
    tiny_data: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, store = make_spec("vanilla", steps=6), RunStore(tmp_path / "runs")
    path, validate = store.run(spec).path, training_run.Trainer._validate

    def lose(trainer: training_run.Trainer) -> None:
        validate(trainer)
        path.rename(tmp_path / "elsewhere")
        if how == "deleted":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "replaced":
            path.mkdir()

    monkeypatch.setattr(training_run.Trainer, "_validate", lose)
    with pytest.raises(RunLost, match="deleted or moved"):
        train(spec, tiny_data, store, TrainOptions(device="cpu", quiet=True, validate_every=3))
    assert not path.exists() or not list(path.iterdir())
    monkeypatch.undo()
    if how == "moved":  # put back, it resumes
        (tmp_path / "elsewhere").rename(path)
    if how == "replaced":
        path.rmdir()
    assert train(spec, tiny_data, store, TrainOptions(device="cpu", quiet=True)).run == spec.hash
