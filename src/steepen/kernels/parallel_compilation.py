"""Triton kernels compiled, or loaded from Triton's cache, in threads instead of at their first launches.

A step launches some forty kernels. Compiling one takes a third of a second or more, most of it outside
Python's global lock; loading one from the cache takes milliseconds of file reads and of the driver's work.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from steepen.errors import SteepenError
from steepen.utils.files import file_lock

ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are not a multiple of it
MAX_THREADS = 16


def compile_beforehand(device: torch.device, work: Callable[[], object]) -> None:
    """Do `work` without launching Triton kernels: they are compiled in threads, for what they would be given.

    All else in `work` runs, on memory that no kernel has filled: it must not read results on the host, nor
    write anything that is kept. Does nothing where there is one core, or another Triton than is known.
    """
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if threads < 2 or device.type != "cuda":
        return
    try:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction, MockTensor
    except ImportError:
        return
    kernel_type, active = cast("Any", JITFunction), cast("Any", driver.active)
    # Once, not in every thread: the driver, and the key of the cache, a checksum of 0.5 GB (0.4 to 0.8 s on a
    # busy core).
    cache = Path(knobs.cache.dir)
    with made_once(cache / "steepen-driver.lock"):
        active.get_current_device()
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    with (
        torch.cuda.device(device),
        ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool,
        _launches(kernel_type, pool, functools.partial(_stand_in, MockTensor), cache),
    ):
        work()


@contextlib.contextmanager
def _launches(
    kernel_type: Any, pool: ThreadPoolExecutor, stand_in: Callable[[Any], Any], cache: Path
) -> Generator[None]:
    """Let a launch be a compilation in the pool; a second one that is alike does nothing."""
    launch = kernel_type.run
    begun: dict[str, Future[None]] = {}

    def compile_one(kernel: Any, arguments: list[Any], options: dict[str, Any]) -> None:
        # A kernel that does not compile says so at its launch.
        with contextlib.suppress(Exception):
            compiled = launch(kernel, *arguments, grid=None, warmup=True, **options)
            signature = hashlib.sha256(str(list(compiled.src.signature.values())).encode()).hexdigest()
            with made_once(cache / f"steepen-{signature[:16]}.lock"):
                compiled._init_handles()  # loads it into the GPU

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = [stand_in(value) for value in arguments]
        named = {name: stand_in(value) for name, value in options.items()}
        values = [("", value) for value in given] + list(named.items())
        alike = f"{id(kernel)} {[(name, _description(value)) for name, value in values]}"
        if alike not in begun:
            begun[alike] = pool.submit(compile_one, kernel, given, named)

    kernel_type.run = run
    try:
        yield
    finally:
        kernel_type.run = launch


@contextlib.contextmanager
def made_once(lock: Path) -> Generator[None]:
    """Let one thread of one process at a time make, or load, a library of Triton's cache.

    Until 3.6 Triton keeps a launcher in C for every signature of a kernel, and whoever compiles one again
    replaces its file. If another thread or process loads the file just then, Python, which knows a library
    by its inode, can take it for the next library with that inode. A kernel then gets another one's
    arguments: "function takes exactly 20 arguments (28 given)" and "misaligned address" were seen once each
    among 14 runs that started at once with an empty cache.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, SteepenError):  # a cache that cannot be written, a link
            held.enter_context(file_lock(lock, wait=True, poll_seconds=0.02))
        yield


def _stand_in(mock: Any, value: Any) -> Any:
    """What a kernel is compiled for in place of a tensor, which is then not kept."""
    aligned = isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT == 0
    return mock(value.dtype, list(value.shape)) if aligned else value


def _description(value: Any) -> str:
    """Equal for arguments for which one compiled kernel serves; reads nothing from the GPU."""
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"{value.base.dtype} {value.shape} {value.block_shape}"
    dtype = getattr(value, "dtype", None)
    return repr(value) if dtype is None else f"{type(value).__name__} {dtype}"
