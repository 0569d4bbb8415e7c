"""Slurm jobs of runs on several GPUs: nodes, tasks and ranks; what a preempted job does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from steepen.errors import SteepenError
from steepen.launch.base import Job, LaunchContext
from steepen.launch.cost_estimate import GpusPerRun
from steepen.launch.slurm import SlurmJob, SlurmLauncher
from steepen.runs.spec import RunSpec

submitit: Any = pytest.importorskip("submitit", reason="submitit is not installed")
Spec = Callable[..., RunSpec]


class FakeExecutor:
    """Takes what is submitted, and the parameters at that time."""

    submitted: ClassVar[list[tuple[dict[str, Any], list[SlurmJob]]]] = []

    def __init__(self, folder: Path, cluster: str) -> None:
        self.parameters: dict[str, Any] = {}

    def update_parameters(self, **parameters: Any) -> None:
        self.parameters |= parameters

    def submit_array(self, tasks: list[SlurmJob]) -> list[object]:
        self.submitted.append(({**self.parameters}, tasks))
        return [object() for _ in tasks]


@pytest.mark.parametrize(
    ("gpus", "layout", "ranks"),
    [
        (2, {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 2}, 2),
        (8, {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4}, None),  # srun starts the ranks
    ],
)
def test_ranks_of_a_run_get_gpus_of_one_node_or_whole_nodes(
    gpus: int,
    layout: dict[str, int],
    ranks: int | None,
    context: LaunchContext,
    spec: Spec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submitit, "AutoExecutor", FakeExecutor)
    FakeExecutor.submitted = []
    launcher = SlurmLauncher(
        replace(context, gpus_per_run=GpusPerRun(gpus)), max_gpus_per_node=4, partition="gpu"
    )
    launcher.start([Job(one, context.store.run(one)) for one in (spec(1), spec(2))])
    ((parameters, tasks),) = FakeExecutor.submitted
    assert parameters == {"timeout_min": 1440, "slurm_partition": "gpu", **layout}
    found = [[task.request.get("gpus") for task in job.tasks.values()] for job in tasks]
    assert found == [[ranks], [ranks]]


def test_gpus_that_do_not_fill_nodes_are_rejected(
    context: LaunchContext, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitit, "AutoExecutor", FakeExecutor)
    launcher = SlurmLauncher(replace(context, gpus_per_run=GpusPerRun(8)), max_gpus_per_node=3)
    with pytest.raises(SteepenError, match="must be a multiple of the 3 GPUs of a node"):
        list(launcher.launch([spec(1)]))


def test_a_preempted_job_saves_and_the_requeued_one_goes_on(
    context: LaunchContext, spec: Spec, trainer: Any, tmp_path: Path
) -> None:
    specs = [spec(1, steps=4), spec(2, steps=60)]
    results = [tmp_path / "first.json", tmp_path / "second.json"]
    task = SlurmJob([context.task(one) for one in specs], results)
    thread = threading.Thread(target=task)
    thread.start()
    run, deadline = context.store.run(specs[1]), time.monotonic() + 60
    while run.saved_step() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert task.worker is not None
    worker = task.worker.process
    os.kill(worker.pid, signal.SIGUSR2)  # Slurm sends it to every process of the job
    time.sleep(0.1)
    requeued = task.checkpoint().function
    assert worker.returncode != -signal.SIGUSR2
    thread.join(60)
    saved = run.saved_step()
    assert 3 <= saved < 60 and not run.record_file.exists()
    assert isinstance(requeued, SlurmJob) and [result.exists() for result in results] == [True, False]
    requeued()
    assert [json.loads(result.read_text())["failure"] for result in results] == [None, None]
    assert (context.store.run(specs[0]).path / "trained.txt").read_text() == "once\n"
    record = run.record()
    assert record is not None and record.resumed == 1
    assert record.validation_loss == pytest.approx(trainer.record_of(specs[1]).validation_loss)
