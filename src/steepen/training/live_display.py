"""What a person sees while a run goes on: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from steepen.runs.spec import RunSpec


@dataclass(frozen=True)
class Moment:
    """The numbers of one moment of a run."""

    step: int  # steps done
    loss: float
    learning_rate: float
    passes: int
    tokens_per_second: float
    mfu: float | None
    seconds_left: float


class LiveDisplay:
    """Shows moments as they come, and messages between them. Writes to standard error: output stays clean."""

    def __init__(self, spec: RunSpec, quiet: bool = False, every_seconds: float = 10.0) -> None:
        self.spec, self.quiet, self.every = spec, quiet, every_seconds
        self.last = 0.0
        self.live: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
            self.live.start()

    def say(self, message: str) -> None:
        """A message that stays."""
        if self.quiet:
            return
        if self.live is not None:
            self.live.console.print(message, highlight=False, markup=False)
        else:
            print(message, file=sys.stderr, flush=True)

    def show(self, moment: Moment) -> None:
        """The current moment."""
        if self.quiet:
            return
        if self.live is not None:
            self.live.update(self._panel(moment))
        elif time.monotonic() - self.last >= self.every or moment.step == self.spec.steps:
            self.last = time.monotonic()
            self.say(line(self.spec, moment))

    def close(self) -> None:
        """Take the live line away."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _panel(self, moment: Moment) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            f"[bold]{self.spec.arm.title} d{self.spec.shape.depth}[/]",
            ProgressBar(total=self.spec.steps, completed=moment.step, width=24),
            line(self.spec, moment),
        )
        return grid


def line(spec: RunSpec, moment: Moment) -> str:
    """One moment in one line."""
    mfu = "" if moment.mfu is None else f"  MFU {moment.mfu:.1%}"
    return (
        f"step {moment.step:,}/{spec.steps:,}  loss {moment.loss:.4f}  lr {moment.learning_rate:.2e}  "
        f"K {moment.passes}  {count(moment.tokens_per_second)} tok/s{mfu}  ETA {clock(moment.seconds_left)}"
    )


def count(value: float) -> str:
    """A large number in a few characters: 1.2M, 345k, 87."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
