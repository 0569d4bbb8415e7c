"""The verdict on one arm: what the tests say, what each reading predicts, and how firmly it stands."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.intervals import Interval, LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Array, unscaled_covariance
from steepen.laws.hypotheses.bootstrap import LeaveOneOut, Resampling, bootstrap, leave_one_out
from steepen.laws.hypotheses.nested_models import (
    HYPOTHESES,
    DecisionRule,
    FTests,
    Hypothesis,
    LadderPair,
    NestedFits,
    VerdictWord,
    f_test_hypotheses,
    fit_hypotheses,
    t_quantile,
    verdict_words,
)
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.sensitivity import (
    MistuningTolerance,
    Separation,
    mistuning_tolerance,
    separate_hypotheses,
)
from steepen.laws.verdict.sentences import sentence, what_would_change

MIN_EXPONENT = 1e-6  # an exponent up to which a curve does not fall
MAX_MULTIPLIER = 1e30  # a multiplier beyond which it is no number anyone could use


@dataclass(frozen=True)
class Prediction:
    """What one reading says at one compute; the multiplier's interval is from the bootstrap."""

    label: str
    flops: float
    reference_loss: float
    arm_loss: float
    multiplier: float
    multiplier_interval: Interval


@dataclass(frozen=True)
class HypothesisFit:
    """One reading of the two ladders. `p_against_free` is small where the measurements refute it."""

    hypothesis: Hypothesis
    gamma: tuple[float, float]
    log_a: tuple[float, float]
    e: tuple[float, float]
    rss: float
    p_against_free: float | None
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Verdict:
    """Steeper, lower (constant), floor, undecided, shallower or worse; and why, how firmly, and what would
    change it.

    `multiplier` is the exponent reading's at `multiplier_flops`, the top of the span both ladders cover; NaN
    where there is none. `delta_gamma` supposes one floor for both, `delta_gamma_free` does not.
    """

    arm: str
    reference: str
    word: VerdictWord
    sentence: str
    rule: DecisionRule
    delta_gamma: float
    delta_gamma_interval: Interval
    delta_e: float
    p_slope: float
    p_slope_one_sided: float
    p_shift: float
    p_exponent_hypothesis: float
    p_irreducible_hypothesis: float
    delta_gamma_free: float
    delta_gamma_free_interval: Interval
    sigma: float
    multiplier: float
    multiplier_flops: float
    c0: float
    hypotheses: dict[Hypothesis, HypothesisFit]
    bootstraps: tuple[Resampling, ...]
    leave_one_out: tuple[LeaveOneOut, ...]
    separation: Separation
    tolerance: tuple[MistuningTolerance, MistuningTolerance]
    what_would_change: tuple[str, ...]
    unit: str = "FLOPs"  # of every `flops` here: what the ladders were measured along

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """The verdict, then what would decide or undo it, as text."""
        return "\n".join([self.sentence, *(f"  · {line}" for line in self.what_would_change)])


def judge_arm(
    reference: Ladder,
    arm: Ladder,
    settings: FitSettings,
    rule: DecisionRule,
    *,
    draws: int = 2000,
    seed: int = 0,
    budget: float | None = None,
    unit: str = "FLOPs",
) -> Verdict:
    """Compare an arm with the reference. The other arms of a study play no part, so adding one changes
    nothing here.
    """
    c0 = settings.c0 or default_c0(reference)
    pair = LadderPair(
        np.log(np.concatenate([reference.flops, arm.flops]) / c0),
        np.repeat([False, True], [len(reference.flops), len(arm.flops)]),
        np.concatenate([reference.seeds, arm.seeds]),
    )
    y = np.concatenate([reference.loss, arm.loss])
    fits = fit_hypotheses(pair, y, rule)
    tests = f_test_hypotheses(fits, rule)
    word = cast(VerdictWord, str(verdict_words(tests, rule)[0]))
    sigma = math.sqrt(float(fits.variance("free", rule)[0])) * (float(y.mean()) if rule.log else 1.0)

    resampled, drawn = bootstrap(
        (reference, arm), fits, y, rule, confidence=settings.confidence, draws=draws, seed=seed
    )
    top = float(reference.flops[-1])
    where = [("10× the top rung", 10 * top), ("1000× the top rung", 1000 * top)]
    if budget is not None:
        where.append((f"{budget:.3g} {unit}", budget))
    readings: dict[Hypothesis, HypothesisFit] = {
        name: _hypothesis_fit(name, fits, drawn, tests, where=where, c0=c0, confidence=settings.confidence)
        for name in HYPOTHESES
        if name != "same"
    }
    decider = separate_hypotheses(fits, rule, c0)
    tolerance = mistuning_tolerance(fits, y, rule, (reference.arm, arm.arm), c0)
    left_out = leave_one_out((reference, arm), fits, y, rule)
    delta = float(tests.delta_gamma[0])
    p_slope = float(tests.p_slope[0])
    interval = _delta_gamma_interval("exponent", 4, fits, y, settings, rule)
    end = _common_top(reference, arm)
    at_end = _log_multiplier("exponent", fits.solutions["exponent"].theta, np.array([math.log(end / c0)]))
    multiplier = float(_usable_multiplier(at_end)[0, 0])
    draft = Verdict(
        arm=arm.arm, reference=reference.arm, word=word, sentence="", rule=rule,
        delta_gamma=delta, delta_gamma_interval=interval, delta_e=float(tests.delta_e[0]),
        p_slope=p_slope, p_slope_one_sided=p_slope / 2 if delta > 0 else 1 - p_slope / 2,
        p_shift=float(tests.p_shift[0]), p_exponent_hypothesis=float(tests.p_exponent_hypothesis[0]),
        p_irreducible_hypothesis=float(tests.p_irreducible_hypothesis[0]),
        delta_gamma_free=float(tests.delta_gamma_free[0]),
        delta_gamma_free_interval=_delta_gamma_interval("free", 5, fits, y, settings, rule),
        sigma=sigma, multiplier=multiplier,
        multiplier_flops=end, c0=c0,
        hypotheses=readings, bootstraps=resampled, leave_one_out=left_out, separation=decider,
        tolerance=tolerance, what_would_change=(), unit=unit,
    )  # fmt: skip
    return replace(draft, sentence=sentence(draft), what_would_change=tuple(what_would_change(draft)))


def _common_top(reference: Ladder, arm: Ladder) -> float:
    """The highest compute both ladders reach (the reference's top rung, if they share no span)."""
    low, high = max(reference.flops[0], arm.flops[0]), min(reference.flops[-1], arm.flops[-1])
    return float(high if low < high else reference.flops[-1])


def _log_multiplier(reading: Hypothesis, theta: Array, x: Array) -> Array:
    """log of the compute the arm saves at the reference's compute x; data sets in rows, x in columns."""
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    design = pair.designs()[reading]
    floor, constant, exponent = design.split(theta)
    above = design.predict(theta, pair.x)[:, : len(x)] - floor[:, -1:]
    fall = exponent.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        far = constant.sum(axis=1, keepdims=True) - np.log(above)
        # An arm that does not fall is at any compute above the reference's loss, or below it.
        log = np.where(fall > MIN_EXPONENT, x - far / fall, np.where(far > 0, -np.inf, np.inf))
    # The reference's loss may lie below the arm's floor: no compute of the arm's reaches it.
    return np.where(above > 0, log, -np.inf)


def _usable_multiplier(log_multiplier: Array) -> Array:
    """The multiplier; NaN where it is no number anyone could use: one of the curves does not fall."""
    usable = np.abs(log_multiplier) < math.log(MAX_MULTIPLIER)
    return np.exp(np.where(usable, log_multiplier, np.nan))


def _hypothesis_fit(
    name: Hypothesis,
    fits: NestedFits,
    drawn: NestedFits,
    tests: FTests,
    *,
    where: list[tuple[str, float]],
    c0: float,
    confidence: float,
) -> HypothesisFit:
    design, theta = fits.designs[name], fits.solutions[name].theta
    floor, constant, exponent = (part[0] for part in design.split(theta))
    x = np.log(np.array([flops for _, flops in where]) / c0)
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    losses = pair.designs()[name].predict(theta[0], pair.x).reshape(2, -1)
    value = _usable_multiplier(_log_multiplier(name, theta, x))[0]
    with np.errstate(over="ignore"):
        spread = np.exp(_log_multiplier(name, drawn.solutions[name].theta, x))
    tail = (1 - confidence) / 2
    bands = np.quantile(spread, [tail, 1 - tail], axis=0, method="nearest")
    p = {"exponent": tests.p_exponent_hypothesis, "irreducible": tests.p_irreducible_hypothesis}.get(name)
    return HypothesisFit(
        hypothesis=name,
        gamma=(float(exponent[0]), float(exponent.sum())),
        log_a=(float(constant[0]), float(constant.sum())),
        e=(float(floor[0]), float(floor[-1])),
        rss=float(fits.rss(name)[0]),
        p_against_free=None if p is None else float(p[0]),
        predictions=tuple(
            Prediction(
                label,
                flops,
                float(losses[0, i]),
                float(losses[1, i]),
                float(value[i]),
                (float(bands[0, i]), float(bands[1, i])),
            )
            for i, (label, flops) in enumerate(where)
        ),
    )


def _delta_gamma_interval(
    reading: Hypothesis, index: int, fits: NestedFits, y: Array, settings: FitSettings, rule: DecisionRule
) -> Interval:
    """The profile interval of a reading's Δγ: floors, constants and the common exponent are all fitted
    again.
    """
    design, theta = fits.designs[reading], fits.solutions[reading].theta[0]
    weights = fits.weights[0]
    fit = LeastSquaresFit(
        design, fits.pair.x, y, weights, theta, float(fits.rss(reading)[0]),
        float(fits.variance(reading, rule)[0]), rule.log,
    )  # fmt: skip
    freedom = np.array(math.inf if rule.noise else float(fits.degrees_of_freedom(reading)[0]))
    covariance = unscaled_covariance(design, fits.pair.x, theta, weights=weights, log=rule.log)[0]
    quantile = float(t_quantile((1 + settings.confidence) / 2, freedom))
    return profile_intervals(fit, [index], covariance, quantile)[0]
