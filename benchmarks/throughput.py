"""Training throughput on one GPU: ours against a plain model of the same function, in one run.

    python benchmarks/throughput.py                                    # d8, every goal's arm
    python benchmarks/throughput.py --depth 12 --arms vanilla
    python benchmarks/throughput.py --small                            # d3 and d2, as a ladder's first rungs
    python benchmarks/throughput.py --precision fp8 --depth 12 --arms vanilla

A step is a whole optimizer step over the global batch, as training makes it. The reference is written out
below: weights cast where they are used, SDPA (the fastest backend there is), F.cross_entropy on fp32 logits,
the whole model compiled, Muon and AdamW as torch has them. Both start from the same weights and must give the
same loss. By default no weight is zero: products of zeros draw less power and run faster than training ever
does (`--weights initial` shows by how much). Tokens are random. FLOPs are counted as in the paper (causal
attention), against the GPU's dense bf16 peak. Watts and MHz are the GPU's own, sampled while it was measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution.float8_linear import float8_linear_where_aligned
from steepen.execution.gpu_fused import FusedBlock, install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.execution.select import CUDA_GRAPH_MAX_FLOPS_PER_STEP
from steepen.model.arms import find_arm
from steepen.model.block import rotary_table
from steepen.model.config import FP32_EPSILON
from steepen.model.init import materialise, on_meta
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.accounting import flops_per_token
from steepen.recipe.paper_tables import recipe_of
from steepen.training.device import fast_kernels, find_device, peak_flops, synchronise
from steepen.training.gradient_accumulation import GradientAccumulator
from steepen.training.train_step import TrainStep

PARTS = ("head", "attention", "MLP", "optimizer", "other")
DEVICE = find_device("auto")


class PlainBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def attend(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = self.qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = norm(turn(q, rotary)), norm(turn(k, rotary))
        a = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return a.transpose(1, 2).flatten(-2)

    def rest(self, attended: Tensor, x: Tensor) -> Tensor:
        x = x + self.out(attended)
        gate, up = self.gate_up(norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        return self.rest(self.attend(x, rotary), x)


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=FP32_EPSILON)


def turn(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary[0].unsqueeze(-2), rotary[1].unsqueeze(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Plain(nn.Module):
    """A vanilla transformer of the same sizes, with an optimizer of torch's own."""

    def __init__(self, ours: Network) -> None:
        super().__init__()
        shape = ours.shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            PlainBlock(shape.width, shape.mlp_width, shape.heads) for _ in range(shape.depth)
        )
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("rotary", rotary_table(shape, ours.options).to(torch.bfloat16))
        with torch.no_grad():
            self.embedding.weight.copy_(ours.embedding)
            self.head.weight.copy_(ours.head)
            for mine, other in zip(self.blocks, ours.blocks(), strict=True):
                for name in ("qkv", "out", "gate_up", "down"):
                    getattr(mine, name).weight.copy_(getattr(other, name).flatten(0, -2))

    def ending(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(norm(x)).float().flatten(0, -2), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = norm(self.embedding(tokens).to(torch.bfloat16))
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.ending(x, targets)


# What a part is timed by: forward and backward, and how often a step does it.
Parts = dict[str, tuple[Callable[[], object], int]]


class PlainStepper:
    def __init__(self, ours: Network, device: torch.device, micro_batch: int, lr: float) -> None:
        self.model = Plain(ours).to(device)
        self.micro_batch = micro_batch
        self.loss = torch.compile(self.model)
        matrices = [p for block in self.model.blocks for p in block.parameters()]
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0)
        ends = [self.model.embedding.weight, self.model.head.weight]
        self.adam = torch.optim.AdamW(ends, lr=lr, weight_decay=0.0, fused=device.type == "cuda")

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=inputs.device)
        pieces = len(inputs) // self.micro_batch
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            with torch.autocast(inputs.device.type, torch.bfloat16):
                loss = self.loss(x, y) / pieces
            loss.backward()
            total += loss.detach()
        self.optimize()
        self.muon.zero_grad()
        self.adam.zero_grad()
        return total

    def optimize(self) -> None:
        self.muon.step()
        self.adam.step()

    def parts(self, inputs: Tensor, targets: Tensor) -> Parts:
        """Compiled apart; what the whole model's compilation gains across them is lost to `other`."""
        pieces, device = len(inputs) // self.micro_batch, inputs.device.type
        block: Any = self.model.blocks[0]
        rotary: Any = self.model.rotary
        x = stream(inputs[: self.micro_batch], block.qkv.in_features)
        a, answers = x.detach().clone().requires_grad_(), targets[: self.micro_batch]
        attend, rest, ending = (torch.compile(f) for f in (block.attend, block.rest, self.model.ending))

        def back(f: Callable[..., Tensor], *arguments: Tensor) -> Callable[[], None]:
            def both() -> None:
                with torch.autocast(device, torch.bfloat16):
                    out = f(*arguments)
                out.backward(None if out.ndim == 0 else torch.ones_like(out))

            return both

        blocks = pieces * len(self.model.blocks)
        back(self.loss, inputs[: self.micro_batch], answers)()  # gradients for the optimizer
        return {
            "head": (back(ending, x, answers), pieces),
            "attention": (back(attend, x, rotary), blocks),
            "MLP": (back(rest, a, x), blocks),
            "optimizer": (self.optimize, 1),
        }


class OurStepper:
    def __init__(
        self, network: Network, passes: int, micro_batch: int, batch: int, lr: float, graphs: bool
    ) -> None:
        hyper = replace(
            recipe_of(network.arm).base,
            learning_rate=lr,
            embedding_lr_multiplier=1.0,
            head_lr_multiplier=1.0,
            weight_decay=0.0,
        )
        self.network, self.passes, self.micro_batch = network, passes, micro_batch
        optimizer = Optimizer(network.named_parameters(), hyper, OptimizerConfig(), network.refresh)
        accumulator = GradientAccumulator(network, batch, micro_batch, print)
        self.stepper = TrainStep(network, optimizer, accumulator, cuda_graphs=graphs, say=print)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.stepper(inputs, targets, self.passes, 1.0)[0]

    def parts(self, inputs: Tensor, targets: Tensor) -> Parts:
        network, pieces = self.network, len(inputs) // self.micro_batch
        block: Any = next(iter(network.blocks()))
        x = stream(inputs[: self.micro_batch], network.shape.width)
        a, answers = x.detach().clone().requires_grad_(), targets[: self.micro_batch]
        fused: FusedBlock = block.fused_forward
        self.stepper.accumulator(inputs, targets, self.passes)  # gradients for the optimizer
        blocks = pieces * network.shape.allocation.executed(self.passes)

        def attend() -> None:
            attended, skip = fused.attention(x, network.rotary)
            torch.autograd.backward([attended, skip], [torch.ones_like(attended), torch.ones_like(skip)])

        def rest() -> None:
            out = fused.after_attention(a, x)
            out.backward(torch.ones_like(out))

        return {
            "head": (lambda: network.loss(x, answers).backward(), pieces),
            "attention": (attend, blocks),
            "MLP": (rest, blocks),
            "optimizer": (self.stepper.optimizer.apply, 1),
        }


def stream(tokens: Tensor, width: int) -> Tensor:
    """Numbers like those between two blocks."""
    generator = torch.Generator(tokens.device).manual_seed(1)
    shape = (*tokens.shape, width)
    x = torch.randn(shape, generator=generator, device=tokens.device, dtype=torch.bfloat16)
    return x.requires_grad_()


Step = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass
class Row:
    """One line of the table."""

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
    shares: dict[str, float]
    ratio: float | None = None  # work per second against the plain model's
    per_flop: float | None = None  # time per FLOP against the first arm's


class Sampler:
    """Power and clock of the GPU, five times a second."""

    def __enter__(self) -> Sampler:
        words = [
            "nvidia-smi",
            "--query-gpu=power.draw,clocks.sm",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        self.watts = self.mhz = float("nan")
        self.process = None
        if DEVICE.type == "cuda":
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.terminate()
        lines = self.process.communicate()[0].splitlines()[2:]
        pairs = [[float(word) for word in line.split(",")] for line in lines if line.count(",") == 1]
        self.watts, self.mhz = (
            (statistics.median(p[i] for p in pairs) for i in (0, 1)) if pairs else (float("nan"),) * 2
        )


def build(name: str, depth: int, scale: SizeRule, device: torch.device, weights: str) -> Network:
    arm = find_arm(name)
    network = materialise(on_meta(arm.shape(depth, scale), arm), device, embedding_std=0.1)
    generator = torch.Generator(device).manual_seed(0)
    if weights == "random":
        with torch.no_grad():  # head and output projections start at zero; a trained network's are not
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    return network


def time_calls(call: Callable[[], object], seconds: float, warm_up: float, each: int = 1) -> float:
    """Median seconds of a call, `each` of them between two looks, after so many seconds of warm-up."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() < start + warm_up + seconds:
        synchronise(DEVICE)
        begun = time.perf_counter()
        for _ in range(each):
            call()
        synchronise(DEVICE)
        if time.perf_counter() > start + warm_up:
            times.append((time.perf_counter() - begun) / each)
    return statistics.median(times)


def breakdown(step: Any, batch: Batch, seconds: float) -> dict[str, float]:
    """Shares of a step's time, each part timed alone; the output projection is in the MLP's."""
    shares: dict[str, float] = {}
    for part, (call, times) in step.parts(*batch).items():
        for _ in range(3):
            call()
        shares[part] = times * time_calls(call, seconds=0.3, warm_up=0.1, each=4) / seconds
    return shares | {"other": 1 - sum(shares.values())}


def measure(label: str, depth: int, make: Callable[[], Any], cost: float, given: Any) -> Row:
    """Build a stepper, warm it up, time it whole and in parts."""
    batches = given.batches
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = make()
    loss = step(*batches[0]).item()
    ready = time.perf_counter() - began
    turns = itertools.cycle(batches)
    with Sampler() as sampler:  # two seconds to get hot: a hot GPU is slower than a cold one
        each = 1 if given.batch_tokens > 100_000 else 8
        seconds = time_calls(lambda: step(*next(turns)), given.seconds, warm_up=2, each=each)
    memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan")
    shares = {} if given.no_breakdown else breakdown(step, batches[0], seconds)
    rate = given.batch_tokens / seconds
    peak = peak_flops(DEVICE)
    return Row(
        label, depth, rate, rate * cost / 1e12, rate * cost / peak if peak else None, memory,
        sampler.watts, sampler.mhz, loss, ready, shares,
    )  # fmt: skip


def plain_row(depth: int, scale: SizeRule, device: torch.device, given: Any) -> Row:
    ours = build("vanilla", depth, scale, device, given.weights)
    cost = flops_per_token(ours.arm, ours.shape, 1).total
    row = measure("plain", depth, lambda: PlainStepper(ours, device, given.rows, given.lr), cost, given)
    torch._dynamo.reset()
    return row


def our_row(name: str, depth: int, scale: SizeRule, device: torch.device, given: Any) -> Row:
    network = build(name, depth, scale, device, given.weights)
    passes = network.passes
    cost = flops_per_token(network.arm, network.shape, passes).total
    graphs = (
        DEVICE.type == "cuda"
        and not given.no_graphs
        and cost * given.batch_tokens <= CUDA_GRAPH_MAX_FLOPS_PER_STEP
    )
    network.compute_dtype = torch.bfloat16
    make = float8_linear_where_aligned if given.precision == "fp8" else FusedLinear
    install_fused_gpu(network, partial(make, dtype=torch.bfloat16))
    batch = given.batch_tokens // given.context
    return measure(
        name, depth, lambda: OurStepper(network, passes, given.rows, batch, given.lr, graphs), cost, given,
    )  # fmt: skip


def table(rows: list[Row], given: Any) -> None:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {given.precision}")
    print(f"{given.rows}×{given.context} tokens a micro-batch, {given.batch_tokens:,} a step")
    print(f"vocabulary {given.vocabulary:,}, {given.weights} weights")
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
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--weights", choices=["random", "initial"], default="random")
    parser.add_argument("--small", action="store_true", help="d3 and d2, 8k vocabulary, 64×1024 tokens")
    parser.add_argument("--tiny", action="store_true", help="a check of this script itself, on any machine")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-breakdown", action="store_true", help="sooner done")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per row, after warm-up")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.small:
        given.depth, given.context, given.vocabulary = [3, 2], 1024, 8192
        given.rows, given.batch_tokens = 64, 65_536
    scale = SizeRule(context=given.context, vocabulary=given.vocabulary)
    if given.tiny:
        given.depth, given.context, given.vocabulary, given.rows, given.batch_tokens = [2], 32, 256, 4, 256
        scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=256)
    device = DEVICE
    given.batches = []
    for seed in range(2 if given.batch_tokens > 100_000 else 8):
        generator = torch.Generator(device).manual_seed(seed)
        shape = (given.batch_tokens // given.context, given.context + 1)
        tokens = torch.randint(0, given.vocabulary, shape, generator=generator, device=device)
        given.batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    rows: list[Row] = []
    with fast_kernels(device):
        for depth in given.depth:
            reference = None if given.no_reference else plain_row(depth, scale, device, given)
            ours = [our_row(name, depth, scale, device, given) for name in given.arms]
            for row in ours:
                row.per_flop = ours[0].teraflops / row.teraflops
                if reference is None:
                    continue
                row.ratio = row.teraflops / reference.teraflops
                if row.arm == "vanilla":
                    gap = abs(row.loss - reference.loss) / reference.loss
                    assert gap < (2e-2 if given.precision == "fp8" else 1e-3), (row.loss, reference.loss)
            rows += [*([reference] if reference else []), *ours]
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        table(rows, given)


if __name__ == "__main__":
    main()
