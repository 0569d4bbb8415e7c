"""The launcher interface, and the queue with retries that the built-in launchers share.

A launcher takes specs and yields outcomes as runs finish. It takes the next spec only when a slot is free, so
a budget can end the iterator of specs early. Each spec is a job in the queue; a job has one attempt or, with
retries, several, and the last attempt determines its outcome.
"""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steepen.errors import SteepenError
from steepen.launch.gpus_per_run import GpusPerRun
from steepen.launch.worker import PROGRAM, Attempt, TrainCommand
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore
from steepen.utils.files import file_version
from steepen.utils.json_io import write_json

MAX_RETRIES_WITHOUT_PROGRESS = 3  # retries in a row that saved no new checkpoint


@dataclass(frozen=True)
class Failure:
    """Why a run has no record."""

    kind: str  # Diverged, OutOfMemory, UsageError, Killed, WorkerLost, …
    message: str  # one sentence
    transient: bool = False  # another attempt may succeed (a lost worker, a kill)


@dataclass(frozen=True)
class Outcome:
    """The result of one run: a record or a failure."""

    spec: RunSpec
    record: RunRecord | None = None
    failure: Failure | None = None
    retries: int = 0


class Launcher(Protocol):
    """Runs specs somewhere. A custom launcher implements this, or derives from `LauncherBase`."""

    @property
    def slots(self) -> int:
        """Max runs at a time."""
        ...

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs and yield outcomes as runs end; closing the iterator stops all runs, resumably."""
        ...


@dataclass(frozen=True)
class LaunchContext:
    """What every launcher needs: the prepared data, the run store and the training command."""

    data: Path
    store: RunStore
    arguments: tuple[str, ...] = ()  # further options of `steepen train`, e.g. ("--device", "cpu")
    program: tuple[str, ...] = PROGRAM
    gpus_per_run: GpusPerRun = field(default_factory=GpusPerRun)
    # What an attempt came to; None: `attempt_result`, for which a run with a record has succeeded.
    result: Callable[[Job, Attempt], RunRecord | Failure] | None = None

    def train_command(
        self, spec: RunSpec, environment: dict[str, str] | None = None, *, gpus: int = 1
    ) -> TrainCommand:
        """Write spec.json and return the command that trains it, with absolute paths for other machines.

        With several `gpus` it starts one rank per GPU of its machine.
        """
        run = self.store.run(spec)
        ranks = ("--gpus", str(gpus)) if gpus > 1 else ()
        # The worker trusts the code that this file names, so it is not one that others may have left there.
        if spec.code is not None or not run.spec_file.exists():
            write_json(run.spec_file, spec.to_dict())
        return TrainCommand(
            str(run.path.absolute()),
            str(self.data.absolute()),
            (*self.arguments, *ranks),
            environment or {},
            self.program,
            spec.code,
        )


@dataclass
class Job:
    """A spec in a launcher's queue."""

    spec: RunSpec
    run: RunDirectory
    handle: Any = None  # of the launcher's current attempt: a process, a Slurm job, a Ray task
    saved_step: int = -1  # of the newest checkpoint when this attempt began
    earlier_failure: tuple[int, ...] | None = None  # version of failure.json when this attempt began
    retries_without_progress: int = 0  # attempts in a row that saved no new checkpoint
    retries: int = 0


class LauncherBase(ABC):
    """A queue with retries; subclasses start attempts, poll for ended ones and stop them."""

    def __init__(self, context: LaunchContext, slots: int) -> None:
        self.context = context
        self._slots = slots

    @property
    def slots(self) -> int:
        """Max runs that train at a time."""
        return self._slots

    @property
    def max_started(self) -> int:
        """Max runs started and not ended: `slots`, or more if a launcher sets runs up ahead of their turn."""
        return self.slots

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Start an attempt at each job and store what identifies it in `job.handle`."""

    @abstractmethod
    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Return the jobs whose attempt has ended; sleep briefly if none has."""

    @abstractmethod
    def stop(self, running: Sequence[Job]) -> None:
        """Make all attempts save a checkpoint and stop, and wait until they have ended."""

    def close(self) -> None:
        """End what the launcher keeps between batches of runs; it can be used again."""
        return

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs and yield outcomes as runs end."""
        spec_iterator = iter(specs)
        retry_queue: deque[Job] = deque()
        running: list[Job] = []
        exhausted = False
        try:
            while True:
                new: list[Job] = []
                while len(running) + len(new) < self.max_started:
                    if retry_queue:
                        new.append(retry_queue.popleft())
                        continue
                    spec = None if exhausted else next(spec_iterator, None)
                    if spec is None:
                        exhausted = True
                        break
                    new.append(Job(spec, self.context.store.run(spec)))
                for job in new:
                    job.saved_step = job.run.saved_step()
                    job.earlier_failure = file_version(job.run.failure_file)
                running += new
                if new:
                    self.start(new)
                if not running:
                    return
                for job, attempt in self.poll(running):
                    running.remove(job)
                    outcome = self._outcome(job, attempt)
                    if outcome is None:
                        retry_queue.append(job)
                    else:
                        yield outcome
        finally:
            if running:
                self.stop([job for job in running if job.handle is not None])

    def _outcome(self, job: Job, attempt: Attempt) -> Outcome | None:
        """The outcome of an attempt, or None if the job is to be retried."""
        result = (self.context.result or attempt_result)(job, attempt)
        if isinstance(result, RunRecord):
            return Outcome(job.spec, record=result, retries=job.retries)
        if result.transient:
            job.retries_without_progress = (
                0 if job.run.saved_step() > job.saved_step else job.retries_without_progress + 1
            )
            if job.retries_without_progress <= MAX_RETRIES_WITHOUT_PROGRESS:
                job.retries += 1
                job.handle = None
                return None
        _write_failure(job.run, result)
        return Outcome(job.spec, failure=result, retries=job.retries)


def _write_failure(run: RunDirectory, failure: Failure) -> None:
    """Write failure.json for a run whose process ended before it could.

    A failure that the run wrote itself is not overwritten: a diverged run stays diverged.
    """
    if run.record_file.exists() or run.failure() is not None or run.busy():
        return
    with contextlib.suppress(OSError):  # a full disk is no reason to lose the outcome
        write_json(run.failure_file, {"kind": failure.kind, "message": failure.message})


def attempt_result(job: Job, attempt: Attempt) -> RunRecord | Failure:
    """The record that an attempt wrote, or the reason why there is none."""
    run = job.run
    try:
        record = run.record()
    except SteepenError as error:
        return Failure("DamagedRecord", str(error))
    return attempt_failure(job, attempt) if record is None else record


def evaluation_result(job: Job, attempt: Attempt) -> RunRecord | Failure:
    """The record of a run, with its scores, if its evaluation exited with 0; else the reason it did not."""
    record = attempt_result(job, attempt)
    return record if attempt.exit_code == 0 else attempt_failure(job, attempt)


def attempt_failure(job: Job, attempt: Attempt) -> Failure:
    """The reason why an attempt did not do what it was made for, from its exit code and output."""
    run = job.run
    host = f" on {attempt.host}" if attempt.host else ""
    if attempt.exit_code is None:
        return Failure("WorkerLost", f"its worker was lost{host}. {attempt.output}".strip(), transient=True)
    number = -attempt.exit_code if attempt.exit_code < 0 else attempt.exit_code - 128
    if number in signal.valid_signals() and number > 0:
        name = signal.Signals(number).name
        hint = "; the machine may be short of memory" if number == signal.SIGKILL else ""
        return Failure("Killed", f"it was stopped by {name}{host}{hint}.", transient=True)
    if attempt.exit_code == 0:
        return Failure(
            "RecordMissing",
            f"it ended{host}, but its record is not in {run.path}: all machines must share that directory.",
        )
    return _failure_from_output(job, attempt)


def _failure_from_output(job: Job, attempt: Attempt) -> Failure:
    """The failure in failure.json if this attempt wrote it, else the last line of the attempt's output."""
    lines = [line.strip() for line in attempt.output.splitlines() if line.strip()]
    errors = [line.removeprefix("steepen: ") for line in lines if line.startswith("steepen: ")]
    message = (
        errors[-1] if errors else (lines[-1] if lines else f"it ended with exit code {attempt.exit_code}.")
    )
    known = job.run.failure()
    if known is not None and file_version(job.run.failure_file) != job.earlier_failure:
        return Failure(*known)
    if message.startswith("internal error: "):
        kind = message.removeprefix("internal error: ").partition(":")[0]
        return Failure(kind, message)
    return Failure("UsageError" if attempt.exit_code == 2 else "Failed", message)
