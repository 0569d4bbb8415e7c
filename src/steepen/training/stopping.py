"""Why a run ends before its last step: a signal, or a loss, gradient or weight that is not finite.

Ctrl-C, SIGTERM and SIGHUP finish the step, save, and stop; a second Ctrl-C stops at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

from steepen.errors import SteepenError
from steepen.runs.spec import RunSpec
from steepen.training.checkpoint import CheckpointWriter, list_checkpoints


class Interrupted(SteepenError):
    """A signal stopped the run after saving a checkpoint, or before its first step (None)."""

    transient = True

    def __init__(self, number: int, step: int | None) -> None:
        when = "before training" if step is None else f"after step {step:,}, which is saved"
        super().__init__(f"stopped by {signal.Signals(number).name} {when}; run the same command to resume.")
        self.exit_code = 128 + number


class StopSignals:
    """Records SIGINT, SIGTERM or SIGHUP, for the trainer to stop after the current step."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Install the handlers, in the main thread only, and restore the old ones on exit."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A terminal that closes sends SIGHUP, which nohup has the process ignore.
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number  # nothing else: printing here could interrupt a print


class Diverged(SteepenError):
    """The loss, a gradient or a weight is NaN or infinite."""


def diverged(spec: RunSpec, writer: CheckpointWriter, step: int, what: str) -> Diverged:
    """The error for a step (from 0): its position in the data, and the last checkpoint before it."""
    if writer.world.size == 1:
        writer.join()  # it may be writing that checkpoint
    good = [c for c in list_checkpoints(writer.folder) if c.step <= step]
    where = f"the last good checkpoint is {good[-1].path}" if good else "no checkpoint was saved before it"
    first = step * spec.batch_sequences
    return Diverged(
        f"{what} at step {step + 1:,} (sequences {first:,} to {first + spec.batch_sequences - 1:,} in "
        f"data order); {where}. Lower the learning rate "
        f"(`changes` learning_rate=…) or look at the data."
    )
