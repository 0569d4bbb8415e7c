"""Coverage of the intervals, size of the tests and accuracy of the verdicts, by simulation.

    python benchmarks/laws_calibration.py [draws]           # all tables
    python benchmarks/laws_calibration.py [draws] adverse   # noise that the tests do not assume

Ladders are the paper's (8 rungs from 3.25e17 to 1.01e20 FLOPs) and a longer one. Noise is the standard
deviation of a run's loss. The arm's rungs lie 10% above the reference's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from steepen.laws.analysis import fit_compute
from steepen.laws.distributions import f_p_value, t_quantile
from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Design, jacobian, one_hot, solve, unscaled_covariance
from steepen.laws.hypotheses.diagnostics import lack_of_fit
from steepen.laws.hypotheses.judge_draws import DrawnAnswers, judge_draws
from steepen.laws.hypotheses.nested_models import (
    VERDICTS,
    DecisionRule,
    FTests,
    LadderPair,
    f_test_hypotheses,
    fit_hypotheses,
    holm_levels,
    verdict_words,
)
from steepen.laws.hypotheses.noise_checks import CHECK_LEVEL, check_noise
from steepen.laws.hypotheses.variance_components import rung_component_weights
from steepen.laws.ladder import make_ladder

E, A, GAMMA = 1.83, 1.5, 0.1113
PAPER = np.array([3.252e17, 1.056e18, 2.925e18, 6.743e18, 1.4977e19, 3.060e19, 5.572e19, 1.0063e20])
LONG = np.geomspace(1e16, 1e22, 12)
TRUTHS = {
    "same law": (E, A, GAMMA),
    "constant, 1.08x": (E, A * 1.08**-GAMMA, GAMMA),
    "constant, 0.93x": (E, A * 0.93**-GAMMA, GAMMA),
    "exponent, Untied-Grow": (E, A * 1.30**-0.1168, 0.1168),
    "exponent, Operator-1": (E, A * 1.12**-0.1140, 0.1140),
    "E lower by 0.05": (E - 0.05, A, GAMMA),
    "shallower": (E, A * 1.10**-GAMMA, 0.109),
    "E and exponent lower": (E - 0.235, 1.35, 0.0913),  # with one E for both the slopes seem equal
}


def curve(law: tuple[float, float, float], flops: np.ndarray) -> np.ndarray:
    return law[0] + law[1] * (flops / 1e18) ** -law[2]


def coverage(draws: int) -> None:
    """One ladder: coverage of 90% intervals of γ by profile (as reported), by Wald, and given E."""
    print(f"\n90% intervals of one ladder's γ, {draws} draws each")
    print(f"{'noise':>8} {'profile':>8} {'Wald':>8} {'given E':>8} {'half width':>11}")
    c0 = float(np.exp(np.log(PAPER).mean()))
    x = np.log(PAPER / c0)
    ones = np.ones((8, 1))
    design = Design(ones, ones, ones)
    truth = np.array([E, np.log(A) - GAMMA * np.log(c0 / 1e18), GAMMA])
    t = float(t_quantile(0.95, np.array(5.0)))
    for noise in (1e-3, 3e-3, 1e-2):
        y = curve(TRUTHS["same law"], PAPER) + noise * np.random.default_rng(0).standard_normal((draws, 8))
        best = solve(design, x, y, truth)
        variance = best.objective / 5
        covariance = unscaled_covariance(design, x, best.theta)
        wald = t * np.sqrt(covariance[:, 2, 2] * variance)
        j = covariance[:, 2, 2] - covariance[:, 0, 2] ** 2 / covariance[:, 0, 0]
        off = np.abs(best.theta[:, 2] - GAMMA)
        held = np.where(np.arange(3) == 2, GAMMA, best.theta)
        rise = solve(design, x, y, held, fixed=np.arange(3) == 2).objective - best.objective
        profile = np.mean(rise < t * t * variance)
        given = np.mean(off < t * np.sqrt(np.maximum(j, 0) * variance))
        half = np.quantile(off, 0.9)
        print(f"{noise:8.0e} {profile:8.3f} {np.mean(off < wald):8.3f} {given:8.3f} {half:11.5f}")
    fit = LeastSquaresFit(
        design, x, y[0], np.ones(8), best.theta[0], float(best.objective[0]), float(variance[0]), False
    )
    (interval,) = profile_intervals(fit, [2], covariance[0], t)
    print(f"(one of the last: γ = {best.theta[0, 2]:.4f}, {interval[0]:.4f} to {interval[1]:.4f})")


def joint_coverage(draws: int) -> None:
    """Four arms with one E: coverage of 90% profile intervals of γ and of E in the joint fit."""
    print(f"\n90% profile intervals in the joint fit of four arms, {draws} draws each")
    print(f"{'noise':>8} {'γ':>8} {'E':>8}")
    laws = [TRUTHS[name] for name in list(TRUTHS)[1:5]]
    c0 = float(np.exp(np.log(PAPER).mean()))
    x = np.tile(np.log(PAPER / c0), 4)
    own = one_hot(np.repeat(np.arange(4), 8), 4)
    design = Design(np.ones((32, 1)), own, own)
    theta = np.array([E, *(np.log(a) - g * np.log(c0 / 1e18) for _, a, g in laws), *(g for *_, g in laws)])
    for noise in (1e-3, 3e-3):
        y = design.predict(theta, x) + noise * np.random.default_rng(7).standard_normal((draws, 32))
        best = solve(design, x, y, theta)
        fractions: list[float] = []
        for index in (7, 0):
            held = np.where(np.arange(9) == index, theta, best.theta)
            rise = solve(design, x, y, held, fixed=np.arange(9) == index).objective - best.objective
            fractions.append(
                float(np.mean(rise < float(t_quantile(0.95, np.array(23.0))) ** 2 * best.objective / 23))
            )
        print(f"{noise:8.0e} {fractions[0]:8.3f} {fractions[1]:8.3f}")


def fitted(repeats: int) -> None:
    """Both methods with four arms: coverage of the reported intervals of γ and E."""
    print(f"\nReported 90% intervals of γ in fits of four arms, {repeats} repeats each")
    print(f"{'noise':>8} {'method':>6} {'unconditional':>14} {'given E':>8} {'E':>6}")
    arms = {name: TRUTHS[name] for name in list(TRUTHS)[1:5]}
    for noise in (1e-3, 3e-3, 1e-2):
        for method in ("joint", "paper"):
            rng = np.random.default_rng(int(1e4 * noise))
            hits = np.zeros(3)
            for _ in range(repeats):
                ladders = {
                    n: make_ladder(n, PAPER, curve(law, PAPER) + noise * rng.standard_normal(8))
                    for n, law in arms.items()
                }
                found = fit_compute(ladders, FitSettings(next(iter(arms)), method=method))
                for name, law in found.arms.items():
                    g, e = law.gamma, law.e.unconditional
                    hits[0] += g.unconditional[0] < arms[name][2] < g.unconditional[1]
                    hits[1] += g.conditional[0] < arms[name][2] < g.conditional[1]
                    hits[2] += e[0] < E < e[1]
            rate = hits / repeats / len(arms)
            print(f"{noise:8.0e} {method:>6} {rate[0]:14.3f} {rate[1]:8.3f} {rate[2]:6.3f}")


def lack(repeats: int) -> None:
    """Three arms of three seeds: rejection rate of the lack-of-fit test, right law and bent law."""
    print(f"\nLack of fit at 5%, three arms of three seeds, noise 0.001, {repeats} repeats each")
    print(f"{'method':>8} {'right law':>10} {'bent law':>9}")
    arms = {name: TRUTHS[name] for name in ("same law", "exponent, Untied-Grow", "exponent, Operator-1")}
    flops = np.repeat(PAPER, 3)
    # Bent: from the middle of the ladder on, every exponent is larger by .005.
    bend = np.maximum(flops / np.exp(np.log(PAPER).mean()), 1.0) ** -0.005
    for method in ("joint", "paper"):
        fractions: list[float] = []
        for factor in (1.0, bend):
            rng = np.random.default_rng(5)
            values: list[float | None] = []
            for _ in range(repeats):
                ladders = {
                    n: make_ladder(
                        n, flops, E + (curve(law, flops) - E) * factor + 1e-3 * rng.standard_normal(24)
                    )
                    for n, law in arms.items()
                }
                values.append(
                    lack_of_fit(ladders, fit_compute(ladders, FitSettings("same law", method=method)))
                )
            fractions.append(float(np.mean(np.array(values, float) < 0.05)))
        print(f"{method:>8} {fractions[0]:10.3f} {fractions[1]:9.3f}")


def verdicts(draws: int) -> None:
    """Fraction of each verdict under each truth, with the size and power of the F-test."""
    rule = DecisionRule()
    for label, flops in (("paper's ladder, 8 rungs to 1e20", PAPER), ("12 rungs, 1e16 to 1e22", LONG)):
        for noise in (1e-3, 3e-3):
            print(f"\n{label}, noise {noise:g}: fraction of verdicts in {draws} draws")
            headings = [word.removeprefix("grows: ").removesuffix(" loss") for word in VERDICTS]
            print(
                f"{'truth':<23}"
                + "".join(f"{word:>12}" for word in headings)
                + f"{'F5%':>7}{'one-sided':>10}"
            )
            for name, law in TRUTHS.items():
                theirs = flops * 1.1
                x = np.log(np.concatenate([flops, theirs]) / np.exp(np.log(flops).mean()))
                pair = LadderPair(x, np.repeat([False, True], len(flops)), np.ones(len(x)))
                truth = np.concatenate([curve(TRUTHS["same law"], flops), curve(law, theirs)])
                y = truth + noise * np.random.default_rng(2).standard_normal((draws, len(x)))
                tests = f_test_hypotheses(
                    fit_hypotheses(pair, y, rule, warm_start=fit_hypotheses(pair, truth, rule)), rule
                )
                words = verdict_words(tests, rule)
                fractions = "".join(f"{np.mean(words == word):12.3f}" for word in VERDICTS)
                one_sided = np.mean((tests.p_slope < 0.10) & (tests.delta_gamma > 0))
                print(f"{name:<23}{fractions}{np.mean(tests.p_slope < 0.05):7.3f}{one_sided:10.3f}")


SIGMA = 2e-3
SCENARIOS = (
    "independent",
    "two lowest rungs x5",
    "the same with a column loss_sd",
    "AR(0.8) along the ladder",
    *(
        f"+0.03 at {whose} {where}"
        for whose in ("reference's", "arm's")
        for where in ("bottom", "middle", "top")
    ),
    "seeds 10,5,3,2,1.. + rung error",
    "FLOPs of seeds differ by 0.01%",
    "--noise half the truth",
    "--noise twice the truth",
    "arms correlated 0.9, seeds match",
)

NOISY_LOW_RUNGS = ("two lowest rungs x5", "the same with a column loss_sd")


def scenario(name: str, law: tuple[float, float, float], draws: int, sigma: float) -> Simulated:
    """Simulated ladders of the reference and an arm at the paper's rungs, under one kind of noise."""
    rng = np.random.default_rng(11)
    x = np.log(np.tile(PAPER, 2) / np.exp(np.log(PAPER).mean()))
    pair = LadderPair(x, np.repeat([False, True], 8), np.ones(16))
    truth = np.concatenate([curve(TRUTHS["same law"], PAPER), curve(law, PAPER)])
    z = rng.standard_normal((draws, 2, 8))
    rule = DecisionRule()
    if name in NOISY_LOW_RUNGS:
        z[:, :, :2] *= 5
    if name.startswith("AR"):
        for i in range(1, 8):
            z[:, :, i] = 0.8 * z[:, :, i - 1] + 0.6 * z[:, :, i]
    if name.startswith("arms correlated"):
        z = np.sqrt(0.9) * z[:, :1] + np.sqrt(0.1) * rng.standard_normal((draws, 2, 8))
    errors = sigma * z.reshape(draws, 16)
    if name.startswith("+0.03"):
        errors[:, rung_off(name)] += 0.03
    if name.startswith("--noise"):
        rule = replace(rule, noise=sigma * (0.5 if "half" in name else 2.0))
    weights, covariance = np.ones((draws, 16)), np.eye(16)
    if name in NOISY_LOW_RUNGS:
        covariance = np.diag(np.tile([25.0, 25.0, *[1.0] * 6], 2))
    if name == "the same with a column loss_sd":
        weights = weights / np.diag(covariance)
    if name.startswith("AR"):
        ladder = 0.8 ** np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
        covariance = np.kron(np.eye(2), ladder)
    if name.startswith("arms correlated"):
        covariance = np.kron([[1.0, 0.9], [0.9, 1.0]], np.eye(8))
    if name.startswith("+0.03"):
        covariance[rung_off(name), rung_off(name)] = 1e9
    if name.startswith(("seeds", "FLOPs")):
        # A rung's error, shared by its seeds, as large as a seed's own; near-equal FLOPs are one rung.
        one = np.array([10, 5, 3, 2, 1, 1, 1, 1]) if name.startswith("seeds") else np.full(8, 3)
        seeds = np.tile(one, 2).astype(float)
        covariance = np.diag(1 + 1 / seeds)
        errors = errors + sigma * rng.standard_normal((draws, 16)) / np.sqrt(seeds)
        freedom = int((seeds - 1).sum())
        within = sigma**2 * rng.chisquare(freedom, draws) / freedom
        y = truth + errors
        weights = (
            rung_component_weights(pair.designs()["free"], x, y, seeds, within)
            if np.ptp(seeds)
            else np.broadcast_to(seeds, y.shape)
        )
    return Simulated(pair, truth, truth + errors, weights, rule, "seeds match" in name, covariance)


def rung_off(name: str) -> int:
    """The point with an error of 0.03 in a scenario."""
    rung = {"bottom": 0, "middle": 4, "top": 7}[name.rsplit(maxsplit=1)[-1]]
    return rung + 8 * ("arm's" in name)


@dataclass(frozen=True)
class Simulated:
    """Simulated losses (draws, points) with what an analysis is told about them."""

    pair: LadderPair
    truth: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    rule: DecisionRule
    matched: bool
    covariance: np.ndarray  # of the errors, up to a factor


def judge_simulated(data: Simulated) -> DrawnAnswers:
    """The answers that a user would get, and which of them are claims."""
    start = fit_hypotheses(data.pair, data.truth, data.rule)
    pair = replace(data.pair, partners=(np.arange(8), np.arange(8, 16))) if data.matched else data.pair
    return judge_draws(pair, data.y, data.rule, start=start, weights=data.weights)


def oracle(data: Simulated) -> float:
    """How often growth is found by a test that is told the covariance of the noise, or which rung is off.

    Generalised least squares, linearised at the truth; its scale is estimated.
    """
    design, rule = data.pair.designs()["exponent"], data.rule
    theta = fit_hypotheses(data.pair, data.truth, rule).solutions["exponent"].theta
    j = jacobian(design, data.pair.x, theta)[0]
    losses = data.y - data.truth + j[:, 2] * theta[0, 2] + j[:, 4] * theta[0, 4]
    kept = np.flatnonzero(np.diag(data.covariance) < 1e6)
    whitener = np.linalg.inv(np.linalg.cholesky(data.covariance[np.ix_(kept, kept)]))
    y = losses[:, kept] @ whitener.T

    def rss(columns: list[int]) -> np.ndarray:
        basis = np.linalg.qr(whitener @ j[kept][:, columns])[0]
        return (y**2).sum(axis=1) - ((y @ basis) ** 2).sum(axis=1)

    none, one, two = rss([0, 1, 3]), rss([0, 1, 2, 3]), rss([0, 1, 2, 3, 4])
    df = len(kept) - 5
    p_difference = f_p_value((none - two) / 2 / (two / df), 2.0, np.array(float(df)))
    p_slope = f_p_value((one - two) / (two / df), 1.0, np.array(float(df)))
    return float(np.mean((p_difference < rule.level) & (p_slope < rule.level)))


def adverse(draws: int) -> None:
    """Rates of false answers and of found growth under noise that the tests do not assume."""
    print(f"\nNoise of {SIGMA:g} that the tests do not assume, paper's ladder, {draws} draws each")
    print("false: any word but the right one and undecided, by least squares (lsq), and as a claim: neither")
    print("demoted nor fragile; found: grows, as a claim, and by a test that is told the noise (oracle)")
    head = (
        "same: lsq",
        "claim",
        "1.2x: lsq",
        "claim",
        "Op-1: word",
        "claim",
        "oracle",
        "U-G: word",
        "claim",
        "oracle",
    )
    print(f"{'noise':<34}" + "".join(f"{name:>11}" for name in head))
    constant = (E, A * 1.2**-GAMMA, GAMMA)
    for name in SCENARIOS:
        row: list[float] = []
        for law, right in ((TRUTHS["same law"], ("undecided",)), (constant, ("undecided", "constant"))):
            found = judge_simulated(scenario(name, law, draws, SIGMA))
            wrong = ~np.isin(found.answers.words, right)
            row += [
                float(np.mean(~np.isin(found.least_squares.words, right))),
                float(np.mean(wrong & found.claim)),
            ]
        for arm in ("exponent, Operator-1", "exponent, Untied-Grow"):
            data = scenario(name, TRUTHS[arm], draws, SIGMA)
            found = judge_simulated(data)
            grows = found.answers.growth == "grows"
            row += [float(np.mean(grows)), float(np.mean(grows & found.claim)), oracle(data)]
        print(f"{name:<34}" + "".join(f"{value:11.3f}" for value in row), flush=True)


def growth_power(draws: int) -> None:
    """With independent noise: growth found before the checks, after them, as a claim, and by the oracle."""
    print(f"\nGrowth found with independent noise, paper's ladder, {draws} draws each")
    print(f"{'arm':<24}{'noise':>8}{'least squares':>15}{'after checks':>14}{'claim':>13}{'oracle':>10}")
    for arm in ("exponent, Operator-1", "exponent, Untied-Grow"):
        for sigma in (1e-3, 2e-3, 3e-3, 3.5e-3, 4e-3):
            data = scenario("independent", TRUTHS[arm], draws, sigma)
            found = judge_simulated(data)
            plain, grows = (part.growth == "grows" for part in (found.least_squares, found.answers))
            rates = (np.mean(plain), np.mean(grows), np.mean(grows & found.claim))
            print(
                f"{arm:<24}{sigma:8.1e}{rates[0]:15.3f}{rates[1]:14.3f}{rates[2]:13.3f}{oracle(data):10.3f}",
                flush=True,
            )


def correlation_found(draws: int) -> None:
    """How often independent errors are rejected in favour of correlated ones."""
    for name in ("independent", "AR(0.8) along the ladder"):
        data = scenario(name, TRUTHS["same law"], draws, SIGMA)
        start = fit_hypotheses(data.pair, data.truth, data.rule)
        fits = fit_hypotheses(data.pair, data.y, data.rule, warm_start=start)
        found = check_noise(fits, data.y, data.rule)["correlation"].p_value < CHECK_LEVEL
        print(f"independent errors rejected, {name}: {np.mean(found):.3f} of {draws} draws")


def wrong_words(draws: int) -> None:
    """Any wrong word about one arm, and anywhere in a table of eight arms, with and without Holm."""
    print(f"\nAny wrong word, noise {SIGMA:g}, {draws} draws; tables of eight arms with the reference's law")
    rule = DecisionRule()
    for name, law in TRUTHS.items():
        right = {
            "same law": ("undecided",),
            "constant, 1.08x": ("undecided", "constant"),
            "constant, 0.93x": ("undecided", "worse"),
            "E lower by 0.05": ("undecided", "grows: irreducible loss", "grows: either"),
            "shallower": ("undecided", "shrinks", "constant"),  # its Δγ lies inside the margin
            "E and exponent lower": ("undecided",),
        }.get(name, ("undecided", "grows: exponent", "grows: either"))
        data = scenario("independent", law, draws, SIGMA)
        fits = fit_hypotheses(data.pair, data.y, rule, warm_start=fit_hypotheses(data.pair, data.truth, rule))
        tests = f_test_hypotheses(fits, rule)
        words = verdict_words(tests, rule)
        print(f"  {name:<24}{np.mean(~np.isin(words, right)):8.3f}")
        if name == "same law":
            tables = np.arange(draws // 8 * 8).reshape(-1, 8)
            alone = np.mean((words[tables] != "undecided").any(axis=1))
            wrong = 0
            for table in tables:
                rows = [FTests(**{k: v[i : i + 1] for k, v in vars(tests).items()}) for i in table]
                levels = holm_levels(rows, rule)
                wrong += any(
                    verdict_words(row, replace(rule, level=level))[0] != "undecided"
                    for row, level in zip(rows, levels, strict=True)
                )
            print(f"  {'  table of eight arms':<24}{alone:8.3f}, with Holm {wrong / len(tables):.3f}")


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    begun = time.perf_counter()
    if "adverse" in sys.argv:
        adverse(number)
        correlation_found(number)
        growth_power(number)
        sys.exit()
    coverage(number)
    joint_coverage(number)
    verdicts(number)
    wrong_words(number)
    growth_power(max(100, number // 10))
    adverse(max(100, number // 10))
    correlation_found(max(100, number // 10))
    fitted(max(50, number // 15))
    lack(max(50, number // 10))
    print(f"\n{time.perf_counter() - begun:.0f} s")
