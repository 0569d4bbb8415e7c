"""Noise that the tests do not assume: unequal, correlated, off by a rung, misstated; and its consequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse, fit_compute
from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.hypotheses.bootstrap import residual_draws, seed_draws
from steepen.laws.hypotheses.diagnostics import lack_of_fit
from steepen.laws.hypotheses.judge_draws import DrawnAnswers, judge_draws
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    LadderPair,
    answer_questions,
    f_test_hypotheses,
    fit_hypotheses,
    paired_free_fit,
)
from steepen.laws.hypotheses.noise_checks import (
    scatter_p_value,
)
from steepen.laws.hypotheses.variance_components import rung_component_weights
from steepen.laws.ladder import Ladder, make_ladder, read_ladders
from steepen.laws.table import table_from
from steepen.laws.verdict.compare import compare
from steepen.laws.verdict.sensitivity import separate_hypotheses
from steepen.laws.verdict.sentences import verdict_sentence

FLOPS = np.array([3.252e17, 1.056e18, 2.925e18, 6.743e18, 1.4977e19, 3.060e19, 5.572e19, 1.0063e20])
RULE = DecisionRule()
SIGMA = 2e-3


def law(flops: np.ndarray, a: float = 1.5, gamma: float = 0.1113) -> np.ndarray:
    return 1.83 + a * (flops / 1e18) ** -gamma


def noise(kind: str, draws: int, seed: int = 0, sigma: float = SIGMA) -> np.ndarray:
    """(draws, 16) errors of a reference and an arm."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((draws, 2, 8))
    if kind == "lowest two rungs ×5":
        z[:, :, :2] *= 5
    if kind == "AR(0.8)":
        for i in range(1, 8):
            z[:, :, i] = 0.8 * z[:, :, i - 1] + 0.6 * z[:, :, i]
    errors = sigma * z.reshape(draws, 16)
    if kind.startswith("+0.03 at"):
        errors[:, {"reference's bottom": 0, "arm's bottom": 8, "arm's top": 15}[kind[9:]]] += 0.03
    return errors


def judged(arm: np.ndarray, kind: str, draws: int = 120, sigma: float = SIGMA) -> DrawnAnswers:
    """The answers about simulated ladders, with what the checks say about them."""
    pair = LadderPair(
        np.log(np.tile(FLOPS, 2) / np.exp(np.log(FLOPS).mean())), np.repeat([False, True], 8), np.ones(16)
    )
    truth = np.concatenate([law(FLOPS), arm])
    y = truth + noise(kind, draws, sigma=sigma)
    return judge_draws(pair, y, RULE, start=fit_hypotheses(pair, truth, RULE))


@pytest.mark.parametrize(
    ("kind", "least_squares"),
    [
        ("lowest two rungs ×5", 0.12),
        ("AR(0.8)", 0.4),
        ("+0.03 at reference's bottom", 0.6),
        ("+0.03 at arm's bottom", 0.6),
    ],
)
def test_false_claims_are_rare_under_noise_that_the_tests_do_not_assume(
    kind: str, least_squares: float
) -> None:
    found = judged(law(FLOPS), kind)
    assert np.mean(found.least_squares.growth != "undecided") > least_squares, "least squares alone is fooled"
    assert np.mean(found.claim) <= 0.08


@pytest.mark.parametrize("gamma", [0.1140, 0.1168])
def test_growth_of_the_papers_size_is_claimed_at_a_noise_of_0_001(gamma: float) -> None:
    found = judged(law(FLOPS, 1.5 * 1.12**-gamma, gamma), "independent", 60, 1e-3)
    assert np.mean(found.answers.growth == "grows") >= 0.99
    assert np.mean((found.answers.growth == "grows") & found.claim) >= 0.97


def test_growth_on_six_decades_is_claimed_at_a_noise_of_0_01() -> None:
    """Laws with one E tell independent from correlated errors; with separate E half the claims were lost."""
    flops = np.geomspace(1e16, 1e22, 12)
    pair = LadderPair(np.log(np.tile(flops, 2) / 1e19), np.repeat([False, True], 12), np.ones(24))
    truth = np.concatenate([law(flops), law(flops, 1.5 * 1.30**-0.1168, 0.1168)])
    y = truth + 0.01 * np.random.default_rng(3).standard_normal((100, 24))
    found = judge_draws(pair, y, RULE, start=fit_hypotheses(pair, truth, RULE))
    assert np.mean((found.answers.growth == "grows") & found.claim) >= 0.67


@pytest.mark.parametrize("where", ["reference's bottom", "arm's bottom", "arm's top"])
def test_outlier_is_left_out_so_that_growth_is_still_claimed(where: str) -> None:
    gain = law(FLOPS, 1.5 * 1.30**-0.1168, 0.1168)
    found = judged(gain, f"+0.03 at {where}", 60)
    assert np.mean((found.answers.growth == "grows") & found.claim) >= 0.9


def test_outlier_is_named_with_its_size_in_the_first_sentence_and_in_json() -> None:
    errors = noise("+0.03 at arm's top", 1)[0]
    found = analysed(errors, law(FLOPS, 1.5 * 1.30**-0.1168, 0.1168))
    verdict = found.verdicts["arm"]
    assert verdict.growth == "grows" and verdict.outlier is not None
    assert verdict.outlier.flops == FLOPS[-1] and abs(verdict.outlier.deviation - 0.03) < 0.01
    assert "without arm at 1e20 FLOPs" in verdict.sentence.split(". ")[0]
    assert verdict.to_dict()["outlier"]["arm"] == "arm"
    assert len(verdict.leave_one_out) == 15


def test_clean_ladders_seldom_lose_a_rung() -> None:
    found = judged(law(FLOPS), "independent", 300)
    assert np.mean(found.outlier >= 0) <= 0.03


def test_judged_draws_have_the_answers_of_measured_ladders() -> None:
    """`steepen power` counts what `steepen fit` would say: the same answers and the same claims."""
    arm = law(FLOPS, 1.5 * 1.12**-0.1140, 0.1140)
    for kind in ("independent", "lowest two rungs ×5", "+0.03 at arm's bottom"):
        found = judged(arm, kind, 3)
        for i, errors in enumerate(noise(kind, 3)):
            verdict = analysed(errors, arm).verdicts["arm"]
            assert verdict.growth == found.answers.growth[i]
            assert (verdict.by_what or "") == found.answers.by_what[i]
            assert verdict.claim == found.claim[i]


def analysed(errors: np.ndarray, arm: np.ndarray | None = None, **options: float) -> LadderAnalysis:
    losses = np.concatenate([law(FLOPS), law(FLOPS) if arm is None else arm]) + errors
    ladders = {
        "vanilla": make_ladder("vanilla", FLOPS, losses[:8]),
        "arm": make_ladder("arm", FLOPS, losses[8:]),
    }
    return analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=100, **options))  # type: ignore[arg-type]


def test_word_that_rests_on_one_rung_is_fragile_in_the_sentence_and_in_json() -> None:
    """An error of 0.015 at the arm's bottom rung looks like a gain that grows, and not like an outlier."""
    errors_off = noise("independent", 40)
    errors_off[:, 8] += 0.015
    for errors in errors_off:
        found = analysed(errors)
        verdict = found.verdicts["arm"]
        if verdict.growth == "grows":
            break
    else:
        pytest.fail("no draw was fooled")
    assert any("arm at 3.3e17 the" in reason and "'undecided'" in reason for reason in verdict.fragile)
    assert "(fragile, not a claim: " in verdict.sentence.split(". ")[0]
    row = found.to_dict()["arms"]["arm"]
    assert row["fragile"] == list(verdict.fragile) and row["claim"] is False
    assert verdict.to_dict()["claim"] is False


def test_failed_noise_check_makes_the_word_undecided_and_says_so() -> None:
    for errors in noise("lowest two rungs ×5", 60):
        found = analysed(errors)
        verdict = found.verdicts["arm"]
        if verdict.demoted is not None:
            break
    else:
        pytest.fail("no draw was demoted")
    assert verdict.growth == "undecided" and verdict.demoted.growth != "undecided"
    assert verdict.demoted.growth in verdict.sentence.split(". ")[0]
    assert found.to_dict()["arms"]["arm"]["growth"] == "undecided"
    (failed,) = [check for check in verdict.noise_checks if check.consequence == "undecided"]
    assert failed.kind == verdict.demoted.kind and failed.p_value < 0.05
    # Nothing "would make the verdict undecided", which it is, and no rung was left out under such noise.
    advice = " ".join(verdict.what_would_change)
    assert "make the verdict" not in advice and "leaving out" not in advice


def test_stated_noise_far_below_the_scatter_is_not_used() -> None:
    """Noise eight times too small made "shallower, p = 1.9e-41" of two equal laws."""
    errors = noise("independent", 3)[2]
    stated, estimated = analysed(errors, noise=SIGMA / 8).verdicts["arm"], analysed(errors).verdicts["arm"]
    assert stated.p_scatter < 1e-6 and "the scatter was used" in stated.sentence
    assert stated.p_slope == estimated.p_slope and stated.growth == estimated.growth
    # Nor by the fitted laws and the test of one E for all arms.
    fitted, plain = analysed(errors, noise=SIGMA / 8), analysed(errors)
    assert fitted.primary_fit.sigma == plain.primary_fit.sigma
    assert fitted.shared_irreducible_loss.p == plain.shared_irreducible_loss.p
    right = analysed(errors, noise=SIGMA).verdicts["arm"]
    assert right.p_scatter > 0.05 and right.sigma == SIGMA


def test_stated_noise_off_by_two_makes_few_false_words() -> None:
    pair = LadderPair(np.log(np.tile(FLOPS, 2) / 6e18), np.repeat([False, True], 8), np.ones(16))
    truth = np.tile(law(FLOPS), 2)
    y = truth + noise("independent", 400, seed=3)
    rule = replace(RULE, noise=SIGMA / 2)
    fits = fit_hypotheses(pair, y, rule, warm_start=fit_hypotheses(pair, truth, rule))
    stated = answer_questions(f_test_hypotheses(fits, rule), rule).growth
    scatter = answer_questions(f_test_hypotheses(fits, RULE), RULE).growth
    judged = np.where(scatter_p_value(fits, rule) < 0.05, scatter, stated)
    assert np.mean(stated != "undecided") > 0.3
    assert np.mean(judged != "undecided") <= 0.08


def test_robust_answer_is_in_the_first_sentence_where_it_differs() -> None:
    found = analysed(np.zeros(16), law(FLOPS, 1.4, 0.1113)).verdicts["arm"]
    assert found.robust_growth == found.growth and "robust" not in found.sentence
    verdict = replace(
        found, growth="grows", by_what="exponent", fragile=("a robust (Huber) fit says 'constant'",)
    )
    assert "robust (Huber) fit says 'constant'" in verdict_sentence(verdict).split(". ")[0]


def test_answer_that_nothing_could_check_is_no_claim() -> None:
    """Four and three rungs are too few for every check; above 200 points the noise models are left out."""
    errors = 1e-4 * np.random.default_rng(0).standard_normal(7)
    ladders = {
        "vanilla": make_ladder("vanilla", FLOPS[:4], law(FLOPS[:4]) + errors[:4]),
        "arm": make_ladder("arm", FLOPS[:3], law(FLOPS[:3] * 1.3) + errors[4:]),
    }
    found = analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=100)).verdicts["arm"]
    assert found.growth == "constant" and not found.claim
    assert "too few rungs to check the noise" in found.sentence.split(". ")[0]
    checked = analysed(np.zeros(16), law(FLOPS, 1.4, 0.1113)).verdicts["arm"]
    assert "not checked" not in checked.sentence
    assert "The noise was not checked" in verdict_sentence(replace(checked, noise_checks=()))


def table(rows: list[dict[str, object]]) -> dict[str, Ladder]:
    return read_ladders(table_from({name: [row[name] for row in rows] for name in rows[0]}))


def ladder_rows(errors: np.ndarray, **columns: np.ndarray) -> list[dict[str, object]]:
    """Rows of two equal laws with these (16,) errors and further columns."""
    return [
        {
            "arm": ("vanilla", "arm")[i // 8],
            "flops": float(FLOPS[i % 8]),
            "loss": float(law(FLOPS)[i % 8] + errors[i]),
            **{name: values[i] for name, values in columns.items()},
        }
        for i in range(16)
    ]


def test_loss_sd_and_weight_columns_are_precisions_of_the_losses() -> None:
    """Known noise of the lowest rungs restores the level that unequal noise destroys."""
    sd = np.tile([5.0, 5.0, 1, 1, 1, 1, 1, 1], 2) * SIGMA
    errors = noise("lowest two rungs ×5", 1)[0]
    by_sd = table(ladder_rows(errors, loss_sd=sd))
    by_weight = table(ladder_rows(errors, weight=7 / sd**2))
    for ladders in (by_sd, by_weight):
        assert ladders["vanilla"].weights.tolist() == pytest.approx([0.04, 0.04, 1, 1, 1, 1, 1, 1])
    first, second = (
        analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=100)).verdicts["arm"]
        for ladders in (by_sd, by_weight)
    )
    assert first.p_slope == pytest.approx(second.p_slope)
    known = np.tile([0.04, 0.04, 1, 1, 1, 1, 1, 1], 2)
    pair = LadderPair(np.log(np.tile(FLOPS, 2) / 6e18), np.repeat([False, True], 8), known)
    y = np.tile(law(FLOPS), 2) + noise("lowest two rungs ×5", 400)
    tests = f_test_hypotheses(fit_hypotheses(pair, y, RULE), RULE)
    assert np.mean(answer_questions(tests, RULE).growth != "undecided") <= 0.08
    with pytest.raises(UsageError, match="loss_sd and weight"):
        table(ladder_rows(errors, loss_sd=sd, weight=sd))


@pytest.mark.parametrize("noisy", [slice(0, 5), slice(5, 8)])
def test_lack_of_fit_test_holds_its_level_with_known_unequal_noise(noisy: slice) -> None:
    rng = np.random.default_rng(5)
    sd = np.full(8, 1e-3)
    sd[noisy] *= 10
    fit = fit_compute({name: make_ladder(name, FLOPS, law(FLOPS)) for name in ("a", "b")}, FitSettings("a"))
    found: list[float] = []
    for _ in range(40):
        rows = [
            {"arm": name, "flops": float(FLOPS[i]), "loss": float(law(FLOPS)[i] + sd[i] * z), "seed": k,
             "loss_sd": float(sd[i])}
            for name in ("a", "b") for k in range(3) for i, z in enumerate(rng.standard_normal(8))
        ]  # fmt: skip
        found.append(lack_of_fit(table(rows), fit) or 0.0)
    assert stats.kstest(found, "uniform").pvalue > 0.05


def test_bootstrap_over_seeds_is_about_the_fitted_loss() -> None:
    """Which is a weighted mean where the rows of a rung have different weights."""
    rows = [
        {"arm": "a", "flops": float(c), "loss": 3.0 + k, "seed": k, "weight": 4.0 if k else 1.0}
        for c in FLOPS
        for k in range(2)
    ]
    ladder = table(rows)["a"]
    drawn = seed_draws((ladder, ladder), 2000, np.random.default_rng(0))
    assert drawn is not None
    assert ladder.loss == pytest.approx(3.8)
    assert drawn.mean() == pytest.approx(3.8, abs=0.02)


def test_bootstrap_does_not_draw_the_residuals_of_a_ladder_without_any() -> None:
    """Three rungs have a law through each: its residuals of zero say nothing about the noise."""
    rungs = FLOPS[[0, 3, 7]]
    reference = make_ladder("vanilla", FLOPS, law(FLOPS) + noise("", 1)[0, :8])
    found = compare(reference, make_ladder("arm", rungs, law(rungs)), FitSettings("vanilla"), RULE)
    drawn = residual_draws(found.fits, found.y, RULE, 200, np.random.default_rng(0))[:, 8:] - law(rungs)
    assert len(np.unique(drawn.round(8))) == 8


def test_runs_within_one_percent_of_compute_are_one_rung() -> None:
    """Three seeds whose FLOPs differ by 0.01% and share a rung's error are not three independent rungs."""
    rng = np.random.default_rng(0)
    flops = np.concatenate([FLOPS * (1 + 1e-4 * k) for k in (-1, 0, 1)])
    ladder = make_ladder("v", flops, np.tile(law(FLOPS), 3) + 1e-3 * rng.standard_normal(24))
    assert ladder.flops == pytest.approx(FLOPS) and ladder.seeds.tolist() == [3.0] * 8
    apart = make_ladder("v", np.array([1e18, 1.011e18, 2e18]), np.array([3.0, 2.9, 2.8]))
    assert len(apart.flops) == 3


def test_rung_errors_do_not_let_many_seeds_outweigh_the_others() -> None:
    """Seeds 10, 5, 3, 2, 1 … with an error that the seeds of a rung share, as large as a seed's own."""
    seeds = np.array([10, 5, 3, 2, 1, 1, 1, 1])
    counts = np.tile(seeds, 2).astype(float)
    rng = np.random.default_rng(1)
    draws = 150
    y = np.tile(law(FLOPS), 2) + SIGMA * (
        rng.standard_normal((draws, 16)) + rng.standard_normal((draws, 16)) / np.sqrt(counts)
    )
    within = SIGMA**2 * rng.chisquare(2 * (seeds - 1).sum(), draws) / (2 * (seeds - 1).sum())
    x, arm = np.log(np.tile(FLOPS, 2) / 6e18), np.repeat([False, True], 8)
    pair = LadderPair(x, arm, np.ones(16))
    weights = rung_component_weights(pair.designs()["free"], x, y, counts, within)
    assert 1.2 < np.median(weights[:, 0]) < 3, "not ten: truly (1 + 1)/(1 + 0.1)"
    rates: list[float] = []
    for used in (np.broadcast_to(counts, y.shape), weights):
        tests = f_test_hypotheses(fit_hypotheses(pair, y, RULE, weights=used), RULE)
        rates.append(float(np.mean(answer_questions(tests, RULE).growth != "undecided")))
    assert rates[1] <= 0.09 < rates[0]


def test_rows_of_one_run_do_not_count_as_independent() -> None:
    """Two rows from each of eight runs per arm, with one error per run."""
    rng = np.random.default_rng(2)
    both = np.sort(np.concatenate([FLOPS, FLOPS * 1.05]))
    run = np.repeat(np.arange(8), 2)
    errors = {name: SIGMA * rng.standard_normal(8)[run] for name in ("vanilla", "arm")}
    rows = [
        {
            "arm": name,
            "flops": float(c),
            "loss": float(law(both)[i] + errors[name][i]),
            "run": f"{name}-{run[i]}",
        }
        for name in errors
        for i, c in enumerate(both)
    ]
    clustered = table(rows)
    ignored = {name: replace(ladder, clusters=()) for name, ladder in clustered.items()}
    found, naive = (
        analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=200)).verdicts["arm"]
        for ladders in (clustered, ignored)
    )
    assert np.ptp(found.delta_gamma_interval) > 1.3 * np.ptp(naive.delta_gamma_interval)
    assert np.ptp(found.bootstraps[0].delta_gamma) > 1.1 * np.ptp(naive.bootstraps[0].delta_gamma)
    assert found.p_slope > naive.p_slope


def test_rungs_that_share_a_run_are_one_cluster() -> None:
    """Four runs with a row at each rung, whose compute differs by less than 1%: any can be a rung's first."""
    rng = np.random.default_rng(3)
    rows = [
        {"arm": "vanilla", "flops": float(c * (1 + 0.003 * rng.random())), "loss": 3.0, "run": f"run {k}"}
        for k in range(4)
        for c in FLOPS
    ]
    assert len(set(table(rows)["vanilla"].clusters)) == 1
    # Rungs 0 to 3 are linked in a chain; 4 and 5 have runs of their own.
    chain = zip([0, 1, 1, 2, 2, 3, 4, 5], "aabbccde", strict=True)
    rows = [{"arm": "vanilla", "flops": float(FLOPS[i]), "loss": 3.0, "run": run} for i, run in chain]
    clusters = table(rows)["vanilla"].clusters
    assert len(set(clusters[:4])) == 1 and len(set(clusters)) == 3


def test_matching_seeds_are_paired_and_buy_power() -> None:
    """Noise of 0.004 that both arms share but for a tenth hides a growth that their differences show."""
    rng = np.random.default_rng(4)
    shared = 4e-3 * np.sqrt(0.95) * np.tile(rng.standard_normal(8), 2)
    errors = shared + 4e-3 * np.sqrt(0.05) * rng.standard_normal(16)
    errors[8:] += law(FLOPS, 1.5 * 1.12**-0.1140, 0.1140) - law(FLOPS)
    request = AnalysisRequest("vanilla", method="joint", draws=100)
    matched = table(ladder_rows(errors, seed=np.zeros(16, int)))
    apart = table(ladder_rows(errors, seed=np.repeat([0, 1], 8)))
    paired, unpaired = (analyse(ladders, request).verdicts["arm"] for ladders in (matched, apart))
    assert paired.paired and not unpaired.paired
    assert paired.growth == "grows" and paired.p_slope < 0.01 * unpaired.p_slope
    low, high = paired.delta_gamma_interval
    assert low < 0.1140 - 0.1113 < high and low > 0


@pytest.mark.parametrize(("cost", "missing"), [(1.0, 0), (1.2, 0), (1.0, 1)])
def test_pairs_stay_together_when_a_rung_is_left_out(cost: float, missing: int) -> None:
    """Also where the arm's runs take more compute, and where it lacks the lowest rung."""
    rng = np.random.default_rng(4)
    flops = np.geomspace(3e17, 1e20, 12)
    own_flops, shared = flops[missing:] * cost, 4e-3 * rng.standard_normal(12)
    loss = law(flops) + shared + 4e-4 * rng.standard_normal(12)
    own_loss = law(own_flops * 1.1) + shared[missing:] + 4e-4 * rng.standard_normal(12 - missing)
    loss[4] += 0.2
    rows: list[dict[str, object]] = [
        {"arm": name, "flops": float(c), "loss": float(y), "seed": 0}
        for name, at, losses in (("vanilla", flops, loss), ("arm", own_flops, own_loss))
        for c, y in zip(at, losses, strict=True)
    ]
    ladders = table(rows)
    found = compare(ladders["vanilla"], ladders["arm"], FitSettings("vanilla"), RULE)
    assert found.outlier is not None and found.outlier.flops == pytest.approx(flops[4])
    partners = found.fits.pair.partners
    assert partners is not None and len(partners[0]) == 11 - missing
    assert np.ptp(np.diff(found.fits.pair.x[np.array(partners)], axis=0)) == pytest.approx(0, abs=1e-9)


def test_paired_tests_hold_their_level() -> None:
    rng = np.random.default_rng(5)
    partners = (np.arange(8), np.arange(8, 16))
    pair = LadderPair(
        np.log(np.tile(FLOPS, 2) / 6e18), np.repeat([False, True], 8), np.ones(16), partners=partners
    )
    constant = np.concatenate([law(FLOPS), law(FLOPS, 1.5 * 1.2**-0.1113)])
    y = constant + SIGMA * (3 * np.tile(rng.standard_normal((600, 8)), 2) + rng.standard_normal((600, 16)))
    tests = f_test_hypotheses(fit_hypotheses(pair, y, RULE), RULE)
    for p in (tests.p_slope, tests.p_exponent_hypothesis, tests.p_irreducible_hypothesis):
        assert 0.025 <= np.mean(p < 0.05) <= 0.08


def test_numbers_beside_a_paired_verdict_are_paired_too() -> None:
    """Three seeds with noise that both arms share: it cancels in the seed bootstrap and in the free model."""
    rng = np.random.default_rng(0)
    shared = 3e-3 * rng.standard_normal((8, 3))
    rows: list[dict[str, object]] = [
        {
            "arm": name,
            "flops": float(c),
            "seed": f"s{k}",
            "loss": float(law(c * gain) + shared[i, k] + 3e-4 * rng.standard_normal()),
        }
        for name, gain, order in (("vanilla", 1.0, (0, 1, 2)), ("arm", 1.08, (2, 0, 1)))
        for i, c in enumerate(FLOPS)
        for k in order
    ]
    ladders = table(rows)
    found = analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=300)).verdicts["arm"]
    assert found.paired
    residuals, seeds = (np.ptp(one.delta_gamma) for one in found.bootstraps)
    assert 0.4 < seeds / residuals < 2.5
    widths = [np.ptp(found.delta_e_free_interval), np.ptp(found.delta_gamma_free_interval)]
    apart = {name: replace(ladder, seed_names=()) for name, ladder in ladders.items()}
    unpaired = analyse(apart, AnalysisRequest("vanilla", method="joint", draws=100)).verdicts["arm"]
    assert widths[0] < 0.4 * np.ptp(unpaired.delta_e_free_interval)
    assert widths[1] < 0.4 * np.ptp(unpaired.delta_gamma_free_interval)
    # The interval of ΔE excludes zero exactly where the test rejects one E.
    low, high = found.delta_e_free_interval
    assert (low <= 0 <= high) == (found.p_exponent_hypothesis >= found.level)
    assert found.separation.seeds_factor < 0.2 * unpaired.separation.seeds_factor


def test_seeds_factor_of_paired_ladders_reaches_the_power_it_promises() -> None:
    rng = np.random.default_rng(1)
    pair = LadderPair(
        np.log(np.tile(FLOPS, 2) / 6e18), np.repeat([False, True], 8), np.ones(16),
        partners=(np.arange(8), np.arange(8, 16)),
    )  # fmt: skip

    def noise(draws: int, own: float) -> np.ndarray:
        return 6e-3 * np.tile(rng.standard_normal((draws, 8)), 2) + own * rng.standard_normal((draws, 16))

    truth = np.concatenate([law(FLOPS), law(FLOPS, 1.5 * 1.3**-0.1168, 0.1168)])
    fits = fit_hypotheses(pair, truth + noise(1, 1.5e-3), RULE)
    factor = separate_hypotheses(fits, RULE, 6e18).seeds_factor
    assert factor > 1.3
    sigma = float(np.sqrt(paired_free_fit(fits, RULE)[2][0]))
    true = fits.designs["exponent"].predict(fits.solutions["exponent"].theta, pair.x)
    power: list[float] = []
    for times in (1.0, factor):
        y = true + noise(400, sigma) / np.sqrt(times)
        tests = f_test_hypotheses(fit_hypotheses(pair, y, RULE, warm_start=fits), RULE)
        power.append(float(np.mean(tests.p_irreducible_hypothesis < RULE.level)))
    assert power[0] < 0.85 < power[1] < 0.97
