"""Triton, imported where it can run; elsewhere a stub, so that the reference forms import without it.

Operation modules keep their reference and Triton forms side by side and import `triton` and `tl` from here.
Triton adds 0.2 to 0.4 s to the import of torch (measured on two CPU cores), so machines without a GPU skip it
unless TRITON_INTERPRET is set.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING

import torch


def _triton_can_run() -> bool:
    """Whether Triton is installed and has a GPU, or its interpreter or compiler is requested."""
    if importlib.util.find_spec("triton") is None:
        return False
    return "TRITON_INTERPRET" in os.environ or torch.cuda.device_count() > 0


if TYPE_CHECKING or _triton_can_run():
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
else:

    class _Stub:
        """What the definition of kernels and their constants needs; nothing here can run them."""

        @staticmethod
        def jit(function: object) -> object:
            """Leave the kernel's source as a Python function, which is never called."""
            return function

        @staticmethod
        def constexpr(value: object) -> object:
            """Leave the constant as it is."""
            return value

    triton = tl = _Stub()
    TensorDescriptor = gdc_launch_dependents = gdc_wait = None


@functools.cache
def has_triton_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and the device is a GPU it compiles bf16 for (capability 8.0 or more)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


THREADS_PER_WARP = 32


def row_tile(width: int, min_elements: int = 2048, elements_per_thread: int = 16) -> dict[str, int]:
    """Launch options of a kernel whose programs process ROWS rows of up to BLOCK columns each.

    Short rows are grouped until a program has `min_elements`. Eight bf16 elements are one 16-byte load; with
    sixteen per thread, two loads are in flight.
    """
    block = 1 << (width - 1).bit_length()
    rows = max(1, min_elements // block)
    warps = rows * block // (THREADS_PER_WARP * elements_per_thread)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(warps, 1), 16)}


def row_grid(rows: int, tile: dict[str, int]) -> tuple[int]:
    """Launch grid with one program per tile of rows."""
    return (-(-rows // tile["ROWS"]),)


__all__ = [
    "TensorDescriptor",
    "gdc_launch_dependents",
    "gdc_wait",
    "has_triton_kernels",
    "row_grid",
    "row_tile",
    "tl",
    "triton",
]
