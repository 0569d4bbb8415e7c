"""`steepen runs` and `steepen status`: what has been run, and how far a study has come."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.cli.launch_options import Runs, Studies
from steepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from steepen.runs.status import RunRow
    from steepen.studies.driver.dry_run import StudyStatus

SORTS = ("arm", "depth", "seed", "tokens", "flops", "loss", "speed", "status", "finished")
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table.")]


def runs(
    runs: Runs = Path("runs"),
    arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None,
    depth: Annotated[int | None, typer.Option(help="Only this depth.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only finished, running, failed, interrupted or waiting.")
    ] = None,
    sort: Annotated[str, typer.Option(help=f"By {', '.join(SORTS)}; a - before it reverses.")] = "arm",
    as_json: Json = False,
    table: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the finished ones to this file, as `steepen fit` takes them."),
    ] = None,
) -> None:
    """List runs: what came out, what is going on, and what went wrong.

    A run that is not finished shows its last training loss; one that was interrupted goes on where it
    stopped when it is asked for again.

    Example: steepen runs --arm untied-grow --sort loss
    """
    from steepen.runs.status import check_status
    from steepen.runs.store import RunStore

    if not runs.is_dir():
        raise UsageError(f"there is no folder {runs}; name the one with your runs with --runs.")
    chosen = None if status is None else check_status(status)
    found = _sorted(RunStore(runs).rows(arm=arm, depth=depth, status=chosen), sort)
    if table is not None:
        _write_csv(table, [row for row in found if row.status == "finished"])
    if as_json:
        print(json.dumps({"runs": [row.to_dict() for row in found]}, indent=2, ensure_ascii=False))
        return
    if not found:
        asked = any(value is not None for value in (arm, depth, status))
        print(f"No run in {runs}" + (" is like that." if asked else " yet."))
        return
    _print_table(found)


def status(
    study: Annotated[
        str | None,
        typer.Argument(help="A study's name or the beginning of it, or its folder; all where left out."),
    ] = None,
    studies: Studies = Path("studies"),
    runs: Annotated[
        Path | None, typer.Option(help="Where its run directories are, if they have moved.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far a study has come: runs by status, FLOPs done and left, and when it will be done.

    It looks at files only, so it can be asked anywhere the folder is visible, also while the study runs
    elsewhere.

    Example: steepen status ladder
    """
    from steepen.studies.driver.dry_run import study_status
    from steepen.studies.driver.journal import Journal, find_study_folder, read_journals

    if study is None:
        if not studies.is_dir():
            raise UsageError(f"there is no folder {studies}; name the one with your studies with --studies.")
        journals, unreadable = read_journals(studies)
        every = [study_status(journal, runs) for journal in journals]
        if as_json:
            found = {"studies": [one.to_dict() for one in every], "unreadable": unreadable}
            print(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            lines = [*map(_headline, every), *(f"{name}: {why}" for name, why in unreadable.items())]
            print("\n".join(lines) or f"No study in {studies} yet.")
        return
    found = study_status(Journal.read(find_study_folder(study, studies)), runs)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    print(_headline(found))
    if found.message:
        print(found.message)
    waiting = [row for row in found.runs if row.status in ("running", "failed", "interrupted")]
    if waiting:
        _print_table(waiting)


def _headline(study: StudyStatus) -> str:
    """A study in one or two lines."""
    from steepen.utils.formatting import format_duration

    total = len(study.runs)
    counts = ", ".join(f"{count} {name}" for name, count in study.counts.items() if count)
    line = f"{study.name}: {study.state}, batch {study.batches}; {total} runs asked for so far"
    line += f" ({counts})" if counts else ""
    line += f"; {study.flops_done:.3g} FLOPs done, {study.flops_left:.3g} left"
    if study.flops_left and study.seconds_left is not None:
        when = "ETA" if study.state == "running" else "about"
        line += f", {when} {format_duration(study.seconds_left)}" + ("" if when == "ETA" else " of work")
    return line + "."


def _write_csv(path: Path, rows: list[RunRow]) -> None:
    """The table a law is fitted to, one line per run."""
    from steepen.report.table_files import to_csv
    from steepen.studies.answer import Table
    from steepen.utils.files import write_atomically

    if not rows:
        raise UsageError(f"none of these runs is finished: {path} was not written.")
    columns = ("arm", "depth", "seed", "tokens", "flops", "loss", "run")
    values = tuple(tuple(getattr(row, column) for column in columns) for row in rows)
    write_atomically(path, to_csv(Table("runs", columns, values)))
    print(f"{path}: {len(rows)} finished runs.", file=sys.stderr)


def _sorted(rows: list[RunRow], sort: str) -> list[RunRow]:
    key = sort.removeprefix("-")
    if key not in SORTS:
        raise UsageError(f"--sort {sort!r} is not known; the nearest are {nearest(key, SORTS)}.")
    field = {"speed": "tokens_per_second"}.get(key, key)
    rows = sorted(rows, key=lambda row: (row.arm, row.depth, row.seed, row.run))
    have = [row for row in rows if getattr(row, field) is not None]
    lack = [row for row in rows if getattr(row, field) is None]  # what has no value comes last, either way
    return sorted(have, key=lambda row: getattr(row, field), reverse=sort.startswith("-")) + lack


def _print_table(rows: list[RunRow]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for column in ("depth", "seed", "tokens", "FLOPs", "loss", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status")
    for row in rows:
        table.add_row(*_cells(row))
    # A reader that is not a terminal has no width: nothing is cut off there.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cells(row: RunRow) -> list[Any]:
    from rich.text import Text

    loss = "" if row.loss is None else f"{row.loss:.4f}"
    speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    step = f" at step {row.step:,}/{row.steps:,}" if row.steps and row.step is not None else ""
    words = {
        "finished": Text("finished", style="green"),
        "running": Text(f"running{step}", style="cyan"),
        "failed": Text(f"failed: {row.cause}", style="red"),
        "interrupted": Text(f"interrupted{step}, resumable", style="yellow"),
        "waiting": Text("waiting", style="dim"),
    }
    return [
        row.run,
        row.arm,
        str(row.depth),
        str(row.seed),
        f"{row.tokens:,}",
        f"{row.flops:.2e}",
        loss if row.status == "finished" else Text(loss, style="dim"),
        speed,
        words[row.status],
    ]
