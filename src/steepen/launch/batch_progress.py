"""Progress of a batch of runs, read from their files, so that it works for every launcher."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from types import TracebackType

from steepen.launch.base import Outcome
from steepen.launch.cost_estimate import Speed, flops_left, makespan
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.status import last_metrics
from steepen.runs.store import RunStore
from steepen.utils.formatting import format_duration
from steepen.utils.progress import Progress, ProgressDisplay, ProgressRow

_LINE_SECONDS = 30.0  # between lines where there is no terminal
_MAX_ROWS = 12  # running runs in the live table


class BatchProgress:
    """Follows batches of runs and shows them on standard error: done, running, failed, losses, ETA."""

    def __init__(
        self,
        store: RunStore,
        *,
        speed: Speed | None = None,  # used until the first run ends
        quiet: bool = False,
    ) -> None:
        self.store, self.quiet = store, quiet
        self.first_speed = speed
        self.known: list[RunRecord] = []  # of the runs that ended here
        self.batches = 0
        self.total: dict[str, RunSpec] = {}
        self.left: dict[str, RunSpec] = {}  # not ended, in order
        self.current: dict[str, RunSpec] = {}  # handed to the launcher, not ended
        self.failed = 0
        self.guard = threading.RLock()  # the display polls from another thread
        self.display = ProgressDisplay(quiet=True)

    def batch(self, specs: Sequence[RunSpec], waiting: Sequence[RunSpec]) -> None:
        """A batch begins; `waiting` are those not finished."""
        with self.guard:
            self.batches += 1
            self.total = {spec.hash: spec for spec in specs}
            self.left = {spec.hash: spec for spec in waiting}
            self.current, self.failed = {}, 0
        if waiting:
            done = len(self.total) - len(self.left)
            before = f", {done} already finished" if done else ""
            noun = "run" if len(self.total) == 1 else "runs"
            cost = sum(flops_left(spec, self.store.run(spec)) for spec in waiting)
            self.display.print(
                f"batch {self.batches}: {len(self.total)} {noun}{before}, {cost:.3g} FLOPs to go."
            )

    def started(self, spec: RunSpec) -> None:
        """A run was handed to the launcher."""
        with self.guard:
            self.current[spec.hash] = spec

    def ended(self, outcome: Outcome) -> None:
        """A run ended."""
        name, record, failure = outcome.spec.hash, outcome.record, outcome.failure
        with self.guard:
            self.left.pop(name, None)
            self.current.pop(name, None)
            if record is not None:
                self.known.append(record)
            self.failed += failure is not None
            done = f"{len(self.total) - len(self.left)}/{len(self.total)}"
        again = f" (retried {outcome.retried}×)" if outcome.retried else ""
        if record is not None:
            took = format_duration(record.seconds_total)
            self.display.print(
                f"{done} {title(outcome.spec)}: loss {record.validation_loss:.4f} in {took}{again}"
            )
        elif failure is not None:
            self.display.print(f"{done} {title(outcome.spec)}: {failure.kind}: {failure.message}{again}")

    def speed(self) -> Speed:
        """How fast runs have been here, or, before the first has ended, were elsewhere."""
        if not self.known and self.first_speed is not None:
            return self.first_speed
        return Speed.of(self.known)

    def __enter__(self) -> BatchProgress:
        self.display = ProgressDisplay(quiet=self.quiet, line_seconds=_LINE_SECONDS, poll=self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.close()

    def summary(self) -> str:
        """Done of total, what runs, and how long it will take."""
        left, running = self._left(), self._running()
        text = f"{len(self.total) - len(left)}/{len(self.total)} runs done, {len(running)} running"
        if self.failed:
            text += f", {self.failed} failed"
        eta = self._eta(left, running) if left else None
        return text if eta is None else f"{text}, ETA {format_duration(eta)}"

    def _left(self) -> list[RunSpec]:
        with self.guard:
            return list(self.left.values())

    def _running(self) -> list[RunSpec]:
        with self.guard:
            current = list(self.current.values())
        return [spec for spec in current if self.store.run(spec).busy()]

    def _eta(self, left: Sequence[RunSpec], running: Sequence[RunSpec]) -> float | None:
        """Time to the end of the batch: what runs by its own pace, what waits by that of those before it."""
        known = {spec.hash: last_metrics(self.store.run(spec)) for spec in running}
        paces = [
            expected_flops(spec) / spec.tokens * known[spec.hash]["tokens_per_second"]
            for spec in running
            if known[spec.hash].get("tokens_per_second")
        ]
        if not self.known and self.first_speed is None:
            if not paces:
                return None
            speed = Speed((), statistics.median(paces), "measured on the runs under way")
        else:
            speed = self.speed()
        seconds: list[float] = []
        for spec in left:
            last = known.get(spec.hash, {})
            pace = last.get("tokens_per_second")
            if pace:
                seconds.append((1 - last["step"] / spec.steps) * spec.tokens / pace)
            else:
                seconds.append(speed.seconds(spec, flops_left(spec, self.store.run(spec))))
        return makespan(seconds, max(1, len(running)))

    def _progress(self) -> Progress:
        """The rows and the line that the display shows."""
        if not self.total:
            return Progress((), "")
        rows: list[ProgressRow] = []
        for spec in self._running()[:_MAX_ROWS]:
            last = last_metrics(self.store.run(spec))
            step = int(last.get("step", 0))
            loss = f"loss {last['loss']:.4f}" if last else "starting"
            rows.append(ProgressRow(title(spec), step, spec.steps, f"step {step:,}/{spec.steps:,} {loss}"))
        summary, left = self.summary(), self._left()
        done = len(self.total) - len(left)
        rows.append(ProgressRow(f"batch {self.batches}", done, len(self.total), summary))
        return Progress(rows, summary if left else "")


def title(spec: RunSpec) -> str:
    """A run in a few words."""
    return f"{spec.arm.name} d{spec.shape.depth} seed {spec.seed}"
