"""Choosing further runs, and ladders that are run until their question is decided."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.looks import Looks, needed_information
from steepen.laws.next_runs import (
    Forecast,
    Offer,
    Suspect,
    choose_next,
    open_arm,
    settling_chance,
    table_offers,
)
from steepen.laws.stopping import Stopping, StoppingRule
from steepen.requests.app import main

FLOPS = np.geomspace(1e18, 1e20, 8)


def rows(
    growth: float = 0.0, multiplier: float = 1.1, *, noise: float = 2e-3, seeds: int = 2, arms: int = 1,
    flops: Any = FLOPS, seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs of a reference and arms whose exponent is larger by `growth`."""
    rng = np.random.default_rng(seed)
    laws = {"base": (1.5, 0.11)} | {f"arm-{i}": (1.5 * multiplier**-0.11, 0.11 + growth) for i in range(arms)}
    return [
        {"arm": arm, "flops": c, "seed": k,
         "loss": 1.8 + a * (c / 1e18) ** -gamma + noise * rng.standard_normal()}
        for arm, (a, gamma) in laws.items() for c in flops for k in range(seeds)
    ]  # fmt: skip


def judge_of(table: list[dict[str, Any]]) -> Any:
    found: Any = steepen.fit(table, reference="base", method="joint", draws=100)
    return found.analysis.judge


def test_looks_spend_the_level_and_no_more_whatever_the_information() -> None:
    rng = np.random.default_rng(1)
    for plan in ([0.2, 0.4, 0.6, 0.8, 1.0], [0.5, 1.0], [0.1, 0.3, 0.35, 0.9, 1.2]):
        looks = Looks(1.0)
        nominal = [looks.look(t, 0.05) for t in plan]
        steps = np.sqrt(np.diff([0.0, *plan]))
        sums = np.cumsum(rng.standard_normal((100_000, len(plan))) * steps, axis=1)
        found = (np.abs(sums) / np.sqrt(plan) > looks.critical).any(axis=1).mean()
        assert found == pytest.approx(0.05, abs=0.003)
        assert looks.spent == pytest.approx(0.05, abs=1e-6) and max(nominal) <= 0.05


def test_information_that_does_not_grow_spends_nothing_and_the_last_look_spends_the_rest() -> None:
    looks = Looks(1.0)
    assert looks.look(0.5, 0.05) > 0
    assert looks.look(0.3, 0.05) == 0.0 and looks.information == [0.5, 0.5]
    assert looks.look(0.6, 0.05, last=True) > 0 and looks.spent == pytest.approx(0.05, abs=1e-6)


def test_the_p_value_of_a_late_look_counts_the_earlier_ones() -> None:
    looks = Looks(1.0)
    looks.look(0.5, 0.05)
    assert looks.p_value(0.001) == pytest.approx(0.001, rel=1e-2), "one look is a fixed sample"
    at_first = looks.spent
    last = looks.look(1.0, 0.05)
    assert looks.p_value(last) == pytest.approx(0.05, abs=1e-6)
    assert at_first < looks.p_value(1e-9) < looks.p_value(0.01) < looks.p_value(0.5) <= 1


def test_needed_information_is_that_of_the_textbook() -> None:
    assert needed_information(0.5, 0.05, 0.9) == pytest.approx((1.959964 + 1.281552) ** 2 / 0.25, rel=1e-5)


def test_predicted_information_is_what_the_runs_then_bring() -> None:
    """The forecast of doubling all seeds, against the fit of a table with twice the seeds."""
    before, after = (judge_of(rows(seeds=n, seed=4)) for n in (2, 4))
    now, then = (open_arm(judge, "arm-0", "grows") for judge in (before, after))
    assert now is not None and then is not None
    offers = [Offer(arm, float(c), 1.0, 2, new_rung=False) for arm in ("base", "arm-0") for c in FLOPS]
    path = Forecast(before, [now], offers).path()
    assert len(path) == 32
    assert float(path[-1].information[0]) == pytest.approx(then.information, rel=0.5)
    gains = np.diff([now.information, *(float(step.information[0]) for step in path)])
    assert (gains >= 0).all()


def test_by_what_a_gain_grows_is_told_by_what_the_runs_then_bring() -> None:
    """The forecast of doubling all seeds and four rungs above, against the fit of a table that has them."""
    high = np.concatenate([FLOPS, FLOPS[-1] * 3.0 ** np.arange(1, 5)])
    before, after = judge_of(rows(0.02, seeds=2, seed=4)), judge_of(rows(0.02, seeds=4, seed=4, flops=high))
    now, then = (open_arm(judge, "arm-0", "by-what") for judge in (before, after))
    assert now is not None and then is not None
    offers = [Offer(arm, float(c), 1.0, 4 if c > FLOPS[-1] else 2) for arm in ("base", "arm-0") for c in high]
    path = Forecast(before, [now], offers).path()
    reached = float(path[-1].information[0])
    assert len(path) == 64 and reached == pytest.approx(then.information, rel=0.5)
    assert reached > 4 * now.information
    chances = [settling_chance(now, "by-what", one, 0.05) for one in (now.information, reached)]
    assert 0.02 < chances[0] < chances[1] <= 1
    slope = open_arm(before, "arm-0", "grows")
    assert slope is not None and slope.information > 4 * now.information, "E and γ are hard to tell apart"


def test_by_what_is_asked_of_gains_that_grow() -> None:
    with pytest.raises(UsageError, match="none is shown to"):
        steepen.next_runs(rows(0.0), reference="base", question="by-what")
    found = steepen.next_runs(rows(0.01, arms=2), reference="base", question="by-what").found
    assert {one.word for one in found.arms} <= {"exponent", "irreducible loss", "both", "either"}
    open_ = steepen.next_runs(rows(0.01, seeds=1), reference="base", question="by-what")
    assert open_.found.arms[0].word == "either" and open_.rows
    assert open_.found.arms[0].chances[0] <= open_.found.arms[0].reachable < 0.95
    sure = steepen.next_runs(
        rows(0.03, noise=2e-4, flops=np.geomspace(1e16, 1e22, 13)), reference="base", question="by-what"
    )
    assert sure.found.arms[0].word == "exponent" and sure.advice == "settled"


def test_the_ranking_prefers_cheap_runs_until_they_tell_little() -> None:
    """Of two seeds that tell about the same, the cheaper one; of free runs, the one that tells more."""
    judge = judge_of(rows(0.004, seeds=1))
    one = open_arm(judge, "arm-0", "grows")
    assert one is not None
    ends = [Offer("arm-0", float(c), cost) for c, cost in ((FLOPS[0], 1.0), (FLOPS[3], 1.0))]
    forecast = Forecast(judge, [one], ends)
    free = forecast.after_each()[:, 0]
    assert free[0] > free[1], "a run at the end of a ladder says more about its slope than one in the middle"
    ranked = choose_next(
        judge, "grows", table_offers(judge, ["arm-0"]), words={"arm-0": "undecided"}, levels={"arm-0": 0.05}
    ).ranked
    assert ranked[0].gain_per_cost == 1 and ranked[0].flops < 1e19
    rates = [run.gain / run.cost for run in ranked]
    assert rates == sorted(rates, reverse=True)


def test_a_rung_that_may_be_mistuned_comes_before_further_runs() -> None:
    judge = judge_of(rows())
    found = choose_next(
        judge, "grows", table_offers(judge, ["arm-0"]), words={"arm-0": "undecided"},
        levels={"arm-0": 0.05}, budget=1e20,
        suspects=[
            Suspect("arm-0", 1e20, "off the collapse", 1e20, rates=(0.5,)),
            Suspect("arm-0", 1e19, "still decaying", 1e19),
            Suspect("arm-0", 1e20, "too dear", 2e20, rates=(0.5, 2.0)),
        ],
    )  # fmt: skip
    assert [(one.what, one.reason) for one in found.ranked[:3]] == [
        ("sweep", "off the collapse"), ("finish", "still decaying"), ("run", "")
    ]  # fmt: skip
    assert found.ranked[0].rates == (0.5,)


def test_next_settles_goes_on_or_gives_up() -> None:
    settled = steepen.next_runs(rows(0.02), reference="base")
    assert settled.advice == "settled" and not settled.rows
    going = steepen.next_runs(rows(0.002, noise=0.01), reference="base")
    assert going.advice == "go on" and going.rows
    (outlook,) = going.found.arms
    assert 0 <= outlook.chances[0] <= outlook.chances[1] <= outlook.chances[2] <= outlook.reachable <= 1
    assert outlook.to_end > 0 and going.to_dict()["advice"] == "go on"
    hopeless = steepen.next_runs(
        rows(0.0005, noise=0.03, seeds=3), reference="base", budget=1e18, highest=1e20
    )
    assert hopeless.advice == "not worth going on"
    assert "Not worth going on" in str(hopeless)


def test_ladders_of_whole_depths_are_offered_whole_depths_at_their_compute() -> None:
    sizes = {round((c / 1e18) ** 0.4 * 6): float(c) for c in FLOPS}
    depths = {c: depth for depth, c in sizes.items()}
    table = [{**row, "depth": depths[row["flops"]]} for row in rows(0.002, noise=0.01)]
    ranked = steepen.next_runs(table, reference="base").rows
    new = [run for run in ranked if run.new_rung]
    assert new and all(run.depth is not None for run in ranked)
    for run in new:
        assert run.depth is not None and run.depth not in sizes
        assert run.flops == pytest.approx(1e18 * (run.depth / 6) ** 2.5, rel=0.1)
    assert "another seed" in str(steepen.next_runs(table, reference="base"))
    clash = [
        {**row, "depth": 6} for row in table
    ]  # one depth, several budgets: compute alone tells them apart
    assert all(run.depth is None for run in steepen.next_runs(clash, reference="base").rows)


def test_next_counts_hours_dollars_and_a_budget() -> None:
    table = [{**row, "hours": (row["flops"] / 1e18) ** 0.9} for row in rows(0.002, noise=0.01)]
    hours = steepen.next_runs(table, reference="base", per="hours", budget=100)
    assert hours.found.unit == "hours" and hours.rows
    for row in hours.rows:
        assert row.cost == pytest.approx((row.flops / 1e18) ** 0.9, rel=1e-6) and row.cost <= 100
    dollars = steepen.next_runs(table, reference="base", per="dollars", dollars_per_hour=2.0)
    assert dollars.rows[0].cost == pytest.approx(2 * (dollars.rows[0].flops / 1e18) ** 0.9, rel=1e-6)
    with pytest.raises(UsageError, match="no column hours"):
        steepen.next_runs(rows(), reference="base", per="hours")
    with pytest.raises(UsageError, match="dollars_per_hour"):
        steepen.next_runs(table, reference="base", per="dollars")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([row for row in rows() if row["arm"] == "base"], "no arm can be judged"),
        (rows(flops=FLOPS[:2]), "at least"),
        ([{**row, "loss": float("nan")} for row in rows()], "loss"),
        ([row | {"flops": row["flops"] * (1 if row["arm"] == "base" else 1e6)} for row in rows()], "overlap"),
    ],
)  # fmt: skip
def test_next_refuses_tables_that_say_nothing(table: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        steepen.next_runs(table, reference="base")


def test_next_answers_for_strange_tables() -> None:
    equal = [{**row, "loss": 1.8 + (row["flops"] / 1e18) ** -0.11} for row in rows()]  # no noise at all
    diverged = [*rows(0.002), {"arm": "arm-0", "flops": 3e19, "seed": 9, "loss": 9.0}]
    close = [{**row, "flops": row["flops"] * (1 + 1e-4 * row["seed"])} for row in rows()]
    for table in (equal, diverged, close):
        found = steepen.next_runs(table, reference="base")
        assert found.advice in ("settled", "go on", "not worth going on")
        json.dumps(found.to_dict(), allow_nan=True)


def test_next_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(found_csv(rows(0.002, arms=2, noise=3e-3)))
    assert main(["next", str(path), "--reference", "base"]) == 0
    assert "Chance of an answer" in capsys.readouterr().out
    assert main(["next", str(path), "--reference", "base", "--arm", "arm-7"]) == 2


def found_csv(table: list[dict[str, Any]]) -> str:
    head = list(table[0])
    return "\n".join([",".join(head), *(",".join(str(row[name]) for name in head) for row in table)])


def bought(
    rule: StoppingRule, loss: Callable[[str, float], float], seed: int = 0, arms: Sequence[str] = ("arm",)
) -> tuple[Stopping, float]:
    """A ladder that is run until it is decided, from four rungs with two seeds."""
    rng = np.random.default_rng(seed)
    runs: dict[str, list[tuple[float, float]]] = {"base": [], **{arm: [] for arm in arms}}

    def buy(arm: str, flops: float) -> None:
        runs[arm].append((flops, loss(arm, flops) + 2e-3 * rng.standard_normal()))

    for flops in FLOPS[:4].tolist():
        for arm in runs:
            buy(arm, flops)
            buy(arm, flops)
    stopping = Stopping(rule)
    while True:
        ladders: dict[str, Ladder] = {}
        for arm, own in runs.items():
            x, y = (np.array(part) for part in zip(*own, strict=True))
            ladders[arm] = make_ladder(arm, x, y)
        offers = [
            Offer(arm, c, c, 5 - have)
            for arm, own in runs.items() for c in FLOPS.tolist()
            if (have := sum(flops == c for flops, _ in own)) < 5
        ]  # fmt: skip
        spent = sum(flops for own in runs.values() for flops, _ in own)
        look = stopping.look(ladders, offers, spent)
        if not look.batch:
            return stopping, spent
        for offer in look.batch:
            buy(offer.arm, offer.flops)


def law(growth: float) -> Callable[[str, float], float]:
    return lambda arm, c: 1.8 + 1.5 * (c / 1e18) ** -(0.11 + growth * (arm == "arm"))


def test_a_ladder_stops_when_it_is_decided() -> None:
    stopping, spent = bought(StoppingRule("base", "grows", 1.05), law(0.02))
    end = stopping.closed["arm"]
    assert (end.word, end.closed) == ("grows", "decided") and end.p_value < 0.05
    assert end.interval[0] > 0, "the repeated interval excludes no growth"
    assert spent < 0.5 * 4 * FLOPS.sum()
    assert stopping.level("arm") < 0.05, "words of the last look are judged at what it may spend"
    verdict = stopping.verdicts()["arm"]
    assert (verdict.growth, verdict.slope.p_value) == (end.word, pytest.approx(end.p_fixed))
    assert verdict.slope.interval == pytest.approx(end.interval)


def test_every_verdict_is_that_of_the_look_that_closed_its_arm() -> None:
    """An arm decided late keeps the level of its look, whatever little an earlier look might spend."""
    rule = StoppingRule("base", "grows", 1.06)
    growth = {"base": 0.0, "steep": 0.03, "arm": 0.008}
    late = 0
    for seed in range(4):
        stopping, _ = bought(
            rule, lambda arm, c: 1.8 + 1.5 * (c / 1e18) ** -(0.11 + growth[arm]), seed, ("steep", "arm")
        )
        verdicts = stopping.verdicts()
        for name, end in stopping.closed.items():
            assert verdicts[name].growth == end.word
            assert verdicts[name].slope.p_value == pytest.approx(end.p_fixed)
            assert verdicts[name].levels == (stopping.level(name),) * 3
        steep, arm = stopping.closed["steep"], stopping.closed["arm"]
        late += arm.word == "grows" and steep.nominal < arm.p_fixed < arm.nominal
    assert late, "the level of the arm decided first would leave the other undecided"


def test_a_ladder_stops_for_the_budget_and_never_exceeds_it() -> None:
    start = 4 * float(FLOPS[:4].sum())
    rule = StoppingRule("base", "grows", 1.02, budget=1.5 * start, futility=0.0)
    stopping, spent = bought(rule, law(0.0004))
    assert spent <= 1.5 * start
    assert stopping.closed["arm"].closed in ("budget", "decided")
    small, same = bought(StoppingRule("base", "grows", 1.005, budget=1.1 * start), law(0.0))
    assert small.closed["arm"].closed == "out of reach" and same == pytest.approx(start), (
        "hopeless: nothing more is bought"
    )


def test_looks_are_the_same_for_the_same_runs() -> None:
    first, second = (bought(StoppingRule("base", "grows", 1.04), law(0.003), 7)[0] for _ in range(2))
    assert first.looks == second.looks and len(first.looks) >= 1
    assert [look.number for look in first.looks] == list(range(1, len(first.looks) + 1))
    fractions = [look.arms[0].fraction for look in first.looks]
    assert fractions == sorted(fractions) and all(math.isfinite(one) for one in fractions)


def ladders_of(table: list[dict[str, Any]]) -> dict[str, Ladder]:
    """The ladders of a table, by arm."""
    found: dict[str, Ladder] = {}
    for arm in {row["arm"]: None for row in table}:
        own = [(row["flops"], row["loss"]) for row in table if row["arm"] == arm]
        found[arm] = make_ladder(arm, *(np.array(part) for part in zip(*own, strict=True)))
    return found


def test_nothing_is_tested_before_enough_rungs_tell_the_noise() -> None:
    """The first batch are the cheapest new rungs, whatever the first runs say, for no more than they cost."""
    ladders = ladders_of(rows(0.05, flops=FLOPS[:4]))
    between = np.sqrt(FLOPS[1:] * FLOPS[:-1])
    offers = [
        Offer(arm, float(c), float(c), new_rung=False)
        for arm in ("base", "arm-0")
        for c in [*FLOPS, *between]
    ]
    spent = sum(float((one.flops * one.seeds).sum()) for one in ladders.values())
    stopping = Stopping(StoppingRule("base", "grows", 1.05))
    look = stopping.look(ladders, offers, spent)
    assert not stopping.closed and look.arms[0].nominal == 0 and look.arms[0].word == "undecided"
    costs = [one.cost for one in look.batch]
    assert costs == sorted(costs) and 0 < sum(costs) <= spent
    assert not {one.flops for one in look.batch} & set(FLOPS[:4].tolist())
    table = rows(0.05, flops=[*FLOPS[:4], *between[:4]])
    assert stopping.look(ladders_of(table), offers, spent).arms[0].nominal >= 0
    assert stopping.looks[1].arms[0].fraction > 0, "the second look tests"


def test_an_arm_that_is_decided_hands_its_level_on_at_the_same_look() -> None:
    """Holm: with two arms, the other is tested at twice the level once the first is decided."""
    low, high = 1.0, 1.6
    rule = StoppingRule("base", "better", 1.1)
    for _ in range(30):  # a multiplier whose p is between the two levels
        middle = (low + high) / 2
        table = [row for row in rows(0.0, 1.9, arms=2, noise=0.01, seed=3) if row["arm"] != "arm-1"]
        table += [
            {**row, "arm": "arm-1"} for row in rows(0.0, middle, noise=0.01, seed=4) if row["arm"] != "base"
        ]
        stopping = Stopping(rule)
        stopping.look(ladders_of(table), [], 1.0)
        second = stopping.closed["arm-1"]
        if 0.021 < second.p_fixed < 0.039 and second.estimate > 0:
            break
        low, high = (middle, high) if second.p_fixed > 0.039 or second.estimate < 0 else (low, middle)
    else:
        raise AssertionError("no multiplier has such a p-value")
    assert stopping.closed["arm-0"].word == second.word == "better"
    assert stopping.closed["arm-0"].nominal < second.p_fixed < second.nominal


@pytest.mark.parametrize("wrong", [{"question": "why"}, {"effect": 1.0}, {"budget": 0.0}])
def test_a_rule_rejects_what_cannot_be_asked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StoppingRule("base", **wrong)
