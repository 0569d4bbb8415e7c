"""A step of the paper's d26 on 16 ranks without GPUs: memory and traffic of a rank, beside the planner's.

Tensors are fake (shapes without memory) and so is the process group, but network, execution and optimizer are
the real ones. `python tests/distributed/test_dry_run.py` prints a table (docs/distributed.md sums it up) and
fails if a planned number is more than 5% off; it takes a minute, so `make test` checks `--shard full` on d6.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from steepen.distributed.environment import ProcessEnvironment
from steepen.distributed.full_shard import FullyShardedOptimizer
from steepen.distributed.owners import assign_owners, owned_by
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import find_arm
from steepen.model.network import Network
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.recipe import PlannedRun
from steepen.recipe.sharding import Shard, communication, parameter_shapes, state_memory

CONTEXT = 64  # of the dry run: activations are left out, so a short one will do


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank."""

    memory: float  # weights, gradients, optimizer state and what is gathered; no activations
    gradients: float  # sent in a step
    weights: float


class Traffic(TorchDispatchMode):
    """Counts the bytes that a rank sends in collectives, as a ring would: by kind of collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.others = (ranks - 1) / ranks
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            kind = name.split("::")[1].rstrip("_").removesuffix("_base").strip("_").removesuffix("_")
            tensors = [t for part in args[:2] for t in (part if isinstance(part, list) else [part])]
            sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)]
            # A gather or reduction of shards moves all but this rank's own; a reduce or broadcast, all.
            whole = kind in ("reduce", "broadcast", "allreduce")
            moved = max(sizes, default=0) * (1.0 if whole else self.others)
            if kind in ("gather", "scatter"):  # one shard of a matrix from or to each rank
                moved = min(sizes, default=0) * self.others
            self.bytes[kind] = self.bytes.get(kind, 0.0) + moved
        return func(*args, **(kwargs or {}))


def storage_bytes(tensors: Any) -> float:
    """Bytes of the distinct storages of tensors."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        seen[id(local) if storage.nbytes() == 0 else storage._cdata] = storage.nbytes()
    return float(sum(seen.values()))


@pytest.fixture(scope="module")
def fake_world() -> Generator[None]:
    """A process group of 16 ranks that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


def rung_of(name: str, depth: int) -> PlannedRun:
    arm = find_arm(name)
    return recipe_of(arm).at(arm, depth)


def busiest_rank(rung: PlannedRun, ranks: int) -> int:
    pieces = assign_owners(parameter_shapes(rung.arm, rung.shape, rung.schedule.max_passes), ranks)
    return max(range(ranks), key=lambda rank: sum(p.elements for p in owned_by(pieces, rank).values()))


def dry_run(rung: PlannedRun, ranks: int, shard: Shard) -> Measured:
    """One step of the grown network on the busiest rank."""
    world = World(ProcessEnvironment(busiest_rank(rung, ranks), ranks))
    world.backend = "fake"
    mesh = init_device_mesh("cpu", (ranks,))
    passes, config = rung.schedule.max_passes, OptimizerConfig()
    with FakeTensorMode(allow_non_fake_inputs=True), Traffic(ranks) as traffic:
        network = Network(rung.shape, rung.arm, passes=passes)
        network.compute_dtype = torch.bfloat16
        ids = torch.zeros(1, CONTEXT, dtype=torch.long)
        if shard == "optimizer":
            install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
            fused = network.fused
            assert fused is not None
            copies = {name: fused.compute_copies().get(p) for name, p in network.named_parameters()}
            optimizer: Any = ShardedOptimizer(
                network.named_parameters(),
                rung.hyperparameters,
                config,
                world,
                copies={name: copy for name, copy in copies.items() if copy is not None},
            )
            network(ids, ids, passes=passes).backward()
            gradients = [p.grad for p in network.parameters()]
            compute = [copy.weight for copy in copies.values() if copy is not None]
            held = [*network.parameters(), *gradients, *compute]
            transient = 0.0
            optimizer.step(1.0, 0)
        else:
            tied = rung.arm.tied and passes > 1
            repeated = [block for core in network.cores for block in cast("Any", core)] if tied else []
            optimizer = FullyShardedOptimizer(
                network, rung.hyperparameters, config, world, compute_dtype=torch.bfloat16, mesh=mesh,
                reduce_dtype=torch.float32, repeated=repeated,
            )  # fmt: skip
            tracker: Any = FSDPMemTracker(network)
            with tracker:
                network(ids, ids, passes=passes).backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            parts = {getattr(key, "name", str(key)): value for key, value in peak.items()}
            kept = ("Total", "SHARDED_PARAM", "SHARDED_GRAD", "BUFFER")
            transient = sum(value for name, value in parts.items() if name not in kept)
            held = [*network.parameters(), *(p.grad for p in network.parameters())]
            optimizer.step(1.0, 0)
        masters = optimizer.local.parameters.values()
        state = [value for each in optimizer.local.state().values() for value in each.values() if value.ndim]
        memory = storage_bytes([*held, *masters, *state]) + transient
    sent = traffic.bytes
    if shard == "optimizer":
        return Measured(memory, sent["reduce"], sent["broadcast"])
    return Measured(memory, sent["reduce_scatter"] + sent["gather"], sent["allgather"] + sent["scatter"])


def planned(rung: PlannedRun, ranks: int, shard: Shard) -> Measured:
    """The planner's numbers."""
    held = state_memory(rung, ranks, shard, OptimizerConfig().state_bytes)
    rows = rung.batch_tokens // rung.shape.context // ranks
    traffic = communication(rung, ranks, shard, micro_batch=rows, step_seconds=1.0)
    return Measured(held.state + held.compute_weights, traffic.gradient_bytes, traffic.weight_bytes)


@pytest.mark.parametrize(
    ("arm", "depth", "shard"),
    [("untied-grow", 26, "optimizer"), ("loop-2", 6, "full")],
)
def test_planned_memory_and_traffic_are_those_of_a_dry_run(
    arm: str, depth: int, shard: Shard, fake_world: None
) -> None:
    rung = rung_of(arm, depth)
    check(dry_run(rung, 16, shard), planned(rung, 16, shard))


def check(found: Measured, expected: Measured) -> None:
    for name in ("memory", "gradients", "weights"):
        assert getattr(expected, name) == pytest.approx(getattr(found, name), rel=0.05), name


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    print("| d26 on 16 ranks, GiB per rank | memory | gradients sent | weights sent |\n|---|---|---|---|")
    modes: tuple[Shard, ...] = ("optimizer", "full")
    for mode in modes:
        run = rung_of("untied-grow", 26)
        measured, estimated = dry_run(run, 16, mode), planned(run, 16, mode)
        for label, values in (("dry run", measured), ("planned", estimated)):
            cells = [f"{value / 2**30:.2f}" for value in (values.memory, values.gradients, values.weights)]
            print(f"| `--shard {mode}`, {label} | {' | '.join(cells)} |", flush=True)
        check(measured, estimated)
