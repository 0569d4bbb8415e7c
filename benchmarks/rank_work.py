"""One rank's work in a run on many GPUs, measured on one: collectives that move nothing, transfers modelled.

    python benchmarks/rank_work.py --depths 12 20 26 --ranks 8 16

The rank that owns most runs whole steps of its part of the batch with the sharded optimizer (ZeRO-1), in a
world whose collectives return at once. Interleaved with it are the same forward and backward alone; what the
step takes beyond is the rank's optimizer, its copies into and out of buckets, and gaps between kernels (their
part of the GPU's time is measured by the profiler). Only the transfer is a model: the bytes that the step
would have sent, at the bandwidth that `recipe.sharding` states, hidden behind the last micro-batch's backward
and the next forward as there. `--buckets` tries other sizes of buckets, in MiB.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from gpu_timing import DEVICE, ON_GPU, SAMPLE_SECONDS, Call, time_interleaved
from throughput import build
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity

from steepen.distributed import gradient_reducer, sharded_optimizer
from steepen.distributed.environment import ProcessEnvironment
from steepen.distributed.owners import assign_owners, owned_by
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.sharding import GPUS_PER_NODE, NETWORK, NVLINK
from steepen.training.device import configure_backends, synchronize
from steepen.training.run_state import wait_for_weights_in_forward
from steepen.training.train_step import GradientAccumulator, accumulate


class Ended:
    """The handle of a transfer that has ended."""

    def wait(self) -> None:
        """Return at once."""


class SilentWorld(World):
    """A rank of a world whose collectives move nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(ProcessEnvironment(rank, size, rank))
        self.device = DEVICE

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Leave the tensor as it is."""
        return tensor

    def reduce_(self, tensor: Tensor, owner: int) -> Any:
        """Send nothing."""
        return Ended()

    def broadcast_(self, tensor: Tensor, owner: int) -> Any:
        """Send nothing."""
        return Ended()


def busy_fraction(call: Call) -> float | None:
    """Part of a call's time in which the GPU runs a kernel; kernels on parallel streams count once."""
    if not ON_GPU:
        return None
    call()
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


def measure(depth: int, ranks: int, rule: SizeRule, args: Any) -> dict[str, Any]:
    """One row: the rank that owns most of a network of this depth."""
    network = build(args.arm, depth, rule, DEVICE, args)
    arm, shape, passes = network.arm, network.shape, network.passes
    network.compute_dtype = torch.bfloat16
    install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
    fused = network.fused
    assert fused is not None
    pieces = assign_owners({name: p.shape for name, p in network.named_parameters()}, ranks)
    rank = max(range(ranks), key=lambda each: sum(p.elements for p in owned_by(pieces, each).values()))
    copies = fused.compute_copies()
    optimizer = ShardedOptimizer(
        network.named_parameters(),
        recipe_of(arm).at(arm, depth).hyperparameters,
        OptimizerConfig.named("authors"),
        SilentWorld(rank, ranks),
        copies={name: copies[p] for name, p in network.named_parameters() if p in copies},
        after_broadcast=fused.requantize,
    )
    fused.signal.listener = optimizer.gradient_ready
    wait_for_weights_in_forward(network, optimizer)
    rows = max(1, args.batch_tokens // shape.context // ranks)
    size = min(rows, args.rows)
    text = torch.randint(0, shape.vocabulary, (rows, shape.context + 1), device=DEVICE)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    accumulator = GradientAccumulator(network, rows, size, print, ranks=ranks, sink=optimizer)

    def step() -> None:
        accumulator(inputs, targets, passes)
        optimizer.step(1e-4, 0)
        optimizer.zero_grad()

    def compute() -> None:
        fused.signal.listener = None
        accumulate(network, inputs, targets, passes, size)
        fused.signal.listener = optimizer.gradient_ready
        for parameter in network.parameters():
            parameter.grad = None

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    step()
    gib = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None
    sent = optimizer.reducer.bytes_reduced, optimizer.bytes_broadcast
    calls: dict[str, Call] = {"step": step, "compute": compute}
    seconds, power = time_interleaved(calls, args.rounds * SAMPLE_SECONDS, args.warm_up)
    rate = NVLINK if ranks <= GPUS_PER_NODE else NETWORK
    micro_batches = -(-rows // size)
    hidden = [share * seconds["compute"] / micro_batches for share in (2 / 3, 1 / 3)]
    exposed = sum(max(0.0, transfer / rate - behind) for transfer, behind in zip(sent, hidden, strict=True))
    return {
        "arm": args.arm, "depth": depth, "ranks": ranks, "micro_batches": micro_batches,
        "step_ms": 1e3 * seconds["step"], "compute_ms": 1e3 * seconds["compute"],
        "rank_share": 1 - seconds["compute"] / seconds["step"], "busy": busy_fraction(step),
        "gib": gib,
        "gradient_gib": sent[0] / 2**30, "weight_gib": sent[1] / 2**30,
        "exposed_ms_modelled": 1e3 * exposed, "efficiency": seconds["compute"] / (seconds["step"] + exposed),
        **power,
    }  # fmt: skip


def main() -> None:
    """Print one row per depth, number of ranks and size of buckets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depths", type=int, nargs="+", default=[12])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--buckets", type=int, nargs="+", default=[gradient_reducer.BUCKET_BYTES // 2**20])
    parser.add_argument("--rows", type=int, default=16, help="largest micro-batch, in sequences")
    parser.add_argument("--batch-tokens", type=int, default=1_048_576, help="of all ranks")
    parser.add_argument("--rounds", type=int, default=10, help="steps, alternating with compute alone")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of GEMMs before")
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
        for bucket in args.buckets:
            gradient_reducer.BUCKET_BYTES = sharded_optimizer.BUCKET_BYTES = bucket * 2**20
            for depth in args.depths:
                for ranks in args.ranks:
                    found.append({"bucket_mib": bucket, **measure(depth, ranks, rule, args)})
    if args.json:
        print(json.dumps(found))
        return
    for row in found:
        print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in row.items() if value is not None))  # fmt: skip


if __name__ == "__main__":
    main()
