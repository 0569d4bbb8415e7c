"""Kernels are compiled in threads before they are launched, once for all launches that are alike."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steepen.kernels import parallel_compilation
from steepen.kernels.parallel_compilation import compile_beforehand, made_once
from steepen.kernels.triton_backend import tl, triton

Launch = tuple[tuple[Any, ...], bool]


class Mock:
    """Stands in for a tensor, as Triton's `MockTensor`."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        self.dtype, self.shape = dtype, shape


class Kernel:
    """What Triton's `JITFunction` does here: `run` compiles or launches."""

    def __init__(self) -> None:
        self.runs: list[Launch] = []
        self.loaded = self.loading = 0
        self.src = SimpleNamespace(signature={"x": "*fp32"})

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Kernel:
        self.runs.append((arguments, warmup))
        if options.get("BLOCK") == 3:
            raise ValueError("a block must be a power of two")
        return self

    def _init_handles(self) -> None:
        self.loading += 1
        time.sleep(0.02)
        assert self.loading == 1, "two kernels of one signature load their launcher at once"
        self.loading -= 1
        self.loaded += 1


def test_launches_that_are_alike_are_one_compilation(tmp_path: Path) -> None:
    kernel, launch = Kernel(), Kernel.run
    aligned, odd = torch.zeros(64), torch.zeros(64)[1:]
    with ThreadPoolExecutor(2) as pool:
        stand_in = lambda value: parallel_compilation._stand_in(Mock, value)  # noqa: E731
        with parallel_compilation._launches(Kernel, pool, stand_in, tmp_path):
            for tensor in (aligned, aligned + 1, odd, aligned.bfloat16()):
                kernel.run(tensor, 5, grid=(1,), warmup=False, BLOCK=4)
            kernel.run(aligned, 6, grid=(1,), warmup=False, BLOCK=4)
            kernel.run(aligned, 5, grid=(1,), warmup=False, BLOCK=3)  # fails, and says so when it is launched
    assert Kernel.run is launch
    assert all(warmup for _, warmup in kernel.runs)
    assert len(kernel.runs) == 5 and kernel.loaded == 4
    kinds = {type(arguments[0]) for arguments, _ in kernel.runs}
    assert kinds == {Mock, torch.Tensor}  # the pointer that is not aligned is kept as it is


def test_nothing_is_done_beforehand_on_a_cpu() -> None:
    compile_beforehand(torch.device("cpu"), lambda: pytest.fail("the work was done"))


def test_kernels_load_without_a_lock_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for lock in (tmp_path / "file" / "lock", tmp_path / "link"):
        with made_once(lock):
            entered = lock
        assert entered == lock


@triton.jit
def _double_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, 2 * tl.load(x_ptr + offset, mask=offset < size), mask=offset < size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_compiled_beforehand_and_not_launched() -> None:
    x, out = torch.arange(96.0, device="cuda"), torch.zeros(96, device="cuda")
    kernel: Any = _double_kernel

    def launch() -> None:
        kernel[(1,)](x, out, 96, BLOCK=128)

    compile_beforehand(x.device, launch)
    compiled = kernel.device_caches[torch.cuda.current_device()][0]
    assert len(compiled) == 1 and not out.any()
    launch()
    assert len(compiled) == 1, "the launch compiled a kernel of its own"
    assert torch.equal(out, 2 * x)
