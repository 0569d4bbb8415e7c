"""Runs as Ray tasks, on an existing cluster or on one that is started on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepen.errors import Failure, SteepenError, UsageError, first_line, is_whole
from steepen.launch.base import Job, LaunchContext, LauncherBase, Outcome, nodes_of, wait_until_free
from steepen.launch.local import MAX_PER_MACHINE, available_cores, visible_gpus
from steepen.launch.worker import NODES_VARIABLE, Attempt, Task, python_path, run_task, variable
from steepen.runs.spec import RunSpec
from steepen.utils.formatting import is_number

_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class _Tasks:
    """The tasks of one attempt, one per node, and the placement group that holds their resources."""

    handles: list[Any]
    group: Any = None  # None: a task on one GPU, which Ray places by itself


def rendezvous_address() -> str:
    """HOST:PORT of this node at which the nodes of a run can meet."""
    import ray.util

    with socket.socket() as found:
        found.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"


def run_on_node(task: Task, node: int, nodes: int, address: str) -> Attempt:
    """Run one node's ranks of a task on several nodes."""
    meeting = {NODES_VARIABLE: f"{node}/{nodes} {address}"}
    return run_task(replace(task, environment={**task.environment, **meeting}))


@contextlib.contextmanager
def _loopback_only() -> Generator[None]:
    """Have a Ray that starts listen on the loopback interface, as it does by itself on macOS and Windows.

    Whoever reaches its ports runs code; on Linux they would be open to the network. Ray reads the variable
    when it is imported, and in the processes that it starts.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with variable("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class RayLauncher(LauncherBase):
    """Ray tasks of `num_cpus` and `num_gpus` each (half a GPU means two runs on one).

    A run on several GPUs has a placement group: all GPUs on one node or, beyond `max_gpus_per_node`, that
    many on each of several nodes, reserved together. `num_cpus` and `num_gpus` are then per rank.

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
        max_gpus_per_node: int = 8,
    ) -> None:
        try:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: it is read there
            import ray
        except ImportError as error:
            raise SteepenError(
                "`launcher` ray needs the package ray; install it with `pip install 'steepen[ray]'`."
            ) from error
        sizes = (num_cpus, num_gpus or 0)
        good = all(is_number(value) and 0 <= value <= MAX_PER_MACHINE for value in sizes)
        counts = (threads, max_gpus_per_node, jobs or 1)
        if not (good and all(is_whole(value) and 1 <= value <= MAX_PER_MACHINE for value in counts)):
            raise UsageError(
                f"jobs, threads and max_gpus_per_node must be whole numbers from 1 to {MAX_PER_MACHINE:,}, "
                f"num_cpus and num_gpus numbers from 0 to {MAX_PER_MACHINE:,}."
            )
        self.ray: Any = ray
        self.address, self.threads = address, threads
        self.num_cpus, self.num_gpus = num_cpus, num_gpus
        self.jobs, self.max_gpus_per_node = jobs, max_gpus_per_node
        self.started_here = False
        super().__init__(context, jobs or 0)

    @property
    def slots(self) -> int:
        """Max runs at a time: `jobs`, or as many as the cluster's resources allow."""
        if self.jobs is not None:
            return self.jobs
        if not self.ray.is_initialized():
            gpus, cores = len(visible_gpus()), available_cores()
            return max(1, int(gpus / self._gpus if self._gpus else cores / max(self.num_cpus, 1e-9)))
        have = self.ray.cluster_resources()
        count = self.context.gpus_per_run.count
        ranks = 1 if count == "auto" else count
        limits = [have.get("CPU", 0) / (self.num_cpus * ranks)] if self.num_cpus else []
        limits += [have.get("GPU", 0) / (self._gpus * ranks)] if self._gpus else []
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
            with _loopback_only() if self.address is None else contextlib.nullcontext():
                self.ray.init(**options)
        except Exception as error:
            where = self.address or "this machine"
            raise SteepenError(
                f"Ray could not be reached or started at {where}: {first_line(error)}"
            ) from error
        self.started_here = True

    def start(self, jobs: Sequence[Job]) -> None:
        """Submit a task for each, or one per node."""
        for job in jobs:
            gpus = self.context.gpus_per_run.of(job.spec)
            if gpus == 1:
                task = self.context.task(job.spec, {"OMP_NUM_THREADS": str(self.threads)})
                job.handle = _Tasks([self._remote(run_task, self.num_cpus, self._gpus).remote(task)])
            else:
                job.handle = self._start_on_several(job, gpus)

    def _remote(self, function: Any, cpus: float, gpus: float, **options: Any) -> Any:
        # Ray's own retries are off: `LauncherBase` retries.
        return self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, **options)(function)

    def _start_on_several(self, job: Job, gpus: int) -> _Tasks:
        """Reserve the resources of all ranks and start one task per node, which starts the ranks there."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes, on_node = nodes_of(gpus, self.max_gpus_per_node)
        need = {"CPU": self.num_cpus * on_node, "GPU": self._gpus * on_node}
        need = {name: amount for name, amount in need.items() if amount}
        self._require(need, nodes)
        group = placement_group(
            [dict(need) for _ in range(nodes)], strategy="STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
        )
        task = self.context.task(job.spec, {"OMP_NUM_THREADS": str(self.threads)}, gpus=on_node)

        def place(function: Any, bundle: int, cpus: float, gpus: float) -> Any:
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            return self._remote(function, cpus, gpus, scheduling_strategy=where)

        if nodes == 1:
            placed = place(run_task, 0, need.get("CPU", 0), need.get("GPU", 0))
            return _Tasks([placed.remote(task)], group)
        address = place(rendezvous_address, 0, 0, 0).remote()
        tasks = [
            place(run_on_node, node, need.get("CPU", 0), need.get("GPU", 0)).remote(
                task, node, nodes, address
            )
            for node in range(nodes)
        ]
        return _Tasks(tasks, group)

    def _require(self, need: dict[str, float], nodes: int) -> None:
        """Raise UsageError for more than a Ray of this machine can ever have; a cluster may still grow."""
        have = self.ray.cluster_resources()
        for name, amount in need.items():
            if self.address is None and amount * nodes > have.get(name, 0):
                raise UsageError(
                    f"a run needs {amount * nodes:g} {name}s, and the Ray of this machine has "
                    f"{have.get(name, 0):g}; use a cluster (`launcher_options` address=…), or fewer "
                    "`gpus_per_run`."
                )

    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs whose tasks have ended."""
        every = [handle for job in running for handle in job.handle.handles]
        ended, _ = self.ray.wait(every, num_returns=len(every), timeout=0)
        done = [job for job in running if all(handle in ended for handle in job.handle.handles)]
        if not done:
            waiting = [handle for handle in every if handle not in ended]
            self.ray.wait(waiting, num_returns=1, timeout=0.2)
        return [(job, self._end(job.handle)) for job in done]

    def _end(self, tasks: _Tasks) -> Attempt:
        attempts = [self._attempt(handle) for handle in tasks.handles]
        self._release(tasks)
        return worst_attempt(attempts)

    def _release(self, tasks: _Tasks) -> None:
        if tasks.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(tasks.group)

    def stop(self, running: Sequence[Job]) -> None:
        """Cancel the tasks: each makes its run save and stop."""
        for job in running:
            for handle in job.handle.handles:
                with contextlib.suppress(Exception):  # it has just ended
                    self.ray.cancel(handle, force=False)
        wait_until_free(running, _GRACE_SECONDS)
        for job in running:
            self._release(job.handle)

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
            reason = str(error).strip().splitlines()[-1]
            return Attempt(Failure("Failed", f"the task failed on its node: {reason}", 70))
        except self.ray.exceptions.RayError as error:  # worker, node or object lost
            return Attempt(Failure("WorkerLost", f"its worker was lost. {first_line(error)}", transient=True))


def worst_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """What a run on several nodes came to: a lost node first, then a failure, then success."""
    # A node whose peers have failed is stopped: the failure itself says more.
    kinds = {"WorkerLost": 0, "Killed": 2, "Interrupted": 2}
    return min(attempts, key=lambda each: 3 if each.failure is None else kinds.get(each.failure.kind, 1))
