"""Parameters and FLOPs: the closed form equals the modules, and both give the paper's numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from module_count import count
from steepen.errors import UsageError
from steepen.model.arm import AllocationRule
from steepen.model.arms import ARMS
from steepen.model.init import build_on_meta
from steepen.model.shape import BlockAllocation, SizeRule
from steepen.model.stages import Stage, StageSchedule
from steepen.recipe.flops import (
    compute_active_parameters,
    flops_per_token,
    mean_flops_per_token,
    stage_starts,
    stored_parameters,
)

# Table "Model depths, layer splits, executed depths, and stored parameters", as printed.
PRINTED = """
d6  2/2/2 8 12   768 120M 120M 130M 160M
d8  2/3/3 11 17 1024 210M 210M 240M 320M
d10 3/4/3 14 22 1280 330M 330M 410M 580M
d12 4/4/4 16 24 1536 490M 490M 610M 830M
d14 4/5/5 19 29 1792 730M 730M 920M 1.3B
d16 5/6/5 22 34 2048 1.0B 1.0B 1.3B 2.0B
d18 6/6/6 24 36 2304 1.4B 1.4B 1.8B 2.5B
d20 6/7/7 27 41 2560 1.8B 1.8B 2.4B 3.5B
d22 7/8/7 30 46 2816 2.4B 2.4B 3.2B 4.7B
d24 8/8/8 32 48 3072 3.0B 3.0B 3.9B 5.7B
d26 8/9/9 35 53 3328 3.8B 3.8B 5.0B 7.4B
"""


def two_digits(value: int) -> str:
    """A count as the paper prints it."""
    mantissa, exponent = f"{value:.1e}".split("e")
    if int(exponent) >= 9:
        return f"{float(mantissa) * 10 ** (int(exponent) - 9):.1f}B"
    return f"{float(mantissa) * 10 ** (int(exponent) - 6):.0f}M"


@pytest.mark.parametrize("row", PRINTED.strip().splitlines())
def test_paper_size_table_is_reproduced(row: str) -> None:
    name, split, first, last, width, *sizes = row.split()
    depth = int(name[1:])
    shape = ARMS["untied-grow"].shape(depth)
    assert (str(shape.allocation), shape.width) == (split, int(width))
    assert (shape.allocation.executed(2), shape.allocation.executed(4)) == (int(first), int(last))
    arms = (("vanilla", 1), ("loop-grow", 4), ("untied-2", 2), ("untied-grow", 4))
    found = [two_digits(stored_parameters(ARMS[a], ARMS[a].shape(depth), k)) for a, k in arms]
    assert found == sizes


@pytest.mark.parametrize("depth", [3, 6, 8, 13, 26])
@pytest.mark.parametrize("name", ARMS)
def test_closed_form_counts_equal_those_of_the_modules(name: str, depth: int) -> None:
    arm = ARMS[name]
    try:
        shape = arm.shape(depth)
    except UsageError:
        assert depth <= 5 and arm.allocation.prelude is not None
        return
    for passes in {arm.passes.initial, arm.passes.max_passes}:
        counted = count(build_on_meta(shape, arm, passes=passes))
        flops = flops_per_token(arm, shape, passes)
        assert counted.stored == stored_parameters(arm, shape, passes)
        assert counted.compute_active == compute_active_parameters(arm, shape, passes)
        assert (counted.matmul_flops, counted.attention_flops, counted.head_flops) == (
            flops.matmul,
            flops.attention,
            flops.head,
        )


def test_loops_store_as_much_as_vanilla_and_cost_as_much_as_untied() -> None:
    shape = ARMS["loop-2"].shape(8)
    assert stored_parameters(ARMS["loop-2"], shape, 2) == stored_parameters(
        ARMS["vanilla"], ARMS["vanilla"].shape(8), 1
    )
    assert flops_per_token(ARMS["loop-2"], shape, 2) == flops_per_token(ARMS["untied-2"], shape, 2)


@given(st.integers(1, 400))
def test_allocation_is_even_with_remainders_to_core_then_coda(blocks: int) -> None:
    split = BlockAllocation.even(blocks)
    assert split.blocks == blocks
    assert split.prelude <= split.coda <= split.core <= split.prelude + 1


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.floats(0.05, 0.95),
)
def test_mean_flops_weight_stages_by_their_tokens(after: list[int], start: float) -> None:
    arm = ARMS["loop-grow"]
    shape = arm.shape(8)
    schedule = StageSchedule((Stage((2,)), Stage(tuple(after), start)))
    expected = start * flops_per_token(arm, shape, 2).total + (1 - start) * sum(
        flops_per_token(arm, shape, k).total for k in after
    ) / len(after)
    assert mean_flops_per_token(arm, shape, schedule).total == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6, unique=True), st.integers(1, 50))
def test_stages_start_at_their_fraction_and_before_the_end(shares: list[float], steps: int) -> None:
    schedule = StageSchedule.staged((0, 1), *[(share, k + 2) for k, share in enumerate(sorted(shares))])
    starts = stage_starts(schedule, steps)
    for start, share in zip(starts[1:], sorted(shares), strict=True):
        assert start <= share * steps < start + 1
    assert list(starts) == sorted(starts) and starts[-1] < steps


@given(st.integers(2, 100_000), st.integers(1, 99))
def test_a_growth_step_is_the_product_in_doubles_cut_to_a_whole_number(steps: int, percent: int) -> None:
    """Where ρ·steps is whole its product may fall below, as in the authors' code: 0.29 of 100 is step 28."""
    arm = ARMS["untied-grow"]
    schedule = arm.passes.resolve(float(f"{(100 - percent) / 100:.2f}"))
    assert stage_starts(schedule, steps)[1] == int(float(f"{percent / 100:.2f}") * steps)
    assert stage_starts(arm.passes.resolve(0.71), 100)[1] == 28


@pytest.mark.parametrize(
    ("steps", "share", "start"),
    [(1826, 0.60, 1095), (3341, 0.71, 2372), (1488, 0.75, 1116), (2563, 0.82, 2101), (68_699, 0.77, 52_898)],
)
def test_growth_steps_are_those_of_the_published_command_lines(steps: int, share: float, start: int) -> None:
    assert stage_starts(StageSchedule.staged((0, 2), (share, 4)), steps)[1] == start


@settings(max_examples=30)
@given(st.integers(1, 60), st.sampled_from([16, 64, 128]), st.sampled_from([1, 64, 256]))
def test_mlp_width_is_8w_over_3_rounded_up_to_the_multiple(depth: int, aspect: int, multiple: int) -> None:
    scale = SizeRule(aspect=aspect, head_dim=aspect, mlp_multiple=multiple)
    hidden = scale.mlp_width(scale.width(depth))
    assert hidden % multiple == 0
    assert 0 <= 3 * hidden - 8 * scale.width(depth) < 3 * multiple


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockAllocation(-1, 2, 2),
        lambda: SizeRule(aspect=0),
        lambda: SizeRule(head_dim=5),
        lambda: Stage(()),
        lambda: Stage((2,), 1.5),
        lambda: StageSchedule.staged((0, 2), (0.8, 4), (0.5, 6)),
        lambda: StageSchedule((Stage((2,), 0.5),)),
        lambda: AllocationRule(prelude=2, coda=3).at(5),
        lambda: AllocationRule(prelude=2),
        lambda: ARMS["vanilla"].shape(0),
        lambda: ARMS["vanilla"].shape(3, SizeRule(aspect=10, head_dim=128)),
    ],
)
def test_bad_value_is_rejected_at_construction(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as error:
        make()
    assert "\n" not in str(error.value)
