"""GPUs of each run of a study: a number, or the fewest on which the planner says it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from steepen.errors import SteepenError, UsageError
from steepen.launch import local as local_module
from steepen.launch.base import LaunchContext
from steepen.launch.cost_estimate import START_SECONDS, GpusPerRun, Speed
from steepen.launch.local import LocalLauncher
from steepen.launch.worker import Attempt, Task
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.accelerators import find_accelerator
from steepen.recipe.paper_tables import recipe_of
from steepen.requests.study import request_of
from steepen.runs.spec import DataConfig, RunSpec

Spec = Callable[..., RunSpec]


def paper_spec(depth: int) -> RunSpec:
    arm = find_arm("untied-grow")
    return RunSpec.from_plan(recipe_of(arm).at(arm, depth), DataConfig("d"), precision="bf16")


def test_auto_takes_the_fewest_gpus_that_suffice() -> None:
    assert GpusPerRun("auto").of(paper_spec(8)) == 1
    assert GpusPerRun("auto").of(replace(paper_spec(22), steps=10)) == 2  # 74.5 GiB are not enough
    assert GpusPerRun("auto", find_accelerator("h200")).of(replace(paper_spec(22), steps=10)) == 1
    # The paper's d26 takes 860 GPU hours at 40% of the peak.
    assert GpusPerRun("auto").of(paper_spec(26)) == 64
    assert GpusPerRun(4).of(paper_spec(26)) == 4
    # AdamW keeps 8 bytes per parameter of a matrix, Muon 4.
    assert GpusPerRun("auto").of(replace(paper_spec(21), steps=10)) == 1
    adamw = replace(paper_spec(21), steps=10, optimizer=OptimizerConfig.named("adamw"))
    assert GpusPerRun("auto").of(adamw) == 2


def test_auto_and_the_dry_run_follow_the_way_to_shard() -> None:
    large = replace(paper_spec(40), steps=10)
    with pytest.raises(SteepenError, match="use `shard` full"):
        GpusPerRun("auto").of(large)
    full = GpusPerRun("auto", shard="full")
    assert full.of(large) == 16
    with pytest.raises(UsageError, match=r"`shard` = 'half' .* one of 'optimizer', 'full'"):
        request_of("ladder")(shard="half")  # pyright: ignore[reportArgumentType]
    one, many = (Speed.from_records([], gpu="h100", gpus_per_run=each) for each in (None, full))
    assert many.seconds(large) - START_SECONDS == pytest.approx((one.seconds(large) - START_SECONDS) / 16)
    assert "one H100" in one.assumption and "each H100" in many.assumption


def test_wrong_numbers_of_gpus_are_rejected(spec: Spec) -> None:
    for text in ("0", "-1", "two"):
        with pytest.raises(UsageError, match=r"`gpus_per_run` = .* must be a whole number"):
            request_of("ladder")(gpus_per_run=text)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="cannot be divided evenly"):
        GpusPerRun(3).of(spec(1))  # eight sequences
    with pytest.raises(SteepenError, match="does not fit on any number"):
        GpusPerRun("auto", find_accelerator("rtx4090")).of(paper_spec(40))


class FakeWorker:
    """A worker whose task ends when `ended` is set."""

    started: ClassVar[list[FakeWorker]] = []

    def __init__(self, task: Task, worker: Any = None) -> None:
        self.task, self.ended = task, False
        FakeWorker.started.append(self)

    def poll(self) -> Attempt | None:
        if not self.ended:
            return None
        Path(self.task.log).with_name("record.json").write_text("{}")  # damaged: an outcome, no retry
        return Attempt()

    def close(self) -> None: ...

    def terminate(self) -> None:
        self.ended = True

    def kill(self) -> None: ...


def test_local_launcher_shares_out_a_pool_of_gpus(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [(str(number), "H100") for number in range(4)]
    monkeypatch.setattr(local_module, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(local_module, "begin_task", FakeWorker)
    sizes = {1: 2, 2: 4, 3: 1, 4: 1}
    monkeypatch.setattr(GpusPerRun, "of", lambda self, spec: sizes[spec.seed])
    FakeWorker.started = []
    launcher = LocalLauncher(replace(context, gpus_per_run=GpusPerRun("auto")))
    outcomes = launcher.launch(spec(seed) for seed in sizes)

    def visible() -> list[str]:
        return [each.task.environment["CUDA_VISIBLE_DEVICES"] for each in FakeWorker.started]

    original = local_module.time.sleep

    def end_the_oldest(seconds: float) -> None:
        running = [each for each in FakeWorker.started if not each.ended]
        running[0].ended = True

    monkeypatch.setattr(local_module.time, "sleep", end_the_oldest)
    ended = [outcome.spec.seed for outcome in outcomes]
    monkeypatch.setattr(local_module.time, "sleep", original)
    # The run of four GPUs waits for the first to end; the small ones wait behind it, and are not let past.
    assert visible() == ["0,1", "2,3,0,1", "2", "3"]
    assert ended == [1, 2, 3, 4]
    assert [each.task.request.get("gpus") for each in FakeWorker.started] == [2, 4, None, None]


def test_run_that_needs_more_gpus_than_the_machine_has_is_rejected(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "visible_gpus", lambda: [("0", "H100"), ("1", "H100")])
    launcher = LocalLauncher(replace(context, gpus_per_run=GpusPerRun(4)))
    with pytest.raises(UsageError, match="needs 4 GPUs, and this machine has 2"):
        list(launcher.launch([spec(1)]))
    assert LocalLauncher(replace(context, gpus_per_run=GpusPerRun(2))).slots == 1
