"""What is ahead: the runs a study would make next and what they cost; how far a study has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steepen.launch.cost_estimate import Speed, flops_left, makespan
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.status import STATUSES, RunRow
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.driver.drive import DryRunStep
from steepen.studies.driver.journal import Asked, Journal


@dataclass(frozen=True)
class PlannedRun:
    """A run that would be made."""

    run: str
    arm: str
    depth: int
    seed: int
    tokens: int
    flops: float  # still to be spent, where it has a checkpoint
    seconds: float  # estimated


@dataclass(frozen=True)
class DryRunReport:
    """The runs of a study that are known, before anything is spent, and about how many follow."""

    finished: int  # runs that are done already
    complete: bool  # nothing is left to run
    runs: tuple[PlannedRun, ...]
    slots: int
    speed: str  # where the estimate of time comes from
    dollars_per_hour: float | None = None  # of what one run occupies
    later_runs: int = 0  # about so many follow, with settings that depend on results
    later_flops: float = 0.0

    @property
    def flops(self) -> float:
        """Of all runs together."""
        return sum(run.flops for run in self.runs)

    @property
    def machine_seconds(self) -> float:
        """Of all runs together, one after the other."""
        return sum(run.seconds for run in self.runs)

    @property
    def seconds(self) -> float:
        """From start to end, with so many runs at a time."""
        return makespan([run.seconds for run in self.runs], self.slots)

    @property
    def dollars(self) -> float | None:
        """Cost, where a price is known."""
        price = self.dollars_per_hour
        return None if price is None else price * self.machine_seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        totals = {name: getattr(self, name) for name in ("flops", "seconds", "machine_seconds", "dollars")}
        return {**asdict(self), **totals}

    @staticmethod
    def of(
        rehearsal: DryRunStep,
        store: RunStore,
        speed: Speed,
        slots: int,
        dollars_per_hour: float | None = None,
    ) -> DryRunReport:
        """Of a study that has been walked as far as its finished runs go."""
        runs = tuple(_planned(spec, store, speed) for spec in rehearsal.batch)
        return DryRunReport(
            rehearsal.finished, rehearsal.complete, runs, slots, speed.source, dollars_per_hour,
            len(rehearsal.later), sum(map(expected_flops, rehearsal.later)),
        )  # fmt: skip


def _planned(spec: RunSpec, store: RunStore, speed: Speed) -> PlannedRun:
    flops = flops_left(spec, store.run(spec))
    seconds = speed.seconds(spec, flops)
    return PlannedRun(spec.hash, spec.arm.name, spec.shape.depth, spec.seed, spec.tokens, flops, seconds)


@dataclass(frozen=True)
class StudyStatus:
    """How far a study has come, by the runs it has asked for so far."""

    name: str
    stage: str
    message: str
    options: dict[str, Any]
    batches: int
    counts: dict[str, int]  # runs by status
    flops_done: float
    flops_left: float  # without runs that diverged: they are not trained again
    seconds_left: float | None  # at the measured speed, with as many runs at a time as there are now
    changed: str
    host: str
    answer: Any
    runs: tuple[RunRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def study_status(journal: Journal, runs_directory: Path | None = None) -> StudyStatus:
    """From the journal and the run directories; also while the study runs elsewhere."""
    entry = journal.entry
    store = RunStore(runs_directory or Path(entry.runs_directory))
    names = {asked.run for asked in entry.runs}
    known = {row.run: row for row in store.rows() if row.run in names}
    rows = tuple(known.get(asked.run) or _not_begun(asked) for asked in entry.runs)
    counts = Counter(row.status for row in rows)
    shares = {row.run: _share(row, store) for row in rows}
    left = [row for row in rows if row.status != "finished" and row.failure_kind != "Diverged"]
    return StudyStatus(
        name=entry.name,
        stage=journal.stage,
        message=entry.message,
        options=entry.options,
        batches=entry.batches,
        counts={status: counts[status] for status in STATUSES},
        flops_done=sum(row.flops * shares[row.run] for row in rows),
        flops_left=sum(row.flops * (1 - shares[row.run]) for row in left),
        seconds_left=_seconds_left(rows, shares),
        changed=entry.changed,
        host=entry.host,
        answer=entry.answer,
        runs=rows,
    )


def _not_begun(asked: Asked) -> RunRow:
    return RunRow(**asdict(asked), status="waiting")


def _share(row: RunRow, store: RunStore) -> float:
    """How much of a run is done: of one that does not run now, what it has saved and goes on from."""
    if row.status == "finished":
        return 1.0
    step = row.step if row.status == "running" else RunDirectory(store.root / row.run).saved_step()
    return min(1.0, max(0, step or 0) / row.steps) if row.steps else 0.0


def _seconds_left(rows: Iterable[RunRow], shares: dict[str, float]) -> float | None:
    """Time to the end of the runs asked for, from the speed of those that have one; without failed ones."""
    rows = list(rows)
    rates = [
        row.flops / row.tokens * row.tokens_per_second for row in rows if row.tokens and row.tokens_per_second
    ]
    left = [row for row in rows if row.status not in ("finished", "failed")]
    if not left:
        return 0.0
    if not rates:
        return None
    rate = sorted(rates)[len(rates) // 2]
    running = sum(row.status == "running" for row in rows)
    return makespan([row.flops * (1 - shares[row.run]) / rate for row in left], max(1, running))
