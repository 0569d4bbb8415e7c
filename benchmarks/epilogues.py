"""SwiGLU inside the products around it, in Triton, against cuBLAS and a kernel of its own: a thing tried.

    python benchmarks/epilogues.py [--depth 8] [--tokens 65536]

forward    gate and up, and from both the activation, in one kernel: the matrix of gates and ups is not read
backward   the activation's gradient never leaves the product that makes it: gates and ups become gradients
plain      the product alone, by Triton and by cuBLAS, to tell what the joining costs from what Triton does

Each is checked against the two kernels it would replace. Times are taken in turns on a loaded GPU, as in
ceilings.py; a ratio above 1 would be a gain. It needs a GPU with a copy engine (Hopper or later).
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
import triton
import triton.language as tl
from ceiling_clocks import Call, hot
from ceiling_gemms import normal
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from steepen.kernels.dispatch import TRITON
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule

# Rows and columns of a tile, depth of a step, warps, stages: of those tried the best at d8.
FORWARD = (128, 64, 64, 4, 3)
BACKWARD = (128, 128, 64, 8, 3)
PLAIN = (128, 128, 64, 4, 3)
PARTS = 4  # a tile's way back is made in so many pieces: in one, the registers overflow


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Eight tiles below each other, then the next column of them."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    first = tile // (8 * across) * 8
    height = min(down - first, 8)
    return (first + tile % (8 * across) % height) * ROWS, tile % (8 * across) // height * COLUMNS


@triton.jit
def _plain(x, w, out, rows, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    i, j = _place(rows, columns, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        total = tl.dot(x.load([i, k]), w.load([j, k]).T, total)
    out.store([i, j], total.to(tl.bfloat16))


@triton.jit
def _forward(
    x, w, gate_up, h, rows, hidden, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    i, j = _place(rows, hidden, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
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
def _part(d, gate_up, h, i, j, hidden):
    gate = gate_up.load([i, j]).to(tl.float32)
    up = gate_up.load([i, hidden + j]).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    gate_up.store([i, j], (d * up * share * (1 + gate * (1 - share))).to(tl.bfloat16))
    gate_up.store([i, hidden + j], (d * silu).to(tl.bfloat16))
    h.store([i, j], (silu * up).to(tl.bfloat16))


@triton.jit
def _backward(
    d, w, gate_up, h, rows, hidden, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    i, j = _place(rows, hidden, ROWS, COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        total = tl.dot(d.load([i, k]), w.load([k, j]), total)
    left, right = _halves(total, ROWS, COLUMNS)
    first, second = _halves(left, ROWS, COLUMNS // 2)
    _part(first, gate_up, h, i, j, hidden)
    _part(second, gate_up, h, i, j + COLUMNS // 4, hidden)
    first, second = _halves(right, ROWS, COLUMNS // 2)
    _part(first, gate_up, h, i, j + COLUMNS // 2, hidden)
    _part(second, gate_up, h, i, j + 3 * (COLUMNS // 4), hidden)


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
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        parser.error("it needs a GPU of compute capability 9.0 or more")
    shape = find_arm("vanilla").shape(given.depth, SizeRule())
    tokens, width, hidden = given.tokens, shape.width, shape.mlp_width
    x, d = normal(tokens, width), normal(tokens, width)
    up, down = normal(2 * hidden, width) * width**-0.5, normal(width, hidden) * hidden**-0.5
    gate_up, h = normal(tokens, 2 * hidden), normal(tokens, hidden)
    sizes = (tokens, hidden, width)

    def forward_apart() -> Tensor:
        torch.mm(x, up.t(), out=gate_up)
        return TRITON.swiglu(gate_up)

    r, c, k = FORWARD[:3]
    forward_parts = [tiled(x, r, k), tiled(up, c, k), tiled(gate_up, r, c), tiled(h, r, c)]
    r, c, k = BACKWARD[:3]
    backward_parts = [
        tiled(d, r, k),
        tiled(down, k, c),
        tiled(gate_up, r, c // PARTS),
        tiled(h, r, c // PARTS),
    ]
    r, c, k = PLAIN[:3]
    plain_parts = [tiled(x, r, k), tiled(up, c, k), tiled(gate_up, r, c)]

    def backward_apart() -> None:
        torch.mm(d, down, out=h)
        TRITON.swiglu_backward_(gate_up, h, None)

    pairs: dict[str, tuple[Call, Call]] = {
        "plain": (
            lambda: torch.mm(x, up.t(), out=gate_up),
            lambda: launch(_plain, PLAIN, plain_parts, (tokens, 2 * hidden, width)),
        ),
        "forward": (forward_apart, lambda: launch(_forward, FORWARD, forward_parts, sizes)),
        "backward": (backward_apart, lambda: launch(_backward, BACKWARD, backward_parts, sizes)),
    }
    start = normal(tokens, 2 * hidden)
    for name, (apart, joined) in pairs.items():
        gate_up.copy_(start)
        expected = apart()
        want = [gate_up.clone(), (cast(Tensor, expected) if name == "forward" else h).clone()]
        gate_up.copy_(start)
        joined()
        for one, two in zip([gate_up, h], want, strict=True):
            assert (one.float() - two.float()).norm() <= 1e-2 * two.float().norm(), name
    calls = {f"{name} {i}": call for name, both in pairs.items() for i, call in enumerate(both)}
    found, sampled = hot(calls, given.seconds, given.warm_up)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, {sampled}"
    )
    print(f"d{given.depth}: {tokens:,} tokens, width {width}, MLP {hidden}")
    print(f"{'':<12}{'cuBLAS, ms':>12}{'Triton, ms':>12}{'ratio':>8}")
    for name in pairs:
        one, two = (1e3 * found[f"{name} {i}"] for i in range(2))
        print(f"{name:<12}{one:>12.4f}{two:>12.4f}{one / two:>8.3f}")


if __name__ == "__main__":
    main()
