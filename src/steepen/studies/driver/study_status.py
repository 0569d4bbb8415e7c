"""The status of a study: its runs by status, the FLOPs that are left, and the time they will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from steepen.launch.cost_estimate import makespan
from steepen.runs.row import CANNOT_TELL, STATUSES, RunRow
from steepen.runs.store import RunDirectory, RunStore
from steepen.runs.trunk import shared_fractions
from steepen.studies.driver.journal import Journal, RequestedRun
from steepen.studies.mistuning import Mistuning, mistuned_runs
from steepen.utils.codec import to_builtins
from steepen.utils.formatting import format_duration


@dataclass(frozen=True, repr=False)
class StudyStatus:
    """Progress of a study: the runs it has requested so far, by status."""

    name: str
    state: str  # `Journal.live_status`
    message: str
    options: dict[str, Any]
    batches: int
    counts: dict[str, int]  # runs by status
    flops_done: float
    flops_left: float  # without diverged runs, which are not trained again
    flops_shared: float  # in neither: of first steps that another run has trained, or will
    seconds_left: float | None  # at the measured speed, with as many runs at a time as there are now
    changed: str
    host: str
    answer: Any
    runs: tuple[RunRow, ...]
    runs_directory: str = ""  # where the runs were looked for
    mistuned: tuple[Mistuning, ...] = ()  # looked for where one study is asked for

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        left = "" if not self.seconds_left else f", {format_duration(self.seconds_left)} left"
        return f"<study {self.name}: {self.state}, runs: {counts or 'none'}{left}>"

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return to_builtins(self)


def with_mistuned(status: StudyStatus) -> StudyStatus:
    """The status with what looks mistuned among its finished runs, whose metrics are read."""
    root = Path(status.runs_directory)
    names = sorted(row.run for row in status.runs if row.status == "finished")
    finished = [RunDirectory(root / name).record() for name in names]
    return replace(status, mistuned=mistuned_runs(root, [record for record in finished if record]))


def done_fraction(status: StudyStatus) -> float:
    """Fraction of the FLOPs of the requested runs that are done."""
    total = status.flops_done + status.flops_left
    return status.flops_done / total if total else 0.0


def study_status(journal: Journal, runs_directory: Path | None = None) -> StudyStatus:
    """Status from the journal and the run directories; works while the study runs on another machine."""
    entry = journal.entry
    store = RunStore(journal.runs_directory(runs_directory))
    known = {row.run: row for row in store.rows(runs=[asked.run for asked in entry.runs])}
    rows = tuple(_row(asked, known.get(asked.run)) for asked in entry.runs)
    counts = Counter(row.status for row in rows)
    noted = shared_fractions(store)
    shared = {row.run: _shared_fraction(row, noted) for row in rows}
    # What is left of a run begins where the run itself does.
    begun = {row.run: max(_fraction_done(row, store), shared[row.run]) for row in rows}
    left = [row for row in rows if row.status != "finished" and row.failure_kind != "Diverged"]
    return StudyStatus(
        name=entry.name,
        state=journal.live_status,
        message=entry.message or (CANNOT_TELL if journal.live_status == "unknown" else ""),
        options=entry.options,
        batches=entry.batches,
        counts={status: counts[status] for status in STATUSES},
        flops_done=sum(row.flops * (begun[row.run] - shared[row.run]) for row in rows),
        flops_left=sum(row.flops * (1 - begun[row.run]) for row in left),
        flops_shared=sum(row.flops * shared[row.run] for row in rows),
        seconds_left=_seconds_left(rows, begun),
        changed=entry.changed,
        host=entry.host,
        answer=entry.answer,
        runs=rows,
        runs_directory=str(store.root),
    )


def _row(asked: RequestedRun, known: RunRow | None) -> RunRow:
    """The row of a requested run; what its files do not say, as FLOPs of custom code, is the journal's."""
    if known is None:
        return RunRow(**asdict(asked), status="waiting")
    return known if known.flops else replace(known, **asdict(asked))


def _fraction_done(row: RunRow, store: RunStore) -> float:
    """Fraction of a run's steps done; of a run that is not running, those saved in its newest checkpoint."""
    if row.status == "finished":
        return 1.0
    step = row.step if row.status == "running" else RunDirectory(store.root / row.run).saved_step()
    return min(1.0, max(0, step or 0) / row.steps) if row.steps else 0.0


def _shared_fraction(row: RunRow, noted: dict[str, float]) -> float:
    """Fraction of a run's cost in the steps of its trunk: of its FLOPs by its record, else of its steps."""
    if row.status == "finished":
        return 1 - row.more.get("spent_flops", row.flops) / row.flops if row.flops else 0.0
    return min(1.0, noted.get(row.run, 0.0))


def _seconds_left(rows: Sequence[RunRow], fractions: dict[str, float]) -> float | None:
    """Seconds to the end of the requested runs at the median measured speed; failed runs excluded."""
    known = [row for row in rows if row.tokens and row.tokens_per_second]
    rates = sorted(row.flops / row.tokens * (row.tokens_per_second or 0.0) for row in known)
    left = [row for row in rows if row.status not in ("finished", "failed")]
    if not left or not rates:
        return None if left else 0.0
    rate, running = rates[len(rates) // 2], sum(row.status == "running" for row in rows)
    return makespan([row.flops * (1 - fractions[row.run]) / rate for row in left], max(1, running))
