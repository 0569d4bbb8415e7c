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
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.model.arms import find_arm
from steepen.model.block import rotary_table
from steepen.model.init import materialise, on_meta
from steepen.model.network import Network
from steepen.model.shape import Scale
from steepen.recipe.accounting import flops_per_token
from steepen.recipe.paper import recipe_of
from steepen.runs.spec import OptimizerChoice
from steepen.training.device import fast_kernels, find_device, peak_flops
from steepen.training.gradients import Accumulator
from steepen.training.optimizer import Optimizer
from steepen.training.step import Stepper
from steepen.training.way import GRAPH_FLOPS, prepare

PARTS = ("head", "attention", "MLP", "optimizer", "other")


class PlainBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        n = functional.rms_norm(x, x.shape[-1:], eps=1.1920929e-07)
        q, k, v = self.qkv(n).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = (functional.rms_norm(turn(t, rotary), t.shape[-1:], eps=1.1920929e-07) for t in (q, k))
        a = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(functional.rms_norm(x, x.shape[-1:], eps=1.1920929e-07)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


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
            PlainBlock(shape.width, shape.hidden, shape.heads) for _ in range(shape.depth)
        )
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("rotary", rotary_table(shape, ours.options).to(torch.bfloat16))
        with torch.no_grad():
            self.embedding.weight.copy_(ours.embedding)
            self.head.weight.copy_(ours.head)
            for mine, other in zip(self.blocks, ours.blocks(), strict=True):
                for name in ("qkv", "out", "gate_up", "down"):
                    getattr(mine, name).weight.copy_(getattr(other, name).flatten(0, -2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        x = functional.rms_norm(x, x.shape[-1:], eps=1.1920929e-07)
        for block in self.blocks:
            x = block(x, self.rotary)
        x = functional.rms_norm(x, x.shape[-1:], eps=1.1920929e-07)
        return functional.cross_entropy(self.head(x).float().flatten(0, -2), targets.flatten())


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
        with torch.profiler.record_function("the optimizer"):
            self.muon.step()
            self.adam.step()
            self.muon.zero_grad()
            self.adam.zero_grad()
        return total


class OurStepper:
    def __init__(
        self, network: Network, passes: int, micro_batch: int, batch: int, lr: float, graphs: bool
    ) -> None:
        hyper = replace(recipe_of(network.arm).base, glr=lr, elrm=1.0, hlrm=1.0, wd=0.0)
        self.passes = passes
        optimizer = Optimizer(network, hyper, OptimizerChoice())
        accumulator = Accumulator(network, batch, micro_batch, print)
        self.stepper = Stepper(network, optimizer, accumulator, graphs=graphs, say=print)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.stepper(inputs, targets, self.passes, 1.0)[0]

    def profiled(self) -> None:
        """From now on without graphs, and with the optimizer's part named."""
        self.stepper.graphs = False
        self.stepper.reset()
        apply = self.stepper.optimizer.apply

        def named() -> None:
            with torch.profiler.record_function("the optimizer"):
                apply()

        self.stepper.optimizer.apply = named


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
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        lines = self.process.communicate()[0].splitlines()[2:]
        pairs = [[float(word) for word in line.split(",")] for line in lines if line.count(",") == 1]
        self.watts, self.mhz = (
            (statistics.median(p[i] for p in pairs) for i in (0, 1)) if pairs else (float("nan"),) * 2
        )


def build(name: str, depth: int, scale: Scale, device: torch.device, weights: str) -> Network:
    arm = find_arm(name)
    network = materialise(on_meta(arm.shape(depth, scale), arm), device, embedding_std=0.1)
    generator = torch.Generator(device).manual_seed(0)
    if weights == "random":
        with torch.no_grad():  # head and output projections start at zero; a trained network's are not
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    return network


def time_steps(step: Step, batches: list[Batch], seconds: float) -> float:
    """Median seconds of a step, after two seconds of warm-up: a hot GPU is slower than a cold one."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() < start + seconds + 2:
        inner = 1 if len(batches) == 2 else len(batches)  # many short steps between two looks
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for batch in batches[:inner]:
            step(*batch)
        events[1].record()
        torch.cuda.synchronize()
        if time.perf_counter() > start + 2:
            times.append(events[0].elapsed_time(events[1]) / 1e3 / inner)
    return statistics.median(times)


def breakdown(step: Step, batch: Batch, vocabulary: int, hidden: int) -> dict[str, float]:
    """Shares of the GPU's time, by what a kernel belongs to."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step(*batch)
        torch.cuda.synchronize()
    events = list(profile.events())
    on_gpu = [e for e in events if e.device_type == torch.profiler.DeviceType.CUDA]
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.name == "the optimizer" and e.device_type == torch.profiler.DeviceType.CPU
    ]
    left: defaultdict[str, float] = defaultdict(float)  # by kernel, what no operator of torch's launched
    for event in on_gpu:
        if not event.name.startswith(("the optimizer", "Torch-Compiled", "## Call", "CompiledFunction")):
            left[event.name] += event.time_range.elapsed_us()
    spent: defaultdict[str, float] = defaultdict(float)
    for event in events:
        for kernel in event.kernels:
            inside = any(a <= event.time_range.start <= b for a, b in spans)
            part = "optimizer" if inside else belongs(kernel.name, event.input_shapes, vocabulary, hidden)
            spent[part] += kernel.duration
            left[kernel.name] -= kernel.duration
    for name, duration in left.items():
        spent[belongs(name, (), vocabulary, hidden)] += max(0.0, duration)
    total = sum(spent.values())
    return {part: spent[part] / total for part in PARTS} if total else {}


def belongs(kernel: str, shapes: Any, vocabulary: int, hidden: int) -> str:
    sizes = {n for shape in shapes or () if isinstance(shape, list | tuple) for n in shape}
    name = kernel.lower()
    words = {
        "optimizer": ("momentum_into", "decay_and_add", "symmetric_product", "fusedopti", "fusedadam"),
        "head": ("cross_entropy", "softmax", "nll"),
        "attention": ("sdpa", "flash", "fmha", "cudnn", "rotate"),
        "MLP": ("swiglu", "silu"),
    }
    for part, found in words.items():
        if any(word in name for word in found):
            return part
    if vocabulary in sizes:
        return "head"
    if {hidden, 2 * hidden} & sizes:
        return "MLP"
    # The other products: queries, keys, values and the output.
    return "attention" if any(word in name for word in ("nvjet", "gemm", "cutlass")) else "other"


def measure(label: str, depth: int, make: Callable[[], Any], cost: float, shape: Any, given: Any) -> Row:
    """Build a stepper, warm it up, time it, profile it."""
    batches = given.batches
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = make()
    loss = step(*batches[0]).item()
    ready = time.perf_counter() - began
    with Sampler() as sampler:
        seconds = time_steps(step, batches, given.seconds)
    memory = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(step, OurStepper):  # kernels of a graph no longer know what launched them
        step.profiled()
    shares = {} if given.no_breakdown else breakdown(step, batches[0], given.vocabulary, shape.hidden)
    rate = given.batch_tokens / seconds
    peak = peak_flops(batches[0][0].device)
    return Row(
        label, depth, rate, rate * cost / 1e12, rate * cost / peak if peak else None, memory,
        sampler.watts, sampler.mhz, loss, ready, shares,
    )  # fmt: skip


def plain_row(depth: int, scale: Scale, device: torch.device, given: Any) -> Row:
    ours = build("vanilla", depth, scale, device, given.weights)
    cost = flops_per_token(ours.arm, ours.shape, 1).total
    row = measure(
        "plain", depth, lambda: PlainStepper(ours, device, given.rows, given.lr), cost, ours.shape, given
    )
    torch._dynamo.reset()
    return row


def our_row(name: str, depth: int, scale: Scale, device: torch.device, given: Any) -> Row:
    network = build(name, depth, scale, device, given.weights)
    passes = network.passes
    cost = flops_per_token(network.arm, network.shape, passes).total
    graphs = not given.no_graphs and cost * given.batch_tokens <= GRAPH_FLOPS
    prepare(network, given.precision, fast=True, compiled=False)
    batch = given.batch_tokens // given.context
    return measure(
        name, depth, lambda: OurStepper(network, passes, given.rows, batch, given.lr, graphs), cost,
        network.shape, given,
    )  # fmt: skip


def table(rows: list[Row], given: Any) -> None:
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.precision}")
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
    device = find_device("cuda")
    scale = Scale(context=given.context, vocabulary=given.vocabulary)
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
