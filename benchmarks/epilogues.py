"""SwiGLU fused into the adjacent GEMMs in Triton, against cuBLAS and a SwiGLU kernel: tried without gain.

    python benchmarks/epilogues.py [--depth 8] [--tokens 65536]

gemm       the gate and up GEMM alone, in cuBLAS and in Triton: the cost of Triton without any fusion
forward    gate and up GEMM with the activation in its epilogue: gate and up are not read again
backward   dgrad GEMM of the down projection with SwiGLU backward in its epilogue: the gradient of the
           activation is not stored, and the gradients of gate and up overwrite their inputs

Each result is checked against the two kernels it would replace. Times are interleaved on a hot GPU, as in
ceilings.py; a ratio above 1 would be a gain. Needs a GPU with TMA (Hopper or later).
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
import triton
import triton.language as tl
from gemm_workload import normal
from gpu_timing import Call, time_interleaved
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from steepen.kernels.dispatch import TRITON
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule

# Rows and columns of a tile, contraction per iteration, warps, stages: the best of those tried at d8.
FORWARD = (128, 64, 64, 4, 3)
BACKWARD = (128, 128, 64, 8, 3)
GEMM = (128, 128, 64, 4, 3)
PARTS = 4  # the backward epilogue processes a tile in this many parts: in one, the registers spill


@triton.jit
def _tile_offsets(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row and column of this program's tile, in groups of eight row tiles."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    first = tile // (8 * across) * 8
    height = min(down - first, 8)
    return (first + tile % (8 * across) % height) * ROWS, tile % (8 * across) // height * COLUMNS


@triton.jit
def _gemm(x, w, out, rows, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    i, j = _tile_offsets(rows, columns, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        total = tl.dot(x.load([i, k]), w.load([j, k]).T, total)
    out.store([i, j], total.to(tl.bfloat16))


@triton.jit
def _forward(
    x, w, gate_up, h, rows, hidden, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    i, j = _tile_offsets(rows, hidden, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        a = x.load([i, k])
        gate = tl.dot(a, w.load([j, k]).T, gate)
        up = tl.dot(a, w.load([hidden + j, k]).T, up)
    gate_up.store([i, j], gate.to(tl.bfloat16))
    gate_up.store([i, hidden + j], up.to(tl.bfloat16))
    h.store([i, j], (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _swiglu_backward(d, gate_up, i, j, hidden):
    gate = gate_up.load([i, j]).to(tl.float32)
    up = gate_up.load([i, hidden + j]).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    gate_up.store([i, j], (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(tl.bfloat16))
    gate_up.store([i, hidden + j], (d * gate * sigmoid).to(tl.bfloat16))


@triton.jit
def _backward(
    d, w, gate_up, rows, hidden, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    i, j = _tile_offsets(rows, hidden, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        total = tl.dot(d.load([i, k]), w.load([k, j]), total)
    left, right = _halves(total, ROWS, COLUMNS)
    first, second = _halves(left, ROWS, COLUMNS // 2)
    _swiglu_backward(first, gate_up, i, j, hidden)
    _swiglu_backward(second, gate_up, i, j + COLUMNS // 4, hidden)
    first, second = _halves(right, ROWS, COLUMNS // 2)
    _swiglu_backward(first, gate_up, i, j + COLUMNS // 2, hidden)
    _swiglu_backward(second, gate_up, i, j + 3 * (COLUMNS // 4), hidden)


def launch(
    kernel, tiles: tuple[int, ...], descriptors: list[TensorDescriptor], sizes: tuple[int, ...]
) -> None:
    rows, columns, depth, warps, stages = tiles
    grid = (triton.cdiv(sizes[0], rows) * triton.cdiv(sizes[1], columns),)
    kernel[grid](
        *descriptors, *sizes, ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages
    )


def tiled(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--warm-up", type=float, default=3.0)
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        parser.error("needs a GPU of compute capability 9.0 or more")
    shape = find_arm("vanilla").shape(args.depth, SizeRule())
    tokens, width, hidden = args.tokens, shape.width, shape.mlp_width
    x, d = normal(tokens, width), normal(tokens, width)
    up, down = normal(2 * hidden, width) * width**-0.5, normal(width, hidden) * hidden**-0.5
    gate_up, h = normal(tokens, 2 * hidden), normal(tokens, hidden)
    sizes = (tokens, hidden, width)

    def forward_separate() -> Tensor:
        torch.mm(x, up.t(), out=gate_up)
        return TRITON.swiglu(gate_up)

    r, c, k = FORWARD[:3]
    forward_tiles = [tiled(x, r, k), tiled(up, c, k), tiled(gate_up, r, c), tiled(h, r, c)]
    r, c, k = BACKWARD[:3]
    backward_tiles = [
        tiled(d, r, k),
        tiled(down, k, c),
        tiled(gate_up, r, c // PARTS),
    ]
    r, c, k = GEMM[:3]
    gemm_tiles = [tiled(x, r, k), tiled(up, c, k), tiled(gate_up, r, c)]

    def backward_separate() -> None:
        torch.mm(d, down, out=h)
        TRITON.swiglu_backward_(gate_up, h)

    pairs: dict[str, tuple[Call, Call]] = {
        "gemm": (
            lambda: torch.mm(x, up.t(), out=gate_up),
            lambda: launch(_gemm, GEMM, gemm_tiles, (tokens, 2 * hidden, width)),
        ),
        "forward": (forward_separate, lambda: launch(_forward, FORWARD, forward_tiles, sizes)),
        "backward": (backward_separate, lambda: launch(_backward, BACKWARD, backward_tiles, sizes)),
    }
    start = normal(tokens, 2 * hidden)
    for name, (separate, fused) in pairs.items():
        gate_up.copy_(start)
        activated = separate()
        expected = [gate_up.clone(), *([cast(Tensor, activated)] if name == "forward" else [])]
        gate_up.copy_(start)
        fused()
        for result, want in zip([gate_up, h], expected, strict=False):
            assert (result.float() - want.float()).norm() <= 1e-2 * want.float().norm(), name
    calls = {f"{name} {i}": call for name, both in pairs.items() for i, call in enumerate(both)}
    seconds, sampled = time_interleaved(calls, args.seconds, args.warm_up)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, {sampled}"
    )
    print(f"d{args.depth}: {tokens:,} tokens, width {width}, MLP {hidden}")
    print(f"{'':<12}{'cuBLAS, ms':>12}{'Triton, ms':>12}{'ratio':>8}")
    for name in pairs:
        cublas, fused = (1e3 * seconds[f"{name} {i}"] for i in range(2))
        print(f"{name:<12}{cublas:>12.4f}{fused:>12.4f}{cublas / fused:>8.3f}")


if __name__ == "__main__":
    main()
