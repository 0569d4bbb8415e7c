"""Training throughput on one GPU: the fused path against torch.compile of the same model, in one run.

    python benchmarks/throughput.py                                    # d8, four arms
    python benchmarks/throughput.py --depth 12 --arms vanilla
    python benchmarks/throughput.py --small                            # d3 and d2, as a ladder's first rungs
    python benchmarks/throughput.py --precision fp8 --depth 12 --arms vanilla

A step is a complete optimizer step over the global batch, as in training. The reference is in this file: bf16
autocast, SDPA with its fastest backend, F.cross_entropy on fp32 logits, torch.compile of the whole model,
torch.optim.Muon and AdamW. Both start from the same weights, and their losses must agree. By default no
weight is zero: GEMMs of zeros draw less power and run faster than in training (`--weights initial` shows by
how much). Tokens are random. FLOPs are counted as in the paper (causal attention); MFU is relative to the
GPU's dense bf16 peak. Watts and MHz are medians of nvidia-smi samples taken during the measurement.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_timing import DEVICE, PowerSampler, time_calls
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution.float8_linear import float8_linear_where_aligned
from steepen.execution.gpu_fused import Edge, FusedBlock, install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.execution.select import CUDA_GRAPH_MAX_FLOPS_PER_STEP
from steepen.model.arms import find_arm
from steepen.model.block import rotary_table
from steepen.model.config import FP32_EPSILON, ModelOptions
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OPTIMIZERS, OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.flops import flops_per_token
from steepen.recipe.paper_tables import recipe_of
from steepen.training.device import configure_backends, peak_flops
from steepen.training.train_step import GradientAccumulator, TrainStep

PARTS = ("head", "attention", "MLP", "optimizer", "other")


class ReferenceBlock(nn.Module):
    """A pre-norm block with RoPE, QK norm and SwiGLU, in torch operations."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def attention(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = self.qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = norm(rotate(q, rotary)), norm(rotate(k, rotary))
        a = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return a.transpose(1, 2).flatten(-2)

    def after_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        x = x + self.out(attended)
        gate, up = self.gate_up(norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        return self.after_attention(self.attention(x, rotary), x)


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=FP32_EPSILON)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary[0].unsqueeze(-2), rotary[1].unsqueeze(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class ReferenceModel(nn.Module):
    """A vanilla transformer with the shape and the weights of a `Network`."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        shape = network.shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            ReferenceBlock(shape.width, shape.mlp_width, shape.heads) for _ in range(shape.depth)
        )
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("rotary", rotary_table(shape, network.options).to(torch.bfloat16))
        with torch.no_grad():
            self.embedding.weight.copy_(network.embedding)
            self.head.weight.copy_(network.head)
            for block, source in zip(self.blocks, network.blocks(), strict=True):
                for name in ("qkv", "out", "gate_up", "down"):
                    getattr(block, name).weight.copy_(getattr(source, name).flatten(0, -2))

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(norm(x)).float().flatten(0, -2), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = norm(self.embedding(tokens).to(torch.bfloat16))
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head_loss(x, targets)


# Component → forward and backward of it, and how many times a step runs that.
Components = dict[str, tuple[Callable[[], object], int]]


class ReferenceStep:
    """An optimizer step of the compiled reference, and its components."""

    def __init__(self, network: Network, device: torch.device, micro_batch: int, lr: float) -> None:
        self.model = ReferenceModel(network).to(device)
        self.micro_batch = micro_batch
        self.loss = torch.compile(self.model)
        matrices = [p for block in self.model.blocks for p in block.parameters()]
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0)
        ends = [self.model.embedding.weight, self.model.head.weight]
        self.adam = torch.optim.AdamW(ends, lr=lr, weight_decay=0.0, fused=device.type == "cuda")

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=inputs.device)
        micro_batches = len(inputs) // self.micro_batch
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast(inputs.device.type, torch.bfloat16):
                loss = self.loss(x, y) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimize()
        self.muon.zero_grad()
        self.adam.zero_grad()
        return total

    def optimize(self) -> None:
        self.muon.step()
        self.adam.step()

    def components(self, inputs: Tensor, targets: Tensor) -> Components:
        """Components compiled separately; fusion across them in the whole model makes `other` smaller."""
        micro_batches, device = len(inputs) // self.micro_batch, inputs.device.type
        block: Any = self.model.blocks[0]
        rotary: Any = self.model.rotary
        x = random_hidden_states(inputs[: self.micro_batch], block.qkv.in_features)
        attended, micro_targets = x.detach().clone().requires_grad_(), targets[: self.micro_batch]
        attention, after_attention, head_loss = (
            torch.compile(f) for f in (block.attention, block.after_attention, self.model.head_loss)
        )

        def forward_backward(f: Callable[..., Tensor], *arguments: Tensor) -> Callable[[], None]:
            def run() -> None:
                with torch.autocast(device, torch.bfloat16):
                    out = f(*arguments)
                out.backward(None if out.ndim == 0 else torch.ones_like(out))

            return run

        blocks = micro_batches * len(self.model.blocks)
        # The optimizer needs gradients.
        forward_backward(self.loss, inputs[: self.micro_batch], micro_targets)()
        return {
            "head": (forward_backward(head_loss, x, micro_targets), micro_batches),
            "attention": (forward_backward(attention, x, rotary), blocks),
            "MLP": (forward_backward(after_attention, attended, x), blocks),
            "optimizer": (self.optimize, 1),
        }


class FusedStep:
    """An optimizer step as training runs it, and its components."""

    def __init__(
        self,
        network: Network,
        passes: int,
        micro_batch: int,
        batch: int,
        lr: float,
        cuda_graphs: bool,
        optimizer_name: str = "authors",
    ) -> None:
        hyperparameters = replace(
            recipe_of(network.arm).base,
            learning_rate=lr,
            embedding_lr_multiplier=1.0,
            head_lr_multiplier=1.0,
            weight_decay=0.0,
        )
        self.network, self.passes, self.micro_batch = network, passes, micro_batch
        config = OptimizerConfig.named(optimizer_name)
        optimizer = Optimizer(network.named_parameters(), hyperparameters, config, network.refresh)
        accumulator = GradientAccumulator(network, batch, micro_batch, print)
        self.train_step = TrainStep(
            network, optimizer, accumulator, cuda_graphs=cuda_graphs, print_message=print
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.train_step(inputs, targets, self.passes, 1.0)[0]

    def components(self, inputs: Tensor, targets: Tensor) -> Components:
        network, micro_batches = self.network, len(inputs) // self.micro_batch
        block: Any = next(iter(network.blocks()))
        x = random_hidden_states(inputs[: self.micro_batch], network.shape.width)
        attended, micro_targets = x.detach().clone().requires_grad_(), targets[: self.micro_batch]
        fused: FusedBlock = block.fused_forward
        self.train_step.accumulator(inputs, targets, self.passes)  # the optimizer needs gradients
        blocks = micro_batches * network.shape.allocation.executed(self.passes)

        def attention() -> None:
            out, residual, _ = fused.attention(x, network.rotary)
            torch.autograd.backward([out, residual], [torch.ones_like(out), torch.ones_like(residual)])

        def after_attention() -> None:
            (out,) = fused.after_attention(attended, x, Edge())
            out.backward(torch.ones_like(out))

        optimizer = self.train_step.optimizer
        assert isinstance(optimizer, Optimizer)
        return {
            "head": (lambda: network.loss(x, micro_targets).backward(), micro_batches),
            "attention": (attention, blocks),
            "MLP": (after_attention, blocks),
            "optimizer": (optimizer.step_at_current_lr, 1),
        }


def random_hidden_states(tokens: Tensor, width: int) -> Tensor:
    """Random bf16 hidden states, (batch, time, width)."""
    generator = torch.Generator(tokens.device).manual_seed(1)
    shape = (*tokens.shape, width)
    x = torch.randn(shape, generator=generator, device=tokens.device, dtype=torch.bfloat16)
    return x.requires_grad_()


Batch = tuple[Tensor, Tensor]


@dataclass
class Row:
    """One row of the table; its fields are the keys of the JSON output."""

    arm: str
    depth: int
    tokens_per_second: float
    teraflops: float
    mfu: float | None
    peak_gib: float
    watts: float
    mhz: float
    loss: float
    seconds_to_ready: float
    shares: dict[str, float]  # fraction of the step time by component
    ratio: float | None = None  # FLOP/s relative to the reference
    per_flop: float | None = None  # time per FLOP relative to the first arm


def build(name: str, depth: int, scale: SizeRule, device: torch.device, args: argparse.Namespace) -> Network:
    arm, options = find_arm(name), ModelOptions(residual_stream=args.residual_stream)
    meta = build_on_meta(arm.shape(depth, scale), arm, options=options)
    network = materialize(meta, device, embedding_std=0.1)
    generator = torch.Generator(device).manual_seed(0)
    if args.weights == "random":
        # Head and output projections are initialized to zero, unlike those of a trained network.
        with torch.no_grad():
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    return network


def breakdown(step: Any, batch: Batch, seconds: float) -> dict[str, float]:
    """Fraction of the step time by component, each timed alone; the MLP includes the output projection."""
    shares: dict[str, float] = {}
    for part, (call, count) in step.components(*batch).items():
        for _ in range(3):
            call()
        seconds_per_call = time_calls(call, seconds=0.3, warm_up=0.1, calls_per_sample=4)
        shares[part] = count * seconds_per_call / seconds
    return shares | {"other": 1 - sum(shares.values())}


def measure(label: str, depth: int, make: Callable[[], Any], cost: float, args: Any) -> Row:
    """Build a step, warm it up, and time it and its components. `cost` is in FLOPs per token."""
    batches = args.batches
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = make()
    loss = step(*batches[0]).item()
    ready = time.perf_counter() - began
    cycle = itertools.cycle(batches)
    with PowerSampler() as sampler:  # two seconds of warm-up: a hot GPU is slower than a cold one
        calls = 1 if args.batch_tokens > 100_000 else 8
        seconds = time_calls(lambda: step(*next(cycle)), args.seconds, warm_up=2, calls_per_sample=calls)
    memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan")
    shares = {} if args.no_breakdown else breakdown(step, batches[0], seconds)
    rate = args.batch_tokens / seconds
    peak = peak_flops(DEVICE)
    return Row(
        label, depth, rate, rate * cost / 1e12, rate * cost / peak if peak else None, memory,
        sampler.watts, sampler.mhz, loss, ready, shares,
    )  # fmt: skip


def reference_row(depth: int, scale: SizeRule, device: torch.device, args: Any) -> Row:
    network = build("vanilla", depth, scale, device, args)
    cost = flops_per_token(network.arm, network.shape, 1).total
    row = measure("reference", depth, lambda: ReferenceStep(network, device, args.rows, args.lr), cost, args)
    torch._dynamo.reset()
    return row


def install(network: Network, precision: str, batch_tokens: int) -> bool:
    """Make a network run as in training; returns whether its steps are captured as CUDA graphs."""
    network.compute_dtype = torch.bfloat16
    make_linear = float8_linear_where_aligned if precision == "fp8" else FusedLinear
    install_fused_gpu(network, partial(make_linear, dtype=torch.bfloat16))
    cost = flops_per_token(network.arm, network.shape, network.passes).total
    return DEVICE.type == "cuda" and cost * batch_tokens <= CUDA_GRAPH_MAX_FLOPS_PER_STEP


def fused_row(name: str, depth: int, scale: SizeRule, device: torch.device, args: Any) -> Row:
    network = build(name, depth, scale, device, args)
    passes = network.passes
    cost = flops_per_token(network.arm, network.shape, passes).total
    cuda_graphs = install(network, args.precision, args.batch_tokens) and not args.no_graphs
    batch = args.batch_tokens // args.context
    return measure(
        name,
        depth,
        lambda: FusedStep(network, passes, args.rows, batch, args.lr, cuda_graphs, args.optimizer),
        cost,
        args,
    )


def print_table(rows: list[Row], args: Any) -> None:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {args.precision}, optimizer {args.optimizer}")
    print(f"{args.rows}×{args.context} tokens a micro-batch, {args.batch_tokens:,} a step")
    print(f"vocabulary {args.vocabulary:,}, {args.weights} weights")
    titles = [("tokens/s", 11), ("ratio", 7), ("TFLOP/s", 9), ("MFU", 7), ("per FLOP", 10), ("peak GiB", 10)]
    titles += [(part, 10) for part in PARTS] + [("loss", 9), ("ready s", 9), ("W", 6), ("MHz", 6)]
    print(f"{'':<5}{'arm':<12}" + "".join(f"{title:>{width}}" for title, width in titles))
    for r in rows:
        cells = [f"{r.tokens_per_second:,.0f}", f"{r.ratio:.3f}" if r.ratio else "-", f"{r.teraflops:.1f}"]
        cells += [
            f"{r.mfu:.1%}" if r.mfu else "-",
            f"{r.per_flop:.4f}" if r.per_flop else "-",
            f"{r.peak_gib:.2f}",
        ]
        cells += [f"{r.shares.get(part, 0):.1%}" for part in PARTS]
        cells += [f"{r.loss:.4f}", f"{r.seconds_to_ready:.1f}", f"{r.watts:.0f}", f"{r.mhz:.0f}"]
        line = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, titles, strict=True))
        print(f"d{r.depth:<4}{r.arm:<12}{line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, nargs="+", default=[8])
    parser.add_argument("--arms", nargs="+", default=["vanilla", "operator-1", "loop-2", "untied-2"])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rows", type=int, default=32, help="micro-batch, in sequences")
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="authors")
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument(
        "--weights", choices=["random", "initial"], default="random", help="initial: head and outputs zero"
    )
    parser.add_argument("--residual-stream", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--small", action="store_true", help="d3 and d2, 8k vocabulary, 64×1024 tokens")
    parser.add_argument(
        "--tiny", action="store_true", help="test this script with a tiny model, on any machine"
    )
    parser.add_argument("--no-reference", action="store_true", help="skip the compiled reference")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs of small steps")
    parser.add_argument("--no-breakdown", action="store_true", help="skip timing the components")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measurement per row, after warm-up")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if args.small:
        args.depth, args.context, args.vocabulary = [3, 2], 1024, 8192
        args.rows, args.batch_tokens = 64, 65_536
    scale = SizeRule(context=args.context, vocabulary=args.vocabulary)
    if args.tiny:
        args.depth, args.context, args.vocabulary, args.rows, args.batch_tokens = [2], 32, 256, 4, 256
        scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=256)
    device = DEVICE
    args.batches = []
    for seed in range(2 if args.batch_tokens > 100_000 else 8):
        generator = torch.Generator(device).manual_seed(seed)
        shape = (args.batch_tokens // args.context, args.context + 1)
        tokens = torch.randint(0, args.vocabulary, shape, generator=generator, device=device)
        args.batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    rows: list[Row] = []
    with configure_backends(device):
        for depth in args.depth:
            reference = None if args.no_reference else reference_row(depth, scale, device, args)
            fused_rows = [fused_row(name, depth, scale, device, args) for name in args.arms]
            for row in fused_rows:
                row.per_flop = fused_rows[0].teraflops / row.teraflops
                if reference is None:
                    continue
                row.ratio = row.teraflops / reference.teraflops
                if row.arm == "vanilla":
                    gap = abs(row.loss - reference.loss) / reference.loss
                    assert gap < (2e-2 if args.precision == "fp8" else 1e-3), (row.loss, reference.loss)
            rows += [*([reference] if reference else []), *fused_rows]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows, args)


if __name__ == "__main__":
    main()
