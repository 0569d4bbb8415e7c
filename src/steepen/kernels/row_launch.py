"""How kernels that take whole rows at a time share them among programs."""

# Triton's helpers are typed for its kernels.
# pyright: basic, reportReturnType=false

from __future__ import annotations

import triton


def tile(width: int, numbers: int = 2048, each: int = 16) -> dict[str, int]:
    """Rows and columns of a program: several rows, to so many numbers, where they are short.

    A thread takes `each` numbers. Eight of sixteen bits are one read; with more it has several under way.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, numbers // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // (32 * each), 1), 16)}


def grid(rows: int, size: dict[str, int]) -> tuple[int]:
    """One program per tile of rows."""
    return (triton.cdiv(rows, size["ROWS"]),)
