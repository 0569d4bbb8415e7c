"""The machine a run is on, and what the record says of it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from steepen.errors import UsageError
from steepen.recipe.hardware import ACCELERATORS


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--device {name.splitlines()[0]!r} is not known: use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name!r} is not supported: use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name} is not here: this machine has {torch.cuda.device_count()} GPUs.")
    return device


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU, where its name is known; None on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    found = [gpu for key, gpu in ACCELERATORS.items() if key in name.replace(" ", "")]
    return max(found, key=lambda gpu: len(gpu.name)).peak_flops if found else None


@contextlib.contextmanager
def fast_kernels(device: torch.device) -> Generator[None]:
    """Process-wide switches for speed that leave the function computed unchanged."""
    if device.type != "cuda":
        keep_freed_memory()
        yield
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    # cuDNN's attention is the fastest in both directions on Hopper; the others follow where it cannot serve.
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as far as it can be told.

    It gives large blocks back to the system, and every step of a tiny model then spends up to a quarter of
    its time on being given them again, page by page.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    # M_MMAP_THRESHOLD of malloc.h, where older versions refuse more than 32 MiB; then M_TRIM_THRESHOLD. The
    # latter alone would do harm: it stops the former from following what is asked for.
    if mallopt(-3, 2**30) or mallopt(-3, 2**25):
        mallopt(-1, 2**30)


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run ran on."""
    facts: dict[str, Any] = {
        "device": device.type,
        "name": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "gpus": 1, "gpu_memory_bytes": properties.total_memory}
    return facts


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
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
    return found


@functools.cache
def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the source tree this package runs from, where it is one."""
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
