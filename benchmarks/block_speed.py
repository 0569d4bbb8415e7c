"""Speed of blocks with options against a compiled plain PyTorch block of the same shape.

    python benchmarks/block_speed.py [--depth 12] [--rows 8] [--seconds 1]

A row is the forward and backward of a stack of blocks, without embedding and head. The paper's block and
grouped-query attention run the fused kernels, the others torch.compile. The plain block is `nn.Linear`,
`scaled_dot_product_attention` and `silu`, under autocast and torch.compile; its experts are a loop, as a
first version of such a block would be.
The fused and the plain stack alternate within each round, so that a drift of the clock affects both. What a
block saves for its backward is compared with the planner's estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from gpu_timing import DEVICE, ON_GPU, time_interleaved
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution.select import apply_execution_mode
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import Shape, SizeRule
from steepen.recipe.flops import block_cost
from steepen.recipe.memory import COMPILED_ACTIVATIONS, saved_by_block
from steepen.training.device import configure_backends

TINY = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=64)


class PlainBlock(nn.Module):
    """The block of an arm as plain PyTorch: fp32 weights, autocast, one module per matrix."""

    def __init__(self, arm: Arm, shape: Shape) -> None:
        super().__init__()
        options, width = arm.block_options, shape.width
        self.heads, self.kv_heads = shape.heads, options.heads(shape)
        self.experts, self.active = options.experts, options.active_experts
        self.qkv = nn.Linear(width, width + 2 * self.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden, count = options.mlp_width(shape), options.experts or 1
        self.gate_up = nn.ModuleList(nn.Linear(width, 2 * hidden, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))
        if options.experts is not None:
            self.router = nn.Linear(width, options.experts, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Attention, then the MLP."""
        x = x + self.attention(functional.rms_norm(x, x.shape[-1:]), rotary)
        normed = functional.rms_norm(x, x.shape[-1:])
        return x + (self.mlp(normed, 0) if self.experts is None else self.routed(normed))

    def attention(self, x: Tensor, rotary: Tensor) -> Tensor:
        """RoPE, QK norm and causal attention."""
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        rotated, value = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=-2)
        cos, sin = rotary.unsqueeze(-2)
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        rotated = functional.rms_norm(rotated, rotated.shape[-1:]).to(value.dtype)
        query, key = rotated.split([self.heads, self.kv_heads], dim=-2)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )  # fmt: skip
        return self.out(attended.transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor, number: int) -> Tensor:
        """One SwiGLU."""
        gate, up = self.gate_up[number](x).chunk(2, dim=-1)
        return self.down[number](functional.silu(gate) * up)

    def routed(self, x: Tensor) -> Tensor:
        """Experts one after the other, each on the tokens that chose it."""
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).float().topk(self.active, dim=-1)
        weights = scores.softmax(-1)
        found = torch.zeros_like(tokens)
        for number in range(self.experts or 0):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            part = self.mlp(tokens[rows], number) * weights[rows, place].unsqueeze(-1)
            found = found.index_add(0, rows, part.to(found.dtype))
        return found.view_as(x)


def built(name: str, depth: int, rule: SizeRule) -> Network:
    """The network of an arm as it trains here, its weights away from zero: GEMMs of zeros are faster."""
    arm = find_arm(name)
    network = materialize(build_on_meta(arm.shape(depth, rule), arm), DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    fused = arm.fused_block
    apply_execution_mode(network, "bf16", fused=fused, compiled=ON_GPU and not fused)
    return network


def blocks_step(network: Network, rows: int) -> tuple[Any, Any]:
    """Forward and backward of a network's blocks, and their forward alone."""
    shape, blocks = network.shape, list(network.blocks())
    streams = network.arm.block_options.streams
    size = (rows, shape.context, *(() if streams is None else (streams,)), shape.width)
    x = torch.randn(size, device=DEVICE, requires_grad=True)
    table = network.rotary if network.fused is not None else network.rotary.to(torch.bfloat16)

    def forward() -> Tensor:
        y = x
        for block in blocks:
            y = block(y, table)
        return y

    def step() -> None:
        forward().backward(x.detach())

    return step, forward


def saved_bytes(forward: Any) -> float:
    """Bytes that a forward keeps for its backward: what is allocated after it, less its output."""
    forward()  # compiles
    gc.collect()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    y = forward()
    held = (torch.cuda.memory_allocated() if ON_GPU else 0) - before - y.numel() * y.element_size()
    del y
    return float(held)


def plain_step(arm: Arm, network: Network, rows: int) -> Any:
    """Forward and backward of as many plain blocks."""
    shape, table = network.shape, network.rotary.to(torch.bfloat16)
    blocks = [PlainBlock(arm, shape).to(DEVICE) for _ in network.blocks()]
    for block in blocks:
        if ON_GPU:
            block.compile(dynamic=False if block.experts is None else None)
    x = torch.randn(rows, shape.context, shape.width, device=DEVICE, requires_grad=True)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = x
            for block in blocks:
                y = block(y, table)
        y.backward(x.detach())

    return step


def main() -> None:
    """Print one row per arm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=3, help="blocks that are executed")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="per arm and form")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["vanilla", "vanilla+kv_heads=4", "vanilla+kv_heads=1", "vanilla+experts=8"],
    )
    args = parser.parse_args()
    rule = TINY if args.tiny else SizeRule(vocabulary=1024)
    found: list[dict[str, Any]] = []
    for name in args.arms:
        with configure_backends(DEVICE):
            network = built(name, args.depth, rule)
            keep = nn.ModuleList(list(network.prelude)[: args.blocks])
            network.prelude = keep
            arm, shape = network.arm, network.shape
            step, forward = blocks_step(network, args.rows)
            calls = {"steepen": step}
            if args.plain:
                calls["plain"] = plain_step(arm, network, args.rows)
            seconds, power = time_interleaved(calls, args.seconds, warm_up=0.5)
            saved = saved_bytes(forward)
        cost, tokens = block_cost(arm, shape), args.rows * shape.context
        # As `recipe.memory` estimates it; the plain PyTorch block has no options but GQA and experts.
        estimate = 2 * tokens * len(keep) * saved_by_block(arm, shape, fused=arm.fused_block)
        if not arm.fused_block:  # its bf16 weights too, which the planner counts as `compute_weights`
            estimate = COMPILED_ACTIVATIONS * estimate + 2 * sum(p.numel() for p in keep.parameters())
        flops = tokens * len(keep) * (6 * cost.matrices + cost.attention_flops)
        row = {"arm": name, "form": "fused" if arm.fused_block else "compiled", **power}
        row |= {f"{key}_ms": 1e3 * value / len(keep) for key, value in seconds.items()}
        row |= {"tflops": flops / seconds["steepen"] / 1e12, "saved_over_estimate": saved / estimate}
        if args.plain:
            row["speedup"] = seconds["plain"] / seconds["steepen"]
        found.append(row)
        if not args.json:
            against = f"  plain {row['plain_ms']:8.3f} ms, {row['speedup']:5.2f}×" if args.plain else ""
            print(
                f"{name:28} {row['form']:9} {row['steepen_ms']:8.3f} ms a block{against}  "
                f"{row['tflops']:6.1f} TFLOP/s, saved {row['saved_over_estimate']:.2f} of the estimate",
                flush=True,
            )
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
