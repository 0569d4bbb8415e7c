"""Tile sizes and launch grids of Triton kernels that process whole rows of a matrix."""

# Triton's helpers are typed for use inside kernels.
# pyright: reportReturnType=false

from __future__ import annotations

from steepen.kernels.triton_backend import triton

THREADS_PER_WARP = 32


def row_tile(width: int, min_elements: int = 2048, elements_per_thread: int = 16) -> dict[str, int]:
    """Launch options of a kernel whose programs process ROWS rows of up to BLOCK columns each.

    Short rows are grouped until a program has `min_elements`. Eight bf16 elements are one 16-byte load; with
    sixteen per thread, two loads are in flight.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, min_elements // block)
    warps = rows * block // (THREADS_PER_WARP * elements_per_thread)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(warps, 1), 16)}


def row_grid(rows: int, tile: dict[str, int]) -> tuple[int]:
    """Launch grid with one program per tile of rows."""
    return (triton.cdiv(rows, tile["ROWS"]),)
