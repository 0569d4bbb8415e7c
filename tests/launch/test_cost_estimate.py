"""Cost of runs before they start: speed from finished runs, and makespan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from steepen.launch.cost_estimate import Speed, makespan
from steepen.runs.spec import RunSpec, expected_flops, is_light

Spec = Callable[..., RunSpec]


def test_speed_comes_from_finished_runs_of_similar_size_else_is_assumed(
    spec: Spec, trainer: ModuleType
) -> None:
    small, large = spec(1), spec(2, depth=6)
    slow = trainer.record_of(small, seconds_training=10.0, seconds_total=10.0)
    quick = trainer.record_of(large, seconds_training=20.0, seconds_total=20.0)
    speed = Speed.from_records([slow, slow, slow, quick, quick, quick])
    # Each size at the pace of its own kind.
    assert speed.seconds(small) == pytest.approx(10 + 5) and speed.seconds(large) == pytest.approx(20 + 5)
    assert Speed.from_records([slow], device="another machine").samples == ()
    assert "H100" in Speed.from_records([slow], gpu="h100", mfu=0.5).assumption
    assert Speed.from_records([], device="NVIDIA H200").assumed_flops_per_second == pytest.approx(
        0.4 * 989.4e12
    )


def test_small_runs_reach_less_of_a_gpus_peak(spec: Spec) -> None:
    assumed, light, heavy = Speed.from_records([], gpu="h200"), spec(1), spec(1, depth=6, batch_tokens=2**26)
    assert not is_light(heavy) and is_light(light)
    for one, mfu in ((light, 0.15), (heavy, 0.4)):
        assert assumed.seconds(one) == pytest.approx(expected_flops(one) / (mfu * 989.4e12) + 5)
    assert assumed.source([heavy]) == "assuming 40% of the peak of one H200"
    assert assumed.source([heavy, light]) == "assuming 40% of the peak of one H200, 15% for small runs"
    given = Speed.from_records([], gpu="h200", mfu=0.3)
    assert given.seconds(light) == pytest.approx(expected_flops(light) / (0.3 * 989.4e12) + 5)


def test_runs_of_another_precision_say_nothing_about_the_speed(spec: Spec, trainer: ModuleType) -> None:
    wanted = spec(1)
    other = trainer.record_of(replace(wanted, precision="bf16"), seconds_training=1e6, seconds_total=1e6)
    speed = Speed.from_records([other])
    assert wanted.precision == "fp32"
    assert speed.seconds(wanted) == Speed.from_records([]).seconds(wanted)
    assert speed.source([wanted]).endswith("as no run of this precision is measured yet")
    assert speed.seconds(other.spec) == pytest.approx(1e6 + 5)
    assert speed.source([other.spec]) == "measured on 1 finished run"


def test_makespan_starts_runs_in_order_on_the_first_free_slot() -> None:
    assert makespan([3, 1, 1, 1], 2) == 3 and makespan([], 2) == 0 and makespan([2, 2], 1) == 4
