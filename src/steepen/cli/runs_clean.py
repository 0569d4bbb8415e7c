"""`steepen runs clean`: free disk space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steepen.cli.run_options import Studies, open_store, runs_directory
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.disk import Removal
    from steepen.runs.store import RunStore


def clean(
    context: typer.Context,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Checkpoints of finished runs; records and curves stay.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Whole directories of runs that failed.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Whole directories of runs that no study requested.")
    ] = False,
    keep_final: Annotated[
        bool, typer.Option("--keep-final", help="With --checkpoints: keep each run's last one, its weights.")
    ] = False,
    where: Annotated[
        str | None, typer.Option(help="Only runs with fields like this: 'depth < 8'.", show_default=False)
    ] = None,
    runs: Annotated[Path | None, typer.Option("--runs", help="Directory of all runs.")] = None,
    studies: Studies = Path("studies"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Free disk space. A run that is being trained is never touched.

    Example: steepen runs clean --checkpoints --keep-final --dry-run
    """
    from steepen.utils.formatting import format_bytes, wrap_to_terminal

    if not (checkpoints or failed or orphans):
        raise UsageError("say what to remove: --checkpoints, --failed or --orphans.")
    if keep_final and not checkpoints:
        raise UsageError("--keep-final belongs to --checkpoints.")
    store = open_store(runs_directory(context, runs))
    found = _removals(store, checkpoints, failed, orphans, keep_final, where, studies)
    if not found:
        print("There is nothing to remove.")
        return
    from steepen.runs.disk import total_bytes

    width = max(len(label) for label, _ in found)
    for label, removal in found:
        size = format_bytes(removal.bytes)
        print(f"{removal.run.path.name:16}  {label:{width}}  {removal.what:15}  {size:>8}")
    removals = [removal for _, removal in found]
    total = format_bytes(total_bytes(removals))
    if any(removal.what == "checkpoints" for removal in removals):
        note = (
            "Without its last checkpoint a run cannot be evaluated, exported or continued by `generate`; "
            "--keep-final keeps it."
        )
        print(wrap_to_terminal(note, sys.stdout))
    if dry_run:
        print(f"{total} would be freed; nothing was removed.")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{total} would be removed; confirm with --yes, or look with --dry-run.")
        typer.confirm(f"Remove {total} for good?", abort=True)
        # Meanwhile a study may have requested some of these runs.
        still = _removals(store, checkpoints, failed, orphans, keep_final, where, studies)
        removals = [removal for removal in removals if removal.key in {one.key for _, one in still}]
    removed = [removal for removal in removals if removal.apply()]
    print(f"{format_bytes(total_bytes(removed))} freed.")
    if len(removed) < len(found):
        note = f"{len(found) - len(removed)} of {len(found)} were left alone: they were used meanwhile."
        print(wrap_to_terminal(note, sys.stdout))


def _removals(
    store: RunStore,
    checkpoints: bool,
    failed: bool,
    orphans: bool,
    keep_final: bool,
    where: str | None,
    studies: Path,
) -> list[tuple[str, Removal]]:
    """What would be removed, each with its run's arm and depth, the largest first."""
    from steepen.runs.disk import removable_checkpoints, removable_run
    from steepen.runs.fields import all_run_fields, parse_where
    from steepen.runs.store import RunDirectory
    from steepen.studies.driver.journal import read_journals

    requested: set[str] = set()
    if orphans:
        journals, unreadable = read_journals(studies)
        if unreadable or not journals:
            why = (
                f"{', '.join(unreadable)} cannot be read" if unreadable else f"there is no study in {studies}"
            )
            raise UsageError(
                f"--orphans needs every study that may use these runs, and {why}; see --studies."
            )
        requested = {asked.run for journal in journals for asked in journal.entry.runs}
    rows = all_run_fields(store, store.rows(), disk=False)
    if where is not None and rows:
        condition = parse_where(where, rows)
        rows = [row for row in rows if condition(row)]
    found: list[tuple[str, Removal]] = []
    for row in rows:
        run = RunDirectory(store.root / row["run"])
        removal = None
        # With a damaged record or spec, a run's checkpoints are whole: it can be finished again.
        hopeless = row["status"] == "failed" and not str(row["failure_kind"]).startswith("Damaged")
        if (failed and hopeless) or (orphans and row["run"] not in requested):
            removal = removable_run(run)
        elif checkpoints and row["status"] == "finished":
            removal = removable_checkpoints(run, keep_final=keep_final)
        if removal is not None:
            found.append((f"{row['arm']} d{row['depth']}", removal))
    return sorted(found, key=lambda one: -one[1].bytes)
