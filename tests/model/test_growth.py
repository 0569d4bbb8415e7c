"""Growth along every axis: what it says it keeps, it keeps to 1e-12 in fp64; how an arm is told to grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.growth import Growth, block_origins, grown
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule

RULE = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=384)
BASES = (
    "vanilla", "untied-2", "loop-2", "operator-1", "vanilla+kv_heads=2", "vanilla+activation=relu2",
    "vanilla+streams=2", "vanilla+experts=4", "deep-vanilla+parallel=true",
)  # fmt: skip


def start(arm: Arm, depth: int = 4) -> Network:
    """The network of the first stage in fp64, with weights that are nowhere zero."""
    first = arm.networks(arm.shape(depth, RULE), arm.passes)[0]
    network = build_on_meta(first.shape, first.arm, passes=first.passes)
    materialize(network, dtype=torch.float64, embedding_std=1.0, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return network


def through_all_stages(arm: Arm, depth: int = 4) -> list[Network]:
    networks, shape = [start(arm, depth)], arm.shape(depth, RULE)
    for after in arm.networks(shape, arm.passes)[1:]:
        networks.append(grown(networks[-1], after, arm.passes, seed=3))
    return networks


@torch.no_grad()
def logits(network: Network, passes: int | None = None) -> Tensor:
    tokens = torch.randint(384, (2, 8), generator=torch.Generator().manual_seed(5))
    return network(tokens, passes=passes)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "growth",
    [
        "blocks=1-all@0.5", "blocks=0-2-all@0.2-0.5", "blocks=0.5-all@0.5+block_order=interleaved",
        "width=0.5-1@0.5", "width=0.5-1@0.5+new_width=zero", "context=0.25-1@0.5",
        "blocks=1-all@0.5+width=0.5-1@0.5", "blocks=1-3-all@0.2-0.6+width=0.5-1@0.4+context=0.5-1@0.4",
        "experts=1-4@0.5", "experts=1-6@0.5+active_experts=3+shared_experts=1+balance=loss",
        "experts=1-8@0.5+active_experts=4+shared_experts=1",  # 5 experts of 10 units, and 48 of the dense MLP
        "experts=1-4@0.5+width=0.5-1@0.5+blocks=1-all@0.5+context=0.5-1@0.5",
        "experts=1-4@0.5+width=0.5-1@0.5+new_width=zero",
    ],
)  # fmt: skip
def test_growth_keeps_what_the_network_computes(base: str, growth: str) -> None:
    arm = find_arm(f"{base}+{growth}")
    networks = through_all_stages(arm)
    expected = logits(networks[0])
    for network in networks[1:]:
        assert (logits(network) - expected).abs().max() < 1e-12
    # And it is the arm's own network at the end.
    final = build_on_meta(arm.shape(4, RULE), arm)
    assert [(n, p.shape) for n, p in networks[-1].named_parameters()] == [
        (n, p.shape) for n, p in final.named_parameters()
    ]


def test_a_width_that_is_no_multiple_grows_by_zeros_only() -> None:
    with pytest.raises(UsageError, match="whole multiple"):
        through_all_stages(find_arm("vanilla+width=2/3-1@0.5"), 3)
    networks = through_all_stages(find_arm("vanilla+width=2/3-1@0.5+new_width=zero"), 3)
    assert (logits(networks[1]) - logits(networks[0])).abs().max() < 1e-12


@pytest.mark.parametrize("new_width", ["copy", "zero"])
def test_widened_units_do_not_stay_equal(new_width: str) -> None:
    network = through_all_stages(find_arm(f"vanilla+width=0.5-1@0.5+new_width={new_width}"))[-1]
    tokens = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.enable_grad():
        for _ in range(3):
            network.zero_grad()
            network(tokens[:, :-1], tokens[:, 1:]).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
    for name in ("embedding", "prelude.0.out", "prelude.1.down"):
        weight = network.get_parameter(name)
        channels = weight.T if name == "embedding" else weight
        assert torch.unique(channels, dim=0).shape[0] == channels.shape[0], name
        assert (channels.abs().sum(1) > 0).all(), name


def test_optimizer_state_of_rows_and_of_columns_is_that_of_each_expert() -> None:
    """The variances of NorMuon: one for all units of the dense MLP, or one for each."""
    arm = find_arm("vanilla+experts=1-4@0.5")
    stages = arm.networks(arm.shape(4, RULE), arm.passes)
    growth = Growth(stages[0], stages[1], arm.passes)
    dense, routed = (
        {name: p.shape for name, p in build_on_meta(one.shape, one.arm).named_parameters()} for one in stages
    )
    rows = torch.rand(dense["prelude.1.down"][0], 1)
    columns = torch.rand(2, 1, dense["prelude.1.gate_up"][2])
    for leaf, origin, old, expected in (
        ("expert_down", "down", rows, rows.expand(4, -1, -1)),
        ("expert_gate_up", "gate_up", columns, columns.repeat(4, 1, 1)),
    ):
        shapes = dense[f"prelude.1.{origin}"], routed[f"prelude.1.{leaf}"]
        found = growth.state(f"prelude.1.{leaf}", "second_moment", old, *shapes)
        assert torch.equal(found, expected), leaf


@pytest.mark.parametrize("growth", ["experts=1-4@0.5", "experts=2-4@0.5"])
def test_experts_of_one_origin_do_not_stay_equal(growth: str) -> None:
    network = through_all_stages(find_arm(f"vanilla+{growth}"))[-1]
    tokens = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.enable_grad():
        for _ in range(3):
            network.zero_grad()
            network(tokens[:, :-1], tokens[:, 1:]).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
    for name in ("router", "expert_gate_up", "expert_down"):
        experts = network.get_parameter(f"prelude.1.{name}")
        assert torch.unique(experts, dim=0).shape == experts.shape, name


def test_copies_of_experts_are_copies_and_their_rows_differ_around_the_old_ones() -> None:
    before, after = through_all_stages(find_arm("vanilla+experts=2-6@0.5+width=0.5-1@0.5+balance=bias"))
    # Width repeats every channel, and divides what is read of it.
    row = after.get_parameter("prelude.0.router").unflatten(-1, (-1, 2)).sum(-1).unflatten(0, (2, 3))
    assert (row.mean(1) - before.get_parameter("prelude.0.router")).abs().max() < 1e-12
    assert row.std(1).min() > 0
    for name in ("expert_gate_up", "expert_down"):
        experts = after.get_parameter(f"prelude.0.{name}").unflatten(0, (2, 3, -1))
        assert torch.equal(experts[:, 0], experts[:, 1]) and not torch.equal(experts[0], experts[1]), name


def test_rows_of_the_router_are_equal_for_the_parts_of_one_copy_of_an_mlp_only() -> None:
    after = through_all_stages(find_arm("vanilla+blocks=2-all@0.5+experts=1-4@0.5"))[-1]
    rows = [after.get_parameter(f"prelude.{index}.router") for index in range(4)]
    assert [len(torch.unique(row, dim=0)) for row in rows] == [2, 2, 4, 4]  # the last two blocks are new
    assert torch.equal(rows[0][0], rows[0][1])


@pytest.mark.parametrize("growth", ["experts=1-5@0.5", "experts=1-4@0.5+active_experts=1", "experts=2-4@0.5"])
def test_experts_that_are_chosen_otherwise_compute_something_else(growth: str) -> None:
    networks = through_all_stages(find_arm(f"vanilla+{growth}"))
    assert 1e-3 < (logits(networks[1]) - logits(networks[0])).abs().max() < torch.inf


def test_copies_are_stacked_or_between_the_old_blocks() -> None:
    assert [source for source, _ in block_origins(2, 5, "stacked")] == [0, 1, 0, 1, 0]
    assert [source for source, _ in block_origins(2, 4, "interleaved")] == [0, 0, 1, 1]
    assert [kept for _, kept in block_origins(2, 4, "interleaved")] == [True, False, True, False]
    network, larger = through_all_stages(find_arm("vanilla+blocks=2-all@0.5+new_blocks=copy"))
    for index, source in enumerate([0, 1, 0, 1]):
        old = network.get_parameter(f"prelude.{source}.qkv")
        assert torch.equal(larger.get_parameter(f"prelude.{index}.qkv"), old)


def test_untied_passes_and_blocks_grow_together() -> None:
    arm = find_arm("untied-grow+blocks=2-all")
    arm = replace(arm, passes=arm.passes.resolve(0.5))
    before, after = through_all_stages(arm)
    assert len(before.cores) == 2 and len(after.cores) == 4
    assert torch.equal(after.get_parameter("cores.2.0.qkv"), before.get_parameter("cores.0.0.qkv"))


def test_state_of_a_widened_parameter_changes_as_its_gradient() -> None:
    arm = find_arm("vanilla+width=0.5-1@0.5")
    first, last = arm.networks(arm.shape(4, RULE), arm.passes)
    before, after = through_all_stages(arm)
    growth = Growth(first, last, arm.passes)
    tokens = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(5))
    for network in (before, after):
        network(tokens[:, :-1], tokens[:, 1:]).backward()
    old = {name: parameter.grad for name, parameter in before.named_parameters()}
    for name in ("prelude.3.down", "prelude.3.out", "head"):
        gradient, wider = old[name], after.get_parameter(name)
        assert gradient is not None and wider.grad is not None
        found = growth.state(name, "exp_avg", gradient, gradient.shape, wider.shape)
        if name == "head":
            assert (found - wider.grad).abs().max() < 1e-12
        else:  # the sum over the repetitions of a channel is the gradient of the channel
            pairs = [each.unflatten(0, (-1, 2)).sum(1) for each in (found, wider.grad)]
            assert (pairs[0] - pairs[1]).abs().max() < 1e-12
    count = torch.tensor(7.0)
    assert growth.state("head", "step", count, old["head"].shape, after.head.shape) == 7  # type: ignore[union-attr]


def test_state_of_experts_changes_as_their_gradient() -> None:
    arm = find_arm("vanilla+experts=1-6@0.5")
    first, last = arm.networks(arm.shape(4, RULE), arm.passes)
    before, after = through_all_stages(arm)
    growth = Growth(first, last, arm.passes)
    tokens = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(5))
    for network in (before, after):
        network(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, source in (("expert_gate_up", "gate_up"), ("expert_down", "down")):
        old = before.get_parameter(f"prelude.3.{source}").grad
        new = after.get_parameter(f"prelude.3.{name}").grad
        assert old is not None and new is not None
        found = growth.state(f"prelude.3.{name}", "exp_avg", old, old.shape, new.shape)
        # The sum over the three experts that have a part of the MLP is the gradient of that part.
        pairs = [each.unflatten(0, (3, 2, -1)).sum(0) for each in (found, new)]
        assert (pairs[0] - pairs[1]).abs().max() < 1e-12
    assert growth.origin("prelude.3.router").name is None


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("untied-2+passes=2-4-6@0.5-0.8", [(0, (2,)), (0.5, (4,)), (0.8, (6,))]),
        ("loop-2+passes=2-4-6", [(0, (2,)), (None, (4,)), (None, (6,))]),
    ],
)
def test_an_arm_is_told_its_stages(name: str, stages: list[Any]) -> None:
    arm = find_arm(name)
    assert [(stage.start, stage.passes) for stage in arm.passes.stages] == stages
    assert arm.name == name and arm.recipe == find_arm(name.partition("+")[0]).recipe


def test_starts_that_the_recipe_decides_are_at_equal_distances() -> None:
    starts = [stage.start for stage in find_arm("loop-2+passes=2-4-6").passes.resolve(0.4).stages]
    assert starts == [0.0, 0.6, 0.8]
    assert len(find_arm("loop-2+passes=2-4-6").passes.resolve(1.0).stages) == 2


def test_axes_have_their_own_starts() -> None:
    arm = find_arm("untied-2+passes=2-4@0.5+width=1/2-1@0.2")
    assert [(s.start, s.passes, s.width) for s in arm.passes.stages] == [
        (0.0, (2,), 0.5), (0.2, (2,), None), (0.5, (4,), None),
    ]  # fmt: skip
    assert arm.passes.axes == ("passes", "width")


def test_the_last_number_of_experts_is_the_arms() -> None:
    arm = find_arm("vanilla+experts=1-4-8@0.2-0.6+shared_experts=1")
    assert [(s.start, s.experts) for s in arm.passes.stages] == [(0.0, 1), (0.2, 4), (0.6, None)]
    assert find_arm("vanilla+experts=8+experts=1-4-all@0.2-0.6+shared_experts=1").passes == arm.passes
    assert arm.block_options == find_arm("vanilla+experts=8+shared_experts=1").block_options
    options = [one.arm.block_options for one in arm.networks(arm.shape(4, RULE), arm.passes)]
    assert [one.experts for one in options] == [None, 4, 8] and options[0].standard


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vanilla+experts=-3", "not a number"),
        ("vanilla+experts=1.5-4", "whole number"),
        ("vanilla+blocks=2", "two or more stages"),
        ("vanilla+width=0.5-1@0.2-0.4", "two or more stages"),
        ("vanilla+width=0.5-1@0.2+blocks=1-all", "of every axis"),
        ("vanilla+width=x-1", "not a number"),
        ("vanilla+width=0.5-1+new_width=big", "'copy', 'zero'"),
        ("loop-2+passes=two-4", "number of passes"),
        ("vanilla+width=0.5-1+blocks=0-1-all", "as many stages"),
    ],
)
def test_a_growth_that_cannot_be_read_is_rejected(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_arm(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vanilla+blocks=9-all@0.5", "cannot start with 9"),
        ("vanilla+width=1-0.5@0.5", "only adds"),
        ("vanilla+width=0.3-1@0.5", "whole number"),
        ("vanilla+context=0.3-1@0.5", "whole number"),
        ("loop-2-2-c-3+blocks=3-all@0.5", "only its core"),
        ("vanilla+experts=8-4@0.5", "cannot start with 8"),
        ("vanilla+experts=1-all@0.5", "no experts"),
        ("vanilla+experts=0-4@0.5", "experts"),
        ("vanilla+experts=2-8@0.5+active_experts=4", "active_experts"),
    ],
)
def test_a_growth_that_a_size_does_not_have_is_rejected(name: str, said: str) -> None:
    arm = find_arm(name)
    depth = 12 if "2-c-3" in name else 4
    with pytest.raises(UsageError, match=said):
        arm.networks(arm.shape(depth, RULE), arm.passes)


def test_schedules_hold_their_axes() -> None:
    assert StageSchedule.growing(2, 4).axes == ("passes",)
    assert not StageSchedule.fixed(2).axes
