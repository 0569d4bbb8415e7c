"""LM head and cross-entropy in one GEMM, which writes exponentiated logit differences instead of logits.

With x the logits of a token and t its target, the GEMM's epilogue computes r_j = exp(x_j − x_t) for j ≠ t.
With s = Σ r_j the loss is log(1 + s), and the gradient of the logits is r_j / (1 + s), with −s in the place
of r_t. The separate softmax pass over the logits disappears: the division by 1 + s is a factor per row, which
the wgrad GEMM applies to its other operand and the RMSNorm backward kernel to the dgrad GEMM's result.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.cross_entropy import BITS_PER_NAT, TL_BITS_PER_NAT, softcap_backward, softcapped
from steepen.kernels.norm import at_least_fp32
from steepen.kernels.triton_backend import TensorDescriptor, tl, triton

# Logit differences are clamped here, in nats: e^60 times the tokens of a batch and the size of a vocabulary
# is still finite in fp32, and so is its reciprocal.
MAX_LOGIT_DIFFERENCE = 60.0


class LogitGradient(NamedTuple):
    """The logits' gradient in factored form: exp_differences · row_factor."""

    exp_differences: Tensor  # (tokens, vocabulary), compute dtype
    row_factor: Tensor  # (tokens,), fp32
    scaled_input: Tensor  # (tokens, width): n · row_factor, the other operand of the wgrad GEMM


def supports_fused_linear_cross_entropy_reference(n: Tensor, weight: Tensor) -> bool:
    """Whether `fused_linear_cross_entropy` accepts these operands: always, in the reference."""
    del n, weight
    return True


def fused_linear_cross_entropy_reference(
    n: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: int | None = None,
    *,
    gradient: bool,
) -> tuple[Tensor, LogitGradient | None]:
    """Cross-entropy (tokens,) of the logits n @ weightᵀ, and with `gradient` `scale` times their gradient.

    Rows of the weight from `vocabulary` on are padding without a logit: their gradient is zero. The loss of a
    target is at most about `MAX_LOGIT_DIFFERENCE`: larger logit differences are clamped.
    """
    real = len(weight) if vocabulary is None else vocabulary
    x = at_least_fp32(n) @ at_least_fp32(weight[:real]).t()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    target = targets[:, None]
    differences = (x - x.gather(1, target)).clamp(max=MAX_LOGIT_DIFFERENCE)
    exp_differences = torch.exp(differences).scatter(1, target, 0.0)
    total = exp_differences.sum(-1)
    losses = torch.log1p(total)
    if not gradient:
        return losses, None
    exp_differences = exp_differences.scatter(1, target, -total[:, None])
    if softcap is not None:
        exp_differences = exp_differences * (1 - (x / softcap).square())
    exp_differences = functional.pad(exp_differences, (0, len(weight) - real))
    row_factor = scale / (1 + total)
    scaled_input = (at_least_fp32(n) * row_factor[:, None]).to(n.dtype)
    return losses, LogitGradient(exp_differences.to(n.dtype), row_factor, scaled_input)


TL_MAX_DIFFERENCE_BITS = tl.constexpr(MAX_LOGIT_DIFFERENCE * BITS_PER_NAT)
# Tile of the result, and DEPTH columns of the operands per step. One program per streaming multiprocessor: it
# loads the operands of the next tile while it exponentiates and stores this one, so the shared memory must
# hold the operands of three steps beside the tile.
HEAD_TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
HEAD_SHARED_MEMORY = 214_100  # bytes of shared memory the kernel needs, on Hopper and on Blackwell


# First, because every tile of the GEMM subtracts the target's logit, which only one tile would compute. It is
# one dot product per token, against a vocabulary of them in the GEMM.
@triton.jit
def _target_logit_kernel(
    n_ptr, weight_ptr, target_ptr, target_logit_ptr, rows, width, softcap,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The logit of each row's target."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    target = tl.load(target_ptr + row, mask=row_mask, other=0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = row_mask[:, None] & (column < width)
        n = tl.load(n_ptr + row.to(tl.int64)[:, None] * width + column, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + target[:, None] * width + column, mask=mask, other=0.0)
        total += n.to(tl.float32) * weight.to(tl.float32)
    tl.store(target_logit_ptr + row, softcapped(tl.sum(total, axis=1), softcap, SOFTCAP), mask=row_mask)


@triton.jit
def _exp_difference_kernel(
    n_tiles, weight_tiles, out_tiles, partial_sum_ptr, target_logit_ptr, target_ptr, rows, vocabulary, real,
    width, softcap,
    SOFTCAP: tl.constexpr, STORE: tl.constexpr, EVEN: tl.constexpr, PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Persistent GEMM: exp(logit differences), zero at the target, and their sums per column tile."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS, flatten=True):
        # GROUP row tiles of one column tile, then the next column tile: tiles close in time share operands.
        first = tile // (GROUP * tiles_across) * GROUP
        height = min(tiles_down - first, GROUP)
        i = first + tile % (GROUP * tiles_across) % height
        j = tile % (GROUP * tiles_across) // height
        x = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            n = n_tiles.load([i * ROWS, start])
            weight = weight_tiles.load([j * COLUMNS, start])
            x = tl.dot(n, weight.T, x)
        x = softcapped(x, softcap, SOFTCAP)
        row = i * ROWS + tl.arange(0, ROWS)
        target_logit = tl.load(target_logit_ptr + row, mask=row < rows, other=0.0) * TL_BITS_PER_NAT
        target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int32)
        column = j * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        # This runs for every logit while the tensor cores wait, so every instruction counts. Columns beyond
        # the `real` ones become zero through their limit of −inf; the target's own term is set to zero.
        limit = (
            TL_MAX_DIFFERENCE_BITS if EVEN else tl.where(column < real, TL_MAX_DIFFERENCE_BITS, float("-inf"))
        )
        difference = tl.minimum(
            x * TL_BITS_PER_NAT - target_logit[:, None], limit, propagate_nan=tl.PropagateNan.ALL
        )
        exp_difference = tl.where(column == target[:, None], 0.0, tl.exp2(difference))
        tl.store(partial_sum_ptr + j * rows + row, tl.sum(exp_difference, axis=1), mask=row < rows)
        if STORE:
            out = softcap_backward(exp_difference, x, softcap, SOFTCAP).to(out_tiles.dtype)
            out_tiles.store([i * ROWS, j * COLUMNS], out)


# Last, because the sum over the vocabulary is complete only when all column tiles are done. It also scales
# the input of the wgrad GEMM, which would otherwise need a pass of its own.
@triton.jit
def _finish_kernel(
    partial_sum_ptr, target_logit_ptr, target_ptr, n_ptr, loss_ptr, out_ptr, factor_ptr, scaled_ptr,
    parts, rows, vocabulary, width, scale, softcap,
    SOFTCAP: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: add the partial sums, then the loss, the target's gradient, the row factor and scaled n."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    sums = tl.zeros([PARTS, ROWS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        mask = (part < parts) & row_mask
        sums += tl.load(partial_sum_ptr + part * rows + row[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(loss_ptr + row, tl.log(1 + total), mask=row_mask)
    if STORE:
        row64 = row.to(tl.int64)
        target = tl.load(target_ptr + row, mask=row_mask, other=0)
        target_logit = tl.load(target_logit_ptr + row, mask=row_mask, other=0.0)
        target_value = softcap_backward(-total, target_logit, softcap, SOFTCAP)
        target_pointer = out_ptr + row64 * vocabulary + target
        tl.store(target_pointer, target_value.to(out_ptr.dtype.element_ty), mask=row_mask)
        factor = scale / (1 + total)
        tl.store(factor_ptr + row, factor, mask=row_mask)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            offset = row64[:, None] * width + column
            mask = row_mask[:, None] & (column < width)
            n = tl.load(n_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + offset, (n * factor[:, None]).to(scaled_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _usable_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU with TMA and shared memory for a tile; 0 on other GPUs."""
    if device.type != "cuda":
        return 2  # Triton's interpreter
    found = torch.cuda.get_device_properties(device)
    supported = found.major >= 9 and found.shared_memory_per_block_optin >= HEAD_SHARED_MEMORY
    return found.multi_processor_count if supported else 0


def supports_fused_linear_cross_entropy_triton(n: Tensor, weight: Tensor) -> bool:
    """Whether `fused_linear_cross_entropy_triton` accepts these: bf16, aligned for TMA, on a GPU with TMA."""
    # fp16 would overflow, but Triton's interpreter multiplies fp16 and not bf16.
    dtype = torch.bfloat16 if n.is_cuda else torch.float16
    aligned = all(side % 8 == 0 for side in weight.shape) and n.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return n.dtype == dtype and aligned and _usable_multiprocessors(n.device) > 0


def fused_linear_cross_entropy_triton(
    n: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: int | None = None,
    *,
    gradient: bool,
) -> tuple[Tensor, LogitGradient | None]:
    """`fused_linear_cross_entropy_reference` in Triton."""
    (rows, width), device = n.shape, n.device
    vocabulary, real = len(weight), len(weight) if vocabulary is None else vocabulary
    parts = triton.cdiv(vocabulary, HEAD_TILE["COLUMNS"])
    losses, target_logits, row_factor = (
        torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3)
    )
    partial_sums = torch.empty(parts, rows, dtype=torch.float32, device=device)
    out = torch.empty(rows, vocabulary, dtype=n.dtype, device=device) if gradient else n
    scaled_input = torch.empty_like(n) if gradient else n
    cap, options = softcap or 1.0, {"SOFTCAP": softcap is not None}
    _target_logit_kernel[(triton.cdiv(rows, 8),)](
        n, weight, targets, target_logits, rows, width, cap, **options, ROWS=8, BLOCK=256, num_warps=4
    )
    options["STORE"] = gradient
    tile: dict[str, Any] = HEAD_TILE
    programs = min(_usable_multiprocessors(device), triton.cdiv(rows, tile["ROWS"]) * parts)
    _exp_difference_kernel[(programs,)](
        TensorDescriptor.from_tensor(n, [tile["ROWS"], tile["DEPTH"]]),
        TensorDescriptor.from_tensor(weight, [tile["COLUMNS"], tile["DEPTH"]]),
        TensorDescriptor.from_tensor(out, [tile["ROWS"], tile["COLUMNS"]]),
        partial_sums, target_logits, targets, rows, vocabulary, real, width, cap,
        **options, **tile, EVEN=real == vocabulary and vocabulary % tile["COLUMNS"] == 0,
        PROGRAMS=programs, GROUP=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(rows, 16),)](
        partial_sums, target_logits, targets, n, losses, out, row_factor, scaled_input,
        parts, rows, vocabulary, width, scale, cap,
        **options, ROWS=16, PARTS=32, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return losses, LogitGradient(out, row_factor, scaled_input) if gradient else None
