"""`steepen report`: figures, tables and one HTML page of finished studies."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from steepen.utils.formatting import wrap_to_terminal

LINE_SECONDS = 5  # between lines of progress, where there is no terminal


def report(
    study: Annotated[
        list[str],
        typer.Argument(
            help="Studies: directories, names (or unambiguous prefixes of names) in --studies, or a "
            "directory that holds runs/ and studies/."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write to; created if missing.")] = Path("report"),
    formats: Annotated[
        str, typer.Option("--format", help="Figure formats: any of pdf, svg and png, separated by commas.")
    ] = "pdf,svg,png",
    studies: Annotated[Path, typer.Option(help="Directory of all studies.")] = Path("studies"),
    runs: Annotated[
        Path | None, typer.Option(help="Directory of the runs, if they have moved since the study.")
    ] = None,
    forecasts: Annotated[
        Path | None,
        typer.Option(
            help="Score the forecasts of this file of `steepen fit --register` against the studies' runs.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the names of the written files as JSON.")
    ] = False,
) -> None:
    """Make a report of finished studies: one HTML page, figures and tables.

    OUT/report.html is self-contained: verdicts, figures with hover values,
    tables, method, and every run with its spec and record; it opens offline,
    on phones, and prints. OUT/figures has every figure as PDF, SVG and PNG,
    with its data as CSV; OUT/tables every table as CSV, Markdown and LaTeX.
    The same study gives the same bytes.

    \b
    Examples:
    [bold]steepen report ladder[/bold]
    [bold]steepen report ladder-tiny studies/tpp-tiny --out report --format pdf[/bold]
    """
    from steepen.report.load_studies import expand_studies, load_study, with_registered_forecasts
    from steepen.report.write import PAGE_NAME, parse_formats, step_count, write_report

    kinds = parse_formats(formats)
    loaded = [load_study(name, studies, runs) for name in expand_studies(study)]
    if forecasts is not None:
        loaded = [with_registered_forecasts(one, forecasts) for one in loaded]
    steps = with_progress(write_report(loaded, out, kinds), step_count(loaded))
    written = [file for files in steps for file in files]
    if others := [
        file for kind in ("figures", "tables") for file in (out / kind).glob("*") if file not in written
    ]:
        count = "1 file" if len(others) == 1 else f"{len(others)} files"
        note = f"note: {out} also has {count} that this report did not write, such as {min(others)}."
        print(wrap_to_terminal(note, sys.stderr), file=sys.stderr)
    if as_json:
        print(json.dumps({"page": str(out / PAGE_NAME), "files": [str(file) for file in written]}, indent=2))
        return
    figures = sum(file.parent.name == "figures" for file in written)
    tables = sum(file.parent.name == "tables" for file in written)
    print(f"{out / PAGE_NAME}: open it in any browser.")
    for folder, count in (("figures", figures), ("tables", tables)):
        if count:
            print(f"{out / folder}: {count} files.")


def with_progress(steps: Iterator[tuple[Path, ...]], total: int) -> Iterator[tuple[Path, ...]]:
    """Yield the steps, showing a progress bar in a terminal and a line every few seconds elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from steepen.utils.console import SafeConsole

    console = SafeConsole(stderr=True)
    columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = last_line = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for done, files in enumerate(steps, 1):
            yield files
            progress.advance(task)
            now = time.monotonic()
            if not console.is_terminal and now - last_line > LINE_SECONDS and done < total:
                left = (now - start) / done * (total - done)
                print(f"drawing: {done} of {total}, about {left:.0f} s left", file=sys.stderr, flush=True)
                last_line = now
