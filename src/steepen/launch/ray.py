"""Runs as Ray tasks, on an existing cluster or on one that is started on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.launch.base import Job, LaunchContext, LauncherBase, Outcome
from steepen.launch.local import available_cores, visible_gpus
from steepen.launch.worker import Attempt, python_path, run_attempt
from steepen.runs.spec import RunSpec

_GRACE_SECONDS = 60.0


class RayLauncher(LauncherBase):
    """Ray tasks of `num_cpus` and `num_gpus` each (half a GPU means two runs on one).

    With an address ("auto", "ray-head:6379") it connects to that cluster, whose nodes must see data and runs
    under the same paths. Without one it starts Ray on this machine and stops it in the end.
    """

    def __init__(
        self,
        context: LaunchContext,
        jobs: int | None = None,
        *,
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        threads: int = 1,
    ) -> None:
        try:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: it is read there
            import ray
        except ImportError as error:
            raise SteepenError(
                "--launcher ray needs the package ray; install it with `pip install 'steepen[ray]'`."
            ) from error
        if num_cpus < 0 or (num_gpus or 0) < 0 or (jobs is not None and jobs < 1):
            raise UsageError("jobs must be at least 1, and num_cpus and num_gpus can't be negative.")
        self.ray: Any = ray
        self.address, self.threads = address, threads
        self.num_cpus, self.num_gpus = num_cpus, num_gpus
        self.jobs = jobs
        self.started_here = False
        super().__init__(context, jobs or 0)

    @property
    def slots(self) -> int:
        """Max runs at a time: `jobs`, or as many as the cluster's resources allow."""
        if self.jobs is not None:
            return self.jobs
        if not self.ray.is_initialized():
            return max(
                1,
                int(
                    (len(visible_gpus()) / self._gpus)
                    if self._gpus
                    else available_cores() / max(self.num_cpus, 1e-9)
                ),
            )
        have = self.ray.cluster_resources()
        limits = [have.get("CPU", 0) / self.num_cpus] if self.num_cpus else []
        limits += [have.get("GPU", 0) / self._gpus] if self._gpus else []
        return max(1, int(min(limits, default=1)))

    @property
    def _gpus(self) -> float:
        """GPUs per run: as given, or one where this machine has any."""
        if self.num_gpus is not None:
            return self.num_gpus
        return 1.0 if self.address is None and visible_gpus() else 0.0

    def _connect(self) -> None:
        if self.ray.is_initialized():
            return
        options: dict[str, Any] = {
            "address": self.address,
            "log_to_driver": False,
            "logging_level": "error",
            "runtime_env": {"env_vars": {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}},
        }
        if self.address is None:
            # At least the CPUs that --jobs needs, even if fewer cores were detected.
            need = max(available_cores(), int((self.jobs or 0) * self.num_cpus + 0.999))
            options |= {"address": "local", "num_cpus": need, "include_dashboard": False}
        try:
            self.ray.init(**options)
        except Exception as error:
            where = self.address or "this machine"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SteepenError(f"Ray could not be reached or started at {where}: {reason}") from error
        self.started_here = True

    def start(self, jobs: Sequence[Job]) -> None:
        """Submit a task for each."""
        # Ray's own retries are off: `LauncherBase` retries.
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        for job in jobs:
            gpus = self.context.gpus_per_run.of(job.spec)
            # One task holds all GPUs of a run, on one node, and starts the ranks there.
            needs = {"num_cpus": self.num_cpus * gpus, "num_gpus": self._gpus * gpus}
            remote = self.ray.remote(**needs, max_retries=0)(run_attempt)
            job.handle = remote.remote(self.context.train_command(job.spec, environment, gpus=gpus))

    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs whose task has ended."""
        ready, _ = self.ray.wait([job.handle for job in running], num_returns=1, timeout=0.2)
        return [(job, self._attempt(job.handle)) for job in running if job.handle in ready]

    def stop(self, running: Sequence[Job]) -> None:
        """Cancel the tasks: each makes its run save and stop."""
        for job in running:
            with contextlib.suppress(Exception):  # it has just ended
                self.ray.cancel(job.handle, force=False)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(job.run.busy() for job in running) and time.monotonic() < deadline:
            time.sleep(0.1)

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        """Run specs and yield outcomes as runs end. Ray stays up for the next batch: starting it is slow."""
        self._connect()
        yield from super().launch(specs)

    def close(self) -> None:
        """Stop Ray if it was started here. The end of the process does the same."""
        if self.started_here:
            self.ray.shutdown()
            self.started_here = False

    def _attempt(self, handle: Any) -> Attempt:
        try:
            return self.ray.get(handle)
        except self.ray.exceptions.RayTaskError as error:  # steepen raised on the node
            return Attempt(70, f"steepen: the task failed on its node: {str(error).strip().splitlines()[-1]}")
        except self.ray.exceptions.RayError as error:  # worker, node or object lost
            return Attempt(None, (str(error).strip().splitlines() or [type(error).__name__])[0])
