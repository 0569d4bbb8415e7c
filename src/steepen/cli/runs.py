"""`steepen runs` and `steepen status`: the runs of a store, and the progress of studies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.cli.launch_options import Runs, Studies
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.status import RunRow
    from steepen.studies.driver.dry_run import StudyStatus

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs(
    runs: Runs = Path("runs"),
    arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None,
    depth: Annotated[int | None, typer.Option(help="Only this depth.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only finished, running, failed, interrupted or waiting.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="Sort by arm, depth, seed, tokens, flops, loss, speed, status or finished; -loss reverses."
        ),
    ] = "arm",
    as_json: Json = False,
    table: Annotated[
        Path | None,
        typer.Option("--csv", help="Write finished runs to this file, for `steepen fit`."),
    ] = None,
) -> None:
    """List runs with status, loss and speed.

    An unfinished run shows its last training loss. The command that started an interrupted run resumes it.

    Example: steepen runs --arm untied-grow --sort loss
    """
    from steepen.runs.status import check_status, sort_rows
    from steepen.runs.store import VALIDATED_RUNS, RunStore
    from steepen.utils.formatting import wrap_to_terminal

    if not runs.is_dir():
        raise UsageError(f"there is no directory {runs}; name the directory of your runs with --runs.")
    chosen = None if status is None else check_status(status)
    store = RunStore(runs)
    found = sort_rows(store.rows(arm=arm, depth=depth, status=chosen), sort)
    if len(store.runs()) > VALIDATED_RUNS:
        note = (
            f"note: more than {VALIDATED_RUNS:,} runs: only the fields shown here were checked; "
            "`steepen report` and `steepen fit` check whole records."
        )
        print(wrap_to_terminal(note, sys.stderr), file=sys.stderr)
    if table is not None:
        _write_csv(table, [row for row in found if row.status == "finished"])
    if as_json:
        print(json.dumps({"runs": [row.to_dict() for row in found]}, indent=2, ensure_ascii=False))
        return
    if not found:
        filtered = any(value is not None for value in (arm, depth, status))
        print(f"No run in {runs}" + (" matches." if filtered else " yet."))
        return
    _print_table(found)


def status(
    study: Annotated[
        str | None,
        typer.Argument(help="Name of a study, a prefix of it, or its directory (default: all)."),
    ] = None,
    studies: Studies = Path("studies"),
    runs: Annotated[Path | None, typer.Option(help="Directory of its runs, if it has moved.")] = None,
    as_json: Json = False,
) -> None:
    """Show the progress of a study: runs by status, FLOPs done and left, and ETA.

    It reads files only, so it works on any machine that mounts the directory.

    Example: steepen status ladder
    """
    from steepen.studies.driver.dry_run import study_status
    from steepen.studies.driver.journal import Journal, find_study_folder, read_journals
    from steepen.utils.formatting import wrap_to_terminal

    if study is None:
        if not studies.is_dir():
            raise UsageError(
                f"there is no directory {studies}; name the directory of your studies with --studies."
            )
        journals, unreadable = read_journals(studies)
        every = [study_status(journal, runs) for journal in journals]
        if as_json:
            found = {"studies": [one.to_dict() for one in every], "unreadable": unreadable}
            print(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            lines = [*map(_headline, every), *(f"{name}: {why}" for name, why in unreadable.items())]
            text = "\n".join(lines) or f"No study in {studies} yet."
            print(wrap_to_terminal(text, sys.stdout))
        return
    found = study_status(Journal.read(find_study_folder(study, studies)), runs)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    print(wrap_to_terminal(_headline(found), sys.stdout))
    if found.message:
        print(wrap_to_terminal(found.message, sys.stdout))
    shown = [row for row in found.runs if row.status in ("running", "failed", "interrupted")]
    if shown:
        _print_table(shown)


def _headline(study: StudyStatus) -> str:
    """One line: state, runs by status, FLOPs done and left, ETA."""
    from steepen.utils.formatting import format_duration

    total = len(study.runs)
    counts = ", ".join(f"{count} {name}" for name, count in study.counts.items() if count)
    line = f"{study.name}: {study.state}, batch {study.batches}; {total} runs requested"
    line += f" ({counts})" if counts else ""
    line += f"; {study.flops_done:.3g} FLOPs done, {study.flops_left:.3g} left"
    if study.flops_left and study.seconds_left is not None:
        when = "ETA" if study.state == "running" else "about"
        line += f", {when} {format_duration(study.seconds_left)}" + ("" if when == "ETA" else " of work")
    return line + "."


def _write_csv(path: Path, rows: list[RunRow]) -> None:
    """Write the table that `steepen fit` reads, one line per run."""
    from dataclasses import replace

    from steepen.report.table_files import to_csv
    from steepen.studies.answer import Table
    from steepen.utils.files import write_atomically
    from steepen.utils.series import SeriesRun, split_recipes

    if not rows:
        raise UsageError(f"none of these runs is finished: {path} was not written.")
    columns = ("arm", "depth", "seed", "tokens", "flops", "loss", "corpus", "recipe", "run")
    recipes = split_recipes([SeriesRun(r.arm, r.corpus, r.recipe, r.depth, r.seed) for r in rows])
    named = [replace(row, recipe=recipe) for row, recipe in zip(rows, recipes, strict=True)]
    values = tuple(tuple(getattr(row, column) for column in columns) for row in named)
    write_atomically(path, to_csv(Table("runs", columns, values)))
    print(f"{path}: {len(rows)} finished runs.", file=sys.stderr)


def _print_table(rows: list[RunRow]) -> None:
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
    # A pipe or file has no width: print whole lines.
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
