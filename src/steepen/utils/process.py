"""The start of a process that uses torch or a GPU, and its end, faster than these make them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
from typing import NoReturn


def create_cuda_context(device: str) -> threading.Thread | None:
    """Create the CUDA context that torch will use, in a thread while this process imports torch.

    `device` is auto, cuda or cuda:N. Returns None where there is no CUDA driver; errors are left to torch.
    """
    name, _, number = device.partition(":")
    if name not in ("auto", "cuda") or not (number or "0").isdigit():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

    def create() -> None:
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        # Each returns 0 for success. The primary context is the one that CUDA's runtime, and so torch, uses.
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(handle), int(number or "0")):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)

    thread = threading.Thread(target=create, name="CUDA context", daemon=True)
    thread.start()
    return thread


def import_torch() -> None:
    """Import torch without collecting garbage meanwhile, and without searching its objects for it later.

    This holds for all objects that the process has by then, so it is for programs, not for library calls.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        __import__("torch")
        gc.freeze()
    finally:
        gc.enable()


def exit_process(code: int) -> NoReturn:
    """End this process; with torch imported without a teardown, which takes half a second of a core.

    What was registered to run at the end runs, and output is flushed.
    """
    others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if "torch" not in sys.modules or others:
        sys.exit(code)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    try:
        with contextlib.suppress(BrokenPipeError):  # the process that read it (head, less) has ended
            sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.exit(code)  # Python says what cannot be written, as on a full disk
    os._exit(code)
