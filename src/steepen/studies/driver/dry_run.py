"""Dry runs: the runs that a study would make next, and their cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from steepen.launch.cost_estimate import Speed, makespan, remaining_flops
from steepen.recipe.memory import checkpoint_bytes
from steepen.runs.spec import UNKNOWN_DATA, RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import SimulatedStudy
from steepen.studies.driver.journal import RequestedRun


@dataclass(frozen=True)
class DryRunRow(RequestedRun):
    """A run that the study would make; `flops` are those that remain, where it has a checkpoint."""

    seconds: float  # estimated
    disk_bytes: int = 0  # of its last checkpoint, which it keeps
    gpus: int = 1


@dataclass(frozen=True)
class DryRunReport:
    """The known next runs of a study with their cost, and an estimate of those that follow."""

    finished: int  # runs in the store
    complete: bool  # nothing is left to run
    runs: tuple[DryRunRow, ...]
    slots: int
    speed: str  # source of the time estimate
    dollars_per_hour: float | None = None  # of what one run occupies
    later_runs: int = 0  # estimated number of further runs, whose settings depend on results
    later_flops: float = 0.0
    data_known: bool = True  # False: runs will have other names, as the data is part of a run's hash

    @property
    def flops(self) -> float:
        """FLOPs of all runs together."""
        return sum(run.flops for run in self.runs)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the checkpoints that all runs keep."""
        return sum(run.disk_bytes for run in self.runs)

    @property
    def machine_seconds(self) -> float:
        """Seconds of all runs together, one after the other."""
        return sum(run.seconds for run in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds from start to end, with `slots` runs at a time."""
        return makespan([run.seconds for run in self.runs], self.slots)

    @property
    def dollars(self) -> float | None:
        """Cost, where a price is known."""
        price = self.dollars_per_hour
        return None if price is None else price * self.machine_seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        totals = {
            name: getattr(self, name)
            for name in ("flops", "seconds", "machine_seconds", "dollars", "disk_bytes")
        }
        return {**asdict(self), **totals}

    @staticmethod
    def from_simulation(
        simulated: SimulatedStudy,
        store: RunStore,
        speed: Speed,
        slots: int,
        dollars_per_hour: float | None = None,
    ) -> DryRunReport:
        """The report of a simulated study."""
        runs = tuple(_row(spec, store, speed) for spec in simulated.batch)
        return DryRunReport(
            simulated.finished, simulated.complete, runs, slots, speed.source(simulated.batch),
            dollars_per_hour,
            len(simulated.later), sum(map(expected_flops, simulated.later)),
            all(spec.data.identity != UNKNOWN_DATA for spec in simulated.batch),
        )  # fmt: skip


def _row(spec: RunSpec, store: RunStore, speed: Speed) -> DryRunRow:
    flops = remaining_flops(spec, store.run(spec))
    seconds = speed.seconds(spec, flops)
    saved = checkpoint_bytes(spec.arm, spec.shape, spec.schedule.max_passes, spec.optimizer)
    return DryRunRow(
        spec.hash, spec.arm.name, spec.shape.depth, spec.seed, spec.tokens, flops, seconds,
        saved, speed.gpus(spec),
    )  # fmt: skip
