"""The device of a run: selection, process-wide settings, other runs on it, the record's view of the hardware.

Small runs spend as long on kernels, validation and files as on training, with the GPU mostly idle. The local
launcher therefore starts further runs on each GPU and names their lock files in `GPU_LOCKS_VARIABLE`. A run
waits for its turn before its first step (`GpuSharing`), so only one trains at a time and the others do not
disturb its timing. Where the GPU runs kernels of several processes at once (`MultiProcessService` in
launch/local.py), runs whose steps leave most of it idle take their turns together. A run that needs much
memory has the GPU for itself from start to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from steepen.errors import UsageError
from steepen.recipe.accelerators import accelerator_of
from steepen.recipe.memory import automatic_micro_batch, training_memory
from steepen.runs.spec import RunSpec, is_light
from steepen.utils.files import GPU_LOCKS_VARIABLE, RUNS_PER_GPU_VARIABLE, open_without_links

HOPPER = 9  # major compute capability
_SMALL = 1 / 6  # of the GPU's memory: four such runs fit, also if the estimates are too low by a third
_POLL_SECONDS = 0.005


def find_device(name: str) -> torch.device:
    """Return the torch device of this name; "auto" is the GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"`device` = {name.splitlines()[0]!r} is not known: use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"`device` = {name!r} is not supported: use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"`device` = {name} is not available: this machine has {torch.cuda.device_count()} GPUs."
        )
    return device


def rank_device(name: str, local_rank: int, size: int) -> tuple[torch.device, bool]:
    """The device of a rank, and whether ranks share one: a GPU named by its number serves all of them."""
    device = find_device(name)
    if size == 1 or device.type == "cpu":
        return device, False
    if device.index is not None:
        return device, True
    return find_device(f"cuda:{local_rank}"), False


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done, as timing needs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU in FLOP/s; None on a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    known = accelerator_of(torch.cuda.get_device_name(device))
    return None if known is None else known.peak_flops


@contextlib.contextmanager
def configure_backends(device: torch.device) -> Generator[None]:
    """Set process-wide switches that change speed, not results: attention backend, memory allocator."""
    if device.type != "cuda":
        keep_freed_memory()
        yield
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    with flash_attention_3(device) as installed:
        # Without FlashAttention-3, cuDNN attention is the fastest on Hopper; the others are fallbacks.
        first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        order = [*(reversed(first) if installed else first), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(order, set_priority=True):
            yield


@contextlib.contextmanager
def flash_attention_3(device: torch.device) -> Generator[bool]:
    """Let torch's flash attention run FlashAttention-3 where that is installed, on Hopper; yields whether.

    The authors train with it. Its package is `flash_attn_interface`, built from FlashAttention's sources.
    """
    impl: Any = torch.nn.attention
    found = importlib.util.find_spec("flash_attn_interface") is not None
    found = found and hasattr(impl, "activate_flash_attention_impl")
    if found and torch.cuda.get_device_capability(device)[0] == HOPPER:
        try:
            impl.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError):  # built for another torch or CUDA
            found = False
    else:
        found = False
    try:
        yield found
    finally:
        if found:
            impl.restore_flash_attention_impl()


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system.

    It returns large blocks, and a step of a tiny model then spends up to a quarter of its time on page
    faults.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    # M_MMAP_THRESHOLD (-3; older versions reject more than 32 MiB), then M_TRIM_THRESHOLD (-1). The latter
    # alone would do harm: setting it freezes the mmap threshold, which otherwise adapts.
    if mallopt(-3, 2**30) or mallopt(-3, 2**25):
        mallopt(-1, 2**30)


def is_small(spec: RunSpec, memory_bytes: int) -> bool:
    """Whether a run is expected to need so little memory that another fits beside it."""
    micro_batch = automatic_micro_batch(spec.batch_sequences, spec.shape.context)
    fp8 = spec.precision == "fp8"
    needed = training_memory(spec.planned_run, 1, micro_batch, optimizer=spec.optimizer, fp8=fp8)
    return needed.total <= _SMALL * memory_bytes


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


def process_age() -> float | None:
    """Seconds since this process was started (Linux), or None."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def hardware(device: torch.device, ranks: int = 1, runs_per_gpu: int = 1) -> dict[str, Any]:
    """Description of the hardware for the record; `ranks` is the number of processes, one per GPU."""
    description: dict[str, Any] = {
        "device": device.type,
        "name": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
    }
    if ranks > 1:
        description["ranks"] = ranks
    if runs_per_gpu > 1:  # its speed is that of a share of the GPU
        description["runs_per_gpu"] = runs_per_gpu
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description |= {"name": properties.name, "gpus": ranks, "gpu_memory_bytes": properties.total_memory}
    return description


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers, for the record."""
    import numpy
    import safetensors

    from steepen import __version__

    found = {
        "steepen": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "platform": sys.platform,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["flash_attn_3"] = importlib.metadata.version("flash_attn_3")
    return found


@functools.cache
def package_digest() -> str:
    """Hex SHA-256 of this package's source: ranks on several machines must run the same code."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def git_state() -> dict[str, Any] | None:
    """Git commit of the source tree this package runs from, and whether it is dirty; None outside git."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None
