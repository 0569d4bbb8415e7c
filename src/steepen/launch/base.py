"""What a launcher is, and the queue all of them share: start, notice the end, retry or report, never stop.

A launcher takes specs and yields an outcome for each as it ends, in any order. It draws a spec only when it
has room for it, so whoever supplies the specs may stop at any moment (a budget does).
"""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from steepen.errors import SteepenError
from steepen.launch.worker import PROGRAM, Attempt, TrainCommand
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore
from steepen.utils.json_io import write_json

RETRIES = 3  # attempts after the first that may end without any progress


@dataclass(frozen=True)
class Failure:
    """Why a run has no record."""

    kind: str  # Diverged, OutOfMemory, UsageError, Killed, WorkerLost, …
    message: str  # one sentence
    transient: bool = False  # the cause may be gone next time: another attempt can help


@dataclass(frozen=True)
class Outcome:
    """How one run ended: with a record, or with a failure."""

    spec: RunSpec
    record: RunRecord | None = None
    failure: Failure | None = None
    retried: int = 0


class Launcher(Protocol):
    """Somewhere to run specs."""

    @property
    def slots(self) -> int:
        """Runs at a time."""
        ...

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs, yielding outcomes as runs end; closing the iterator stops what runs, resumably."""
        ...


@dataclass(frozen=True)
class LaunchContext:
    """What every launcher needs to know: where the data and the runs are, and how to train."""

    data: Path
    store: RunStore
    arguments: tuple[str, ...] = ()  # more options of `steepen train`, e.g. ("--device", "cpu")
    program: tuple[str, ...] = PROGRAM

    def task(self, spec: RunSpec, environment: dict[str, str] | None = None) -> TrainCommand:
        """One attempt at a spec, ready to travel: paths are absolute, and the spec is in its directory."""
        run = self.store.run(spec)
        if not run.spec_file.exists():
            write_json(run.spec_file, spec.to_dict())
        return TrainCommand(
            str(run.path.absolute()),
            str(self.data.absolute()),
            self.arguments,
            environment or {},
            self.program,
        )


@dataclass
class Job:
    """A spec on its way through a launcher."""

    spec: RunSpec
    run: RunDirectory
    handle: Any = None  # the launcher's own
    saved: int = -1  # step of the newest checkpoint when this attempt began
    fruitless: int = 0  # attempts in a row that saved nothing new
    retried: int = 0


class LauncherBase(ABC):
    """The queue; a launcher adds how to start an attempt, how to see that it ended and how to stop it."""

    def __init__(self, place: LaunchContext, slots: int) -> None:
        self.place = place
        self._slots = slots

    @property
    def slots(self) -> int:
        """Runs at a time."""
        return self._slots

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Begin an attempt at each job, and put what identifies it into `handle`."""

    @abstractmethod
    def ended(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Wait a moment for any to end."""

    @abstractmethod
    def stop(self, running: Sequence[Job]) -> None:
        """Ask all to save and stop, and wait until they have."""

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs, yielding outcomes as runs end."""
        source = iter(specs)
        again: deque[Job] = deque()
        running: list[Job] = []
        exhausted = False
        try:
            while True:
                new: list[Job] = []
                while len(running) + len(new) < self.slots:
                    if again:
                        new.append(again.popleft())
                        continue
                    spec = None if exhausted else next(source, None)
                    if spec is None:
                        exhausted = True
                        break
                    new.append(Job(spec, self.place.store.run(spec)))
                for job in new:
                    job.saved = job.run.saved_step()
                running += new
                if new:
                    self.start(new)
                if not running:
                    return
                for job, attempt in self.ended(running):
                    running.remove(job)
                    outcome = self._judge(job, attempt)
                    if outcome is None:
                        again.append(job)
                    else:
                        yield outcome
        finally:
            if running:
                self.stop([job for job in running if job.handle is not None])

    def _judge(self, job: Job, attempt: Attempt) -> Outcome | None:
        """The outcome, or None where another attempt can help."""
        result = judge(job.run, attempt)
        if isinstance(result, RunRecord):
            return Outcome(job.spec, record=result, retried=job.retried)
        if result.transient:
            job.fruitless = 0 if job.run.saved_step() > job.saved else job.fruitless + 1
            if job.fruitless <= RETRIES:
                job.retried += 1
                job.handle = None
                return None
        _remember(job.run, result)
        return Outcome(job.spec, failure=result, retried=job.retried)


def _remember(run: RunDirectory, failure: Failure) -> None:
    """Have a failed run listed as failed, also where its process ended before it could say why.

    What a run said itself stays: that it diverged must not be forgotten.
    """
    if run.record_file.exists() or run.failure() is not None or run.busy():
        return
    with contextlib.suppress(OSError):  # a full disk is no reason to lose the outcome
        write_json(run.failure_file, {"kind": failure.kind, "message": failure.message})


def judge(run: RunDirectory, attempt: Attempt) -> RunRecord | Failure:
    """What an attempt came to: the record if there is one, or why not."""
    try:
        record = run.record()
    except SteepenError as error:
        return Failure("UnreadableRecord", str(error))
    if record is not None:
        return record
    where = f" on {attempt.host}" if attempt.host else ""
    if attempt.code is None:
        return Failure("WorkerLost", f"its worker was lost{where}. {attempt.output}".strip(), transient=True)
    number = -attempt.code if attempt.code < 0 else attempt.code - 128
    if number in signal.valid_signals() and number > 0:
        name = signal.Signals(number).name
        hint = "; the machine may be short of memory" if number == signal.SIGKILL else ""
        return Failure("Killed", f"it was stopped by {name}{where}{hint}.", transient=True)
    if attempt.code == 0:
        return Failure(
            "RecordMissing",
            f"it ended{where}, but its record is not in {run.path}: all machines must share that directory.",
        )
    return _reported(run, attempt)


def _reported(run: RunDirectory, attempt: Attempt) -> Failure:
    """The cause as the training process gave it: its last sentence, and its kind from failure.json."""
    lines = [line.strip() for line in attempt.output.splitlines() if line.strip()]
    said = [line.removeprefix("steepen: ") for line in lines if line.startswith("steepen: ")]
    message = said[-1] if said else (lines[-1] if lines else f"it ended with exit code {attempt.code}.")
    known = run.failure()
    if known is not None and known[1].strip() in attempt.output:  # not one left by an earlier attempt
        return Failure(*known)
    if message.startswith("internal error: "):
        kind = message.removeprefix("internal error: ").partition(":")[0]
        return Failure(kind, message)
    return Failure("UsageError" if attempt.code == 2 else "Failed", message)
