"""Nested models of two ladders, the F-tests between them, and the rule that turns tests into two answers.

A verdict answers two questions: does the arm's gain grow with compute (`Growth`), and if so, by what
(`ByWhat`: a larger exponent, a lower irreducible loss, both, or either)?

    same         one law for both                           3 parameters
    constant     separate A                                 4
    exponent     separate A and γ, one E                    5   (the exponent hypothesis)
    irreducible  separate A and E, one γ                    5   (the irreducible-loss hypothesis)
    free         separate A, γ and E                        6

All are fitted by least squares to both ladders at once, so nested models are compared by F-tests, which
are valid for small samples too. Everything is vectorized over data sets: measurements,
bootstrap draws, simulated ladders and ladders with a rung left out go through the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import special

from steepen.laws.distributions import ROUNDING_ERROR, f_p_value, t_quantile
from steepen.laws.fits.solver import (
    Array,
    Design,
    Mask,
    Solution,
    best_of,
    jacobian,
    solve,
    solve_multistart,
    unscaled_covariance,
)

Hypothesis = Literal["same", "constant", "exponent", "irreducible", "free"]
ExtraParameter = Literal["exponent", "irreducible"]
Growth = Literal["grows", "constant", "shrinks", "worse", "undecided"]
ByWhat = Literal["exponent", "irreducible loss", "both", "either: not separable here"]
# Both answers as one label, for counts of simulated and resampled ladders.
VerdictLabel = Literal[
    "grows: exponent",
    "grows: irreducible loss",
    "grows: both",
    "grows: either",
    "constant",
    "shrinks",
    "worse",
    "undecided",
]

HYPOTHESES: tuple[Hypothesis, ...] = ("same", "constant", "exponent", "irreducible", "free")
HYPOTHESIS_NAMES: dict[Hypothesis, str] = {  # of those that may be extrapolated
    "exponent": "exponent",
    "irreducible": "irreducible loss",
    "free": "free E and γ",
}
GROWTH: tuple[Growth, ...] = get_args(Growth)
BY_WHAT: tuple[ByWhat, ...] = get_args(ByWhat)
VERDICTS: tuple[VerdictLabel, ...] = get_args(VerdictLabel)


@dataclass(frozen=True)
class DecisionRule:
    """Level and margin of the tests. `margin` is the largest |Δγ|/γ that still counts as a constant gain.

    The default margin is the smallest exponent gain claimed in the paper this package follows (Operator-1:
    .0027 of .1113), so an effect of that size does not pass as a constant gain. `noise` is a known
    standard deviation of the loss; without it each test uses the residual variance of the larger of its two
    models.
    """

    level: float = 0.05
    margin: float = 0.025
    noise: float | None = None
    log: bool = False


@dataclass(frozen=True, eq=False)
class LadderPair:
    """Points of a reference and an arm: x = log(C/C0), a mask of the arm's points, and their weights.

    `clusters` numbers the training run of each point where runs have several; None: each has its own.
    `partners` are the (reference, arm) points whose errors are correlated, as runs with the same seed and
    data order are; tests then rest on the differences of partners (`_paired_tests`).
    """

    x: Array
    arm: NDArray[np.bool_]
    weights: Array
    clusters: NDArray[np.intp] | None = None
    partners: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None

    def designs(self) -> dict[Hypothesis, Design]:
        """The five designs. Constants and exponents are (reference, arm − reference), E one per ladder."""
        ones = np.ones((len(self.x), 1))
        arm = self.arm[:, None].astype(float)
        both, split = np.hstack([ones, arm]), np.hstack([1.0 - arm, arm])
        return {
            "same": Design(ones, ones, ones),
            "constant": Design(ones, both, ones),
            "exponent": Design(ones, both, both),
            "irreducible": Design(split, both, ones),
            "free": Design(split, both, both),
        }


@dataclass(frozen=True, eq=False)
class NestedFits:
    """Least-squares fits of every hypothesis to every data set."""

    pair: LadderPair
    weights: Array
    designs: dict[Hypothesis, Design]
    solutions: dict[Hypothesis, Solution]
    scale: Array
    y: Array
    # Factor on the noise variance for points that share a run (`cluster_inflation`).
    inflation: float = 1.0

    def rows(self, chosen: Mask | NDArray[np.intp]) -> NestedFits:
        """The fits of some data sets."""
        solutions = {
            name: Solution(found.theta[chosen], found.objective[chosen], found.converged[chosen])
            for name, found in self.solutions.items()
        }
        return replace(
            self,
            weights=self.weights[chosen],
            solutions=solutions,
            scale=self.scale[chosen],
            y=self.y[chosen],
        )

    def rss(self, hypothesis: Hypothesis) -> Array:
        """Weighted residual sum of squares of one hypothesis, one value per data set."""
        return self.solutions[hypothesis].objective

    def degrees_of_freedom(self, hypothesis: Hypothesis) -> Array:
        """Points (or runs, if fewer) with positive weight minus parameters, one value per data set."""
        used = (self.weights > 0).sum(axis=1)
        if self.pair.clusters is not None:
            count = int(self.pair.clusters.max()) + 1
            used = np.stack(
                [(self.weights[:, self.pair.clusters == i] > 0).any(axis=1) for i in range(count)]
            ).sum(axis=0)
        return used - float(self.designs[hypothesis].n_parameters)

    def variance(self, hypothesis: Hypothesis, rule: DecisionRule) -> Array:
        """Noise variance: known, or the residual variance of `hypothesis`, at least the table's rounding."""
        if rule.noise is not None:
            stated = (rule.noise / (self.scale if rule.log else 1.0)) ** 2
            return self.inflation * np.full(len(self.scale), stated)
        rounding = ROUNDING_ERROR * (1.0 if rule.log else self.scale)
        freedom = (self.weights > 0).sum(axis=1) - float(self.designs[hypothesis].n_parameters)
        return self.inflation * np.maximum(self.rss(hypothesis) / np.maximum(freedom, 1e-9), rounding**2)


@dataclass(frozen=True, eq=False)
class FTests:
    """Test results and estimates behind a verdict, one value per data set; `p_…` are F-test p-values.

    `p_difference` tests one law for both against separate A and γ; it must reject before any word is given.
    """

    p_difference: Array
    p_shift: Array
    p_slope: Array
    p_exponent_hypothesis: Array
    p_irreducible_hypothesis: Array
    delta_gamma: Array
    delta_gamma_error: Array
    gamma: Array
    delta_log_a: Array
    delta_e: Array
    delta_gamma_free: Array
    delta_e_free: Array
    degrees_of_freedom: Array


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers to both questions, one per data set; `by_what` is "" where the gain does not grow."""

    growth: NDArray[np.str_]
    by_what: NDArray[np.str_]

    @property
    def words(self) -> NDArray[np.str_]:
        """Both answers as one word each (`VerdictLabel`)."""
        words = self.growth.astype("<U24")
        for by_what in BY_WHAT:
            words[self.by_what == by_what] = verdict_label("grows", by_what)
        return words


def verdict_label(growth: Growth, by_what: ByWhat | None) -> VerdictLabel:
    """Both answers as one label."""
    if growth != "grows" or by_what is None:
        return cast(VerdictLabel, growth)
    return cast(VerdictLabel, f"grows: {by_what.split(':')[0]}")


def fit_hypotheses(
    pair: LadderPair,
    y: Array,
    rule: DecisionRule,
    *,
    weights: Array | None = None,
    warm_start: NestedFits | None = None,
) -> NestedFits:
    """Fit the five hypotheses to each row of `y`, starting from `warm_start` (a fit to similar data).

    Without one, or where the solver does not converge from it, several starting points are tried: a short
    ladder hardly determines E, and from a bad start the solver may stop in that flat valley.
    """
    y, w = np.broadcast_arrays(np.atleast_2d(y), np.atleast_2d(pair.weights if weights is None else weights))
    designs = pair.designs()

    def run(hypothesis: Hypothesis, start: Array) -> Solution:
        return solve(designs[hypothesis], pair.x, y, start, weights=w, log=rule.log, iterations=80, warm=True)

    def multistart(hypothesis: Hypothesis, rows: Mask) -> Solution:
        return solve_multistart(designs[hypothesis], pair.x, y[rows], weights=w[rows], log=rule.log)

    found: dict[Hypothesis, Solution] = {}
    for hypothesis in HYPOTHESES:
        if warm_start is None:
            found[hypothesis] = multistart(hypothesis, np.ones(len(y), bool))
            continue
        found[hypothesis] = run(hypothesis, warm_start.solutions[hypothesis].theta)
        unconverged = ~found[hypothesis].converged
        if unconverged.any():
            found[hypothesis] = found[hypothesis].improve_rows(
                unconverged, multistart(hypothesis, unconverged)
            )
    _restart_from_nested(found, run)
    inflation = 1.0 if warm_start is None else warm_start.inflation
    return NestedFits(pair, w, designs, found, np.abs(y).mean(axis=1), y, inflation)


def _embed(theta: Array, by: ExtraParameter) -> Array:
    """θ of a model as θ of the larger model in which the arm has a separate exponent, or a separate E."""
    return np.hstack([theta, np.zeros((len(theta), 1))] if by == "exponent" else [theta[:, :1], theta])


def _restart_from_nested(
    found: dict[Hypothesis, Solution], run: Callable[[Hypothesis, Array], Solution]
) -> None:
    """Refit a larger model from the model nested in it wherever its fit is worse."""
    pairs: list[tuple[Hypothesis, Hypothesis, ExtraParameter]] = [
        ("constant", "exponent", "exponent"),
        ("constant", "irreducible", "irreducible"),
        ("exponent", "free", "irreducible"),
        ("irreducible", "free", "exponent"),
    ]
    for small, large, by in pairs:
        if (found[large].objective > found[small].objective * (1 + 1e-9)).any():
            found[large] = best_of(found[large], run(large, _embed(found[small].theta, by)))


def f_test_hypotheses(fits: NestedFits, rule: DecisionRule) -> FTests:
    """F-tests of nested models."""
    if fits.pair.partners is not None:
        return _paired_tests(fits, rule)
    free = fits.solutions["free"].theta
    exponent = fits.solutions["exponent"].theta
    covariance = unscaled_covariance(
        fits.designs["exponent"], fits.pair.x, exponent, weights=fits.weights, log=rule.log
    )
    variance = fits.variance("exponent", rule)
    return FTests(
        p_difference=hypothesis_p_value(fits, "same", "exponent", rule),
        p_shift=hypothesis_p_value(fits, "same", "constant", rule),
        p_slope=hypothesis_p_value(fits, "constant", "exponent", rule),
        p_exponent_hypothesis=hypothesis_p_value(fits, "exponent", "free", rule),
        p_irreducible_hypothesis=hypothesis_p_value(fits, "irreducible", "free", rule),
        delta_gamma=exponent[:, 4],
        delta_gamma_error=np.sqrt(covariance[:, 4, 4] * variance),
        gamma=exponent[:, 3],
        delta_log_a=fits.solutions["constant"].theta[:, 2],
        delta_e=fits.solutions["irreducible"].theta[:, 1] - fits.solutions["irreducible"].theta[:, 0],
        delta_gamma_free=free[:, 5],
        delta_e_free=free[:, 1] - free[:, 0],
        degrees_of_freedom=fits.degrees_of_freedom("exponent"),
    )


def _regress_differences(
    fits: NestedFits, rule: DecisionRule
) -> tuple[Callable[[str], tuple[Array, Array, Array]], Array]:
    """Regression of the differences of partners on columns of ΔE (e), Δ log A (a) and Δγ (g); their number.

    The regression takes the letters of its columns and returns the RSS, the coefficients and their variances
    for a noise variance of 1.
    """
    assert fits.pair.partners is not None
    first, second = fits.pair.partners
    theta, design, x = fits.solutions["exponent"].theta, fits.designs["exponent"], fits.pair.x
    predicted = design.predict(theta, x)
    j = jacobian(design, x, theta, rule.log)
    residual = np.log(fits.y) - np.log(np.maximum(predicted, 1e-300)) if rule.log else fits.y - predicted
    with np.errstate(divide="ignore"):
        weight = 1 / (1 / fits.weights[:, first] + 1 / fits.weights[:, second])
    root = np.sqrt(weight)
    shift, slope = j[:, second, 2], j[:, second, 4]
    # E of the arm enters every loss with slope 1 (divided by the loss, where logarithms are fitted).
    offset = 1 / np.maximum(predicted[:, second], 1e-300) if rule.log else np.ones_like(shift)
    difference = residual[:, second] - residual[:, first] + shift * theta[:, 2:3] + slope * theta[:, 4:5]
    columns = {"e": offset * root, "a": shift * root, "g": slope * root}
    target = difference * root
    used = (weight > 0).sum(axis=1).astype(float)

    def fit(names: str) -> tuple[Array, Array, Array]:
        if not names:
            return (target**2).sum(axis=1), np.zeros((len(target), 0)), np.zeros((len(target), 0))
        design = np.stack([columns[name] for name in names], axis=2)
        size = np.sqrt((design**2).sum(axis=1)) + 1e-300
        scaled = design / size[:, None, :]
        inverse = np.linalg.pinv(np.swapaxes(scaled, 1, 2) @ scaled, hermitian=True)
        found = np.einsum("bij,bnj,bn->bi", inverse, scaled, target)
        rest = target - np.einsum("bni,bi->bn", scaled, found)
        return (rest**2).sum(axis=1), found / size, np.einsum("bii->bi", inverse) / size**2

    return fit, used


def paired_free_fit(fits: NestedFits, rule: DecisionRule) -> tuple[Array, Array, Array, Array]:
    """Free model of the differences of partners: (ΔE, Δ log A, Δγ), standard errors, noise variance, freedom.

    The variance is that of one run without the errors that partners share.
    """
    fit, used = _regress_differences(fits, rule)
    rss, values, variances = fit("eag")
    freedom = used - 3
    variance = rss / np.maximum(freedom, 1e-9)
    return values, np.sqrt(variances * variance[:, None]), variance, freedom


def _paired_tests(fits: NestedFits, rule: DecisionRule) -> FTests:
    """The tests on differences of partners, arm minus reference, linearised at the exponent hypothesis.

    Whatever errors partners share cancels, so the tests are valid at any correlation between the arms; they
    have half as many points. The reference's law is taken from the joint fit.
    """
    fit, used = _regress_differences(fits, rule)

    def p(small: str, large: str) -> Array:
        freedom, extra = used - len(large), float(len(large) - len(small))
        variance = np.maximum(fit(large)[0] / np.maximum(freedom, 1e-9), 1e-300)
        return f_p_value((fit(small)[0] - fit(large)[0]) / extra / variance, extra, freedom)

    rss, values, variances = fit("ag")
    free = fit("eag")[1]
    freedom = used - 2
    return FTests(
        p_difference=p("", "ag"),
        p_shift=p("", "a"),
        p_slope=p("a", "ag"),
        p_exponent_hypothesis=p("ag", "eag"),
        p_irreducible_hypothesis=p("ea", "eag"),
        delta_gamma=values[:, 1],
        delta_gamma_error=np.sqrt(variances[:, 1] * rss / np.maximum(freedom, 1e-9)),
        gamma=fits.solutions["exponent"].theta[:, 3],
        delta_log_a=fit("a")[1][:, 0],
        delta_e=fit("ea")[1][:, 0],
        delta_gamma_free=free[:, 2],
        delta_e_free=free[:, 0],
        degrees_of_freedom=freedom,
    )


def partner_correlation_p(fits: NestedFits, partners: tuple[NDArray[np.intp], NDArray[np.intp]]) -> Array:
    """One-sided p-value of uncorrelated residuals of partners about the free model, per data set."""
    design = fits.designs["free"]
    residual = fits.y - design.predict(fits.solutions["free"].theta, fits.pair.x)
    first, second = (residual[:, part] for part in partners)
    product = (first * second).sum(axis=1)
    size = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    correlation = np.clip(product / np.maximum(size, 1e-300), -0.999999, 0.999999)
    # Each law takes three degrees of freedom from its residuals, and the correlation one.
    freedom = max(len(partners[0]) - 4, 1)
    t = correlation * np.sqrt(freedom / (1 - correlation**2))
    return np.where(len(partners[0]) > 5, special.stdtr(freedom, -t), 1.0)


def answer_questions(tests: FTests, rule: DecisionRule) -> Answers:
    """Does the gain grow with compute, and by what? One pair of answers per data set.

    Tests are taken in a fixed order, each at `rule.level`, and none without the ones before it, so that the
    family-wise error rate is at most the level.

    1. One law for both is not rejected (`p_difference`): *undecided*.
    2. Slopes differ, given one E (`p_slope`): the gain *grows* or *shrinks*.
    3. Slopes do not differ: *constant* (or *worse*, if it is a loss) if the constants differ (`p_shift`), the
       interval of Δγ lies inside the margin, and one E for both is not rejected (E and γ that both differ may
       cancel within the ladder but not beyond it); otherwise *undecided*.
    4. By what, if it grows: the exponent and the irreducible-loss hypothesis are each tested against the free
       model. Only the latter rejected: *exponent*. Only the former, and ΔE < 0: *irreducible loss*. Both: the
       signs of the free model's Δγ and ΔE say. Otherwise *either*.
    """
    level = rule.level
    differ = tests.p_difference < level
    slopes_differ = differ & (tests.p_slope < level)
    irreducible_rejected = tests.p_irreducible_hypothesis < level
    exponent_rejected = tests.p_exponent_hypothesis < level
    quantile = t_quantile(
        1.0 - level,
        tests.degrees_of_freedom if rule.noise is None else np.full_like(tests.degrees_of_freedom, np.inf),
    )
    upper_bound = np.abs(tests.delta_gamma) + quantile * tests.delta_gamma_error
    within_margin = upper_bound < rule.margin * np.abs(tests.gamma)
    constant = differ & ~slopes_differ & within_margin & ~exponent_rejected & (tests.p_shift < level)

    growth = np.full(len(differ), "undecided", dtype="<U9")
    growth[constant & (tests.delta_log_a < 0)] = "constant"
    growth[constant & (tests.delta_log_a > 0)] = "worse"
    growth[slopes_differ & (tests.delta_gamma < 0)] = "shrinks"
    grows = slopes_differ & (tests.delta_gamma > 0)
    growth[grows] = "grows"

    by_what = np.full(len(differ), "", dtype="<U26")
    by_what[grows] = "either: not separable here"
    by_what[grows & irreducible_rejected & ~exponent_rejected] = "exponent"
    by_what[grows & exponent_rejected & ~irreducible_rejected & (tests.delta_e < 0)] = "irreducible loss"
    both = grows & exponent_rejected & irreducible_rejected
    larger, lower = tests.delta_gamma_free > 0, tests.delta_e_free < 0
    by_what[both & larger & lower] = "both"
    by_what[both & larger & ~lower] = "exponent"
    by_what[both & ~larger & lower] = "irreducible loss"
    return Answers(growth, by_what)


def confirms(answer: NDArray[np.str_], other: NDArray[np.str_]) -> Mask:
    """Whether the second question has the same answer in `other`, or one that includes it (*both*)."""
    single = np.isin(answer, ["exponent", "irreducible loss"])
    return (other == answer) | (single & (other == "both"))


def verdict_words(tests: FTests, rule: DecisionRule) -> NDArray[np.str_]:
    """Both answers of each data set as one word."""
    return answer_questions(tests, rule).words


def holm_levels(tests: Sequence[FTests], rule: DecisionRule) -> list[float]:
    """The level at which each arm of a table is judged, for a family-wise error rate of `rule.level`.

    `tests` holds the results of one arm each. Every arm starts with an equal share of the level. An arm whose
    source of gain is settled at its share (exponent, irreducible loss or both; not either) has nothing left
    to claim, and its share goes to the others (sequential Holm, for arms whose tests have a fixed order).
    """
    waiting, levels = list(range(len(tests))), [rule.level] * len(tests)
    while waiting:
        share = rule.level / len(waiting)
        answered = [
            i
            for i in waiting
            if answer_questions(tests[i], replace(rule, level=share)).by_what[0]
            in ("exponent", "irreducible loss", "both")
        ]
        for i in waiting:
            levels[i] = share
        if not answered:
            break
        waiting = [i for i in waiting if i not in answered]
    return levels


def hypothesis_p_value(fits: NestedFits, small: Hypothesis, large: Hypothesis, rule: DecisionRule) -> Array:
    """p-value of the F-test of one hypothesis against a larger one, per data set."""
    extra = float(fits.designs[large].n_parameters - fits.designs[small].n_parameters)
    statistic = (fits.rss(small) - fits.rss(large)) / extra / fits.variance(large, rule)
    below = fits.degrees_of_freedom(large) if rule.noise is None else np.full(len(statistic), np.inf)
    return f_p_value(statistic, extra, below)
