"""The launcher interface, launchers by name, and the queue with retries that the built-in ones share.

The way of a run: a study yields specs; `LaunchContext.task` makes a request of each, as JSON; a launcher
hands the task to a worker (`worker.begin_task`), on this machine (`local`), in a Slurm job or a Ray task;
the worker answers with the outcome, as JSON (`worker.Attempt`); the queue retries what may succeed another
time, and yields an `Outcome` with the record that the run left in the store.

A launcher takes the next spec only when a slot is free, so a budget can end the iterator of specs early. Each
spec is a job in the queue; a job has one attempt or, with retries, several, and the last attempt determines
its outcome.
"""

from __future__ import annotations

import inspect
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from steepen.errors import Failure, SteepenError, UsageError, nearest
from steepen.launch.cost_estimate import GpusPerRun
from steepen.launch.worker import PROGRAM, Attempt, Task
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore
from steepen.utils.codec import to_builtins
from steepen.utils.files import file_version
from steepen.utils.imports import import_object, object_name
from steepen.utils.json_io import write_json
from steepen.utils.yaml_io import load_yaml

MAX_RETRIES_WITHOUT_PROGRESS = 3  # retries in a row that saved no new checkpoint


@dataclass(frozen=True)
class Outcome:
    """The result of one run: a record or a failure."""

    spec: RunSpec
    record: RunRecord | None = None
    failure: Failure | None = None
    retries: int = 0
    result: Any = None  # what the request returned, as JSON


class Launcher(Protocol):
    """Runs specs somewhere. A custom launcher implements this, or derives from `LauncherBase`."""

    @property
    def slots(self) -> int:
        """Max runs at a time."""
        ...

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs and yield outcomes as runs end; closing the iterator stops all runs, resumably."""
        ...


def train_request(spec: RunSpec, run: RunDirectory) -> dict[str, Any]:
    """The request that trains a run; `wait`: another launcher may train it just now."""
    return {"request": "train", "spec": spec.to_dict(), "runs": str(run.path.parent.absolute()), "wait": True}


@dataclass(frozen=True)
class LaunchContext:
    """What every launcher needs: the prepared data, the run store, and the request that each run is."""

    data: Path
    store: RunStore
    options: Mapping[str, Any] = field(default_factory=dict)  # further fields, e.g. {"device": "cpu"}
    gpus_per_run: GpusPerRun = field(default_factory=GpusPerRun)
    request: Callable[[RunSpec, RunDirectory], dict[str, Any]] = train_request
    program: tuple[str, ...] = PROGRAM

    def task(self, spec: RunSpec, environment: dict[str, str] | None = None, *, gpus: int = 1) -> Task:
        """Write spec.json and return the task of a run, with absolute paths for other machines.

        With several `gpus` it starts one rank per GPU of its machine.
        """
        run = self.store.run(spec)
        # The code of this spec is trusted from now on, so it is not one that others may have left there.
        if spec.code is not None or not run.spec_file.exists():
            write_json(run.spec_file, spec.to_dict())
        request = {**self.request(spec, run), "data": str(self.data.absolute()), **to_builtins(self.options)}
        request |= {"gpus": gpus} if gpus > 1 else {}
        return Task(request, str(run.path.absolute() / "log.txt"), environment or {}, spec.code, self.program)


def nodes_of(gpus: int, most: int) -> tuple[int, int]:
    """The nodes of a run and its GPUs on each, where a node has `most`; UsageError for an odd number."""
    on_node = min(gpus, most)
    if gpus % on_node:
        raise UsageError(
            f"`gpus_per_run` = {gpus} is not possible: it must be a multiple of the {on_node} GPUs of a node "
            "(`launcher_options` max_gpus_per_node=N)."
        )
    return gpus // on_node, on_node


@dataclass
class Job:
    """A spec in a launcher's queue."""

    spec: RunSpec
    run: RunDirectory
    handle: Any = None  # of the launcher's current attempt: a process, a Slurm job, a Ray task
    saved_step: int = -1  # of the newest checkpoint when this attempt began
    finished: bool = False  # whether the run had a record when this attempt began
    earlier_failure: tuple[int, ...] | None = None  # version of failure.json at that time
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
        try:
            while True:
                room = max(0, self.max_started - len(running))
                new = list(itertools.islice(self._jobs(retry_queue, spec_iterator), room))
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

    def _jobs(self, retry_queue: deque[Job], specs: Iterator[RunSpec]) -> Iterator[Job]:
        """The next jobs to start, retries first; a spec is taken only when its job is."""
        while True:
            if retry_queue:
                job = retry_queue.popleft()
            elif (spec := next(specs, None)) is not None:
                job = Job(spec, self.context.store.run(spec))
            else:
                return
            job.saved_step, job.finished = job.run.saved_step(), job.run.record_file.exists()
            job.earlier_failure = file_version(job.run.failure_file)
            yield job

    def _outcome(self, job: Job, attempt: Attempt) -> Outcome | None:
        """The outcome of an attempt, or None if the job is to be retried."""
        result = attempt_result(job, attempt)
        if isinstance(result, RunRecord):
            return Outcome(job.spec, record=result, retries=job.retries, result=attempt.result)
        if result.transient:
            # A run that saves between losses is retried for ever, as on preempted nodes; one that does not
            # come to its next checkpoint would not the fifth time either.
            job.retries_without_progress = (
                0 if job.run.saved_step() > job.saved_step else job.retries_without_progress + 1
            )
            if job.retries_without_progress <= MAX_RETRIES_WITHOUT_PROGRESS:
                job.retries += 1
                job.handle = None
                return None
        # The process may have ended before it could say why. What the run wrote itself is not overwritten: a
        # diverged run stays diverged.
        if not (job.run.record_file.exists() or job.run.failure() is not None or job.run.busy()):
            job.run.write_failure(result)
        return Outcome(job.spec, failure=result, retries=job.retries)


def wait_until_free(jobs: Sequence[Job], seconds: float) -> None:
    """Wait until no process trains the runs of these jobs any more, at most so long."""
    deadline = time.monotonic() + seconds
    while any(job.run.busy() for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.1)


def attempt_result(job: Job, attempt: Attempt) -> RunRecord | Failure:
    """The record of a run, or the reason why there is none.

    A record that was written during the attempt counts, whatever happened to its process afterwards.
    """
    try:
        record = job.run.record()
    except SteepenError as error:
        return Failure("DamagedRecord", str(error))
    if record is not None and (attempt.failure is None or not job.finished):
        return record
    if attempt.failure is None:
        return Failure(
            "RecordMissing",
            f"it ended on {attempt.host}, but its record is not in {job.run.path}: all machines must share "
            "that directory.",
        )
    # A rank that another one stops has no time to answer; rank 0 has left the failure of the run.
    known = job.run.failure()
    if (
        attempt.failure.kind == "WorkerLost"
        and known is not None
        and file_version(job.run.failure_file) != job.earlier_failure
    ):
        return Failure(*known)
    return attempt.failure


LAUNCHERS = {
    "local": "steepen.launch.local:LocalLauncher",
    "slurm": "steepen.launch.slurm:SlurmLauncher",
    "ray": "steepen.launch.ray:RayLauncher",
}


def make_launcher(
    launcher: str | Callable[..., Launcher],
    context: LaunchContext,
    jobs: int | None = None,
    options: Sequence[str] = (),
) -> Launcher:
    """Make a launcher from its name or class, called as `launcher(context, jobs, **options)`.

    `jobs` is the max number of runs at a time, None for the launcher's default. `options` are KEY=VALUE
    texts: threads=4, partition=gpu, num_gpus=0.5.
    """
    factory, settings = find_launcher(launcher, options)
    return factory(context, jobs, **settings)


def find_launcher(
    launcher: str | Callable[..., Launcher], options: Sequence[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class of a launcher and its options; raises UsageError for a name or option that is wrong."""
    name = launcher if isinstance(launcher, str) else object_name(launcher, "launcher")
    if name not in LAUNCHERS and ":" not in name:
        raise UsageError(
            f"`launcher` = {name!r} is not known: use {', '.join(LAUNCHERS)} or, for a custom launcher, "
            '"module:attribute".'
        )
    factory = import_object(LAUNCHERS.get(name, name), "launcher", own=LAUNCHERS.values())
    if not callable(factory):
        raise UsageError(f"the launcher {name!r} is not valid: it must be a class or a function.")
    settings = dict(_parse_option(option) for option in options)
    _check_options(name, factory, settings)
    return factory, settings


def _check_options(name: str, factory: Callable[..., Any], settings: dict[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in settings:
        if option not in known:
            choices = f"use {nearest(option, known)}" if known else "it has none"
            raise UsageError(f"`launcher_options` = {option} is not an option of {name}: {choices}.")


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"`launcher_options` = {text!r} is not valid: write KEY=VALUE, e.g. threads=4.")
    try:
        found = load_yaml(value)
    except yaml.YAMLError as error:
        raise UsageError(f"`launcher_options` = {text!r} is not valid: its value cannot be read.") from error
    if isinstance(found, dict | list):
        raise UsageError(f"`launcher_options` = {text!r} is not valid: its value must be a number or text.")
    return name.strip().replace("-", "_"), found
