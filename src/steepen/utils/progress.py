"""Progress of long commands, on standard error: a live display in a terminal, plain lines elsewhere.

`ProgressDisplay` shows rows of bars (training, batches of runs); `stage_progress` one bar with an ETA for
work that goes through stages (data preparation, evaluation).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from steepen.utils.formatting import format_clock, printable

MIN_BAR, MAX_BAR = 6, 24  # columns of a bar
LINE_SECONDS = 10.0  # between lines where standard error is not a terminal
STEP_SECONDS = 5.0  # and between those of `show_steps`
T = TypeVar("T")


@dataclass(frozen=True)
class ProgressRow:
    """One bar of the live display."""

    title: str
    done: float
    total: float | None  # None: unknown, the bar pulses
    text: str = ""  # right of the bar


@dataclass(frozen=True)
class Progress:
    """The current state of a command: rows for a terminal, one line (if not empty) for a log."""

    rows: Sequence[ProgressRow]
    line: str


class ProgressDisplay:
    """Shows the newest `Progress`, either passed to `update` or computed by `poll`, and messages that stay.

    `poll` is called from another thread: once a second in a terminal, else once every `line_seconds`.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        line_seconds: float = LINE_SECONDS,
        poll: Callable[[], Progress] | None = None,
    ) -> None:
        self.quiet, self.line_seconds, self.poll = quiet, line_seconds, poll
        self._progress = Progress((), "")
        self.last_line = 0.0  # when it was printed
        self._live: Any = None
        self._console: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if quiet:
            return
        if sys.stderr.isatty():
            from rich.live import Live

            from steepen.utils.console import SafeConsole

            self._console = SafeConsole(stderr=True)
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4 if poll is None else 1,
                transient=True,
            )
            self._live.start()
        elif poll is not None:
            self._thread = threading.Thread(target=self._print_polled_lines, daemon=True)
            self._thread.start()

    def print(self, message: str) -> None:
        """Print a message that stays above the live display."""
        if self.quiet:
            return
        if self._live is not None:
            self._live.console.print(printable(message), highlight=False, markup=False)
        else:
            print(printable(message), file=sys.stderr, flush=True)

    def update(self, progress: Progress, *, final: bool = False) -> None:
        """Show this state; without a terminal, print its line if the last is old enough or if `final`."""
        self._progress = progress
        if self.quiet or self._live is not None or not progress.line:
            return
        if final or time.monotonic() - self.last_line >= self.line_seconds:
            self.last_line = time.monotonic()
            self.print(progress.line)

    def close(self) -> None:
        """Remove the live display."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress if self.poll is None else self.poll()
        grid = Table.grid(padding=(0, 1))
        titles = max((len(row.title) for row in progress.rows), default=0)
        free = self._console.width - 2 - titles - max((len(row.text) for row in progress.rows), default=0)
        for row in progress.rows:
            title = Text(printable(row.title), style="bold", no_wrap=True)
            text = Text(printable(row.text), no_wrap=True)
            if free < MIN_BAR:  # a narrow terminal: one line of text without a bar
                grid.add_row(title, Text(" ".join(row.text.split()), no_wrap=True, overflow="ellipsis"))
            else:
                bar = ProgressBar(total=row.total, completed=row.done, width=min(MAX_BAR, free))
                grid.add_row(title, bar, text)
        return grid

    def _print_polled_lines(self) -> None:
        assert self.poll is not None
        while not self._closed.wait(self.line_seconds):
            if line := self.poll().line:
                self.print(line)


class StageProgressCallback(Protocol):
    """The function that `stage_progress` yields; call it as often as convenient."""

    def __call__(
        self, stage: str, done: float, total: float, *, detail: str = "", tokens: int | None = None
    ) -> None:
        """Report `done` of `total` of a stage; speed and ETA are measured from the stage's first report."""


class _StageProgress:
    def __init__(self, display: ProgressDisplay) -> None:
        self.display = display
        self.stage: str | None = None
        self.began, self.first_done, self.first_tokens = 0.0, 0.0, 0

    def __call__(
        self, stage: str, done: float, total: float, *, detail: str = "", tokens: int | None = None
    ) -> None:
        now = time.monotonic()
        new = stage != self.stage
        if new:
            self.stage, self.began, self.first_done, self.first_tokens = stage, now, done, tokens or 0
        seconds, progressed = now - self.began, done - self.first_done
        figures = [f"{min(1.0, done / total):.0%}"] if total else []
        figures += [detail] if detail else []
        if tokens:
            rate = (tokens - self.first_tokens) / seconds if seconds else 0.0
            figures += [f"{tokens:,} tokens", f"{rate:,.0f} tokens/s"]
        if seconds and progressed > 0 and total:
            figures.append(f"ETA {format_clock((total - done) * seconds / progressed)}")
        row = ProgressRow(stage, done, total or None, ", ".join(figures))
        line = f"{stage} …" if new else f"{stage}: {row.text}"
        self.display.update(Progress((row,), line), final=new)


@contextmanager
def stage_progress(quiet: bool = False) -> Generator[StageProgressCallback]:
    """A display for work in stages: fraction, detail, tokens with their rate, and ETA."""
    with ProgressDisplay(quiet=quiet) as display:
        yield _StageProgress(display)


def show_steps(steps: Sequence[T]) -> Iterator[T]:
    """Yield what there is to draw, with a progress bar in a terminal and a line now and then elsewhere."""
    start, total = time.monotonic(), len(steps)
    with ProgressDisplay(line_seconds=STEP_SECONDS) as display:
        display.last_line = start  # a short drawing needs no line
        for done, step in enumerate(steps, 1):
            yield step
            if done < total:
                left = (time.monotonic() - start) / done * (total - done)
                text = f"{done} of {total}, about {left:.0f} s left"
                display.update(Progress((ProgressRow("drawing", done, total, text),), f"drawing: {text}"))
