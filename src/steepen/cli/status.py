"""`steepen status`: the progress of studies."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steepen.cli.launch_options import Studies
from steepen.cli.run_options import Json
from steepen.errors import UsageError
from steepen.utils.printable_stream import unwrapped

if TYPE_CHECKING:
    from steepen.studies.driver.study_status import StudyStatus

WATCH_SECONDS = 5.0
START_SECONDS = 60.0  # --watch: the longest time between the end of a preparation and the journal


def status(
    study: Annotated[
        str | None,
        typer.Argument(help="Name of a study, a prefix of it, or its directory (default: all)."),
    ] = None,
    studies: Studies = Path("studies"),
    runs: Annotated[Path | None, typer.Option(help="Directory of its runs, if it has moved.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds until the study ends.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the progress of a study: runs by status, FLOPs done and left, and ETA.

    It reads files only, so it works on any machine that mounts the directory.

    Example: steepen status ladder --watch
    """
    if watch and as_json:
        raise UsageError("--watch shows text for people; ask for --json again and again instead.")
    prepared = -math.inf  # when the study was last seen preparing its data
    while True:
        if watch and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="", file=unwrapped(sys.stdout))  # home, and clear the screen
        try:
            state = _show(study, studies, runs, as_json)
        except UsageError:
            if not watch or time.monotonic() - prepared > START_SECONDS:
                raise
            state = "starting"
        if state == "preparing":
            prepared = time.monotonic()
        if not watch or state == "ended":
            return
        sys.stdout.flush()
        time.sleep(WATCH_SECONDS)


def _show(study: str | None, studies: Path, runs: Path | None, as_json: bool) -> str:
    """Print the progress of one study or of all; returns "running", "preparing" (data) or "ended"."""
    from steepen.results.runs import run_blocks
    from steepen.results.text import print_blocks
    from steepen.studies.driver.journal import (
        Journal,
        find_preparing,
        find_study_folder,
        list_preparing,
        read_journals,
    )
    from steepen.studies.driver.study_status import study_status
    from steepen.utils.formatting import wrap_to_terminal

    if study is None:
        if not studies.is_dir():
            raise UsageError(
                f"there is no directory {studies}; name the directory of your studies with --studies."
            )
        preparing = list_preparing(studies)
        journals, unreadable = read_journals(studies)
        every = [study_status(journal, runs) for journal in journals]
        if as_json:
            found = {"studies": [one.to_dict() for one in every], "unreadable": unreadable}
            print(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            lines = [*map(_headline, every), *map(_preparing_line, preparing)]
            lines += [f"{name}: {why}" for name, why in unreadable.items()]
            text = "\n".join(lines) or f"No study in {studies} yet."
            print(wrap_to_terminal(text, sys.stdout))
        running = "running" if any(one.state == "running" for one in every) else "ended"
        return "preparing" if preparing else running
    try:
        folder = find_study_folder(study, studies)
    except UsageError:
        name = find_preparing(study, studies)
        if as_json or name is None:
            raise
        print(wrap_to_terminal(_preparing_line(name), sys.stdout))
        return "preparing"
    found = study_status(Journal.read(folder), runs)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return "ended"
    print(wrap_to_terminal(_headline(found), sys.stdout))
    if found.message:
        print(wrap_to_terminal(found.message, sys.stdout))
    shown = [row for row in found.runs if row.status in ("running", "failed", "interrupted", "unknown")]
    if shown:
        print_blocks(lambda width: run_blocks([vars(row) for row in shown], width))
    return "running" if found.state == "running" else "ended"


def _preparing_line(name: str) -> str:
    return f"{name}: its data is being prepared; no runs requested yet."


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
