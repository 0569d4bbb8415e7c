"""The start of a process that uses a GPU, and the end of one that uses torch, faster than these make them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def prepare_for_torch(device: str) -> None:
    """Do in threads, while this process still imports Python, what torch would do one after the other.

    Loads torch's libraries; where there is a CUDA driver and `device` (auto, cuda or cuda:N) does not rule
    it out, creates the CUDA context that torch will use and computes the key of Triton's cache, a checksum of
    its compiler. Whatever fails here is left to torch and Triton to report.
    """
    _start(_load_torch_libraries)
    name, _, number = device.partition(":")
    if name not in ("auto", "cuda") or not (number or "0").isdigit():
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    _start(functools.partial(_create_cuda_context, driver, int(number or "0")))
    _start(_compute_triton_key)


def _start(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


def _load_torch_libraries() -> None:
    """Load what `import torch` loads first; a call of dlopen lets other threads of Python run meanwhile."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    folder, dlopen = Path(found.origin).parent / "lib", ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for file, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        dlopen(os.fsencode(folder / file), os.RTLD_NOW | mode)


def _create_cuda_context(driver: ctypes.CDLL, number: int) -> None:
    """Retain the primary context of a GPU, which CUDA's runtime uses."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    # Each returns 0 for success.
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(handle), number):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _compute_triton_key() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        cache: Any = importlib.import_module("triton.runtime.cache")
        cache.triton_key()


def exit_process(code: int) -> NoReturn:
    """End this process; with torch imported without a teardown, which takes half a second of a core.

    What was registered to run at the end runs, and output is flushed.
    """
    others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if "torch" not in sys.modules or others:
        sys.exit(code)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
