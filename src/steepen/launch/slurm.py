"""Runs as Slurm jobs, through submitit: one job per run, submitted together as an array."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.launch.base import Job, LaunchContext, LauncherBase
from steepen.launch.local import cores
from steepen.launch.worker import Attempt, Child, TrainCommand, python_path

_POLL = 0.2
_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
_DAY = 1440  # minutes a job is given where nothing else is asked; at its end it saves and is queued again
_IN_QUEUE = 500  # jobs submitted at a time; many clusters refuse more
# What submitit calls the same on every cluster.
_SHARED = {
    "name",
    "timeout_min",
    "mem_gb",
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "stderr_to_stdout",
}


class Work:
    """What a Slurm job does: one attempt. Asked to leave (time limit, preemption) it saves and requeues."""

    def __init__(self, task: TrainCommand) -> None:
        self.task = task
        self.child: Child | None = None

    def __call__(self) -> Attempt:
        """Make the attempt."""
        child = self.child = Child(self.task)
        try:
            return child.wait()
        finally:
            child.terminate()

    def checkpoint(self) -> Any:
        """Called by submitit before the job is taken away: have the run saved, and ask for a fresh job."""
        import submitit

        if self.child is not None:
            self.child.terminate()
            self.child.process.wait()
        return submitit.helpers.DelayedSubmission(Work(self.task))


class SlurmLauncher(LauncherBase):
    """Slurm jobs. Options are submitit's: partition, timeout_min, gpus_per_node, account, qos, …

    A name that submitit does not share between clusters is given to Slurm itself (`slurm_` need not be
    written). `cluster="local"` runs the same jobs as processes of this machine.
    """

    def __init__(self, place: LaunchContext, jobs: int | None = None, **options: Any) -> None:
        try:
            import submitit
        except ImportError as error:
            raise SteepenError(
                "--on slurm needs the package submitit; install it with `pip install 'steepen[slurm]'`."
            ) from error
        self.cluster = options.pop("cluster", "slurm")
        self.threads = int(options.pop("threads", 1))
        folder = Path(options.pop("folder", place.store.root / ".slurm")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster)
            self.executor.update_parameters(**_parameters({"timeout_min": _DAY, **options}))
        except (TypeError, ValueError, NameError, RuntimeError, AssertionError) as error:
            raise UsageError(f"submitit refuses this way of running: {_first_line(error)}") from error
        usual = cores() if self.cluster == "local" else _IN_QUEUE
        super().__init__(place, jobs or usual)

    def start(self, jobs: Sequence[Job]) -> None:
        """Submit, several as one array."""
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        work = [Work(self.place.task(job.spec, environment)) for job in jobs]
        try:
            with _source_on_path():
                handles = self.executor.submit_array(work)
        except Exception as error:  # submitit passes on whatever sbatch said
            raise SteepenError(f"the jobs could not be submitted: {_first_line(error)}") from error
        for job, handle in zip(jobs, handles, strict=True):
            job.handle = handle

    def ended(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Those whose job is over."""
        done = [(job, _attempt(job.handle)) for job in running if job.handle.done()]
        if not done:
            time.sleep(_POLL)
        return done

    def stop(self, running: Sequence[Job]) -> None:
        """Cancel the jobs; Slurm asks them to stop first, and the runs save."""
        for job in running:
            with contextlib.suppress(Exception):  # one that has just ended
                job.handle.cancel()
        deadline = time.monotonic() + 30
        while any(job.run.busy() for job in running) and time.monotonic() < deadline:
            time.sleep(_POLL)


def _attempt(handle: Any) -> Attempt:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return handle.result()
    except FailedJobError as error:  # our own code raised on the node
        return Attempt(70, f"steepen: the job failed on its node: {_raised(error)}")
    except (UncompletedJobError, OSError) as error:
        return Attempt(None, _first_line(error))


def _parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Options under the names submitit wants: Slurm's own have a prefix."""
    return {
        name if name in _SHARED or name.startswith("slurm_") else f"slurm_{name}": value
        for name, value in options.items()
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _raised(error: Exception) -> str:
    """The line of a traceback, printed among other things, that says what was raised."""
    lines = [line for line in str(error).splitlines() if _RAISED.match(line)]
    return lines[-1] if lines else _first_line(error)


@contextlib.contextmanager
def _source_on_path() -> Generator[None]:
    """Jobs inherit the environment they are submitted from; have them import this very source."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = python_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
