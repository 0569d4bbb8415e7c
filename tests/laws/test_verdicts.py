"""Verdicts of one model of the whole table: words, their error rates, and tables that are hard to judge."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.distributions import Prior
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.model.fit_tables import fit_tables, seed_variances
from steepen.laws.model.laws import Cells, Laws
from steepen.laws.verdict.evidence import saving
from steepen.laws.verdict.questions import DecisionRule, by_what, contrasts, holm_levels, p_values
from steepen.results.fit import ComputeResult

FLOPS = np.geomspace(3.25e17, 1.01e20, 8)
H200 = Path(__file__).parent / "ladders" / "wide_d2_to_d5.csv"


def ladder(
    name: str,
    multiplier: float = 1.0,
    gamma: float = 0.1113,
    *,
    noise: float = 1e-3,
    seed: int = 0,
    flops: np.ndarray = FLOPS,
) -> Ladder:
    rng = np.random.default_rng(seed)
    loss = 1.83 + 1.5 * multiplier**-gamma * (flops / 1e18) ** -gamma
    return make_ladder(name, flops, loss + noise * rng.standard_normal(len(flops)))


def judged(*ladders: Ladder, **settings: Any) -> dict[str, Any]:
    table = {one.arm: one for one in ladders}
    return dict(analyse(table, AnalysisRequest(ladders[0].arm, method="joint", **settings)).verdicts)


def simulated(draws: int, tau: float, seeds: int, gamma: float = 0.13) -> tuple[np.ndarray, np.ndarray]:
    """p-values of the first two questions on four rungs of six arms, noise falling tenfold."""
    rng = np.random.default_rng(5)
    x = np.tile(np.linspace(-2.0, 2.0, 4), (6, 1))
    count = np.full(x.shape, float(seeds))
    cells = Cells(x, np.ones(x.shape, bool), count, count - 1, np.zeros(x.shape))
    gammas = np.array([0.13, *[gamma] * 5])
    laws = Laws(np.full(draws, 1.83), np.full((draws, 6), 0.5), np.tile(gammas, (draws, 1)))
    sd = np.geomspace(0.05, 0.005, 4)
    shape = (draws, 6, 4)
    noise = np.sqrt(tau**2 + sd**2 / seeds) * rng.standard_normal(shape)
    squares = sd**2 * rng.chisquare(seeds - 1, shape)
    fit = fit_tables(cells, laws.predict(x) + noise, squares, laws)
    found = [p_values(contrasts(fit, (0, arm), -2.0, 2.0), DecisionRule()) for arm in range(1, 6)]
    return np.array([one.gain for one in found]), np.array([one.slope for one in found])


@pytest.mark.parametrize("tau", [0.0, 0.01])
def test_identical_arms_are_rarely_called_different_where_noise_falls_tenfold(tau: float) -> None:
    """The former analysis found a difference in 64% of such tables."""
    for p in simulated(200, tau, 3):
        assert np.mean(p < 0.05) < 0.08


def test_growth_is_found_almost_as_often_as_by_a_test_that_knows_the_noise() -> None:
    assert np.mean(simulated(200, 0.004, 3, gamma=0.146)[1] < 0.05) > 0.7


def test_seed_variance_follows_compute_and_does_not_fall_above_the_last_replicates() -> None:
    rng = np.random.default_rng(0)
    sd = np.array([0.05, 0.02, 0.008, 0.003, 0.001])
    seeds = np.array([[4.0, 4.0, 4.0, 1.0, 1.0]] * 6)
    x = np.tile(np.arange(5.0), (6, 1))
    cells = Cells(x, np.ones(x.shape, bool), seeds, seeds - 1, np.zeros(x.shape))
    squares = np.where(seeds > 1, sd**2 * rng.chisquare(3, (1, 6, 5)), 0.0)
    found = seed_variances(cells, squares)
    assert found is not None
    estimate = np.sqrt(found.variance[0, 0])
    assert estimate[:3] == pytest.approx(sd[:3], rel=0.4)
    assert estimate[3] == pytest.approx(estimate[4]) and estimate[4] > 0.005


def test_h200_mini_three_arms_are_better_and_none_grows() -> None:
    found = steepen.fit(H200, reference="vanilla")
    assert isinstance(found, ComputeResult)
    assert {found[arm].better for arm in ("untied-grow", "untied-2", "operator-1")} == {"better"}
    assert not any(verdict.growth in ("grows", "shrinks") for verdict in found.verdicts.values())
    assert 0.003 < found.analysis.lack_of_fit < 0.02
    (_, first), *_, (_, last) = found.analysis.seed_noise
    assert first > 4 * last  # seed noise falls with compute


def test_growth_is_found_without_replicates_where_the_bottom_rungs_are_noisy() -> None:
    """A single variance would make residuals at the bottom look like errors that drift along the ladder."""
    noisy = np.array([5.0, 5.0, *[1.0] * 6])
    words: list[str] = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        arms = [ladder("vanilla", noise=0), ladder("steeper", 1.3, 0.1168, noise=0)]
        arms = [
            make_ladder(one.arm, one.flops, one.loss + 2e-3 * noisy * rng.standard_normal(8)) for one in arms
        ]
        words.append(judged(*arms)["steeper"].growth)
    assert words.count("grows") >= 15


@pytest.mark.parametrize("name", ["loop-grow", "untied-grow"])
def test_the_papers_growing_arms_grow(name: str) -> None:
    found = steepen.fit("paper:fineweb")
    assert isinstance(found, ComputeResult)
    assert (found[name].better, found[name].growth) == ("better", "grows")
    drifting = found[name].drifting
    assert drifting is not None and 0 < drifting.weight < 0.5 and drifting.growth == "undecided"
    assert any("drift along a ladder" in line for line in found[name].what_would_change)


def test_seeds_that_share_their_noise_stay_paired() -> None:
    """Six arms whose seeds 0, 1, 2 have nearly the same error: other names for one arm's seeds hide that."""
    rng = np.random.default_rng(4)
    common = 0.02 * rng.standard_normal((4, 3))
    tables: list[dict[str, Ladder]] = [{}, {}]
    for k in range(6):
        one = ladder(f"arm{k}", 1.1 if k else 1.0, noise=0, flops=np.geomspace(1e16, 1e18, 4))
        runs = tuple(one.loss[:, None] + common + 1e-3 * rng.standard_normal((4, 3)))
        loss = np.array([own.mean() for own in runs])
        for table, prefix in zip(tables, ("", one.arm), strict=True):
            names = tuple(tuple(f"{prefix}{seed}" for seed in range(3)) for _ in range(4))
            table[one.arm] = replace(one, loss=loss, runs=runs, weights=np.full(4, 3.0), seed_names=names)
    paired, apart = (analyse(table, AnalysisRequest("arm0")).verdicts["arm3"] for table in tables)
    assert np.diff(np.log(paired.gain.interval)) < 0.4 * np.diff(np.log(apart.gain.interval))
    assert (paired.better, apart.better) == ("better", "not resolved")


def test_words_of_the_first_two_questions() -> None:
    found = judged(
        ladder("vanilla", seed=1), ladder("better", 1.2, seed=2), ladder("worse", 1 / 1.2, seed=3),
        ladder("same", seed=4), ladder("grows", 1.3, 0.1168, seed=5), ladder("shrinks", 1.2, 0.106, seed=6),
    )  # fmt: skip
    words = {arm: (verdict.better, verdict.growth) for arm, verdict in found.items()}
    assert words["better"][0] == "better" and words["worse"][0] == "worse"
    assert words["same"][0] == "no difference"
    assert words["grows"] == ("better", "grows") and words["shrinks"][1] == "shrinks"
    assert found["worse"].sentence.startswith("worse against vanilla: worse. It needs 1.")
    assert "more compute" in found["worse"].sentence and "less compute" in found["better"].sentence


def test_unadjusted_answers_are_those_of_no_adjust() -> None:
    arms = [ladder(f"arm{i}", 1.01 + 0.02 * i, 0.1113 + 0.0008 * i, seed=i, noise=2e-3) for i in range(6)]
    adjusted, alone = (judged(ladder("vanilla", seed=9), *arms, adjust=a) for a in (True, False))
    for arm, verdict in adjusted.items():
        assert verdict.unadjusted == (alone[arm].better, alone[arm].growth, alone[arm].by_what)
    assert {verdict.levels for verdict in alone.values()} == {(0.05, 0.05, 0.05)}


def test_holm_passes_the_level_on() -> None:
    assert holm_levels([0.001, 0.2, 0.02], 0.05) == pytest.approx([0.05 / 3, 0.05, 0.05 / 2])
    assert holm_levels([0.03, 0.04], 0.05) == pytest.approx([0.025, 0.025])


@pytest.mark.parametrize(
    ("p_exponent", "p_irreducible", "delta_gamma", "delta_e", "word"),
    [
        (0.5, 0.5, 0.01, 0.0, "either"),
        (0.5, 0.01, 0.01, 0.0, "exponent"),
        (0.01, 0.5, 0.0, -0.1, "irreducible loss"),
        (0.01, 0.01, 0.01, -0.1, "both"),
        (0.01, 0.01, 0.01, 0.1, "exponent"),
        (0.01, 0.5, 0.0, 0.1, "either"),
    ],
)
def test_by_what(
    p_exponent: float, p_irreducible: float, delta_gamma: float, delta_e: float, word: str
) -> None:
    assert by_what(p_exponent, p_irreducible, delta_gamma, delta_e, 0.05) == word


def test_cause_of_a_long_ladder_is_found() -> None:
    flops = np.geomspace(1e16, 1e22, 12)
    reference = ladder("vanilla", seed=1, flops=flops, noise=5e-4)
    exponent = judged(reference, ladder("arm", 1.3, 0.1168, seed=2, flops=flops, noise=5e-4))["arm"]
    assert (exponent.growth, exponent.by_what) == ("grows", "exponent")
    lower = replace(reference, arm="arm", loss=reference.loss - 0.05 + 5e-4 * np.sin(np.arange(12.0) ** 2))
    cause = judged(reference, lower)["arm"]
    assert (cause.growth, cause.by_what) == ("grows", "irreducible loss")


def test_shared_errors_of_arms_cancel() -> None:
    rng = np.random.default_rng(1)
    common = 4e-3 * rng.standard_normal(8)
    arms = [
        ladder(name, m, seed=i, noise=4e-4)
        for i, (name, m) in enumerate((("v", 1.0), ("a", 1.05), ("b", 1.1)))
    ]
    shared = [replace(one, loss=one.loss + common) for one in arms]
    plain = [replace(one, loss=one.loss + 4e-3 * rng.standard_normal(8)) for one in arms]
    narrow, wide = (judged(*table)["b"].gain.interval for table in (shared, plain))
    assert np.log(narrow[1] / narrow[0]) < 0.7 * np.log(wide[1] / wide[0])


def test_a_diverged_run_is_left_out_of_everything() -> None:
    arms = [ladder("vanilla", seed=1), ladder("arm", 1.2, seed=2)]
    loss = arms[1].loss.copy()
    loss[3] = 7.3
    bad = replace(arms[1], loss=loss, runs=tuple(np.array([value]) for value in loss))
    found, clean = (
        analyse({"vanilla": arms[0], "arm": one}, AnalysisRequest("vanilla")) for one in (bad, arms[1])
    )
    (gone,) = found.left_out
    assert (gone.arm, gone.loss) == ("arm", 7.3)
    for method in ("joint", "paper"):
        gammas = [part.fits[method].arms["arm"].gamma.value for part in (found, clean)]
        assert gammas[0] == pytest.approx(gammas[1], abs=2e-3)
    assert found.verdicts["arm"].better == "better"
    assert any("is left out of everything" in warning for warning in found.warnings)
    table = {"arm": ["vanilla"] * 8 + ["arm"] * 8, "flops": [*FLOPS, *FLOPS], "loss": [*arms[0].loss, *loss]}
    result = steepen.fit(table, reference="vanilla", keep_diverged=True)
    assert "left out: arm at" in result.to_latex()
    assert any(series.note == "left out" for series in result.panels()[0].series)


def test_a_diverged_seed_is_left_out_and_its_rung_kept() -> None:
    rng = np.random.default_rng(2)
    flops = np.repeat(FLOPS, 3)
    arms = {}
    for i, name in enumerate(("vanilla", "arm")):
        one = ladder(name, 1.0 + 0.2 * i, flops=FLOPS, noise=0.0)
        arms[name] = make_ladder(name, flops, np.repeat(one.loss, 3) + 2e-3 * rng.standard_normal(24))
    runs = list(arms["arm"].runs)
    runs[4] = runs[4] + np.array([0.0, 3.0, 0.0])
    arms["arm"] = replace(arms["arm"], runs=tuple(runs), loss=np.array([one.mean() for one in runs]))
    found = analyse(arms, AnalysisRequest("vanilla"))
    assert [(one.arm, one.seed) for one in found.left_out] == [("arm", 1)]
    assert found.judge.ladders["arm"].seeds.tolist() == [3, 3, 3, 3, 2, 3, 3, 3]
    assert found.verdicts["arm"].better == "better"


def test_every_pair_is_compared() -> None:
    arms = [ladder("v", seed=1), ladder("a", 1.2, seed=2), ladder("b", 1.4, seed=3)]
    found = analyse({one.arm: one for one in arms}, AnalysisRequest("v", every_pair=True))
    (pair,) = found.pairs
    assert (pair.reference, pair.arm, pair.better) == ("a", "b", "better")
    assert pair.gain.value == pytest.approx(1.4 / 1.2, rel=0.05)
    assert pair.arms == 3


def test_known_irreducible_loss() -> None:
    arms = [ladder("v", seed=1, noise=3e-3), ladder("a", 1.2, 0.1150, seed=2, noise=3e-3)]
    table = {one.arm: one for one in arms}
    free, prior, held = (
        analyse(table, AnalysisRequest("v", irreducible_loss=e))
        for e in (None, Prior(1.83, 0.02), Prior(1.83))
    )
    widths = [
        high - low
        for low, high in (part.primary_fit.arms["a"].gamma.unconditional for part in (free, prior, held))
    ]
    assert widths[0] > widths[1] > widths[2]
    assert held.primary_fit.arms["a"].e.value == pytest.approx(1.83, abs=1e-9)
    assert prior.primary_fit.arms["a"].e.value == pytest.approx(1.83, abs=0.04)
    assert len(free.e_sweep) >= 3 and set(free.e_sweep[0].answers) == {"a"}


@pytest.mark.parametrize("text", ["1.69±0.05", "1.69+-0.05", "1.69 +/- 0.05"])
def test_irreducible_loss_is_read_with_its_error(text: str) -> None:
    assert Prior.from_text(text) == Prior(1.69, 0.05)
    assert Prior.from_text("1.69") == Prior(1.69)
    with pytest.raises(UsageError, match=r"1\.69±0\.05"):
        Prior.from_text("about two")


def _short_arm() -> dict[str, Ladder]:
    return {"v": ladder("v"), "a": ladder("a", 1.2, seed=2), "tiny": ladder("tiny", flops=FLOPS[:1])}


def _disjoint() -> dict[str, Ladder]:
    return {"v": ladder("v"), "a": ladder("a", flops=FLOPS * 1e4)}


def _identical() -> dict[str, Ladder]:
    return {"v": ladder("v", noise=0.0), "a": ladder("a", noise=0.0)}


def _equal_seeds() -> dict[str, Ladder]:
    return {
        name: make_ladder(name, np.repeat(FLOPS, 2), np.repeat(ladder(name, m, seed=i).loss, 2))
        for i, (name, m) in enumerate((("v", 1.0), ("a", 1.3)))
    }


def _gap() -> dict[str, Ladder]:
    flops = np.array([1e15, 3e15, 1e16, 1e19, 3e19, 1e20])
    return {"v": ladder("v", flops=flops), "a": ladder("a", 1.3, flops=flops, seed=2)}


def _similar() -> dict[str, Ladder]:
    return {"Vanilla": ladder("Vanilla"), "vanilla": ladder("vanilla", seed=3), "a": ladder("a", 1.3, seed=4)}


def _perplexity() -> dict[str, Ladder]:
    return {
        name: make_ladder(name, FLOPS, np.exp(ladder(name, m, seed=i).loss))
        for i, (name, m) in enumerate((("v", 1.0), ("a", 1.3)))
    }


def _pair(change: Callable[..., Any], flops: np.ndarray = FLOPS) -> Callable[[], dict[str, Ladder]]:
    """Two arms, the second 1.3 times better, whose compute and losses are changed."""

    def table() -> dict[str, Ladder]:
        return {
            name: make_ladder(name, *change(flops, ladder(name, m, seed=i, flops=flops).loss, i))
            for i, (name, m) in enumerate((("v", 1.0), ("a", 1.3)))
        }

    return table


SHUFFLED = [3, 1, 0, 2, 7, 6, 5, 4]
CURVE = np.linspace(0, 3, 8) ** 2


def _lengths() -> dict[str, Ladder]:
    many = np.geomspace(FLOPS[0], FLOPS[-1], 30)
    return {"v": ladder("v", flops=FLOPS[::2]), "a": ladder("a", 1.3, seed=2, flops=many)}


def _touching() -> dict[str, Ladder]:
    return {"v": ladder("v", flops=FLOPS[:5]), "a": ladder("a", 1.3, seed=2, flops=FLOPS[4:])}


@pytest.mark.parametrize(
    ("table", "better", "said"),
    [
        (_lengths, "better", ""),
        (_touching, "better", ""),
        (_pair(lambda c, y, i: (c, y[::-1] if i else y)), "worse", "of such a ladder mean nothing"),
        (_pair(lambda c, y, i: (c, 0 * y + 3 - 0.1 * i)), "better", "more than a million × less compute"),
        (_pair(lambda c, y, i: (c, y / 3.1)), "better", ""),  # bits per byte
        (_pair(lambda c, y, i: (c / 8.64e19, y)), "better", "1 PF-day is 8.64e19"),
        (_pair(lambda c, y, i: (c, y), np.geomspace(1e8, 1e28, 8)), "better", ""),
        (_pair(lambda c, y, i: (c, y), np.geomspace(1e18, 1.3e18, 5)), "better", ""),
        (_pair(lambda c, y, i: (c, np.round(y, 2))), "better", ""),
        (_pair(lambda c, y, i: (c, y - 1.83)), "better", ""),  # a pure power law
        (_pair(lambda c, y, i: (c[SHUFFLED], y[SHUFFLED])), "better", ""),
        (_pair(lambda c, y, i: (c, 1e6 * y)), "better", "if these are perplexities"),
        (_pair(lambda c, y, i: (c, 4 - 0.02 * CURVE - 0.05 * i)), "better", "E is 0, its lower bound"),
        (_short_arm, "better", "'tiny' has only 1 rung and is left out"),
        (_disjoint, "not resolved", "a against v: the ladders never overlap in compute"),
        (_identical, "no difference", "no difference within ±5% of compute"),
        (_equal_seeds, "better", "copies of a run are no replicates"),
        (_gap, "better", ""),
        (_similar, "better", "'Vanilla' and 'vanilla' are different arms here"),
        (_perplexity, None, "if these are perplexities"),
    ],
)  # fmt: skip
def test_hostile_tables_get_the_right_answer_or_one_sentence(
    table: Callable[[], dict[str, Ladder]], better: str | None, said: str
) -> None:
    ladders = table()
    report = analyse(ladders, AnalysisRequest(next(iter(ladders)), method="joint"))
    assert better is None or report.verdicts["a"].better == better
    sentences = [*(v.sentence for v in report.verdicts.values()), *report.warnings]
    assert sum(said in sentence for sentence in sentences) >= 1


def test_a_reference_with_one_rung_is_refused() -> None:
    with pytest.raises(UsageError, match=r"arm 'v' has only 1 rung; the reference needs at least"):
        analyse({"v": ladder("v", flops=FLOPS[:1]), "a": ladder("a")}, AnalysisRequest("v"))


def test_brief_form_has_at_most_25_lines_and_no_contradiction() -> None:
    for source, reference in ((H200, "vanilla"), ("paper:fineweb", None), ("paper:fineweb-edu", None)):
        result = steepen.fit(source, reference=reference)
        assert len(str(result).split("\n")) <= 25
        full = str(replace(result, full=True))
        assert not re.search(r"\b0\.\d+× (less|more)", full)
        assert len(full.split("\n")) > 40


def test_savings_are_worded_by_their_direction() -> None:
    assert saving(1.28) == "1.280× less compute"
    assert saving(0.41) == "2.439× more compute"


def test_the_interval_of_more_compute_holds_its_estimate() -> None:
    found = judged(ladder("vanilla"), ladder("worse", 0.8))["worse"]
    number = r"([\d.]+)"
    pattern = (
        rf"needs {number}× more compute .*\(95% {number} to {number}; .*"
        rf"at the top {number}× more compute \({number} to {number}\)"
    )
    words = re.search(pattern, found.sentence)
    assert words is not None, found.sentence
    mean, low, high, top, top_low, top_high = map(float, words.groups())
    assert low < mean < high and top_low < top < top_high
    assert mean == pytest.approx(1 / found.gain.value, abs=1e-3)
    assert (low, high) == pytest.approx([1 / end for end in reversed(found.gain.interval)], abs=1e-3)


def test_thousands_of_rungs_are_thinned() -> None:
    flops = np.geomspace(1e15, 1e25, 3000)
    arms = {"v": ladder("v", flops=flops), "a": ladder("a", 1.2, seed=2, flops=flops)}
    found = analyse(arms, AnalysisRequest("v", method="joint"))
    assert found.verdicts["a"].better == "better"
    assert found.verdicts["a"].gain.value == pytest.approx(1.2, rel=0.02)
