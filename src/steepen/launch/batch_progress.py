"""Progress of a batch of runs, read from their files, so that it works for every launcher."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Sequence
from dataclasses import replace

from steepen.errors import SteepenError
from steepen.launch.base import Outcome
from steepen.launch.cost_estimate import Speed, makespan, remaining_flops, speed_samples
from steepen.runs.fields import varied_settings
from steepen.runs.record import RunRecord
from steepen.runs.row import last_metrics
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.runs.trunk import first_steps
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
        self.initial_speed = speed
        self.records: list[RunRecord] = []  # of runs that ended here
        self.batches = 0
        self.total: dict[str, RunSpec] = {}
        self.unfinished: dict[str, RunSpec] = {}  # in order
        self.launched: dict[str, RunSpec] = {}  # given to the launcher, not ended
        self.failed = 0
        self.slots: int | None = None
        self.varied: dict[str, str] = {}  # what tells a run from others of its arm and size
        self.lock = threading.RLock()  # the display polls from another thread
        self.display = ProgressDisplay(quiet=True)

    def start_batch(
        self, specs: Sequence[RunSpec], waiting: Sequence[RunSpec], slots: int | None = None
    ) -> None:
        """Start a batch; `waiting` are the specs that have not finished, `slots` how many train at once."""
        with self.lock:
            self.slots = slots
            self.batches += 1
            self.total = {spec.hash: spec for spec in specs}
            self.varied = varied_settings(self.total.values())
            self.unfinished = {spec.hash: spec for spec in waiting}
            self.launched, self.failed = {}, 0
        if waiting:
            done = len(self.total) - len(self.unfinished)
            before = f", {done} already finished" if done else ""
            noun = "run" if len(self.total) == 1 else "runs"
            starts = first_steps(self.store, waiting)
            cost = sum(remaining_flops(spec, starts[spec.hash]) for spec in waiting)
            self.display.print(
                f"batch {self.batches}: {len(self.total)} {noun}{before}, {cost:.3g} FLOPs to go."
            )

    def run_started(self, spec: RunSpec) -> None:
        """Note that a run was given to the launcher."""
        with self.lock:
            self.launched[spec.hash] = spec

    def run_ended(self, outcome: Outcome) -> None:
        """Note that a run ended, and print its loss or failure."""
        name, record, failure = outcome.spec.hash, outcome.record, outcome.failure
        with self.lock:
            self.unfinished.pop(name, None)
            self.launched.pop(name, None)
            if record is not None:
                self.records.append(record)
            self.failed += failure is not None
            done = f"{len(self.total) - len(self.unfinished)}/{len(self.total)}"
        again = f" (retried {outcome.retries}×)" if outcome.retries else ""
        if record is not None:
            took = format_duration(record.seconds_total)
            self.display.print(
                f"{done} {self._title(outcome.spec)}: loss {record.validation_loss:.4f} in {took}{again}"
            )
        elif failure is not None:
            self.display.print(
                f"{done} {self._title(outcome.spec)}: {failure.kind}: {failure.message}{again}"
            )

    def _title(self, spec: RunSpec) -> str:
        varied = self.varied.get(spec.hash)
        return f"{spec.arm.name} d{spec.shape.depth} seed {spec.seed}" + (f", {varied}" if varied else "")

    def speed(self) -> Speed:
        """Speed of the runs that ended here, or, before the first has, the initial estimate."""
        initial = self.initial_speed or Speed.from_records(())
        return replace(initial, samples=speed_samples(self.records)) if self.records else initial

    def __enter__(self) -> BatchProgress:
        self.display = ProgressDisplay(quiet=self.quiet, line_seconds=_LINE_SECONDS, poll=self._progress)
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()

    def summary(self) -> str:
        """Runs done, running and failed, and the ETA of the batch."""
        left, running = self._unfinished_specs(), self._running_specs()
        text = f"{len(self.total) - len(left)}/{len(self.total)} runs done, {len(running)} running"
        if self.failed:
            text += f", {self.failed} failed"
        eta = None
        # A run that is still to come may fit on no number of GPUs: the launcher will say so.
        with contextlib.suppress(SteepenError):
            eta = self._eta(left, running) if left else None
        return text if eta is None else f"{text}, ETA {format_duration(eta)}"

    def _unfinished_specs(self) -> list[RunSpec]:
        with self.lock:
            return list(self.unfinished.values())

    def _running_specs(self) -> list[RunSpec]:
        with self.lock:
            current = list(self.launched.values())
        return [spec for spec in current if self.store.run(spec).busy()]

    def _eta(self, left: Sequence[RunSpec], running: Sequence[RunSpec]) -> float | None:
        """Seconds to the end of the batch: running runs at their own speed, waiting ones at `speed()`."""
        known = {spec.hash: last_metrics(self.store.run(spec)) for spec in running}
        flops_per_second = [
            expected_flops(spec) / spec.tokens * known[spec.hash]["tokens_per_second"]
            for spec in running
            if known[spec.hash].get("tokens_per_second")
        ]
        if not self.records and self.initial_speed is None:
            if not flops_per_second:
                return None
            speed = Speed((), statistics.median(flops_per_second), "measured on the runs under way")
        else:
            speed = self.speed()
        seconds, starts = list[float](), first_steps(self.store, left)
        for spec in left:
            last = known.get(spec.hash, {})
            tokens_per_second = last.get("tokens_per_second")
            if tokens_per_second:
                seconds.append((1 - last["step"] / spec.steps) * spec.tokens / tokens_per_second)
            else:
                seconds.append(speed.seconds(spec, remaining_flops(spec, starts[spec.hash])))
        # More runs than train may have started: the next is set up while another trains.
        at_once = len(running) if self.slots is None else min(len(running), self.slots)
        return makespan(seconds, max(1, at_once))

    def _progress(self) -> Progress:
        if not self.total:
            return Progress((), "")
        rows: list[ProgressRow] = []
        for spec in self._running_specs()[:_MAX_ROWS]:
            last = last_metrics(self.store.run(spec))
            step = int(last.get("step", 0))
            loss = f"loss {last['loss']:.4f}" if last else "starting"
            rows.append(
                ProgressRow(self._title(spec), step, spec.steps, f"step {step:,}/{spec.steps:,} {loss}")
            )
        summary, left = self.summary(), self._unfinished_specs()
        done = len(self.total) - len(left)
        rows.append(ProgressRow(f"batch {self.batches}", done, len(self.total), summary))
        return Progress(rows, summary if left else "")
