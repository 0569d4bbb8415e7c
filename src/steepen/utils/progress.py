"""One way to show how far a long command is: a bar with ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import typer

EVERY = 10.0  # seconds between lines where there is no terminal

Show = Callable[[str, float, float], None]  # what is being done, how much is done, of how much


@contextmanager
def shown(quiet: bool = False) -> Generator[Show]:
    """A function to call with (what, done, total) as often as one likes; it writes to standard error."""
    if quiet:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
        with Progress(
            *columns,
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task("starting", total=None)
            stage: float | None = None

            def move(what: str, done: float, total: float) -> None:
                nonlocal stage
                if stage != total:  # another piece of work: its speed is its own
                    bar.reset(task)
                    stage = total
                bar.update(task, description=what, completed=done, total=total)

            yield move
    else:
        from steepen.training.live_display import clock

        begun = said = time.monotonic()
        # The present piece of work, and what of it was done before: that tells nothing of its speed.
        stage, first = -1.0, 0.0

        def line(what: str, done: float, total: float) -> None:
            nonlocal begun, said, stage, first
            now = time.monotonic()
            if stage != total:
                begun, stage, first = now, total, done
            if now - said < EVERY or done <= first:
                return
            said = now
            left = (total - done) * (now - begun) / (done - first)
            typer.echo(f"{done / total:4.0%}  {what}  {clock(left)} left", err=True)

        yield line
