"""ZeRO-1: owners' steps equal those of one process, to the bit given equal gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from steepen.distributed import gradient_reducer, sharded_optimizer
from steepen.distributed.full_shard import FullyShardedOptimizer
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear, is_released
from steepen.inference.decoding import Sampling, continue_tokens
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.paper_tables import recipe_of
from steepen.training.train_step import accumulate

SCALE = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=16, vocabulary=50)
AUTHORS = OptimizerConfig.named("authors")


def build(arm: str, *, passes: int | None = None, dtype: torch.dtype = torch.float32) -> Network:
    found = find_arm(arm)
    network = materialize(build_on_meta(found.shape(3, SCALE), found, passes=passes), dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():  # away from weights initialized to zero
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return network


def hyperparameters(arm: str) -> Hyperparameters:
    return recipe_of(find_arm(arm)).at(find_arm(arm), 3, SCALE).hyperparameters


def random_gradients(network: Network, seed: int) -> None:
    """Set random gradients, none for the last core: as in a step with fewer passes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if name.startswith("cores.3") and seed == 1:
            parameter.grad = None


def matrices(network: Network) -> int:
    """Logical matrices of all blocks."""
    return sum(
        p.shape[:-2].numel() for name, p in network.named_parameters() if name not in ("embedding", "head")
    )


def step_with_equal_gradients(world: World, config: OptimizerConfig, steps: int) -> dict[str, Any]:
    """Weights, norms and orthogonalizations after steps on gradients that only rank 0 contributes."""
    network = build("untied-grow", passes=4)
    make: Any = Optimizer if world.size == 1 else partial(ShardedOptimizer, world=world)
    optimizer = make(network.named_parameters(), hyperparameters("untied-grow"), config)
    norms: list[float] = []
    for step in range(steps):
        random_gradients(network, step)
        for parameter in network.parameters():
            if world.rank > 0 and parameter.grad is not None:
                parameter.grad.zero_()
        norms.append(optimizer.step(0.5, step).item())
        optimizer.zero_grad()
    local = optimizer if world.size == 1 else optimizer.local
    return {
        "weights": {name: p.detach().numpy() for name, p in network.named_parameters()},
        "norms": norms,
        "orthogonalized": 0 if local.muon is None else local.muon.orthogonalized,
        "owned": [] if world.size == 1 else sorted(optimizer.owned),
        "bytes": 0 if world.size == 1 else optimizer.bytes_broadcast,
    }


@pytest.mark.parametrize(("size", "bucket"), [(2, 4096), (4, None)])  # of many buckets, of one
@pytest.mark.parametrize(
    "config",
    [AUTHORS, OptimizerConfig.named("muon"), OptimizerConfig(clip=0.1), OptimizerConfig.named("adamw")],
    ids=["authors", "muon", "clip", "adamw"],
)
def test_step_of_owners_is_bit_equal_to_a_single_process(
    size: int, bucket: int | None, config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bucket is not None:
        monkeypatch.setattr(gradient_reducer, "MAX_BYTES_IN_FLIGHT", 2 * bucket)
        for module in (gradient_reducer, sharded_optimizer):
            monkeypatch.setattr(module, "BUCKET_BYTES", bucket)
    (expected,) = on_ranks(1, step_with_equal_gradients, config, 3)
    found = on_ranks(size, step_with_equal_gradients, config, 3)
    for rank in found:
        for name, weight in expected["weights"].items():
            assert (rank["weights"][name] == weight).all(), name
        assert rank["norms"] == expected["norms"]
    # No matrix is orthogonalized twice, and none is left out.
    assert sum(rank["orthogonalized"] for rank in found) == expected["orthogonalized"]
    network = build("untied-grow", passes=4)
    if config.kind == "muon":
        last_core = sum(
            p.shape[:-2].numel() for n, p in network.named_parameters() if n.startswith("cores.3")
        )
        assert expected["orthogonalized"] == 3 * matrices(network) - last_core
    # Each step broadcasts every fp32 weight once.
    assert found[0]["bytes"] == 3 * 4 * sum(p.numel() for p in network.parameters())


def fused_losses(
    world: World, arm: str, make_linear: Any, dtype: torch.dtype, overlap: bool
) -> dict[str, Any]:
    """Losses of a few steps with the fused execution, whose gradients are reduced as they are written."""
    network = build(arm, dtype=dtype)
    install_fused_gpu(network, make_linear)
    if dtype == torch.float32:
        network.compute_dtype = torch.bfloat16
    fused = network.fused
    assert fused is not None
    config, hyper = AUTHORS, hyperparameters(arm)
    rows = 4 // world.size
    optimizer: Any
    released: set[str] = set()
    if world.size == 1:
        optimizer = Optimizer(network.named_parameters(), hyper, config, network.refresh)
    else:
        copies = fused.compute_copies()
        named = {name: copies[p] for name, p in network.named_parameters() if p in copies}
        optimizer = ShardedOptimizer(
            network.named_parameters(), hyper, config, world, copies=named, after_broadcast=fused.requantize
        )
        fused.signal.listener = optimizer.gradient_ready if overlap else None
        released = {name for name, p in network.named_parameters() if is_released(p)}
        assert released == {n for n in named if n not in optimizer.owned or not optimizer.owned[n].whole}
        assert "head" in released and "embedding" not in released
    losses: list[float] = []
    waiting = 0
    for step in range(4):
        tokens = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(step))
        mine = tokens[world.rank * rows : (world.rank + 1) * rows]
        with optimizer.micro_batch(last=True) if world.size > 1 else torch.enable_grad():
            loss = network(mine[:, :-1], mine[:, 1:], loss_weight=rows / 4)
            loss.backward()
        waiting += sum(p.grad is not None for p in network.parameters())
        losses.append(world.all_reduce_(loss.detach().double()).item())
        optimizer.step(1.0, step)
        optimizer.zero_grad()
    # The reference, which generates text, reads the parameters that are released here.
    with optimizer.whole_weights() if world.size > 1 else torch.no_grad():
        texts = continue_tokens(network, [[1, 2, 3], [4]], 6, Sampling(temperature=0))
    if world.size > 1:
        assert {name for name, p in network.named_parameters() if is_released(p)} == released
    return {"losses": losses, "waiting": waiting, "texts": [text.tokens for text in texts]}


@pytest.mark.parametrize("arm", ["vanilla", "loop-2", "vanilla+kv_heads=1"])
@pytest.mark.parametrize("overlap", [True, False])
def test_fused_execution_on_two_ranks_gives_the_losses_of_one(arm: str, overlap: bool) -> None:
    arguments = (arm, partial(FusedLinear, dtype=torch.float64), torch.float64, overlap)
    (expected,) = on_ranks(1, fused_losses, *arguments)
    for found in on_ranks(2, fused_losses, *arguments):
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=1e-11)
        assert found["texts"] == expected["texts"]
        # With the signal, every gradient has been taken when the backward ends; without, none.
        assert (found["waiting"] == 0) is overlap


def overlapping_hooks(world: World) -> list[Tensor]:
    """Gradients of the reference execution that autograd's hooks hand over during the backward."""
    network = build("loop-2")
    optimizer = ShardedOptimizer(network.named_parameters(), hyperparameters("loop-2"), AUTHORS, world)
    tokens = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(5))
    mine = tokens[2 * world.rank : 2 * world.rank + 2]
    with optimizer.micro_batch(last=True):
        network(mine[:, :-1], mine[:, 1:], passes=2, loss_weight=0.5).backward()
    assert all(p.grad is None for p in network.parameters())
    sums = optimizer.reducer.finish()
    assert set(sums) == set(optimizer.owned)
    return [(name, sums[name].numpy()) for name in sums]  # pyright: ignore[reportReturnType]


def test_hooks_hand_over_each_gradient_once_also_of_a_tied_core() -> None:
    network = build("loop-2")
    tokens = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(5))
    accumulate(network, tokens[:, :-1], tokens[:, 1:], 2, 4)
    whole = {name: p.grad for name, p in network.named_parameters()}
    seen: set[str] = set()
    for found in on_ranks(2, overlapping_hooks):
        for name, gradient in found:
            seen.add(name)
            expected = whole[name]
            assert expected is not None
            if gradient.shape == expected.shape:
                torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-4, atol=1e-7)
    assert seen == set(whole)


def steps_with_few_parameters(world: World, full: bool) -> dict[str, Any]:
    """Losses of a network with four matrices and five rows of embedding and head."""
    scale = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=16, vocabulary=5)
    arm = find_arm("vanilla")
    network = materialize(build_on_meta(arm.shape(1, scale), arm), dtype=torch.float32, seed=3)
    hyper, rows = hyperparameters("vanilla"), 8 // world.size
    optimizer: Any
    if world.size == 1:
        optimizer = Optimizer(network.named_parameters(), hyper, AUTHORS)
    elif full:
        optimizer = FullyShardedOptimizer(network, hyper, AUTHORS, world)
    else:
        optimizer = ShardedOptimizer(network.named_parameters(), hyper, AUTHORS, world)
    losses: list[float] = []
    for step in range(3):
        tokens = torch.randint(0, 5, (8, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[world.rank * rows : (world.rank + 1) * rows]
        with optimizer.micro_batch(last=True) if world.size > 1 else torch.enable_grad():
            loss = network(mine[:, :-1], mine[:, 1:], loss_weight=1 / world.size)
            loss.backward()
        losses.append(world.all_reduce_(loss.detach().double()).item())
        optimizer.step(1.0, step)
        optimizer.zero_grad()
    muon = optimizer.muon if world.size == 1 else optimizer.local.muon
    owned = [] if world.size == 1 else sorted(optimizer.owned)
    return {"losses": losses, "owned": owned, "orthogonalized": muon.orthogonalized}


@pytest.mark.parametrize("full", [False, True], ids=["optimizer", "full"])
def test_ranks_that_own_nothing_take_part(full: bool) -> None:
    (expected,) = on_ranks(1, steps_with_few_parameters, full)
    found = on_ranks(8, steps_with_few_parameters, full)
    assert [] in [rank["owned"] for rank in found]
    for rank in found:
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=0, atol=1e-6)
    # Every matrix once per step, whichever way the network is divided: none twice, none by AdamW.
    assert sum(rank["orthogonalized"] for rank in found) == expected["orthogonalized"] == 3 * 7
