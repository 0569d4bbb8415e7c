"""The head's product and its cross-entropy in one: out of the product come odds, never logits.

The odds of a token are exp(its logit − the target's). With s the sum of all but the target's, a row's loss is
log(1 + s) and the gradient of its logits is its odds over 1 + s, where −s stands for the target's own. So the
pass over the logits that a softmax takes is gone: the division waits for products that are made anyway.
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from steepen.kernels.cross_entropy import capped, uncapped
from steepen.kernels.eager import MOST_NATS

PER_NAT = tl.constexpr(1.4426950408889634)  # bits: the GPU raises two to a power, not e
LIMIT = tl.constexpr(MOST_NATS * PER_NAT.value)
# A tile of the result and the columns of the factors taken at a time. One program to a processor: it fetches
# for the next tile while it raises and stores this one, for which three steps' factors must fit beside it.
TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
SHARED_MEMORY = 214_100  # bytes that takes, on Hopper and on Blackwell


@triton.jit
def _target_kernel(
    n_ptr, weight_ptr, target_ptr, right_ptr, rows, width, cap,
    CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The targets' logits."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    target = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        there = inside[:, None] & (column < width)
        n = tl.load(n_ptr + row.to(tl.int64)[:, None] * width + column, mask=there, other=0.0)
        weight = tl.load(weight_ptr + target[:, None] * width + column, mask=there, other=0.0)
        total += n.to(tl.float32) * weight.to(tl.float32)
    tl.store(right_ptr + row, capped(tl.sum(total, axis=1), cap, CAPPED), mask=inside)


@triton.jit
def _odds_kernel(
    n_tiles, weight_tiles, odds_tiles, part_ptr, right_ptr, target_ptr, rows, vocabulary, width, cap,
    CAPPED: tl.constexpr, STORE: tl.constexpr, EVEN: tl.constexpr, PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Odds, the target's left out, and their sums over each tile's columns."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # GROUP tiles below each other, then the next column of them: neighbours in time share factors.
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        i = first + tile % (GROUP * across) % height
        j = tile % (GROUP * across) // height
        x = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            n = n_tiles.load([i * ROWS, start])
            weight = weight_tiles.load([j * COLUMNS, start])
            x = tl.dot(n, weight.T, x)
        x = capped(x, cap, CAPPED)
        row = i * ROWS + tl.arange(0, ROWS)
        right = tl.load(right_ptr + row, mask=row < rows, other=0.0) * PER_NAT
        target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int32)
        column = j * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        # What is done here is done for every logit, while the products wait: few instructions matter. What
        # is no token has odds of zero, by its limit; of the target only the others' odds are wanted.
        limit = LIMIT if EVEN else tl.where(column < vocabulary, LIMIT, float("-inf"))
        above = tl.minimum(x * PER_NAT - right[:, None], limit, propagate_nan=tl.PropagateNan.ALL)
        odds = tl.where(column == target[:, None], 0.0, tl.exp2(above))
        tl.store(part_ptr + j * rows + row, tl.sum(odds, axis=1), mask=row < rows)
        if STORE:
            odds_tiles.store([i * ROWS, j * COLUMNS], uncapped(odds, x, cap, CAPPED).to(odds_tiles.dtype))


@triton.jit
def _finish_kernel(
    part_ptr, right_ptr, target_ptr, n_ptr, loss_ptr, odds_ptr, factor_ptr, scaled_ptr,
    parts, rows, vocabulary, width, scale, cap,
    CAPPED: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What is known once a row's odds are summed: its loss, the target's own, the divisor."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([PARTS, ROWS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(part_ptr + part * rows + row[None, :], mask=(part < parts) & inside, other=0.0)
    others = tl.sum(total, axis=0)
    tl.store(loss_ptr + row, tl.log(1 + others), mask=inside)
    if STORE:
        wide = row.to(tl.int64)
        target = tl.load(target_ptr + row, mask=inside, other=0)
        right = tl.load(right_ptr + row, mask=inside, other=0.0)
        own = uncapped(-others, right, cap, CAPPED)
        tl.store(odds_ptr + wide * vocabulary + target, own.to(odds_ptr.dtype.element_ty), mask=inside)
        factor = scale / (1 + others)
        tl.store(factor_ptr + row, factor, mask=inside)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            place = wide[:, None] * width + column
            there = inside[:, None] & (column < width)
            n = tl.load(n_ptr + place, mask=there, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + place, (n * factor[:, None]).to(scaled_ptr.dtype.element_ty), mask=there)


@functools.cache
def _processors(device: torch.device) -> int:
    """How many there are on a GPU that can: with a copy engine, and memory for a tile. On others none."""
    if device.type != "cuda":
        return 2  # Triton's interpreter
    found = torch.cuda.get_device_properties(device)
    able = found.major >= 9 and found.shared_memory_per_block_optin >= SHARED_MEMORY
    return found.multi_processor_count if able else 0


def has_odds(n: Tensor, weight: Tensor) -> bool:
    """Whether `odds` takes these: in bf16, in rows that the copy engine of this GPU can fetch."""
    # Odds overflow fp16; but Triton's interpreter multiplies that and not bf16.
    kind = torch.bfloat16 if n.is_cuda else torch.float16
    fits = all(side % 8 == 0 for side in weight.shape) and n.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return n.dtype == kind and fits and _processors(n.device) > 0


def odds(
    n: Tensor, weight: Tensor, targets: Tensor, scale: float, softcap: float | None, *, gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """As `eager.odds`."""
    (rows, width), vocabulary, device = n.shape, len(weight), n.device
    parts = triton.cdiv(vocabulary, TILE["COLUMNS"])
    losses, right, factor = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    sums = torch.empty(parts, rows, dtype=torch.float32, device=device)
    raised = torch.empty(rows, vocabulary, dtype=n.dtype, device=device) if gradient else n
    scaled = torch.empty_like(n) if gradient else n
    cap, options = softcap or 1.0, {"CAPPED": softcap is not None}
    _target_kernel[(triton.cdiv(rows, 8),)](
        n, weight, targets, right, rows, width, cap, **options, ROWS=8, BLOCK=256, num_warps=4
    )
    options["STORE"] = gradient
    programs = min(_processors(device), triton.cdiv(rows, TILE["ROWS"]) * parts)
    _odds_kernel[(programs,)](
        TensorDescriptor.from_tensor(n, [TILE["ROWS"], TILE["DEPTH"]]),
        TensorDescriptor.from_tensor(weight, [TILE["COLUMNS"], TILE["DEPTH"]]),
        TensorDescriptor.from_tensor(raised, [TILE["ROWS"], TILE["COLUMNS"]]),
        sums, right, targets, rows, vocabulary, width, cap,
        **options, **TILE, EVEN=vocabulary % TILE["COLUMNS"] == 0,
        PROGRAMS=programs, GROUP=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(rows, 16),)](
        sums, right, targets, n, losses, raised, factor, scaled, parts, rows, vocabulary, width, scale, cap,
        **options, ROWS=16, PARTS=32, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return losses, (raised, factor, scaled) if gradient else None
