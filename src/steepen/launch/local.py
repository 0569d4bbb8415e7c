"""Runs on this machine: worker processes that train run after run, one per GPU or CPU core by default."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steepen.errors import UsageError, is_whole
from steepen.launch.base import Job, LaunchContext, LauncherBase
from steepen.launch.gpu_service import MultiProcessService
from steepen.launch.worker import Attempt, TaskProcess, Worker
from steepen.utils.lock import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE

MAX_PER_MACHINE = 10_000  # jobs, threads of a run, runs of a GPU
RUNS_AT_ONCE = 4  # small runs of one GPU; eight are no faster (benchmarks/runs_at_once.py)
_GRACE_SECONDS = 60.0  # for a run to save before it is killed


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[tuple[str, str]]:
    """(device, product name) of each GPU of this machine that CUDA_VISIBLE_DEVICES allows."""
    try:
        query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        [part.strip() for part in line.split(",", 2)] for line in done.stdout.splitlines() if line.strip()
    ]
    found = {index: name for index, _, name in rows} | {uuid: name for _, uuid, name in rows}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [(index, name) for index, _, name in rows]
    return [(word, found[word]) for word in (part.strip() for part in visible.split(",")) if word in found]


@dataclass
class Slot:
    """Room for one run at a time: its GPU (None: the CPU) and the worker process of its last run."""

    device: str | None
    worker: Worker | None = None


class LocalLauncher(LauncherBase):
    """A queue of local worker processes: each run sees one GPU, or uses `threads` CPU threads.

    The number of threads does not depend on the number of jobs: it changes the order of sums, and a run's
    result must not depend on what runs beside it. With `overlap`, a GPU's next run is set up while the
    current one trains, and small runs train at the same time (see training/gpu_sharing.py).
    """

    def __init__(
        self,
        context: LaunchContext,
        jobs: int | None = None,
        *,
        runs_per_gpu: int | None = None,
        threads: int = 1,
        overlap: bool = True,
    ) -> None:
        for name, value in (("jobs", jobs), ("runs_per_gpu", runs_per_gpu), ("threads", threads)):
            if value is not None and not (is_whole(value) and 1 <= value <= MAX_PER_MACHINE):
                raise UsageError(
                    f"{name} = {value} is not valid: it must be a whole number from 1 to {MAX_PER_MACHINE:,}."
                )
        requested = str(context.options.get("device", "auto"))
        devices = [] if requested == "cpu" else [device for device, _ in visible_gpus()]
        index = requested.removeprefix("cuda:")
        if index.isdigit() and int(index) < len(devices):
            devices = [devices[int(index)]]
            context = replace(context, options={**context.options, "device": "cuda"})  # the only one it sees
        self.devices: list[str | None] = [*devices] * (runs_per_gpu or 1)
        if not devices:
            self.devices = [None] * (jobs or max(1, available_cores() // threads))
        elif jobs is not None:  # spread over the GPUs; several share one only if `jobs` asks for it
            self.devices = [devices[i % len(devices)] for i in range(jobs)]
        self.threads = threads
        self.pool: list[str | None] | None = None  # free GPUs (None: cores), where a run may have several
        self.waiting: list[Job] = []  # for enough of them
        self.sharing: list[Job] = []  # that have some of them
        if not context.gpus_per_run.single:
            if (runs_per_gpu or 1) > 1:
                raise UsageError("runs_per_gpu and `gpus_per_run` exclude each other.")
            pool: list[str | None] = [*(devices or [None] * available_cores())]
            count = context.gpus_per_run.count
            most = max(1, len(pool) // (1 if count == "auto" else count))
            self.pool, self.devices, overlap = pool, pool[: min(most, jobs or most)], False
        # Further runs per GPU are set up while the first trains, unless runs share the GPUs anyway.
        self.overlap = overlap and bool(devices) and len(set(self.devices)) == len(self.devices)
        # Several runs train on a GPU if that is asked for, or if nothing else is and they are small.
        at_once = runs_per_gpu or (RUNS_AT_ONCE if self.overlap else 1)
        self.serves = bool(devices) and at_once > 1 and MultiProcessService.available()
        self.service: MultiProcessService | None = None
        self.ahead = 1 if not self.overlap else at_once if self.serves else 2  # runs started per GPU
        self.free_slots = [Slot(device) for device in self.devices * self.ahead]
        super().__init__(context, len(self.devices))

    @property
    def max_started(self) -> int:
        """More than train, where the next runs of each GPU are set up ahead."""
        return self.slots * self.ahead

    def start(self, jobs: Sequence[Job]) -> None:
        """Hand each job to the worker process of a free slot; the first job of a slot starts one."""
        if self.pool is not None:
            self.waiting += jobs
            self._start_waiting()
            return
        if self.serves and self.service is None:
            self.service = MultiProcessService.start()
        for job in jobs:
            slot = self.free_slots.pop(0)
            environment = {"OMP_NUM_THREADS": str(self.threads)}
            if self.service is not None:
                environment |= self.service.environment
            if slot.device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = slot.device
                if self.overlap:
                    locks = self.context.store.root.absolute() / ".gpu_locks"
                    environment[GPU_LOCKS_VARIABLE] = str(locks / f"{socket.gethostname()}-{slot.device}")
                    if self.service is not None:
                        environment[RUNS_PER_GPU_VARIABLE] = str(RUNS_AT_ONCE)
            process = TaskProcess(self.context.task(job.spec, environment), slot.worker)
            slot.worker = process.worker
            job.handle = (process, slot)

    def _start_waiting(self) -> None:
        """Start the jobs that wait for GPUs, in order, as long as enough of the pool are free."""
        assert self.pool is not None
        while self.waiting:
            job = self.waiting[0]
            gpus = self.context.gpus_per_run.of(job.spec)
            total = len(self.pool) + sum(len(each.handle[1]) for each in self.sharing)
            if gpus > total:
                raise UsageError(
                    f"{job.spec.arm.name} d{job.spec.shape.depth} needs {gpus} GPUs, and this machine has "
                    f"{total}; use `launcher` slurm, or fewer `gpus_per_run`."
                )
            if gpus > len(self.pool):
                return
            self.waiting.pop(0)
            taken, self.pool = self.pool[:gpus], self.pool[gpus:]
            environment = {"OMP_NUM_THREADS": str(self.threads)}
            visible = [device for device in taken if device is not None]
            if visible:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            job.handle = (TaskProcess(self.context.task(job.spec, environment, gpus=gpus)), taken)
            self.sharing.append(job)

    def _poll_pool(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs that have ended, whose GPUs go to those that wait."""
        assert self.pool is not None
        done: list[tuple[Job, Attempt]] = []
        for job in running:
            if job.handle is None:  # it waits for GPUs
                continue
            process, taken = job.handle
            if (attempt := process.poll()) is not None:
                process.worker.close()
                self.pool.extend(taken)
                self.sharing.remove(job)
                done.append((job, attempt))
        self._start_waiting()
        if not done:
            time.sleep(0.02)
        return done

    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs that have ended."""
        if self.pool is not None:
            return self._poll_pool(running)
        done: list[tuple[Job, Attempt]] = []
        for job in running:
            process, slot = job.handle
            if (attempt := process.poll()) is not None:
                self.free_slots.insert(0, slot)  # first, so that a warm worker is used before a cold slot
                done.append((job, attempt))
        if not done:
            time.sleep(0.02)
        return done

    def stop(self, running: Sequence[Job]) -> None:
        """Make all save and stop; kill what has not within a minute, or at a second Ctrl-C."""
        processes: list[TaskProcess] = [job.handle[0] for job in running]
        if self.pool is None:
            self.free_slots += [job.handle[1] for job in running]
        else:
            self.pool += [device for job in running for device in job.handle[1]]
            self.sharing.clear()
            self.waiting.clear()
        try:
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()

    def close(self) -> None:
        """End the idle worker processes. The end of this process does the same."""
        for slot in self.free_slots:
            if slot.worker is not None:
                slot.worker.close()
                slot.worker = None
        if self.service is not None:
            self.service.stop()
            self.service = None
