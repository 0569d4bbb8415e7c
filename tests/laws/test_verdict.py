"""Verdicts in edge cases: flat arms, cancelling parameters, lack of fit, few runs; and their sentences."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, analyse, fit_compute
from steepen.laws.fits.compute_law import FitSettings, Method
from steepen.laws.fits.isoflop import fit_power_law
from steepen.laws.hypotheses.diagnostics import lack_of_fit
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    LadderPair,
    NestedFits,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_words,
)
from steepen.laws.ladder import Ladder, check_ladders, make_ladder
from steepen.laws.registered_forecasts import register_forecasts
from steepen.laws.table_selection import HoldOut
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.holdout import split_hold_outs
from steepen.laws.verdict.multipliers import fitted_multipliers
from steepen.laws.verdict.sensitivity import extend, separate_hypotheses

FLOPS = np.geomspace(3.25e17, 1.01e20, 8)
LONG = np.geomspace(1e16, 1e22, 12)
GAMMA = 0.1113


def law(flops: np.ndarray, e: float = 1.83, a: float = 1.5, gamma: float = GAMMA) -> np.ndarray:
    return e + a * (flops / 1e18) ** -gamma


def noisy(loss: np.ndarray, noise: float, seed: int) -> np.ndarray:
    return loss + noise * np.random.default_rng(seed).standard_normal(loss.shape)


def verdict(arm: np.ndarray, flops: np.ndarray = FLOPS, noise: float = 1e-3) -> Verdict:
    ladders = {
        "vanilla": make_ladder("vanilla", flops, noisy(law(flops), noise, 0)),
        "arm": make_ladder("arm", flops, noisy(arm, noise, 1)),
    }
    return analyse(ladders, AnalysisRequest("vanilla", draws=100)).verdicts["arm"]


def pair_of(flops: np.ndarray) -> LadderPair:
    x = np.log(np.tile(flops, 2) / np.exp(np.log(flops).mean()))
    return LadderPair(x, np.repeat([False, True], len(flops)), np.ones(len(x)))


@pytest.mark.parametrize("slope", [0.01, 0.0])
def test_arm_whose_loss_does_not_fall_has_no_multiplier(slope: float) -> None:
    found = verdict(3.2 + slope * np.log(FLOPS / FLOPS[0]))
    assert found.growth == "shrinks" and found.by_what is None
    assert math.isnan(found.multiplier)
    assert all(math.isnan(p.multiplier) for p in found.hypotheses["exponent"].predictions)
    assert "no multiplier" in found.sentence and "saves" not in found.sentence
    assert len(found.sentence) < 400, "no number of hundreds of digits"
    ladders = {
        "vanilla": make_ladder("vanilla", FLOPS, law(FLOPS)),
        "arm": make_ladder("arm", FLOPS, 3.2 + slope * np.log(FLOPS / FLOPS[0])),
    }
    fit = fit_compute(ladders, FitSettings("vanilla"))
    assert fitted_multipliers(fit, "arm", FLOPS, extrapolate=True) == []


@pytest.mark.parametrize(
    ("e", "gamma", "why", "crossing"),
    [
        # In units of 1e18: where the smaller exponent, or the higher E, has used up the smaller constant.
        (
            1.83,
            GAMMA - 0.002,
            "a higher irreducible loss with the same exponent is rejected",
            1.6 ** (GAMMA / 0.002),
        ),
        (1.833, GAMMA, "its irreducible loss is higher", (1.5 * (1 - 1.6**-GAMMA) / 0.003) ** (1 / GAMMA)),
    ],
)
def test_sentence_gives_the_crossing_of_a_shallower_arm_that_is_ahead(
    e: float, gamma: float, why: str, crossing: float
) -> None:
    found = verdict(law(LONG, e, 1.5 * 1.6**-GAMMA, gamma), LONG, 1e-5)
    assert found.growth == "shrinks" and found.multiplier > 1
    assert why in found.sentence and "still saves compute" in found.sentence
    (where,) = re.findall(r"the saving is gone at (\S+) FLOPs", found.sentence)
    assert math.log(float(where) / 1e18) == pytest.approx(math.log(crossing), rel=0.02)


def test_sentence_gives_both_crossings_when_both_hypotheses_hold() -> None:
    found = verdict(law(FLOPS, a=1.5 * 1.2**-GAMMA, gamma=0.109))
    assert found.growth == "shrinks"
    assert min(found.p_exponent_hypothesis, found.p_irreducible_hypothesis) > 0.05
    for name, words in (("exponent", "exponent"), ("irreducible", "irreducible-loss")):
        (where,) = re.findall(rf"at (\S+) FLOPs \({words} hypothesis\)", found.sentence)
        x = math.log(float(where) / found.c0)
        fit = found.hypotheses[name]  # type: ignore[index]
        losses = [e + math.exp(a - g * x) for e, a, g in zip(fit.e, fit.log_a, fit.gamma, strict=True)]
        assert float(where) > FLOPS[-1]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_no_crossing_is_given_when_both_hypotheses_are_rejected() -> None:
    """With a lower E and a smaller exponent, an arm falls behind within the ladder, not far beyond it."""
    found = verdict(law(LONG, 1.75, 1.4, 0.095), LONG)
    assert found.growth == "shrinks" and found.multiplier > 1
    assert found.leading == "free" and "gone" not in found.sentence
    assert f"Δγ = {found.delta_gamma_free:+.4f}" in found.sentence


def test_equal_losses_give_no_difference() -> None:
    flat = {name: make_ladder(name, FLOPS, np.full(8, 3.0)) for name in ("vanilla", "arm")}
    found = analyse(flat, AnalysisRequest("vanilla", method="joint", draws=100)).verdicts["arm"]
    assert found.word == "undecided" and "No difference" in found.sentence
    assert math.isnan(found.multiplier) and "no multiplier" in found.sentence


def test_e_and_gamma_that_cancel_are_not_a_constant_gain() -> None:
    """The multiplier is 17 at the lowest rung and 34 at 1e23, though with one E the slopes seem equal."""
    arm = law(FLOPS, 1.83 - 0.235, 1.35, GAMMA - 0.02)
    pair, rule = pair_of(FLOPS), DecisionRule()
    y = noisy(np.tile(np.concatenate([law(FLOPS), arm]), (500, 1)), 1e-3, 2)
    words = verdict_words(f_test_hypotheses(fit_hypotheses(pair, y, rule), rule), rule)
    assert np.mean(words == "constant") < 0.05
    found = verdict(arm)
    assert found.word == "undecided" and "one irreducible loss for both is rejected" in found.sentence


def test_delta_gamma_free_is_quoted_when_e_and_gamma_both_differ() -> None:
    inside = 0
    for seed in range(10):
        ladders = {
            "vanilla": make_ladder("vanilla", LONG, noisy(law(LONG), 1e-3, 2 * seed)),
            "arm": make_ladder("arm", LONG, noisy(law(LONG, 1.88, 1.5, 0.14), 1e-3, 2 * seed + 1)),
        }
        found = analyse(ladders, AnalysisRequest("vanilla", draws=100)).verdicts["arm"]
        low, high = found.delta_gamma_free_interval
        inside += low < 0.14 - GAMMA < high
        assert found.word == "grows: exponent" and found.leading == "free"
        assert "despite a higher irreducible loss" in found.sentence
        assert f"{found.delta_gamma_free:+.4f}" in found.sentence
        assert f"{found.delta_e_free:+.4f}" in found.sentence
    assert inside >= 8, "of 10, at 95%"


def test_rejected_hypotheses_are_neither_extrapolated_nor_drawn(tmp_path: Path) -> None:
    """With E + 0.05 and γ + 0.02 a law with one E, or one γ, gives 13.6 and 1,576 at 1e28, not 0.53."""
    truth = law(np.append(LONG, 1e28), 1.88, 1.5 * 1.3**-0.1313, 0.1313)
    ladders = {
        "vanilla": make_ladder("vanilla", LONG, noisy(law(LONG), 1e-3, 0)),
        "arm": make_ladder("arm", LONG, noisy(truth[:-1], 1e-3, 1)),
    }
    kept, held = split_hold_outs(ladders, [HoldOut("", "arm", 5e21)])
    request = AnalysisRequest("vanilla", method="joint", draws=200, budget=1e28, extrapolate=True)
    found = analyse(kept, request, held)
    arm = found.verdicts["arm"]
    detail = arm.to_dict()["hypotheses"]
    assert not detail["exponent"]["predictions"] and not detail["irreducible"]["predictions"]
    (_, _, last) = detail["free"]["predictions"]
    assert last["multiplier_interval"][0] < 0.53 < last["multiplier_interval"][1]
    drawn = [m for m in found.multipliers["arm"] if m.leads]
    assert {m.method for m in drawn} == {"fitted (free E and γ)"}
    assert max(m.value for m in drawn) < 4, "the curve rises to 2.8, then falls"
    beyond = [m for m in drawn if m.flops > 1e23]
    assert len(beyond) > 5 and all(m.low < m.value < m.high for m in beyond), "a curve with its band"
    assert abs(found.drawn_law("arm").predict(1e28) - truth[-1]) < 0.01
    (out,) = found.hold_out
    assert out.own_law and abs(out.error_in_standard_errors) < 3
    registered = register_forecasts(tmp_path / "forecasts.jsonl", found, kept, 1e28)
    assert abs(next(one for one in registered if one.arm == "arm").forecast - truth[-1]) < 0.01
    assert abs(found.primary_fit.arms["arm"].predict(1e28) - truth[-1]) > 0.01, "the law with one E is off"


def test_arm_that_rises_has_no_growth_per_decade() -> None:
    found = verdict(3 + 0.8 * (LONG / 1e18) ** 0.01, LONG)
    assert found.growth == "shrinks" and math.isnan(found.growth_per_decade)
    assert "×0.000" not in found.sentence and "unknown" not in found.sentence


def three_arms(
    more: float = 0.0, seeds: int = 3, rng: np.random.Generator | None = None
) -> dict[str, Ladder]:
    """Three laws with one E, with noise where there is an `rng`; their exponents rise by `more` in the
    middle of the ladder, which no E compensates.
    """
    bend = np.maximum(FLOPS / np.exp(np.log(FLOPS).mean()), 1.0) ** -more
    ladders: dict[str, Ladder] = {}
    for name, (a, gamma) in {"v": (1.5, 0.111), "w": (1.45, 0.114), "x": (1.4, 0.116)}.items():
        loss = np.repeat(1.83 + law(FLOPS, 0.0, a, gamma) * bend, seeds)
        if rng is not None:
            loss = loss + 1e-3 * rng.standard_normal(len(loss))
        ladders[name] = make_ladder(name, np.repeat(FLOPS, seeds), loss)
    return ladders


def lack(ladders: dict[str, Ladder], method: Method = "paper") -> float:
    p = lack_of_fit(ladders, fit_compute(ladders, FitSettings("v", method=method)))
    assert p is not None
    return p


def test_lack_of_fit_test_holds_its_level() -> None:
    rng = np.random.default_rng(3)
    drawn = [three_arms(rng=rng) for _ in range(160)]
    values = np.array([lack(ladders) for ladders in drawn])
    # 5% + three standard errors; around the paper's laws it would be 12%.
    assert 0 < np.mean(values < 0.05) <= 0.102
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert [lack(ladders, "joint") for ladders in drawn[:10]] == pytest.approx(values[:10], rel=1e-6)


def test_lack_of_fit_test_has_the_power_of_the_noncentral_f() -> None:
    """Exponents that rise by .005 halfway: no loss deviates by more than twice the noise of a rung."""
    clean = three_arms(0.005, seeds=1)
    law_of = fit_compute(clean, FitSettings("v")).arms
    left = [ladder.loss - law_of[name].predict(FLOPS) for name, ladder in clean.items()]
    assert np.abs(left).max() < 2 * 1e-3 / math.sqrt(3)
    foreseen = float(
        stats.ncf.sf(stats.f.isf(0.05, 17, 48), 17, 48, 3 * float(np.square(left).sum()) / 1e-3**2)
    )
    assert foreseen > 0.8
    rng = np.random.default_rng(4)
    found = np.mean([lack(three_arms(0.005, rng=rng)) < 0.05 for _ in range(100)])
    assert found == pytest.approx(foreseen, abs=0.10), "three standard errors"


def test_paper_method_intervals_cover_when_residuals_exceed_delta() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(300):
        ladder = make_ladder("v", FLOPS, law(FLOPS) + 1e-2 * rng.standard_normal(8))
        low, high = fit_compute({"v": ladder}, FitSettings("v", method="paper")).arms["v"].gamma.unconditional
        hits += low < GAMMA < high
    assert 0.85 <= hits / 300 <= 0.96


def test_known_noise_sets_the_paper_methods_intervals() -> None:
    ladders = {
        "v": make_ladder("v", FLOPS, noisy(law(FLOPS), 1e-3, 5)),
        "w": make_ladder("w", FLOPS, noisy(law(FLOPS, a=1.4), 1e-3, 6)),
    }
    wide, narrow = (
        fit_compute(ladders, FitSettings("v", method="paper", noise=noise)) for noise in (1e-2, 1e-3)
    )
    assert wide.sigma == pytest.approx(1e-2) and math.isinf(wide.degrees_of_freedom)
    for name in ladders:
        for kind in ("conditional", "unconditional"):
            ends = [getattr(fit.arms[name].gamma, kind) for fit in (wide, narrow)]
            assert np.ptp(ends[0]) == pytest.approx(10 * np.ptp(ends[1]), rel=0.01)


@pytest.mark.parametrize(("reference", "arm"), [(5, 4), (8, 8)])
def test_seeds_and_rungs_factors_reach_the_power_they_promise(reference: int, arm: int) -> None:
    rule, noise = DecisionRule(), 1e-3
    flops = [np.geomspace(3.25e17, 1.01e20, count) for count in (reference, arm)]
    c0 = float(np.exp(np.log(flops[0]).mean()))

    def truth_at(flops: list[np.ndarray]) -> tuple[LadderPair, np.ndarray]:
        counts = [len(part) for part in flops]
        x = np.log(np.concatenate(flops) / c0)
        loss = [law(flops[0]), law(flops[1], a=1.5 * 1.3**-0.1168, gamma=0.1168)]
        return LadderPair(x, np.repeat([False, True], counts), np.ones(sum(counts))), np.concatenate(loss)

    def power(flops: list[np.ndarray], noise: float) -> float:
        """Power to reject the irreducible-loss hypothesis when the exponent differs."""
        pair, truth = truth_at(flops)
        y = noisy(np.tile(truth, (600, 1)), noise, 7)
        tests = f_test_hypotheses(
            fit_hypotheses(pair, y, rule, warm_start=fit_hypotheses(pair, truth, rule)), rule
        )
        return float(np.mean(tests.p_irreducible_hypothesis < rule.level))

    pair, truth = truth_at(flops)
    separation = separate_hypotheses(scattered(fit_hypotheses(pair, truth, rule), noise), rule, c0)
    assert separation.rungs_factor is not None and separation.seeds_factor > 1
    assert power(flops, noise / math.sqrt(separation.seeds_factor)) > 0.8
    dense = [np.geomspace(part[0], part[-1], len(part) * int(separation.rungs_factor)) for part in flops]
    assert power(dense, noise) > 0.8
    assert power(flops, noise) < 0.8, "without them it would not"


def test_ladders_of_unequal_length_are_extended_to_the_same_compute() -> None:
    ends = [(0.0, 4.0, 5), (0.0, 8.0, 9)]
    x = np.concatenate([np.linspace(*end) for end in ends])
    pair = LadderPair(x, np.repeat([False, True], [5, 9]), np.ones(14))
    longer = extend(pair, 2.001 / math.log(10))
    for flag in (False, True):
        assert longer.x[longer.arm == flag].max() == pytest.approx(10.0)
    assert len(longer.x) == 22


def scattered(fits: NestedFits, noise: float) -> NestedFits:
    """The same fits with this noise variance, on which the predicted power depends."""
    solutions = {
        name: replace(solution, objective=noise**2 * fits.degrees_of_freedom(name))
        for name, solution in fits.solutions.items()
    }
    return replace(fits, solutions=solutions)


def test_runs_needed_for_a_constant_verdict_are_given_only_where_finite() -> None:
    seen: set[str] = set()
    for gain, noise in ((0.0, 1e-2), (0.0, 1.5e-2), (0.002, 1.5e-2)):
        found = verdict(law(FLOPS, a=1.5 * 1.08**-GAMMA, gamma=GAMMA + gain), noise=noise)
        assert found.word == "undecided"
        room = found.rule.margin * found.hypotheses["exponent"].gamma[0] - abs(found.delta_gamma)
        low, high = found.equivalence_interval
        times = (0.5 * (high - low) / room) ** 2
        said = " ".join(found.what_would_change)
        kind = "none" if room <= 0 else "many" if times >= 100 else "some"
        assert ("inside the margin" in said) == (kind == "some"), (kind, times, said)
        assert ("are not enough" in said) == (kind == "many"), (kind, times, said)
        if kind == "some":
            assert f"about {math.ceil(10 * times) / 10:.3g} times the runs" in said
        seen.add(kind)
    assert seen == {"some", "many", "none"}


def test_no_drift_is_alleged_where_delta_gamma_is_inside_the_margin() -> None:
    """One law for both is rejected, but neither the constants nor the slopes alone differ significantly."""
    flops = np.geomspace(3e17, 1e20, 8)
    errors = 1e-3 * np.random.default_rng(1036).standard_normal((2, 8))
    ladders = {
        "vanilla": make_ladder("vanilla", flops, law(flops) + errors[0]),
        "arm": make_ladder("arm", flops, law(flops * 1.007) + errors[1]),
    }
    found = analyse(ladders, AnalysisRequest("vanilla", draws=100)).verdicts["arm"]
    assert found.p_difference < 0.05 <= min(found.p_shift, found.p_slope)
    assert (
        max(map(abs, found.equivalence_interval)) < found.rule.margin * found.hypotheses["exponent"].gamma[0]
    )
    assert "a drift beyond" not in found.sentence
    assert f"neither a constant gain (p = {found.p_shift:.2g}) nor a difference" in found.sentence


def test_runs_of_the_same_compute_are_seeds_of_a_rung() -> None:
    ladder = make_ladder("v", np.array([2e18, 1e18, 2e18]), np.array([2.0, 3.0, 2.2]))
    assert ladder.flops.tolist() == [1e18, 2e18]
    assert ladder.loss.tolist() == pytest.approx([3.0, 2.1]) and ladder.seeds.tolist() == [1, 2]
    with pytest.raises(UsageError, match="only 1 rung"):
        check_ladders({"v": make_ladder("v", np.full(6, 1e18), np.full(6, 3.0))}, "v")


@pytest.mark.parametrize("count", [3, 4, 6])
def test_detectable_exponent_has_80_percent_power(count: int) -> None:
    x = np.geomspace(1, 100, count)
    line = fit_power_law(x, np.exp(noisy(0.5 * np.log(x), 0.1, count)))
    freedom = count - 2
    critical, strength = stats.f.ppf(0.95, 1, freedom), (line.detectable / line.standard_error) ** 2
    assert stats.ncf.sf(critical, 1, freedom, strength) == pytest.approx(0.8, abs=1e-3)


def test_a_verdict_has_a_short_repr_and_an_interval_without_nan() -> None:
    flops = np.geomspace(1e17, 1e20, 4)
    noise = np.array([0.03, -0.03, 0.02, -0.02])
    ladders = {
        "vanilla": make_ladder("vanilla", flops, 1.8 + 1.4 * (flops / 1e18) ** -0.1 + noise),
        "mine": make_ladder("mine", flops, 1.8 + 1.4 * (flops / 1e18) ** -0.1 - noise),
    }
    found = analyse(ladders, AnalysisRequest("vanilla", draws=100)).verdicts["mine"]
    assert repr(found) == f"<mine against vanilla: {found.marked_word}>"
    assert not any(math.isnan(end) for end in found.growth_per_decade_interval)
