"""`steepen report`: figures, tables and one HTML page of finished studies."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer


def report(
    study: Annotated[
        list[str],
        typer.Argument(help="Studies: their folders, or their names in --studies (a beginning will do)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to; it is made if it does not exist.")],
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the figures, separated by commas.")
    ] = "pdf,svg,png",
    studies: Annotated[Path, typer.Option(help="Where studies live.")] = Path("studies"),
    runs: Annotated[
        Path | None, typer.Option(help="Where the runs are now, if they have moved since the study.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files written as JSON.")] = False,
) -> None:
    """Make a report of finished studies: one HTML page, figures and tables.

    OUT/report.html holds everything (verdicts, figures with values under the pointer, tables, method, every
    run with its spec and record) and opens without a network, on a phone as well as in print. OUT/figures has
    each figure for a paper, OUT/tables each table as CSV and Markdown. The same study gives the same bytes.

    Examples: steepen report ladder --out report

    steepen report ladder-tiny studies/tpp-tiny --out report --format pdf
    """
    from steepen.report.load import load_study
    from steepen.report.write import PAGE_NAME, parse_formats, step_count, write_report

    kinds = parse_formats(formats)
    loaded = [load_study(name, studies, runs) for name in dict.fromkeys(study)]
    written = [
        file for files in _followed(write_report(loaded, out, kinds), step_count(loaded)) for file in files
    ]
    if as_json:
        print(json.dumps({"page": str(out / PAGE_NAME), "files": [str(file) for file in written]}, indent=2))
        return
    figures = sum(file.parent.name == "figures" for file in written)
    tables = sum(file.parent.name == "tables" for file in written)
    print(f"{out / PAGE_NAME}: open it in any browser.")
    for folder, count in (("figures", figures), ("tables", tables)):
        if count:
            print(f"{out / folder}: {count} files.")


def _followed(work: Iterator[tuple[Path, ...]], total: int) -> Iterator[tuple[Path, ...]]:
    """The same steps, with a bar and the time left in a terminal, and a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = said = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for done, files in enumerate(work, 1):
            yield files
            progress.advance(task)
            now = time.monotonic()
            if not console.is_terminal and now - said > 5 and done < total:
                left = (now - began) / done * (total - done)
                print(f"drawing: {done} of {total}, about {left:.0f} s left", file=sys.stderr, flush=True)
                said = now
