"""Runs as Slurm jobs, through submitit; a job makes one run or, if there are many, several in turn."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepen.errors import Failure, SteepenError, UsageError, first_line
from steepen.launch.base import Job, LaunchContext, LauncherBase, nodes_of, wait_until_free
from steepen.launch.local import available_cores, require_whole
from steepen.launch.worker import Attempt, Task, Worker, begin_task, python_path, variable
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

_POLL_SECONDS = 0.2
QUEUE_SECONDS = 10.0  # between two calls of squeue
RESULT_SECONDS = 15.0  # for the result of a job that is done to appear on a slow file system
_DEFAULT_TIMEOUT_MINUTES = 1440  # at its time limit a job saves and is requeued
_MAX_QUEUED = 500  # many clusters reject more jobs per user
_RUNS_PER_JOB = 8
# Options that submitit names alike on every cluster.
_SUBMITIT_OPTIONS = {
    "name",
    "timeout_min",
    "mem_gb",
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "stderr_to_stdout",
}


def _make_private(folder: Path) -> None:
    """Make a directory that only its owner may write to: submitit hands jobs over as pickles in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.geteuid():
        raise SteepenError(
            f"{folder} belongs to another user, whose files would run as code; give a folder of your own "
            "with `launcher_options` folder=DIR."
        )
    if state.st_mode & 0o022:
        folder.chmod(state.st_mode & 0o7755)


class SlurmJob:
    """The function of a Slurm job: tasks, one after another in one worker process.

    Each outcome is left as JSON in a file of its own: the launcher never loads the pickles of submitit. At a
    time limit or preemption the job saves and requeues, and goes on with the task that was interrupted.
    """

    def __init__(self, tasks: Sequence[Task], results: Sequence[Path]) -> None:
        self.tasks = dict(zip(results, tasks, strict=True))
        self.worker: Worker | None = None
        self.stopped = False

    def __call__(self) -> None:
        """Run the tasks that have no result yet."""
        try:
            for result, task in self.tasks.items():
                if result.exists() or self.stopped:
                    continue
                try:
                    self.worker = begin_task(task, self.worker)
                    attempt = self.worker.wait()
                except Exception as error:
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    attempt = Attempt(Failure("Failed", f"the job failed on its node: {reason}", 70))
                if not self.stopped and _is_first_task():
                    write_json(result, with_checksum(to_builtins(attempt)))
        finally:
            if self.worker is not None:
                self.worker.terminate()

    def checkpoint(self) -> Any:
        """Called by submitit before preemption or the time limit: save the run and requeue what is left."""
        import submitit

        self.stopped = True
        if self.worker is not None:
            self.worker.terminate()
            self.worker.process.wait()
        return submitit.helpers.DelayedSubmission(SlurmJob([*self.tasks.values()], [*self.tasks]))


@dataclass(frozen=True)
class _Place:
    """Where an attempt is made: a Slurm job, and the file in which it leaves the outcome."""

    job: Any
    result: Path


class Queue:
    """The jobs that squeue lists, which need no accounting; asked every few seconds for all jobs at once."""

    def __init__(self) -> None:
        self.listed: set[str] = set()
        self.seen: set[str] = set()  # ever listed
        self.asked = -math.inf

    def ask_soon(self) -> None:
        """Ask when next needed: jobs were submitted."""
        self.asked = -math.inf

    def lists(self, job: str) -> bool | None:
        """Whether a job has not ended; None of a job that was never listed, as of another cluster."""
        if time.monotonic() - self.asked > QUEUE_SECONDS:
            self.asked = time.monotonic()
            words = ["squeue", "--noheader", "--array", "--format=%i", f"--user={os.geteuid()}"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode == 0:  # else Slurm does not answer now: as before
                self.listed = {*done.stdout.split()}
                self.seen |= self.listed
        return job in self.listed if job in self.seen else None


class SlurmLauncher(LauncherBase):
    """Slurm jobs. Options are submitit's: partition, timeout_min, gpus_per_node, account, qos, …

    A run of more GPUs than a node has (`max_gpus_per_node`, 8) gets several nodes, and srun starts its ranks.
    If there are more runs than `jobs`, a job makes up to `runs_per_job` of them, one after another in one
    worker process: small runs then do not wait for the queue, imports and kernels each.

    Slurm-only options need no `slurm_` prefix. `cluster="local"` runs the same jobs as processes
    of this machine.
    """

    def __init__(self, context: LaunchContext, jobs: int | None = None, **options: Any) -> None:
        try:
            import submitit
        except ImportError as error:
            raise SteepenError(
                "`launcher` slurm needs the package submitit; install it with `pip install 'steepen[slurm]'`."
            ) from error
        self.cluster = options.pop("cluster", "slurm")
        self.threads = require_whole("threads", options.pop("threads", 1))
        self.max_gpus_per_node = require_whole("max_gpus_per_node", options.pop("max_gpus_per_node", 8))
        self.runs_per_job = require_whole("runs_per_job", options.pop("runs_per_job", _RUNS_PER_JOB))
        folder = self.folder = Path(options.pop("folder", context.store.root / ".slurm")).absolute()
        _make_private(folder)
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster)
            self.executor.update_parameters(
                **_submitit_parameters({"timeout_min": _DEFAULT_TIMEOUT_MINUTES, **options})
            )
        except (TypeError, ValueError, NameError, RuntimeError, AssertionError) as error:
            raise UsageError(f"submitit rejects these options: {first_line(error)}") from error
        self.in_queue: list[Any] = []  # Slurm jobs that have not ended
        self.queue = Queue()
        self.waiting: list[Job] = []  # for a place in the queue
        default = available_cores() if self.cluster == "local" else _MAX_QUEUED
        super().__init__(context, jobs or default)

    @property
    def max_started(self) -> int:
        """Runs in the queue: several per Slurm job."""
        return self.slots * self.runs_per_job

    def start(self, jobs: Sequence[Job]) -> None:
        """Submit the jobs, or let them wait until fewer than `slots` Slurm jobs are in the queue."""
        self.waiting += jobs
        self._submit_waiting()

    def _submit_waiting(self) -> None:
        """Share the runs that wait out among free Slurm jobs, one array for each number of GPUs."""
        while self.waiting and (free := self.slots - len(self.in_queue)) > 0:
            gpus = self.context.gpus_per_run.of(self.waiting[0].spec)
            alike = [job for job in self.waiting if self.context.gpus_per_run.of(job.spec) == gpus]
            most = self.runs_per_job if gpus == 1 else 1  # runs on several GPUs take long anyway
            each = min(most, -(-len(alike) // free))
            chosen = alike[: each * free]
            groups = -(-len(chosen) // each)
            self._submit([chosen[first::groups] for first in range(groups)], gpus)
            self.waiting = [job for job in self.waiting if job.handle is None]

    def _submit(self, groups: Sequence[Sequence[Job]], gpus: int) -> None:
        """Submit an array with one Slurm job per group.

        One task starts the ranks of a node, and srun those of several nodes.
        """
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        nodes, on_node = nodes_of(gpus, self.max_gpus_per_node)
        ranks = 1 if nodes > 1 else gpus
        results = [[self.folder / f"result-{uuid.uuid4().hex}.json" for _ in group] for group in groups]
        tasks = [
            SlurmJob([self.context.task(job.spec, environment, gpus=ranks) for job in group], own)
            for group, own in zip(groups, results, strict=True)
        ]
        try:
            if not self.context.gpus_per_run.single:
                layout = {"nodes": nodes, "tasks_per_node": on_node if nodes > 1 else 1}
                if self.cluster != "local":
                    layout["gpus_per_node"] = on_node
                self.executor.update_parameters(**layout)
            with variable("PYTHONPATH", python_path()):  # jobs inherit it from the process that submits them
                handles = self.executor.submit_array(tasks)
        except Exception as error:  # submitit raises what sbatch printed
            raise SteepenError(f"the jobs could not be submitted: {first_line(error)}") from error
        self.queue.ask_soon()
        for group, handle, own in zip(groups, handles, results, strict=True):
            self.in_queue.append(handle)
            for job, result in zip(group, own, strict=True):
                job.handle = _Place(handle, result)

    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs that have ended: by their outcome, else when the whole Slurm job has ended."""
        self.in_queue = [handle for handle in self.in_queue if not self._ended(handle)]
        done: list[tuple[Job, Attempt]] = []
        for job in running:
            if job.handle is None:
                continue
            if job.handle.job not in self.in_queue or job.handle.result.exists():
                done.append((job, _attempt(job.handle)))
        self._submit_waiting()
        if not done:
            time.sleep(_POLL_SECONDS)
        return done

    def _ended(self, handle: Any) -> bool:
        """Whether a Slurm job has ended; submitit alone would wait forever where Slurm has no accounting."""
        if self.cluster == "local" or handle.paths.result_pickle.exists():
            return handle.done()
        listed = self.queue.lists(handle.job_id)
        return handle.done() if listed is None else not listed

    def stop(self, running: Sequence[Job]) -> None:
        """Cancel the jobs; Slurm sends SIGTERM first, on which the runs save."""
        self.waiting.clear()
        for handle in {id(job.handle.job): job.handle.job for job in running}.values():
            with contextlib.suppress(Exception):  # it has just ended
                handle.cancel()
        wait_until_free(running, 30)


def _attempt(place: _Place) -> Attempt:
    deadline = time.monotonic() + RESULT_SECONDS
    while not place.result.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    try:
        return from_builtins(Attempt, without_checksum(read_json(place.result), required=True))
    except FileNotFoundError:
        reason = f"job {place.job.job_id} left no result: it was cancelled or stopped, or its node failed."
    except (OSError, ValueError, SteepenError) as error:
        reason = f"the result of job {place.job.job_id} cannot be read ({error})."
    return Attempt(Failure("WorkerLost", f"its worker was lost: {reason}", transient=True))


def _is_first_task() -> bool:
    import submitit

    try:
        return submitit.JobEnvironment().global_rank == 0
    except RuntimeError:  # not in a job
        return True


def _submitit_parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Options under submitit's names: those that only Slurm knows get the prefix `slurm_`."""
    return {
        name if name in _SUBMITIT_OPTIONS or name.startswith("slurm_") else f"slurm_{name}": value
        for name, value in options.items()
    }
