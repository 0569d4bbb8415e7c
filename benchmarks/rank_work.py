"""One rank's work in a run on many GPUs, measured on one: collectives that move nothing, transfers modelled.

    python benchmarks/rank_work.py --depths 12 20 26 --ranks 8 16

The rank whose matrices cost Muon most runs whole steps of its part of the batch with the sharded optimizer
(ZeRO-1), in a world whose collectives return at once; interleaved with it are the same forward and backward
alone. What the step takes beyond is the rank's optimizer (Muon's part is timed within the step) and copies
into and out of buckets. Gaps between kernels are those that the profiler finds in a step.

Only the transfer is a model. The GPU's clock says when each bucket was ready to be sent and when its result
was waited for; a transfer takes its bytes at the bandwidth that `recipe.sharding` states, one after another,
and LATENCY each. What the waits add up to is exposed. `--buckets` tries sizes of buckets, in MiB: the first
is the one whose step is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_timing import DEVICE, ON_GPU, Call, PowerSampler, heat_up, power, timestamp
from throughput import build
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity

from steepen.distributed import gradient_reducer, sharded_optimizer
from steepen.distributed.environment import ProcessEnvironment
from steepen.distributed.owners import assign_owners, orthogonalization_cost, owned_by
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.sharding import GPUS_PER_NODE, NETWORK, NVLINK
from steepen.training.device import configure_backends, synchronize
from steepen.training.run_state import wait_for_weights_in_forward
from steepen.training.train_step import GradientAccumulator, accumulate

LATENCY = 50e-6  # seconds before the first byte of a collective arrives: assumed


@dataclass
class Transfer:
    """A collective that moves nothing; it notes when it was ready to start and when it was waited for."""

    timeline: list[tuple[Transfer, str, Any]]
    bytes: int

    def wait(self) -> None:
        """Note the time, and return at once."""
        self.timeline.append((self, "wait", timestamp()))


class SilentWorld(World):
    """A rank of a world whose collectives move nothing, with the timeline of those of a step."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(ProcessEnvironment(rank, size, rank))
        self.device = DEVICE
        self.timeline: list[tuple[Transfer, str, Any]] = []

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Leave the tensor as it is."""
        return tensor

    def reduce_(self, tensor: Tensor, owner: int) -> Any:
        """Send nothing."""
        transfer = Transfer(self.timeline, tensor.numel() * tensor.element_size())
        self.timeline.append((transfer, "start", timestamp()))
        return transfer

    def broadcast_(self, tensor: Tensor, owner: int) -> Any:
        """Send nothing."""
        return self.reduce_(tensor, owner)


def seconds_between(first: Any, last: Any) -> float:
    """Seconds between two timestamps, which the GPU has reached."""
    return first.elapsed_time(last) / 1e3 if ON_GPU else last - first


def exposed_seconds(timeline: list[tuple[Transfer, str, Any]], begin: Any, rate: float) -> float:
    """What waiting for transfers of `rate` bytes/s would have added to the part of a timeline after `begin`.

    Transfers go one after another. A wait that lasts delays everything after it.
    """
    free = delay = before = 0.0
    arrived: dict[int, float] = {}
    origin = timeline[0][2]
    for transfer, what, moment in timeline:
        now = seconds_between(origin, moment) + delay
        if what == "start":
            free = max(free, now) + LATENCY + transfer.bytes / rate
            arrived[id(transfer)] = free
        else:
            delay += max(0.0, arrived[id(transfer)] - now)
        if seconds_between(moment, begin) >= 0:
            before = delay
    return delay - before


def busy_fraction(call: Call) -> float | None:
    """Part of a call's time in which the GPU runs a kernel; kernels on parallel streams count once."""
    if not ON_GPU:
        return None
    synchronize(DEVICE)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(DEVICE)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / (end - spans[0][0])


@dataclass
class Rank:
    """The rank whose matrices cost Muon most, and what it does."""

    network: Network
    optimizer: ShardedOptimizer
    world: SilentWorld
    rows: int
    micro_batch: int
    parameters: int  # of the network
    cost: float  # of orthogonalizing what the rank owns (`orthogonalization_cost`)
    muon_spans: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def __post_init__(self) -> None:
        network, rows = self.network, self.rows
        text = torch.randint(0, network.shape.vocabulary, (rows, network.shape.context + 1), device=DEVICE)
        self.inputs, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.accumulator = GradientAccumulator(
            network, rows, self.micro_batch, print, ranks=self.world.size, sink=self.optimizer
        )
        muon = self.optimizer.local.muon
        assert muon is not None
        tasks = muon.tasks
        muon.tasks = lambda *a, **k: [partial(self._timed, task) for task in tasks(*a, **k)]  # pyright: ignore[reportAttributeAccessIssue]

    def _timed(self, task: Callable[[], None]) -> None:
        begin = timestamp()
        task()
        self.muon_spans.append((begin, timestamp()))

    def step(self) -> None:
        """A whole step; new weights are waited for in the next forward."""
        self.accumulator(self.inputs, self.targets, self.network.passes)
        self.optimizer.step(1e-4, 0)
        self.optimizer.zero_grad()

    def compute(self) -> None:
        """Forward and backward alone."""
        fused = self.network.fused
        assert fused is not None
        fused.signal.listener = None
        accumulate(self.network, self.inputs, self.targets, self.network.passes, self.micro_batch)
        fused.signal.listener = self.optimizer.gradient_ready
        for parameter in self.network.parameters():
            parameter.grad = None


def make_rank(depth: int, ranks: int, rule: SizeRule, args: Any) -> Rank:
    """The busiest rank of a network of this depth, as training makes it."""
    network = build(args.arm, depth, rule, DEVICE, args)
    network.compute_dtype = torch.bfloat16
    install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
    fused = network.fused
    assert fused is not None
    pieces = assign_owners({name: p.shape for name, p in network.named_parameters()}, ranks)
    cost = partial(_owned_cost, pieces)
    world = SilentWorld(max(range(ranks), key=cost), ranks)
    copies = fused.compute_copies()
    planned = recipe_of(network.arm).at(network.arm, depth)
    optimizer = ShardedOptimizer(
        network.named_parameters(),
        planned.hyperparameters,
        OptimizerConfig.named("authors"),
        world,
        copies={name: copies[p] for name, p in network.named_parameters() if p in copies},
        after_broadcast=fused.requantize,
    )
    fused.signal.listener = optimizer.gradient_ready
    wait_for_weights_in_forward(network, optimizer)
    tokens = args.batch_tokens or planned.batch_tokens
    rows = max(1, tokens // network.shape.context // ranks)
    parameters = sum(math.prod(p.shape) for _, p in network.named_parameters())
    return Rank(network, optimizer, world, rows, min(rows, args.rows), parameters, cost(world.rank))


def _owned_cost(pieces: Any, rank: int) -> float:
    return sum(
        orthogonalization_cost(piece.shape) for piece in owned_by(pieces, rank).values() if piece.whole
    )


def set_bucket(mib: int) -> None:
    """Let buckets have this size, in MiB."""
    gradient_reducer.BUCKET_BYTES = sharded_optimizer.BUCKET_BYTES = mib * 2**20


def timed_step(rank: Rank, mib: int) -> dict[str, Any]:
    """A step that follows another, whose weights it waits for, with buckets of this size."""
    set_bucket(mib)
    reducer, optimizer, world = rank.optimizer.reducer, rank.optimizer, rank.world
    optimizer.wait_for_weights()
    world.timeline.clear()
    rank.step()
    reduced, sent, before = reducer.bytes_reduced, optimizer.bytes_broadcast, len(world.timeline)
    rank.muon_spans.clear()
    begin = timestamp()
    rank.step()
    end = timestamp()
    synchronize(DEVICE)
    rate = NVLINK if world.size <= GPUS_PER_NODE else NETWORK
    return {
        "bucket_mib": mib,
        "step_ms": 1e3 * seconds_between(begin, end),
        "muon_ms": 1e3 * sum(seconds_between(*span) for span in rank.muon_spans),
        "collectives": sum(what == "start" for _, what, _ in world.timeline[before:]),
        "gradient_gib": (reducer.bytes_reduced - reduced) / 2**30,
        "weight_gib": (optimizer.bytes_broadcast - sent) / 2**30,
        "exposed_ms_modelled": 1e3 * exposed_seconds(world.timeline, begin, rate),
    }


def timed_compute(rank: Rank) -> float:
    """Milliseconds of forward and backward alone."""
    rank.optimizer.wait_for_weights()
    begin = timestamp()
    rank.compute()
    end = timestamp()
    synchronize(DEVICE)
    return 1e3 * seconds_between(begin, end)


def measure(depth: int, ranks: int, rule: SizeRule, args: Any) -> dict[str, Any]:
    """One row: the busiest rank of a network of this depth."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    set_bucket(args.buckets[0])
    rank = make_rank(depth, ranks, rule, args)
    rank.step()  # makes the optimizer's state
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    heat_up(args.warm_up)
    until = time.perf_counter() + args.seconds
    steps: list[dict[str, Any]] = []
    computes: list[float] = []
    gib: float | None = None
    with PowerSampler() as sampler:
        while not steps or time.perf_counter() < until:
            steps.append(timed_step(rank, args.buckets[0]))
            gib = gib or (torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None)
            computes.append(timed_compute(rank))
    step, muon = (statistics.median(one[name] for one in steps) for name in ("step_ms", "muon_ms"))
    compute = statistics.median(computes)
    others = [timed_step(rank, mib) for mib in args.buckets[1:]]
    set_bucket(args.buckets[0])
    return {
        "arm": args.arm, "depth": depth, "ranks": ranks, "rows": rank.rows, "micro_batch": rank.micro_batch,
        "parameters": rank.parameters, "cost": rank.cost, "rounds": len(steps),
        "step_ms": step, "compute_ms": compute, "muon_ms": muon,
        "rank_share": 1 - compute / step, "muon_share": muon / step, "busy": busy_fraction(rank.step),
        "gib": gib, "efficiency": compute / (step + steps[-1]["exposed_ms_modelled"]), **power(sampler),
        "transfers": [steps[-1], *others],
    }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    """The row in words."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if value is not None and name != "transfers"
    )


def main() -> None:
    """Print one row per number of ranks and depth, and below it one per size of buckets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depths", type=int, nargs="+", default=[12])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--buckets", type=int, nargs="+", default=[gradient_reducer.BUCKET_BYTES // 2**20])
    parser.add_argument("--rows", type=int, default=16, help="largest micro-batch, in sequences")
    parser.add_argument("--batch-tokens", type=int, help="of all ranks; default: the recipe's")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps, alternating with compute alone")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds of GEMMs before")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.residual_stream, args.weights = "fp32", "random"
    rule = SizeRule()
    if args.tiny:
        args.depths, args.rows, args.batch_tokens = [2], 2, 32 * 4 * max(args.ranks)
        rule = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=256)
    found: list[dict[str, Any]] = []
    with configure_backends(DEVICE):
        for ranks in args.ranks:
            for depth in args.depths:
                found.append(measure(depth, ranks, rule, args))
                if not args.json:
                    lines = [show(found[-1]), *(f"  {show(each)}" for each in found[-1]["transfers"])]
                    print("\n".join(lines), flush=True)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
