"""Power of a planned ladder: the probability of each answer, and the cheapest ladder with enough power."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy import special

from steepen.errors import UsageError, require_one_of
from steepen.laws.distributions import t_quantile
from steepen.laws.model.fit_tables import fit_tables
from steepen.laws.model.laws import MIN_PARTNERS, Array, Cells, Laws
from steepen.laws.model.table_fit import TableFit, slope_contrast
from steepen.laws.verdict.questions import (
    BETTER,
    BY_WHAT,
    DRIFT_SHAPES,
    GROWTH,
    Better,
    ByWhat,
    DecisionRule,
    DriftShape,
    Growth,
    by_what,
    contrasts,
    drift_profile,
    p_values,
)

Target = Literal["growth", "exponent"]
TARGETS: tuple[Target, ...] = ("growth", "exponent")
MIN_DECADES = 0.29  # no ladder is shorter
SEARCH_DRAWS, CONFIRM_DRAWS = 150, 500  # of a candidate, and of one that passes
BLOCK = 500  # tables that are fitted at once


@dataclass(frozen=True)
class LadderPlan:
    """A planned table of ladders, and the true laws they are simulated from.

    Defaults are the ladder and the Vanilla law of the paper this package follows: `constant` is A at 1e18
    FLOPs, with E and A chosen so that the printed γ reproduces the printed losses. `noise` is the standard
    deviation of a run's loss (`noise_at` instead: at some computes, and by lines in logarithms between them),
    `lack_of_fit` that of a rung's, which more seeds do not reduce. `multiplier` is
    the arm's compute multiplier at the lowest rung. `arms` are to be compared with the reference in one
    table: they share `level`, and E and the noise are estimated from all of them.
    """

    delta_gamma: float
    rungs: int = 8
    lowest: float = 3.25e17
    highest: float = 1.01e20
    noise: float = 1e-3
    lack_of_fit: float = 0.0
    seeds: int = 1
    gamma: float = 0.1113
    irreducible_loss: float = 1.83
    constant: float = 1.5
    multiplier: float = 1.1
    level: float = 0.05
    margin: float = 0.025
    equivalence: float = 0.05
    arms: int = 1
    noise_at: tuple[tuple[float, float], ...] = ()

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
        for name in ("irreducible_loss", "lack_of_fit"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise UsageError(f"{name} is {value}; give a loss of zero or more.")
        if self.arms < 1:
            raise UsageError(f"arms is {self.arms}; give at least 1.")
        _ = self.rule

    @property
    def decades(self) -> float:
        """Decades of compute that the ladder spans."""
        return math.log10(self.highest / self.lowest)

    @property
    def flops(self) -> Array:
        """The rungs of each arm, evenly spaced in log compute."""
        return np.geomspace(self.lowest, self.highest, self.rungs)

    @property
    def run_noise(self) -> Array:
        """The standard deviation of a run's loss at every rung."""
        if not self.noise_at:
            return np.full(self.rungs, self.noise)
        at, noise = np.log(np.array(self.noise_at)).T
        return np.exp(np.interp(np.log(self.flops), at, noise))

    @property
    def rung_variance(self) -> Array:
        """The variance of every rung's mean loss about its law."""
        return self.lack_of_fit**2 + self.run_noise**2 / self.seeds

    @property
    def cost(self) -> float:
        """FLOPs of the reference's and one arm's ladder with all seeds."""
        return 2 * self.seeds * float(self.flops.sum())

    @property
    def rule(self) -> DecisionRule:
        """The rule that turns test results into answers, at the arm's share of the level."""
        return DecisionRule(self.level / self.arms, self.margin, self.equivalence)

    @property
    def x(self) -> Array:
        """Log compute of the rungs, 0 in the middle of the ladder."""
        return np.log(self.flops / math.sqrt(self.lowest * self.highest))

    def cells(self) -> Cells:
        """The rungs of the reference and the arms."""
        shape = (1 + self.arms, self.rungs)
        seeds = np.full(shape, float(self.seeds))
        partners = np.tile(np.arange(self.rungs), (shape[0], 1)) if self.rungs >= MIN_PARTNERS else None
        x = np.tile(self.x, (shape[0], 1))
        return Cells(x, np.ones(shape, bool), seeds, seeds - 1, np.zeros(shape), partners=partners)

    def laws(self, sets: int = 1) -> Laws:
        """The true laws; other arms are equal to the first."""
        log_a = math.log(self.constant) - self.gamma * math.log(math.sqrt(self.lowest * self.highest) / 1e18)
        # At the lowest rung the arm needs lowest/multiplier for the reference's loss there.
        steep, low = self.gamma + self.delta_gamma, float(self.x[0])
        arm = log_a - self.gamma * low + steep * (low - math.log(self.multiplier))
        return Laws(
            np.full(sets, self.irreducible_loss),
            np.tile([log_a, *[arm] * self.arms], (sets, 1)),
            np.tile([self.gamma, *[steep] * self.arms], (sets, 1)),
        )


@dataclass(frozen=True)
class Power:
    """Simulated power of a plan: how often `steepen fit` would answer each question right.

    `better`, `growth` and `exponent` are the fractions of draws with the right answer to each question (the
    last: grows, and by the exponent). `confounding_penalty` is a systematic error, not noise: a loss that
    much too high at the top rung of `confounding_ladder` (a mistuned learning rate), there alone or growing
    towards it linearly or quadratically in log compute, would look like the whole Δγ, whatever the seeds.
    The ladder is the reference for Δγ > 0 and the arm for Δγ < 0.
    """

    plan: LadderPlan
    better: float
    growth: float
    exponent: float
    expected_better: Better
    expected_growth: Growth
    better_fractions: dict[Better, float]
    growth_fractions: dict[Growth, float]
    by_what_fractions: dict[ByWhat, float]
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
    """Simulate the plan `draws` times and count what `steepen fit` would answer."""
    if draws < 100:
        raise UsageError(f"draws is {draws}; a simulation needs at least 100.")
    rng = np.random.default_rng(seed)
    if not (plan.laws().predict(plan.cells().x) > 0).all():
        raise UsageError(
            "the planned law has a loss of zero or less at some rung; check irreducible_loss and constant."
        )
    better: list[str] = []
    growth: list[str] = []
    causes: list[str] = []
    slopes: list[Array] = []
    for begin in range(0, draws, BLOCK):
        fit = _simulate(plan, min(BLOCK, draws - begin), rng)
        found = contrasts(fit, (0, 1), float(plan.x[0]), float(plan.x[-1]))
        p = p_values(found, plan.rule)
        better += p.better(plan.rule.level).tolist()
        grown = p.growth(plan.rule.level)
        growth += grown.tolist()
        slopes.append(found.slope.mean)
        slope, e = fit.causes((0, 1))
        tests = np.stack([e.p_value(), slope.p_value(), slope.mean, e.mean], axis=1)
        for p_exponent, p_irreducible, delta_gamma, delta_e in tests[grown == "grows"].tolist():
            causes.append(by_what(p_exponent, p_irreducible, delta_gamma, delta_e, plan.rule.level))
    expected_better, expected_growth = _expected(plan)
    better_fractions: dict[Better, float] = {word: better.count(word) / draws for word in BETTER}
    growth_fractions: dict[Growth, float] = {word: growth.count(word) / draws for word in GROWTH}
    cause_fractions: dict[ByWhat, float] = {word: causes.count(word) / draws for word in BY_WHAT}
    growth_found = growth_fractions[expected_growth]
    return Power(
        plan=plan, better=better_fractions[expected_better], growth=growth_found,
        exponent=cause_fractions["exponent"] if expected_growth == "grows" else growth_found,
        expected_better=expected_better, expected_growth=expected_growth, better_fractions=better_fractions,
        growth_fractions=growth_fractions, by_what_fractions=cause_fractions,
        delta_gamma_error=float(np.std(np.concatenate(slopes))),
        confounding_penalty=_confounding_penalty(plan),
        confounding_ladder="arm" if plan.delta_gamma < 0 else "reference", draws=draws,
    )  # fmt: skip


def _simulate(plan: LadderPlan, sets: int, rng: np.random.Generator) -> TableFit:
    """The model fitted to simulated tables."""
    cells, laws = plan.cells(), plan.laws(sets)
    shape = (sets, *cells.x.shape)
    # Means and sums of squares of normal seeds are independent, so the seeds themselves are not drawn.
    scatter = np.sqrt(plan.rung_variance)
    loss = np.maximum(laws.predict(cells.x) + scatter * rng.standard_normal(shape), 1e-6)
    squares = np.zeros(shape)
    if plan.seeds > 1:
        squares = plan.run_noise**2 * rng.chisquare(plan.seeds - 1, shape)
    return fit_tables(cells, loss, squares, laws)


def _expected(plan: LadderPlan) -> tuple[Better, Growth]:
    """The right answers to the first two questions."""
    middle = math.log(plan.multiplier) - plan.delta_gamma / (plan.gamma + plan.delta_gamma) * float(plan.x[0])
    better: Better = "better" if middle > 0 else "worse" if middle < 0 else "no difference"
    return better, "grows" if plan.delta_gamma > 0 else "shrinks" if plan.delta_gamma < 0 else "constant"


def _known(plan: LadderPlan) -> TableFit:
    """The model of the planned losses without noise, its variances known."""
    cells, laws = plan.cells(), plan.laws()
    covariance = np.tile(np.diag(plan.rung_variance), (1 + plan.arms, 1, 1))
    loss = laws.predict(cells.x)
    return fit_tables(cells, loss, np.zeros(loss.shape), laws, covariance=covariance)


def _confounding_penalty(plan: LadderPlan) -> dict[DriftShape, float]:
    """Loss penalty at a top rung that shifts the fitted Δγ by the planned one, to first order, by shape."""
    fit = _known(replace(plan, arms=1))
    contrast = slope_contrast(fit.laws, (0, 1))
    found: dict[DriftShape, float] = {}
    for shape in DRIFT_SHAPES:
        direction = np.zeros(fit.cells.x.shape)
        direction[1 if plan.delta_gamma < 0 else 0] = drift_profile(plan.x, shape)
        moved = fit.shifted(contrast, direction, np.array([0.0, 1.0])).mean
        found[shape] = abs(plan.delta_gamma / float(moved[1] - moved[0]))
    return found


def predicted_power(plan: LadderPlan, target: Target) -> float:
    """Power of a t-test with known variances' standard error: fast, and an upper bound for the search."""
    fit = _known(plan)
    one = fit.mixture(slope_contrast(fit.laws, (0, 1)))
    if target == "exponent" and plan.delta_gamma > 0:
        one, _ = fit.causes((0, 1))
    spare = float((1 + plan.arms) * plan.rungs * plan.seeds - 3 - 2 * plan.arms)
    critical = float(t_quantile(1 - plan.rule.level / 2, np.array(spare)))
    return float(special.ndtr(abs(plan.delta_gamma) / float(one.error[0, 0]) - critical))


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
    require_one_of("target", target, TARGETS)
    if not 0.05 < goal < 0.975:
        raise UsageError(f"goal is {goal}; give a power between 0.05 and 0.975 (the 5% level limits it).")
    if plan.delta_gamma == 0:
        raise UsageError("delta_gamma is 0; there is no difference for a ladder to find.")

    @cache
    def power_of(rungs: int, seeds: int, hundredths: int) -> float:
        return predicted_power(_option(plan, rungs, seeds, hundredths), target)

    def shortest(rungs: int, seeds: int, wanted: float) -> LadderPlan | None:
        """The shortest span, in hundredths of a decade, with the wanted power."""
        low, high = int(100 * MIN_DECADES), int(100 * max_decades)
        if power_of(rungs, seeds, high) < wanted:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if power_of(rungs, seeds, middle) >= wanted else (middle, high)
        return _option(plan, rungs, seeds, high)

    sizes = [
        (rungs, seeds)
        for rungs in (*range(4, min(8, max_rungs + 1)), *range(8, max_rungs + 1, 2))
        for seeds in range(1, max_seeds + 1)
    ]
    # Noise is estimated and may be correlated, which takes power, so more is asked for until enough is left.
    for spare in (0.3, 0.1, 0.03, 0.01, 0.001, 1e-4, 1e-6, 1e-9):
        options = [shortest(*size, 1 - spare * (1 - goal)) for size in sizes]
        found = sorted((option for option in options if option), key=lambda option: option.cost)
        for cheapest in found[:3]:
            if _reached(simulate_power(cheapest, min(SEARCH_DRAWS, draws)), target) >= goal:
                power = simulate_power(cheapest, min(CONFIRM_DRAWS, draws))
                if _reached(power, target) >= goal:
                    return CheapestLadder(target, goal, cheapest, power)
    return CheapestLadder(target, goal, None, None)


def _reached(power: Power, target: Target) -> float:
    return power.exponent if target == "exponent" else power.growth


def _option(plan: LadderPlan, rungs: int, seeds: int, hundredths: float) -> LadderPlan:
    return replace(plan, rungs=rungs, seeds=seeds, highest=plan.lowest * 10 ** (hundredths / 100))
