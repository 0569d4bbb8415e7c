"""Identities between arms that the comparisons assume, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import ARMS, find_arm
from steepen.model.config import Multipliers
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule
from steepen.optim.config import GrowthState
from steepen.optim.optimizer import grow_state

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=32)
MULTIPLIERS = Multipliers(residual=0.5, output=0.7, injection=0.6)


def tokens() -> Tensor:
    return torch.randint(0, SCALE.vocabulary, (2, SCALE.context), generator=torch.Generator().manual_seed(1))


def build(arm: Arm | str, depth: int = 5, passes: int | None = None, seed: int = 0) -> Network:
    """A double-precision network without zero weights."""
    arm = find_arm(arm) if isinstance(arm, str) else arm
    network = build_on_meta(arm.shape(depth, SCALE), arm, MULTIPLIERS, passes=passes)
    materialize(network, dtype=torch.float64, embedding_std=0.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(0.1 * noise)
    return network


def copy_blocks(source: Network, target: Network) -> None:
    """Give `target` the weights of `source`, block by block in the order they are stored."""
    target.embedding.data.copy_(source.embedding)
    target.head.data.copy_(source.head)
    for one, other in zip(source.blocks(), target.blocks(), strict=True):
        other.load_state_dict(one.state_dict())


def tie(untied: Network, tied: Network) -> None:
    """Give every core of `untied` the weights of the one core of `tied`."""
    for name in ("prelude", "coda"):
        getattr(untied, name).load_state_dict(getattr(tied, name).state_dict())
    for core in untied.cores:
        core.load_state_dict(tied.cores[0].state_dict())
    untied.embedding.data.copy_(tied.embedding)
    untied.head.data.copy_(tied.head)


def test_one_pass_with_identity_boundaries_is_vanilla() -> None:
    vanilla = build("vanilla")
    split = build("tied-vanilla-1")
    copy_blocks(vanilla, split)
    assert torch.equal(vanilla(tokens()), split(tokens()))


def test_deep_vanilla_is_a_stack_of_its_executed_blocks() -> None:
    deep = build("deep-vanilla", depth=5)
    shape = deep.shape
    plain_arm = replace(
        ARMS["vanilla"], allocation=replace(ARMS["vanilla"].allocation, blocks=shape.allocation.executed(2))
    )
    plain = build(plain_arm, depth=5)
    # A vanilla network stores its blocks in the order it runs them, and so does the untied network.
    copy_blocks(deep, plain)
    assert torch.equal(deep(tokens()), plain(tokens()))


def test_vanilla_equals_an_independent_transformer() -> None:
    network = build("vanilla", depth=3)
    w, heads, half = network.shape.width, network.shape.heads, network.shape.head_dim // 2
    ids = tokens()

    def norm(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + network.options.norm_eps)

    def apply_rope(x: Tensor) -> Tensor:  # (time, head_dim): rotate each pair (i, i + half) by its angle
        angle = torch.arange(len(x))[:, None].double() * 10_000.0 ** (-torch.arange(half).double() / half)
        pair = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], dim=-1)

    rows: list[Tensor] = []
    for sequence in ids:
        x = norm(network.embedding[sequence])
        for block in network.blocks():
            q, k, v = (norm(x) @ matrix.T for matrix in block.get_parameter("qkv"))
            outputs: list[Tensor] = []
            for part in torch.arange(w).chunk(heads):
                query, key = norm(apply_rope(q[:, part])), norm(apply_rope(k[:, part]))
                score = query @ key.T / len(part) ** 0.5
                future = torch.ones_like(score).triu(1).bool()
                outputs.append(score.masked_fill(future, -torch.inf).softmax(-1) @ v[:, part])
            x = x + torch.cat(outputs, -1) @ (MULTIPLIERS.residual * block.get_parameter("out")).T
            gate, up = (norm(x) @ matrix.T for matrix in block.get_parameter("gate_up"))
            x = x + (gate * gate.sigmoid() * up) @ (MULTIPLIERS.residual * block.get_parameter("down")).T
        rows.append(norm(x) @ (MULTIPLIERS.output * network.head).T)
    torch.testing.assert_close(network(ids), torch.stack(rows), atol=1e-12, rtol=1e-12)


def test_boundary_operator_is_applied_after_every_pass_and_the_first_receives_e() -> None:
    network = build("untied-2", depth=4)
    alpha, ids = MULTIPLIERS.injection, tokens()
    rotary = network.rotary[:, : ids.shape[1]]

    def run(blocks: object, x: Tensor) -> Tensor:
        for block in blocks:  # type: ignore[attr-defined]
            x = block(x, rotary)
        return x

    e = run(network.prelude, network.norm(network.embedding[ids]))
    h = run(network.cores[0], e)
    h = run(network.cores[1], network.norm(h) + alpha * e)
    expected = network.logits(run(network.coda, network.norm(h) + alpha * e))
    assert torch.equal(network(ids), expected)


def test_equal_untied_cores_compute_what_the_tied_loop_computes() -> None:
    tied, untied = build("loop-3"), build("untied-3")
    tie(untied, tied)
    assert torch.equal(tied(tokens()), untied(tokens()))


def test_gradient_of_a_tied_core_is_the_sum_over_equal_untied_cores() -> None:
    tied, untied = build("loop-3"), build("untied-3")
    tie(untied, tied)
    for network in (tied, untied):
        network(tokens(), tokens().roll(-1, dims=1)).backward()
    for name, parameter in tied.cores[0].named_parameters():
        summed = sum(core.get_parameter(name).grad for core in untied.cores)  # type: ignore[misc]
        torch.testing.assert_close(parameter.grad, summed, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["loop-2", "untied-4", "loop-2-norm-only", "tied-vanilla-2"])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_passes_at_call_time_equal_a_network_built_with_them(name: str, passes: int) -> None:
    network = build(name, passes=3)
    other = build(name, passes=passes)
    for stage in ("prelude", "coda"):
        getattr(other, stage).load_state_dict(getattr(network, stage).state_dict())
    for one, source in zip(other.cores, network.cores, strict=False):
        one.load_state_dict(source.state_dict())
    other.embedding.data.copy_(network.embedding)
    other.head.data.copy_(network.head)
    assert torch.equal(network(tokens(), passes=passes), other(tokens()))


def test_tied_growth_with_the_passes_unchanged_is_the_identity() -> None:
    network = build("loop-grow")
    before = network(tokens())
    assert grow(network, 2) == {}
    assert torch.equal(before, network(tokens()))


@pytest.mark.parametrize("name", ["loop-grow", "untied-grow", "deep-vanilla-grow"])
def test_growth_leaves_the_function_of_fewer_passes_unchanged(name: str) -> None:
    network = build(name)
    before = network(tokens(), passes=2)
    grow(network, 4)
    assert network.passes == 4
    assert torch.equal(before, network(tokens(), passes=2))
    assert not torch.equal(before, network(tokens()))


def test_new_cores_are_independent_copies_by_algorithm_1() -> None:
    network = build("untied-grow")
    sources = grow(network, 6)
    assert len(network.cores) == 6
    assert sources["cores.5.0.qkv"] == "cores.1.0.qkv"
    for index, core in enumerate(network.cores):
        for name, parameter in core.named_parameters():
            original = network.cores[index % 2].get_parameter(name)
            assert torch.equal(parameter, original)
            assert index < 2 or parameter.data_ptr() != original.data_ptr()


@pytest.mark.parametrize("policy", get_args(GrowthState))
def test_new_cores_optimizer_state_follows_the_policy(policy: GrowthState) -> None:
    network = build("untied-grow")
    state = {
        name: {
            "momentum": torch.full_like(p, 2.0),
            "second": torch.full_like(p, 3.0),
            "step": torch.tensor(7),
        }
        for name, p in network.named_parameters()
    }
    sources = grow(network, 4)
    grow_state(state, sources, policy)
    assert sources and set(sources) <= {name for name, _ in network.named_parameters()}
    for new, source in sources.items():
        if policy == "fresh":
            assert new not in state
            continue
        assert state[new]["momentum"].unique().tolist() == ([2.0] if policy == "copy" else [0.0])
        assert state[new]["second"].unique().tolist() == [3.0] and state[new]["step"] == 7
        assert state[new]["second"].data_ptr() != state[source]["second"].data_ptr()


def test_an_unknown_policy_for_optimizer_state_is_rejected() -> None:
    with pytest.raises(UsageError, match="copy, zero, fresh"):
        grow_state({}, {}, "keep")  # type: ignore[arg-type]


def test_more_passes_than_untied_cores_is_rejected() -> None:
    with pytest.raises(UsageError, match="has 2 cores"):
        build("untied-2")(tokens(), passes=3)


def test_staged_growth_is_a_schedule_like_any_other() -> None:
    arm = replace(ARMS["untied-grow"], passes=StageSchedule.staged((0, 2), (0.5, 4), (0.8, 6)))
    network = build(arm)
    for passes in (4, 6):
        grow(network, passes)
    assert len(network.cores) == 6 and network(tokens()).isfinite().all()
