"""Power of a planned ladder: the probability of each verdict, and the cheapest ladder with enough power."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy import special

from steepen.errors import UsageError
from steepen.laws.fits.solver import Array, jacobian, unscaled_covariance
from steepen.laws.hypotheses.judge_draws import judge_draws
from steepen.laws.hypotheses.nested_models import (
    GROWTH,
    VERDICTS,
    DecisionRule,
    Growth,
    LadderPair,
    VerdictLabel,
    fit_hypotheses,
    verdict_label,
)
from steepen.laws.verdict.sensitivity import DRIFT_SHAPES, DriftShape, alternative_rss, drift_profile

Target = Literal["growth", "exponent"]
TARGETS: tuple[Target, ...] = ("growth", "exponent")
MIN_DECADES = 0.29  # no ladder is shorter
SPANS_COMPUTED = 24  # the search interpolates between these spans, and simulates what it chooses
SEARCH_DRAWS, CONFIRM_DRAWS = 150, 500  # of a candidate, and of one that passes


@dataclass(frozen=True)
class LadderPlan:
    """A planned pair of ladders, and the true laws they are simulated from.

    Defaults are the ladder and the Vanilla law of the paper this package follows: `constant` is A at 1e18
    FLOPs, with E and A chosen so that the printed γ reproduces the printed losses. `noise` is the standard
    deviation of a run's loss. `multiplier` is the arm's compute multiplier at the lowest rung. `arms` are to
    be compared with the reference in one table, which share `level`.
    """

    delta_gamma: float
    rungs: int = 8
    lowest: float = 3.25e17
    highest: float = 1.01e20
    noise: float = 1e-3
    seeds: int = 1
    gamma: float = 0.1113
    irreducible_loss: float = 1.83
    constant: float = 1.5
    multiplier: float = 1.1
    level: float = 0.05
    margin: float = 0.025
    arms: int = 1

    def __post_init__(self) -> None:
        if self.rungs < 4:
            raise UsageError(f"rungs is {self.rungs}; a ladder needs at least 4 to fit E and test it.")
        if self.seeds < 1:
            raise UsageError(f"seeds is {self.seeds}; give at least 1.")
        for name in ("lowest", "highest", "noise", "gamma", "constant", "multiplier"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}; give a finite number greater than zero.")
        if not self.highest > self.lowest:
            raise UsageError(f"highest is {self.highest:g}, not above lowest ({self.lowest:g}).")
        if not (math.isfinite(self.delta_gamma) and self.gamma + self.delta_gamma > 0):
            raise UsageError(f"delta_gamma is {self.delta_gamma}; γ + Δγ must stay above zero.")
        if not (math.isfinite(self.irreducible_loss) and self.irreducible_loss >= 0):
            raise UsageError(f"irreducible_loss is {self.irreducible_loss}; give a loss of zero or more.")
        if self.arms < 1:
            raise UsageError(f"arms is {self.arms}; give at least 1.")
        if not 0 < self.level < 0.5:
            raise UsageError(f"level is {self.level}; give a fraction between 0 and 0.5, such as 0.05.")

    @property
    def decades(self) -> float:
        """Decades of compute that the ladder spans."""
        return math.log10(self.highest / self.lowest)

    @property
    def flops(self) -> Array:
        """The rungs of each arm, evenly spaced in log compute."""
        return np.geomspace(self.lowest, self.highest, self.rungs)

    @property
    def cost(self) -> float:
        """FLOPs of both ladders with all seeds."""
        return 2 * self.seeds * float(self.flops.sum())

    @property
    def rule(self) -> DecisionRule:
        """The rule that turns test results into verdicts, at the arm's share of the level.

        That is Holm's share as long as the source of no other arm's gain is settled.
        """
        return DecisionRule(self.level / self.arms, self.margin)

    def pair(self) -> tuple[LadderPair, float]:
        """The points of both ladders, and C0 (the geometric middle of the ladder)."""
        flops = self.flops
        c0 = math.sqrt(self.lowest * self.highest)
        x = np.log(np.tile(flops, 2) / c0)
        return LadderPair(
            x, np.repeat([False, True], self.rungs), np.full(2 * self.rungs, float(self.seeds))
        ), c0

    def true_parameters(self) -> Array:
        """θ of the exponent hypothesis: (E, log A, Δ log A, γ, Δγ) at C0 in the middle of the ladder."""
        _, c0 = self.pair()
        log_a = math.log(self.constant) - self.gamma * math.log(c0 / 1e18)
        # At the lowest rung the arm needs lowest/multiplier for the reference's loss there.
        steep = self.gamma + self.delta_gamma
        low = math.log(self.lowest / c0)
        shift = -self.gamma * low + steep * (low - math.log(self.multiplier))
        return np.array([self.irreducible_loss, log_a, shift, self.gamma, self.delta_gamma])


@dataclass(frozen=True)
class Power:
    """Simulated power of a plan: how often `steepen fit` would answer each question right.

    Every draw goes through all checks of measured ladders (`judge_draws`). `growth` and `verdict` are
    probabilities here, not answers: `growth` is the fraction of draws that claim the right answer to the
    first question (does the gain grow?), `verdict` of those that also claim that to the second (by the
    exponent?). A fragile answer is no claim: `growth_fractions` and
    `verdict_fractions` count it as undecided (or as *either*); `fragile_growth_fractions` count it alone.
    `least_squares_fractions` are those of the tests alone, before any check.
    `confounding_penalty` is a systematic error, not noise: a loss that much too high at the top rung of
    `confounding_ladder` (a mistuned learning rate), there alone or growing towards it linearly or
    quadratically in log compute, would look like the whole Δγ, whatever the seeds. The ladder is the
    reference for Δγ > 0 and the arm for Δγ < 0.
    """

    plan: LadderPlan
    growth: float
    verdict: float
    expected_growth: Growth
    expected_verdict: VerdictLabel
    growth_fractions: dict[Growth, float]
    verdict_fractions: dict[VerdictLabel, float]
    fragile_growth_fractions: dict[Growth, float]
    least_squares_fractions: dict[VerdictLabel, float]
    delta_gamma_error: float
    confounding_penalty: dict[DriftShape, float]
    confounding_ladder: Literal["reference", "arm"]
    draws: int

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for JSON."""
        return {**asdict(self), "cost_flops": self.plan.cost, "decades": self.plan.decades}


@dataclass(frozen=True)
class CheapestLadder:
    """The cheapest ladder from the same lowest rung with power `goal`, confirmed by simulation; or None."""

    target: Target
    goal: float
    plan: LadderPlan | None
    power: Power | None

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for JSON."""
        plan = asdict(self.plan) if self.plan else None
        return {
            "target": self.target, "goal": self.goal, "plan": plan,
            "cost_flops": self.plan.cost if self.plan else None,
            "power": self.power.to_dict() if self.power else None,
        }  # fmt: skip


def simulate_power(plan: LadderPlan, draws: int = 1000, seed: int = 0) -> Power:
    """Simulate the plan `draws` times and count what `steepen fit` would claim."""
    if draws < 100:
        raise UsageError(f"draws is {draws}; a simulation needs at least 100.")
    pair, _ = plan.pair()
    rng = np.random.default_rng(seed)
    y = pair.designs()["exponent"].predict(plan.true_parameters(), pair.x)
    if not (y > 0).all():
        raise UsageError(
            "the planned law has a loss of zero or less at some rung; check irreducible_loss and constant."
        )
    noise = plan.noise / math.sqrt(plan.seeds) * rng.standard_normal((draws, len(y)))
    found = judge_draws(
        pair,
        np.maximum(y + noise, 1e-6),
        plan.rule,
        start=fit_hypotheses(pair, y, plan.rule),
        arms=plan.arms,
    )
    claimed = found.claimed
    words = claimed.words
    fragile = np.where(found.claim, "undecided", found.answers.growth)
    fractions: dict[VerdictLabel, float] = {word: float(np.mean(words == word)) for word in VERDICTS}
    growth: dict[Growth, float] = {word: float(np.mean(claimed.growth == word)) for word in GROWTH}
    expected = _expected_growth(plan)
    right = verdict_label(expected, "exponent" if expected == "grows" else None)
    return Power(
        plan=plan,
        growth=growth[expected],
        verdict=fractions[right],
        expected_growth=expected,
        expected_verdict=right,
        growth_fractions=growth,
        verdict_fractions=fractions,
        fragile_growth_fractions={
            word: float(np.mean(fragile == word)) for word in GROWTH if word != "undecided"
        },
        least_squares_fractions={
            word: float(np.mean(found.least_squares.words == word)) for word in VERDICTS
        },
        delta_gamma_error=float(np.std(found.tests.delta_gamma)),
        confounding_penalty=_confounding_penalty(plan),
        confounding_ladder="arm" if plan.delta_gamma < 0 else "reference",
        draws=draws,
    )


def _expected_growth(plan: LadderPlan) -> Growth:
    if plan.delta_gamma > 0:
        return "grows"
    if plan.delta_gamma < 0:
        return "shrinks"
    if plan.multiplier == 1:
        return "undecided"
    return "constant" if plan.multiplier > 1 else "worse"


def _confounding_penalty(plan: LadderPlan) -> dict[DriftShape, float]:
    """Loss penalty at a top rung that shifts the fitted Δγ by the planned one, to first order, by shape."""
    pair, _ = plan.pair()
    design, theta = pair.designs()["exponent"], plan.true_parameters()
    j = jacobian(design, pair.x, theta[None])[0]
    response = (unscaled_covariance(design, pair.x, theta)[0] @ j.T)[4]
    own = slice(plan.rungs, None) if plan.delta_gamma < 0 else slice(0, plan.rungs)
    return {
        shape: abs(plan.delta_gamma / float(response[own] @ drift_profile(pair.x[own], shape)))
        for shape in DRIFT_SHAPES
    }


def predicted_power(plan: LadderPlan, target: Target) -> float:
    """Power from the noncentral F distribution: fast, and close to the simulation."""
    return _power_from_rss(plan, target, _alternative_rss(plan, target))


def _alternative_rss(plan: LadderPlan, target: Target) -> float:
    """RSS of the alternative hypothesis on the planned laws without noise, for one seed."""
    pair, _ = replace(plan, seeds=1).pair()
    truth, designs = plan.true_parameters(), pair.designs()
    slope = target == "growth" or plan.delta_gamma <= 0
    start = truth[:4] if slope else truth[[0, 0, 1, 2, 3]]
    return alternative_rss(
        designs["exponent"], truth, designs["constant" if slope else "irreducible"], start, pair
    )


def _power_from_rss(plan: LadderPlan, target: Target, left: float) -> float:
    df = 2 * plan.rungs - (5 if target == "growth" or plan.delta_gamma <= 0 else 6)
    critical = float(special.fdtri(1.0, df, 1.0 - plan.rule.level))
    return 1.0 - float(special.ncfdtr(1.0, df, left * plan.seeds / plan.noise**2, critical))


def cheapest_ladder(
    plan: LadderPlan,
    target: Target = "growth",
    goal: float = 0.90,
    *,
    draws: int = 1000,
    max_rungs: int = 16,
    max_seeds: int = 5,
    max_decades: float = 8.0,
) -> CheapestLadder:
    """Search rungs, span and seeds for the least FLOPs with power `goal`; the lowest rung stays fixed."""
    if target not in TARGETS:
        raise UsageError(f"target is {target!r}; choose growth or exponent.")
    if not 0.05 < goal < 0.975:
        raise UsageError(f"goal is {goal}; give a power between 0.05 and 0.975 (the 5% level limits it).")
    if plan.delta_gamma == 0:
        raise UsageError("delta_gamma is 0; there is no difference for a ladder to find.")
    spans = np.geomspace(MIN_DECADES, max_decades, SPANS_COMPUTED)

    @cache
    def log_rss(rungs: int) -> Array:
        """The logarithm of the RSS at each span; seeds only scale the noncentrality."""
        found = [_alternative_rss(_option(plan, rungs, 1, 100 * float(span)), target) for span in spans]
        return np.log(np.maximum(found, 1e-300))

    def reaches(option: LadderPlan, hundredths: int, wanted: float) -> bool:
        rss = math.exp(float(np.interp(math.log(hundredths / 100), np.log(spans), log_rss(option.rungs))))
        return _power_from_rss(option, target, rss) >= wanted

    def shortest(rungs: int, seeds: int, wanted: float) -> LadderPlan | None:
        """The shortest span, in hundredths of a decade, whose F-test has the wanted power."""
        low, high = longest.get((rungs, seeds), int(100 * MIN_DECADES)), int(100 * max_decades)
        if not reaches(_option(plan, rungs, seeds, high), high, wanted):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            enough = reaches(_option(plan, rungs, seeds, middle), middle, wanted)
            low, high = (low, middle) if enough else (middle, high)
        longest[rungs, seeds] = low
        return _option(plan, rungs, seeds, high)

    longest: dict[tuple[int, int], int] = {}  # spans that were too short, by rungs and seeds
    sizes = [
        (rungs, seeds)
        for rungs in (*range(4, min(8, max_rungs + 1)), *range(8, max_rungs + 1, 2))
        for seeds in range(1, max_seeds + 1)
    ]
    # The checks of a verdict take power from the F-test, so its power is raised until enough draws pass them.
    for spare in (0.3, 0.1, 0.03, 0.01, 0.001, 1e-4, 1e-6):
        options = [shortest(*size, 1 - spare * (1 - goal)) for size in sizes]
        cheapest = min((option for option in options if option), key=lambda option: option.cost, default=None)
        if cheapest is None:
            break
        if _reached(simulate_power(cheapest, min(SEARCH_DRAWS, draws)), target) >= goal:
            power = simulate_power(cheapest, min(CONFIRM_DRAWS, draws))
            if _reached(power, target) >= goal:
                return CheapestLadder(target, goal, cheapest, power)
    return CheapestLadder(target, goal, None, None)


def _reached(power: Power, target: Target) -> float:
    return power.verdict if target == "exponent" else power.growth


def _option(plan: LadderPlan, rungs: int, seeds: int, hundredths: float) -> LadderPlan:
    return replace(plan, rungs=rungs, seeds=seeds, highest=plan.lowest * 10 ** (hundredths / 100))
