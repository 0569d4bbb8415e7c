"""Several runs on one GPU: one trains while another is set up, or validates; small ones train together.

Small runs spend as long on kernels, validation and files as on training, with the GPU mostly idle. The local
launcher therefore starts further runs on each GPU and names their lock files in `GPU_LOCKS_VARIABLE`. A run
waits for its turn before its first step, so only one run trains at a time and the others do not disturb its
timing. Where the GPU runs kernels of several processes at once (launch/gpu_service.py), runs whose steps
leave most of it idle take their turns together. A run that needs much memory has the GPU for itself from
start to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from steepen.recipe.memory import training_memory
from steepen.recipe.recipe import PlannedRun
from steepen.runs.spec import RunSpec, is_light
from steepen.utils.files import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE, open_without_links

_SMALL = 1 / 6  # of the GPU's memory: four such runs fit, also if the estimates are too low by a third
_MICRO_BATCH_TOKENS = 65_536  # the first micro-batch that gradient accumulation tries
_POLL_SECONDS = 0.005


def is_small(spec: RunSpec, memory_bytes: int) -> bool:
    """Whether a run is expected to need so little memory that another fits beside it."""
    planned = PlannedRun(
        spec.arm, spec.shape, spec.schedule, None, spec.hyperparameters, spec.batch_tokens, spec.steps
    )
    micro_batch = max(1, min(spec.batch_tokens, _MICRO_BATCH_TOKENS) // spec.shape.context)
    needed = training_memory(planned, 1, micro_batch, optimizer=spec.optimizer).total
    return needed <= _SMALL * memory_bytes


class GpuSharing:
    """The locks of one run; without lock files (a run that no launcher started) they do nothing."""

    def __init__(self, spec: RunSpec, device: torch.device, stopped: Callable[[], bool]) -> None:
        path = os.environ.get(GPU_LOCKS_VARIABLE) if device.type == "cuda" else None
        self.path = None if path is None else Path(path)
        self.stopped = stopped
        self.seconds_waited = 0.0
        most = int(os.environ.get(RUNS_PER_GPU_VARIABLE, "1"))
        self.runs_per_gpu = most if path and is_light(spec) else 1
        self.small = self.path is None or is_small(
            spec, torch.cuda.get_device_properties(device).total_memory
        )

    @contextlib.contextmanager
    def memory(self) -> Generator[None]:
        """Hold room in the GPU's memory: beside another run if both are small, else alone."""
        with self._lock(".memory", shared=self.small):
            yield

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Hold the GPU's turn to train; ends early, without the turn, if the run receives a stop signal."""
        with self._lock(".turn", shared=self.runs_per_gpu > 1):
            yield

    @contextlib.contextmanager
    def _lock(self, suffix: str, *, shared: bool) -> Generator[None]:
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        began = time.monotonic()
        with open(self.path.with_suffix(suffix), "a", opener=open_without_links) as file:
            while not self.stopped():
                try:
                    fcntl.flock(file, mode)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_SECONDS)
            self.seconds_waited += time.monotonic() - began
            yield
