"""The step schedule: learning-rate factors, passes and FLOPs of every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.model.arms import ARMS
from steepen.model.stages import StageSchedule
from steepen.optim.config import LRScheduleConfig
from steepen.recipe.flops import flops_per_token
from steepen.runs.spec import RunSpec, expected_flops, override
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.step_schedule import build_schedule, learning_rate_factors
from steepen.training.train_options import TrainOptions


@given(st.integers(1, 300), st.integers(0, 50), st.floats(0, 1))
def test_learning_rate_warms_up_stays_constant_and_warms_down(steps: int, warmup: int, share: float) -> None:
    factors = learning_rate_factors(steps, warmup, share, decay_to_zero=False)
    down = round(share * steps)
    assert len(factors) == steps and (factors > 0).all() and (factors <= 1).all()
    for step, factor in enumerate(factors):
        up = (step + 1) / warmup if step < warmup else 1.0
        left = steps - step
        assert factor == pytest.approx(min(up, left / down if left <= down else 1.0))


@given(st.integers(1, 300), st.integers(0, 50), st.floats(0, 1))
def test_the_rate_falls_from_exactly_one_to_exactly_zero(steps: int, warmup: int, share: float) -> None:
    factors = learning_rate_factors(steps, warmup, share)
    start, last = max(warmup, steps - round(share * steps)), steps - 1
    for step, factor in enumerate(factors):
        if step < warmup:
            expected = (step + 1) / warmup
        else:
            expected = 1.0 if step < start else (last - step) / max(1, last - start)
        assert factor == pytest.approx(expected, abs=1e-15)
    if start <= last:  # a decay of one step too
        assert factors[-1] == 0
    if start < last:
        assert factors[start] == 1


@given(st.integers(2, 300), st.integers(0, 50), st.floats(0, 1))
def test_linear_and_cosine_fall_from_the_warm_up_to_zero(steps: int, warmup: int, share: float) -> None:
    linear = learning_rate_factors(steps, warmup, share, name="linear")
    np.testing.assert_array_equal(linear, learning_rate_factors(steps, warmup, 1.0))
    cosine = learning_rate_factors(steps, warmup, share, name="cosine")
    last = steps - 1
    for step in range(warmup, steps):
        through = (step - warmup) / max(1, last - warmup) if warmup < last else 1.0
        assert cosine[step] == pytest.approx((1 + np.cos(np.pi * through)) / 2, abs=1e-12)
    np.testing.assert_array_equal(cosine[:warmup], linear[:warmup])


def test_the_rate_is_one_twice_where_the_whole_run_decays() -> None:
    """Warm-up 40 and warm-down over the whole run, as in the recipes of Loop-2 and Untied-2."""
    factors = learning_rate_factors(1370, 40, 1.0)
    assert factors[39] == factors[40] == 1 and factors[38] < 1 and factors[41] < 1 and factors[1369] == 0


def test_every_rate_rises_from_zero_again_after_growth(make_spec: Callable[..., RunSpec]) -> None:
    for arm in ("untied-grow", "loop-grow"):
        spec = make_spec(arm, steps=20)
        before = build_schedule(replace(spec, lr_schedule=LRScheduleConfig(rewarm_steps=0))).lr_factor
        after = build_schedule(replace(spec, lr_schedule=LRScheduleConfig(rewarm_steps=4))).lr_factor
        assert (after[:10] == before[:10]).all() and (after[14:] == before[14:]).all()
        np.testing.assert_allclose(after[10:14], before[10:14] * [0, 0.25, 0.5, 0.75], rtol=1e-15)
    assert (build_schedule(make_spec("untied-2", steps=20)).lr_factor[:-1] > 0).all()  # nothing grows


def test_a_growth_phase_shorter_than_the_default_rewarm_never_reaches_the_scheduled_rate(
    make_spec: Callable[..., RunSpec],
) -> None:
    spec = make_spec("untied-grow", steps=20)
    before = build_schedule(replace(spec, lr_schedule=LRScheduleConfig(rewarm_steps=0))).lr_factor
    after = build_schedule(spec).lr_factor
    np.testing.assert_allclose(after[10:], before[10:] * np.arange(10) / 40, rtol=1e-15)


def test_growth_changes_the_passes_in_the_schedule(make_spec: Callable[..., RunSpec]) -> None:
    schedule = build_schedule(make_spec(steps=12))
    assert schedule.passes.tolist() == [2] * 6 + [4] * 6
    assert [schedule.networks[index].passes for index in schedule.network] == [2] * 6 + [4] * 6
    assert schedule.eval_passes[-1] == 4
    with pytest.raises(ValueError, match="read-only"):
        schedule.passes[0] = 3


def test_staged_growth_has_three_stages_in_the_schedule(make_spec: Callable[..., RunSpec]) -> None:
    spec = replace(make_spec(steps=10), schedule=StageSchedule.staged((0, 2), (0.5, 4), (0.8, 6)))
    assert build_schedule(spec).passes.tolist() == [2] * 5 + [4] * 3 + [6] * 2


def test_random_passes_are_drawn_once_per_step_from_the_seed(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("random-loop-grow", steps=2000)
    schedule = build_schedule(spec)
    before, after = schedule.passes[:1000], schedule.passes[1000:]
    assert set(before.tolist()) == {2} and set(after.tolist()) == {2, 3, 4, 5, 6}
    assert np.bincount(after)[2:].min() > 150  # uniform: 200 of each, give or take
    assert (schedule.eval_passes[1000:] == 4).all()
    again, other = build_schedule(spec), build_schedule(replace(spec, seed=1))
    assert (again.passes == schedule.passes).all() and (other.passes != schedule.passes).any()


def test_flops_of_random_passes_are_the_sum_over_the_draws(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("random-loop-grow", steps=50)
    schedule = build_schedule(spec)
    arm = ARMS["random-loop-grow"]
    expected = sum(
        flops_per_token(arm, spec.shape, int(k)).total * spec.batch_tokens for k in schedule.passes
    )
    assert schedule.flops(spec.batch_tokens).total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stop", [5, 14])
def test_a_run_that_stops_early_takes_the_first_steps_of_the_longer_run(
    stop: int, make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path
) -> None:
    """Also across growth (at step 10): the same rates, passes, batches, FLOPs and loss to the last bit."""
    whole = make_spec("untied-grow", steps=20)
    stopped = override(whole, [f"stop_after={stop}"])
    assert (stopped.steps, stopped.schedule_steps) == (stop, 20) and stopped.hash != whole.hash
    assert override(stopped, ["stop_after=3"]).schedule_steps == 20
    assert stopped.pool_size(10**9) == whole.pool_size(10**9)
    schedule, longer = build_schedule(stopped), build_schedule(whole)
    assert (schedule.lr_factor == longer.lr_factor[:stop]).all() and len(schedule) == stop
    assert (schedule.network == longer.network[:stop]).all()
    options = TrainOptions(device="cpu", quiet=True, validate_every=stop)
    first = train(whole, tiny_data, RunStore(tmp_path), options)
    second = train(stopped, tiny_data, RunStore(tmp_path), options)
    assert second.validation_loss == next(s.loss for s in first.validation_scores if s.step == stop)
    assert second.tokens == stop * whole.batch_tokens
    assert second.flops == expected_flops(stopped) < expected_flops(whole) == first.flops


def test_a_schedule_that_is_not_longer_than_the_run_is_rejected(make_spec: Callable[..., RunSpec]) -> None:
    for steps in (20, 21, 0, "many"):
        with pytest.raises(UsageError):
            override(make_spec("vanilla", steps=20), [f"stop_after={steps}"])
