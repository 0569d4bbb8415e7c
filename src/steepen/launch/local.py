"""Runs on this machine: a process per run, one per core or so many per GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

from steepen.errors import UsageError
from steepen.launch.base import Job, LaunchContext, LauncherBase
from steepen.launch.worker import Attempt, Child

_GRACE = 60.0  # seconds a run has to save before it is killed


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[tuple[str, str]]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES would name them, each with its product's name."""
    try:
        asked = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
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


class LocalLauncher(LauncherBase):
    """A queue of processes. On GPUs each run sees one; on CPUs each has `threads` of its own.

    The number of threads is never derived from the number of jobs: sums in another order are other numbers,
    and a run's result must not depend on what ran beside it.
    """

    def __init__(
        self, place: LaunchContext, jobs: int | None = None, *, runs_per_gpu: int = 1, threads: int = 1
    ) -> None:
        for name, value in (("jobs", jobs), ("runs_per_gpu", runs_per_gpu), ("threads", threads)):
            if value is not None and value < 1:
                raise UsageError(f"{name} = {value} is not valid: it must be at least 1.")
        asked = _asked_device(place.arguments)
        devices = [] if asked == "cpu" else [device for device, _ in gpus()]
        chosen = asked.removeprefix("cuda:")
        if chosen.isdigit() and int(chosen) < len(devices):
            devices = [devices[int(chosen)]]
            place = replace(place, arguments=(*place.arguments, "--device", "cuda"))  # all a run sees
        self.devices: list[str | None] = [*devices] * runs_per_gpu
        if not devices:
            self.devices = [None] * (jobs or max(1, cores() // threads))
        elif jobs is not None:  # spread over the GPUs, and more than one on each only where asked to
            self.devices = [devices[i % len(devices)] for i in range(jobs)]
        self.threads = threads
        self.free = list(self.devices)
        super().__init__(place, len(self.devices))

    def start(self, jobs: Sequence[Job]) -> None:
        """Start a process for each."""
        for job in jobs:
            device = self.free.pop(0)
            environment = {"OMP_NUM_THREADS": str(self.threads)}
            if device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = device
            job.handle = (Child(self.place.task(job.spec, environment)), device)

    def ended(self, running: Sequence[Job]) -> list[tuple[Job, Attempt]]:
        """Those that have ended; a short sleep where none has."""
        done: list[tuple[Job, Attempt]] = []
        for job in running:
            child, device = job.handle
            if (attempt := child.ended()) is not None:
                self.free.append(device)
                done.append((job, attempt))
        if not done:
            time.sleep(0.05)
        return done

    def stop(self, running: Sequence[Job]) -> None:
        """Ask all to save and stop; what has not within a minute, or at a second Ctrl-C, is killed."""
        children: list[Child] = [job.handle[0] for job in running]
        self.free = list(self.devices)
        try:
            for child in children:
                child.terminate()
            deadline = time.monotonic() + _GRACE
            while any(child.ended() is None for child in children) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()


def _asked_device(arguments: Sequence[str]) -> str:
    words = " ".join(arguments).replace("--device=", "--device ").split()
    return next((b for a, b in itertools.pairwise(words) if a == "--device"), "auto")
