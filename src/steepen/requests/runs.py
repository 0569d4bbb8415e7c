"""`runs`, `runs show`, `runs compare` and `runs clean`: the runs of a directory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from steepen.errors import UsageError
from steepen.requests.request import Argument, Option, Request
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.runs import Run, Runs, curves_panel, find_run, loss_chart, open_runs
from steepen.results.table import Column, table_of
from steepen.results.text import MARKS, Block, Lines, Paragraph, print_blocks
from steepen.runs.row import Status
from steepen.utils.codec import option
from steepen.utils.formatting import format_bytes
from steepen.utils.values import Depth, Words

if TYPE_CHECKING:
    from steepen.runs.disk import Removal
    from steepen.runs.row import RunRow

RunsField: TypeAlias = Annotated[Path, Option("Directory of all runs.")]
WhereField: TypeAlias = Annotated[
    tuple[str, ...],
    Option("Only runs with fields like this: arm=a,b or 'glr > 0.1 and depth >= 4'. Repeatable."),
]


@dataclass(frozen=True, kw_only=True)
class ListRuns(Request[Runs]):
    """List runs with status, loss and speed.

    An unfinished run shows its last training loss. The command that started an interrupted run resumes it.
    """

    examples = ("steepen runs --where 'depth >= 4 and loss < 3' --sort loss",)

    runs: RunsField = Path("runs")
    arm: str | None = option("Only this arm.")
    depth: Depth | None = option("Only this depth.")
    status: Status | None = option("Only finished, running, failed, interrupted, waiting or unknown.")
    where: WhereField = ()
    sort: str = option("Sort by any field, which is then shown; -loss reverses.", "arm")
    columns: Words | None = option("Show these fields: run,arm,learning_rate,loss.")
    fields: bool = option("List the fields, and exit.", False)
    csv: Path | None = option("Write finished runs to this file, for `steepen fit`.")
    parquet: Path | None = option("The same as a Parquet file.")

    def run(self) -> Runs:
        """Open the directory, select and sort its runs, and write the files."""
        from steepen.runs.fields import check_field

        equal = {"arm": self.arm, "depth": self.depth, "status": self.status}
        given = {name: value for name, value in equal.items() if value is not None}
        found = open_runs(self.runs, self.where, **given).sort(self.sort)
        names = found.field_names
        columns = tuple(check_field(name, names, "`columns`") for name in self.columns or () if names)
        files = {False: self.csv, True: self.parquet}
        written = [found.write_finished(file, kind) for kind, file in files.items() if file is not None]
        return replace(found, columns=columns, written=tuple(written))

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """The runs, or the names of their fields."""
        if not self.fields:
            return self.run()
        from steepen.utils.formatting import wrap_to_terminal

        print(wrap_to_terminal(", ".join(open_runs(self.runs).field_names), sys.stdout))
        return None


@dataclass(frozen=True)
class ShowRun(Request[Run]):
    """Show everything about a run, with its loss curve."""

    examples = ("steepen runs show 6084f5",)
    figure = tables = True

    name: Annotated[str, Argument("The run's hash or the beginning of it, or its directory.", metavar="RUN")]
    _: KW_ONLY
    runs: RunsField = Path("runs")

    def run(self) -> Run:
        """Find the run."""
        return find_run(self.name, self.runs)


@dataclass(frozen=True)
class DifferenceRow:
    """A field in which two runs differ."""

    field: str
    setting: Annotated[bool, Column(shown=False)]  # False: it was measured
    first: Any
    second: Any


@dataclass(frozen=True, eq=False, repr=False)
class RunComparison(Result):
    """The fields in which two runs differ, and their loss curves."""

    first: Run
    second: Run

    @property
    def rows(self) -> list[DifferenceRow]:
        """A row for each field that differs."""
        from steepen.runs.fields import is_setting

        one, other = self.first.fields, self.second.fields
        return [
            DifferenceRow(name, is_setting(name), one.get(name), other.get(name))
            for name in dict.fromkeys([*one, *other])
            if one.get(name) != other.get(name)
        ]

    def headline(self) -> str:
        """Which runs are compared."""
        return f"{self.first.headline()}; {self.second.headline()}"

    def headings(self) -> dict[str, str]:
        """The names of the runs."""
        return {"first": self.first.name, "second": self.second.name}

    def to_dict(self) -> dict[str, Any]:
        """The names of the runs, and both values of each field that differs."""
        different = {row.field: [row.first, row.second] for row in self.rows}
        return {"runs": [self.first.name, self.second.name], "different": different}

    def panels(self) -> list[Panel]:
        """Both loss curves."""
        return [curves_panel([self.first, self.second])]

    def blocks(self, width: int) -> Iterable[Block]:
        """Both runs, settings that differ, then what was measured, and the loss curves as text."""
        from steepen.runs.fields import format_field

        pair = (self.first, self.second)
        yield Lines("\n".join(f"{mark} {run.headline()}" for mark, run in zip(MARKS, pair, strict=False)))
        columns = [
            Column(value=lambda row: row.field),
            Column(value=lambda row: format_field(row.field, row.first)),
            Column(value=lambda row: format_field(row.field, row.second)),
        ]
        settings = [row for row in self.rows if row.setting and row.field != "run"]
        if not settings:
            yield Lines("\nno setting differs")
        measured = [row for row in self.rows if not row.setting]
        for title, rows in (("settings that differ", settings), ("results", measured)):
            if rows:
                yield Paragraph()
                yield table_of(rows, columns, title, rule=False)
        yield from loss_chart(pair, width)


@dataclass(frozen=True)
class CompareRuns(Request[RunComparison]):
    """Show the fields in which two runs differ, and their loss curves."""

    examples = ("steepen runs compare 6084f5 d31e5a --figure curves.pdf",)
    figure = tables = True

    first: Annotated[str, Argument("A run, as in `steepen runs show`.")]
    second: Annotated[str, Argument("The run to compare it with.")]
    _: KW_ONLY
    runs: RunsField = Path("runs")

    def run(self) -> RunComparison:
        """Find both runs."""
        return RunComparison(find_run(self.first, self.runs), find_run(self.second, self.runs))


@dataclass(frozen=True)
class RemovalRow:
    """Something that a run has on disk and that can be removed."""

    run: str
    arm: str
    depth: int
    what: str
    bytes: Annotated[int, Column("size", format_bytes, align="right")]
    removed: Annotated[bool, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class CleanedRuns(Result):
    """What can be removed from a directory of runs, and what of it was."""

    found: tuple[tuple[RunRow, Removal], ...]
    removed: tuple[Removal, ...] = ()
    dry_run: bool = False

    @property
    def rows(self) -> list[RemovalRow]:
        """A row for each thing to remove, the largest first."""
        return [
            RemovalRow(row.run, row.arm, row.depth, one.what, one.bytes, one in self.removed)
            for row, one in self.found
        ]

    @property
    def size(self) -> str:
        """The disk space of everything that can be removed."""
        return format_bytes(sum(one.bytes for _, one in self.found))

    def headline(self) -> str:
        """How much was, or would be, freed."""
        if self.dry_run:
            return f"{self.size} would be freed; nothing was removed."
        return f"{format_bytes(sum(one.bytes for one in self.removed))} freed."

    def listing(self, width: int) -> Iterable[Block]:
        """What there is to remove."""
        if not self.found:
            yield Paragraph("There is nothing to remove.")
            return
        yield replace(self.table(), title="", rule=False)
        if any(one.what == "checkpoints" for _, one in self.found):
            yield Paragraph(
                "Without its last checkpoint a run cannot be evaluated, exported or continued by `generate`; "
                "--keep-final keeps it."
            )

    def outcome(self, width: int) -> Iterable[Block]:
        """How much was freed, and what was left alone."""
        if self.found:
            yield Paragraph(self.headline())
        left = 0 if self.dry_run else len(self.found) - len(self.removed)
        if left:
            yield Paragraph(f"{left} of {len(self.found)} were left alone: they were used meanwhile.")

    def blocks(self, width: int) -> Iterable[Block]:
        """What there was to remove, and how much was freed."""
        yield from self.listing(width)
        yield from self.outcome(width)


@dataclass(frozen=True, kw_only=True)
class CleanRuns(Request[CleanedRuns]):
    """Free disk space. A run that is being trained is never touched."""

    examples = ("steepen runs clean --checkpoints --keep-final --dry-run",)

    checkpoints: bool = option("Checkpoints of finished runs; records and curves stay.", False)
    failed: bool = option("Whole directories of runs that failed.", False)
    orphans: bool = option("Whole directories of runs that no study requested.", False)
    keep_final: bool = option("With `checkpoints`: keep each run's last one, its weights.", False)
    where: WhereField = ()
    runs: RunsField = Path("runs")
    studies: Path = option("Directory of the studies.", Path("studies"))
    dry_run: bool = option("List what would go; remove nothing.", False)
    yes: bool = option("Do not ask.", False, flag="-y")

    def check(self) -> None:
        """Reject a request that names nothing to remove."""
        if not (self.checkpoints or self.failed or self.orphans):
            raise UsageError("say what to remove: `checkpoints`, `failed` or `orphans`.")
        if self.keep_final and not self.checkpoints:
            raise UsageError("`keep_final` belongs to `checkpoints`.")

    def run(self) -> CleanedRuns:
        """Find what can be removed and, if that is confirmed by `yes`, remove it."""
        found = CleanedRuns(tuple(self.removals()), dry_run=self.dry_run)
        if self.dry_run or not found.found:
            return found
        if not self.yes:
            raise UsageError(f"{found.size} would be removed; confirm with `yes`, or look with `dry_run`.")
        return replace(found, removed=tuple(removal for _, removal in found.found if removal.apply()))

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """Ask before anything is removed, where there is a person to ask."""
        if self.yes or self.dry_run or as_json or not sys.stdin.isatty():
            return self.run()
        import typer

        found = CleanedRuns(tuple(self.removals()))
        print_blocks(found.listing)
        if not found.found:
            return None
        typer.confirm(f"Remove {found.size} for good?", abort=True)
        # Meanwhile a study may have requested some of these runs.
        still = {removal.key for _, removal in self.removals()}
        removed = [one for _, one in found.found if one.key in still and one.apply()]
        print_blocks(replace(found, removed=tuple(removed)).outcome)
        return None

    def removals(self) -> list[tuple[RunRow, Removal]]:
        """What would be removed, each with its run, the largest first."""
        from steepen.runs.disk import removable_checkpoints, removable_run
        from steepen.runs.store import RunDirectory, RunStore

        requested = self._requested() if self.orphans else set[str]()
        kept = {run.name for run in open_runs(self.runs, self.where)}
        found: list[tuple[RunRow, Removal]] = []
        for row in RunStore(self.runs).rows(runs=kept):
            run = RunDirectory(self.runs / row.run)
            removal = None
            # With a damaged record or spec, a run's checkpoints are whole: it can be finished again.
            hopeless = row.status == "failed" and not row.failure_kind.startswith("Damaged")
            if (self.failed and hopeless) or (self.orphans and row.run not in requested):
                removal = removable_run(run)
            elif self.checkpoints and row.status == "finished":
                removal = removable_checkpoints(run, keep_final=self.keep_final)
            if removal is not None:
                found.append((row, removal))
        return sorted(found, key=lambda one: -one[1].bytes)

    def _requested(self) -> set[str]:
        """The runs that any study requested; raises UsageError unless every study can be read."""
        from steepen.studies.driver.journal import read_journals

        journals, unreadable = read_journals(self.studies)
        if unreadable or not journals:
            why = f"{', '.join(unreadable)} cannot be read" if unreadable else f"{self.studies} has none"
            raise UsageError(
                f"`orphans` needs every study that may use these runs, and {why}; see `studies`."
            )
        return {asked.run for journal in journals for asked in journal.entry.runs}
