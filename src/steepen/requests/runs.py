"""`runs`, `runs show`, `runs compare` and `runs clean`: the runs of a directory."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from steepen.errors import UsageError
from steepen.requests.request import Argument, Option, Request
from steepen.results.runs import CleanedRuns, Run, RunComparison, Runs, find_run, open_runs
from steepen.runs.row import Status
from steepen.utils.codec import option
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

        from steepen.results.text import print_blocks

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
