"""Launch a study or estimate it in a dry run, given data, run store, launcher, device and speed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from steepen.launch.base import LaunchContext, Launcher, LauncherBase
from steepen.launch.batch_progress import BatchProgress
from steepen.launch.budget import Budget
from steepen.launch.cost_estimate import Speed, local_hardware_name
from steepen.launch.gpus_per_run import GpusPerRun
from steepen.launch.local import visible_gpus
from steepen.launch.registry import make_launcher
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import StudyGenerator, drive, simulate_with_synthetic_records
from steepen.studies.driver.dry_run import DryRunReport
from steepen.studies.driver.journal import Journal

A = TypeVar("A")


@dataclass(frozen=True)
class LaunchSettings:
    """Where and how the runs of a study are made."""

    data: Path
    runs: Path = Path("runs")
    launcher: str = "local"  # name: local, slurm, ray or module:attribute
    jobs: int | None = None  # max runs at a time; None: the launcher's default
    options: tuple[str, ...] = ()  # of the launcher, as KEY=VALUE
    device: str = "auto"
    gpu: str | None = None  # estimate time for this GPU instead of from finished runs
    mfu: float | None = None  # and for this fraction of its peak
    gpus_per_run: str = "1"  # or auto: the fewest on which the planner says a run fits
    shard: str = "optimizer"  # what they divide among them, as in `steepen train --shard`
    trackers: tuple[str, ...] = ()  # that every run logs to, as in `steepen train --track`
    sample_every: int | None = None  # steps between texts that each run generates; None: none
    sample_prompts: tuple[str, ...] = ()  # what they continue; none: the start of a document

    @property
    def store(self) -> RunStore:
        """The run store."""
        return RunStore(self.runs)

    def make_launcher(self) -> Launcher:
        """The launcher of these settings; raises UsageError for an unknown name or option."""
        options: dict[str, Any] = {"device": self.device, "shard": self.shard, "track": self.trackers}
        if self.sample_every is not None:
            options |= {"sample_every": self.sample_every, "sample_prompt": self.sample_prompts}
        context = LaunchContext(self.data, self.store, options, gpus_per_run=self.gpus())
        return make_launcher(self.launcher, context, self.jobs, self.options)

    def gpus(self) -> GpusPerRun:
        """GPUs of each run; raises UsageError for what is none."""
        return GpusPerRun.parse(self.gpus_per_run, self.gpu, self.shard)

    def speed(self) -> Speed:
        """Speed of runs: as given, else from finished runs on the same hardware, else assumed."""
        # The hardware of a cluster's nodes is not known here, so all finished runs count.
        if self.launcher != "local":
            device = None
        else:
            device = platform.node() if self.device == "cpu" else local_hardware_name()
        given = self.gpu is not None or self.mfu is not None
        return Speed.from_records(
            () if given else self.store.records(),
            device=device,
            gpu=self.gpu,
            mfu=self.mfu,
            gpus_per_run=self.gpus(),
        )

    def estimated_on_cpu(self) -> bool:
        """Whether time estimates are for CPUs of this machine."""
        given = self.gpu is not None or self.mfu is not None
        return not given and self.launcher == "local" and (self.device == "cpu" or not visible_gpus())


def dry_run_study(
    make_study: Callable[[], StudyGenerator[Any]],
    settings: LaunchSettings,
    *,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]] = (),
    accept_diverged: bool = False,
    dollars_per_hour: float | None = None,
) -> DryRunReport:
    """The runs that a study would make next, with FLOPs, time and cost; starts and writes nothing.

    `stand_ins` make synthetic records that lead an adaptive study to its later runs.
    """
    slots = settings.make_launcher().slots
    if settings.gpu is not None and settings.launcher == "local":
        slots = settings.jobs or 1  # on that GPU; this machine's cores say nothing about it
    speed = settings.speed()
    simulated = simulate_with_synthetic_records(
        make_study, settings.store, stand_ins, accept_diverged=accept_diverged
    )
    return DryRunReport.from_simulation(simulated, settings.store, speed, slots, dollars_per_hour)


def launch_study(
    make_study: Callable[[], StudyGenerator[A]],
    settings: LaunchSettings,
    *,
    name: str,
    options: dict[str, Any],
    studies: Path = Path("studies"),
    budget: Budget | None = None,
    accept_diverged: bool = False,
    retry_diverged: bool = False,
) -> A:
    """Run a study to its answer, with a journal in `studies`/`name` and progress on standard error.

    The journal holds `options`; a study of the same name with other options is rejected.
    """
    launcher = settings.make_launcher()
    speed = settings.speed()
    try:
        return drive(
            make_study(),
            settings.store,
            launcher,
            journal=Journal.open(studies, name, options, settings.runs),
            budget=budget,
            accept_diverged=accept_diverged,
            retry_diverged=retry_diverged,
            progress=BatchProgress(settings.store, speed=speed),
        )
    finally:
        if isinstance(launcher, LauncherBase):
            launcher.close()
