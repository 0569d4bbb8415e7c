"""Runs on this machine: worker processes that train run after run, one per GPU or CPU core by default.

Several runs on one GPU use NVIDIA's Multi-Process Service where it is there: their kernels run at the same
time. Without it the driver gives each process the GPU in turn, and a small run leaves most of it idle.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steepen.errors import UsageError, is_whole, show
from steepen.launch.base import Job, LaunchContext, LauncherBase
from steepen.launch.worker import Attempt, Worker, begin_task
from steepen.runs.spec import is_light
from steepen.utils.files import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE

MAX_PER_MACHINE = 10_000  # jobs, threads of a run, runs of a GPU
RUNS_AT_ONCE = 4  # small runs of one GPU; eight are no faster (benchmarks/runs_at_once.py)
_GRACE_SECONDS = 60.0  # for a run to save before it is killed


def require_whole(name: str, value: Any) -> int:
    """The value of an option that counts something on a machine; raises UsageError for any other."""
    if not (is_whole(value) and 1 <= value <= MAX_PER_MACHINE):
        raise UsageError(
            f"{name} = {show(value)} is not valid: it must be a whole number from 1 to {MAX_PER_MACHINE:,}."
        )
    return value


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
    current one trains, and small runs train at the same time (see training/device.py).
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
            if value is not None:
                require_whole(name, value)
        gpus, context = _chosen_gpus(context)
        single = context.gpus_per_run.single
        if not single and (runs_per_gpu or 1) > 1:
            raise UsageError("runs_per_gpu and `gpus_per_run` exclude each other.")
        self.threads = threads
        self.waiting: list[Job] = []  # for enough free slots
        # A run that may have several GPUs takes as many slots, of a pool of all GPUs.
        pool: list[str | None] = [*(gpus or [None] * available_cores())]
        if single:
            self.devices = _devices_of_single_runs(gpus, jobs, runs_per_gpu or 1, threads)
        else:
            count = context.gpus_per_run.count
            most = max(1, len(pool) // (1 if count == "auto" else count))
            self.devices = pool[: min(most, jobs or most)]
        # Further runs per GPU are set up while the first trains, unless runs share the GPUs anyway.
        alone = bool(gpus) and len(set(self.devices)) == len(self.devices)
        self.overlap = overlap and single and alone
        # Several runs train on a GPU if that is asked for, or if nothing else is and they are small.
        at_once = runs_per_gpu or (RUNS_AT_ONCE if self.overlap else 1)
        self.serves = bool(gpus) and at_once > 1 and MultiProcessService.available()
        self.service: MultiProcessService | None = None
        self.light = False  # whether the runs that were started last are
        self.ahead = 1 if not self.overlap else at_once if self.serves else 2  # runs started per GPU
        slots = self.devices * self.ahead if single else pool
        self.free_slots, self.slot_count = [Slot(device) for device in slots], len(slots)
        super().__init__(context, len(self.devices))

    @property
    def max_started(self) -> int:
        """More than train, where the next runs of each GPU are set up ahead; many of them only if light."""
        return self.slots * (self.ahead if self.light else min(2, self.ahead))

    def start(self, jobs: Sequence[Job]) -> None:
        """Hand each job to the worker process of a free slot; the first job of a slot starts one."""
        if self.serves and self.service is None:
            self.service = MultiProcessService.start()
        self.light = all(is_light(job.spec) for job in jobs)
        self.waiting += jobs
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the jobs that wait, in order, as long as enough slots are free for the next."""
        while self.waiting:
            job, spec = self.waiting[0], self.waiting[0].spec
            gpus = self.context.gpus_per_run.of(spec)
            if gpus > self.slot_count:
                raise UsageError(
                    f"{spec.arm.name} d{spec.shape.depth} needs {gpus} GPUs, and this machine has "
                    f"{self.slot_count}; use `launcher` slurm, or fewer `gpus_per_run`."
                )
            if gpus > len(self.free_slots):
                return
            self.waiting.pop(0)
            taken, self.free_slots = self.free_slots[:gpus], self.free_slots[gpus:]
            task = self.context.task(spec, self._environment(taken), gpus=gpus)
            taken[0].worker = begin_task(task, taken[0].worker)
            job.handle = (taken[0].worker, taken)

    def _environment(self, taken: Sequence[Slot]) -> dict[str, str]:
        """The variables of a run: its threads and GPUs, and what it needs to share a GPU."""
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        if self.service is not None:
            environment |= self.service.environment
        visible = [slot.device for slot in taken if slot.device is not None]
        if visible:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        if visible and self.overlap:
            locks = self.context.store.root.absolute() / ".gpu_locks"
            environment[GPU_LOCKS_VARIABLE] = str(locks / f"{socket.gethostname()}-{visible[0]}")
            if self.service is not None:
                environment[RUNS_PER_GPU_VARIABLE] = str(RUNS_AT_ONCE)
        return environment

    def poll(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Jobs that have ended, whose slots go to those that wait."""
        done: list[tuple[Job, Attempt]] = []
        for job in running:
            if job.handle is None:  # it waits for slots
                continue
            worker, taken = job.handle
            if (attempt := worker.poll()) is not None:
                if self.context.gpus_per_run.single:
                    self.free_slots[:0] = taken  # first, so that a warm worker is used before a cold slot
                else:  # an idle worker would keep memory of a GPU that the next run shares with others
                    worker.close()
                    taken[0].worker = None
                    self.free_slots += taken
                done.append((job, attempt))
        self._start_waiting()
        if not done:
            time.sleep(0.02)
        return done

    def stop(self, running: Sequence[Job]) -> None:
        """Make all save and stop; kill what has not within a minute, or at a second Ctrl-C."""
        workers: list[Worker] = [job.handle[0] for job in running]
        self.free_slots += [slot for job in running for slot in job.handle[1]]
        self.waiting.clear()
        try:
            for worker in workers:
                worker.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS
            while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.kill()

    def close(self) -> None:
        """End the idle worker processes. The end of this process does the same."""
        for slot in self.free_slots:
            if slot.worker is not None:
                slot.worker.close()
                slot.worker = None
        if self.service is not None:
            self.service.stop()
            self.service = None


def _chosen_gpus(context: LaunchContext) -> tuple[list[str], LaunchContext]:
    """The GPUs that runs may use, and the context with the device as a run sees it that is given one."""
    requested = str(context.options.get("device", "auto"))
    gpus = [] if requested == "cpu" else [device for device, _ in visible_gpus()]
    index = requested.removeprefix("cuda:")
    if index.isdigit() and int(index) < len(gpus):
        only = replace(context, options={**context.options, "device": "cuda"})  # the only one it sees
        return [gpus[int(index)]], only
    return gpus, context


def _devices_of_single_runs(
    gpus: list[str], jobs: int | None, runs_per_gpu: int, threads: int
) -> list[str | None]:
    """The device of each run that trains at the same time, where every run has one: a GPU, or None."""
    if not gpus:
        return [None] * (jobs or max(1, available_cores() // threads))
    if jobs is None:
        return [*gpus] * runs_per_gpu
    return [gpus[i % len(gpus)] for i in range(jobs)]  # several share one only if `jobs` asks for it


CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
# prctl(PR_SET_PDEATHSIG, SIGTERM) holds for the program that takes the place of the interpreter.
_START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
_START_SECONDS, _STOP_SECONDS = 0.5, 20.0


@dataclass
class MultiProcessService:
    """A service of this process's own, with its files in a temporary folder that only its user can enter.

    It runs in the foreground of a child process, which the kernel ends together with this one: a launcher
    that receives SIGKILL leaves no service behind.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client of the service."""
        return _environment(self.folder)

    @staticmethod
    def available() -> bool:
        """Whether it is installed, and the user does not run one already."""
        return PIPE_VARIABLE not in os.environ and shutil.which(CONTROL) is not None

    @staticmethod
    def start() -> MultiProcessService | None:
        """Start the service; None where it ends at once, as without the right to start one."""
        folder = Path(tempfile.mkdtemp(prefix="steepen-mps-"))
        process = subprocess.Popen(
            [sys.executable, "-c", _START, CONTROL, "-f"],
            env={**os.environ, **_environment(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        service = MultiProcessService(folder, process)
        atexit.register(service.stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_START_SECONDS)
            service.stop()
            return None
        return service

    def stop(self) -> None:
        """End the service, after its clients have ended, and delete its files."""
        atexit.unregister(self.stop)
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment(folder: Path) -> dict[str, str]:
    return {PIPE_VARIABLE: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
