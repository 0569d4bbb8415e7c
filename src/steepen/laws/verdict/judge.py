"""Judge a table of ladders: one model of all of them, and a verdict on each arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import special

from steepen.laws.distributions import Interval, exp, exp_interval
from steepen.laws.fits.compute_law import (
    AnalysisRequest,
    ArmLaw,
    ComputeFit,
    Estimate,
    default_c0,
    flops_range,
    root_mean_square,
)
from steepen.laws.ladder import Ladder, thin
from steepen.laws.model.fit_tables import fit_tables
from steepen.laws.model.laws import Array, starting_laws, to_cells
from steepen.laws.model.table_fit import (
    Contrast,
    Mixture,
    TableFit,
    multiplier_contrast,
    parameter_contrast,
    slope_contrast,
)
from steepen.laws.verdict.evidence import (
    Drifting,
    Effect,
    LeftOut,
    Prediction,
    Verdict,
    verdict_sentence,
    what_would_change,
)
from steepen.laws.verdict.multipliers import MAX_MULTIPLIER, Multiplier, both_cover
from steepen.laws.verdict.questions import (
    Better,
    ByWhat,
    Contrasts,
    DecisionRule,
    Growth,
    PValues,
    by_what,
    contrasts,
    holm_levels,
    mistuning_tolerance,
    p_values,
)

# Leaving out a good run makes the noise look smaller than it is, and answers too sure: levels are strict, and
# enough must be left to test against.
OUTLIER_LEVEL = 0.002  # of the test that a rung is off the law of the others, for the whole table
DIVERGED_LEVEL = 1e-4  # of the test that the seeds of a rung scatter more than those of other arms
MIN_SPARE = 4  # degrees of freedom that are left without the rung
MIN_RUNGS_LEFT = 3
MIN_DEVIATION = 1e-4  # of the loss: smaller ones are left in
MIN_RUNGS_OF_OWN_E = 4  # three constants, and one rung to tell how well they hold
MISSED = 3.0  # mean residual of an arm over its scatter, above which a law is no law of its runs
MAX_ELEMENTS = 400_000  # of the covariances of a table: longer ladders are thinned


@dataclass(frozen=True)
class Outlier:
    """A rung, or a seed of one, that was left out of everything: its loss is `deviation` above the others."""

    place: str
    arm: str
    flops: float
    loss: float
    deviation: float
    p_value: float
    seed: int | None = None  # which run of the rung, where the others were kept


def _through_runs(values: list[float], ladder: Ladder, c0: float, scatter: float) -> list[float]:
    """log A, γ and E, with the first two fitted again given E where their means miss every run.

    They do where E is hardly known: each is the mean over the model's components, which together may be a
    curve far above or below the runs.
    """
    log_a, gamma, e = values
    x, e = np.log(ladder.flops / c0), min(e, 0.999 * float(ladder.loss.min()))
    # The means of hardly known laws may be anything.
    predicted = np.exp(np.clip(log_a - gamma * x, -700.0, 700.0))
    missed = float((ladder.loss - e - predicted).mean())
    if abs(missed) <= MISSED * scatter:
        return values
    slope, constant = np.polyfit(x, np.log(ladder.loss - e), 1)
    return [float(constant), -float(slope), e]


@dataclass(frozen=True, eq=False)
class Asked:
    """What the questions found of a pair (reference, arm), and the level at which each is answered.

    `span` is the log compute that both cover (None: they never overlap), `causes` are ΔE and Δγ together.
    """

    pair: tuple[int, int]
    span: tuple[float, float] | None
    found: Contrasts
    tested: PValues
    causes: tuple[Effect, Effect]
    levels: list[float]

    def answers(self, levels: Sequence[float]) -> tuple[Better, Growth, ByWhat | None]:
        """The answers to the three questions."""
        if self.span is None:
            return "not resolved", "undecided", None
        better, growth = self.tested.words(levels)
        e, gamma = self.causes
        cause = by_what(e.p_value, gamma.p_value, gamma.value, e.value, levels[2])
        return better, growth, cause if growth == "grows" else None


@dataclass(frozen=True, eq=False)
class TableJudge:
    """The model of a table, fitted; `ladders` without what was left out (`outliers`).

    `fit` has one E for all arms unless `p_one_e`, the p-value of that, is below the level.
    """

    ladders: dict[str, Ladder]
    settings: AnalysisRequest
    c0: float
    fit: TableFit
    p_one_e: float | None
    outliers: tuple[Outlier, ...]

    @cached_property
    def rule(self) -> DecisionRule:
        """The rule that turns p-values into words."""
        return self.settings.rule

    @property
    def own_e(self) -> bool:
        """Whether every arm has its own E, because one for all is rejected."""
        return self.fit.laws.own_e

    @cached_property
    def names(self) -> list[str]:
        """The arms in the order of the table."""
        return list(self.ladders)

    @property
    def tau(self) -> float:
        """The lack of fit (without replicates: the residual standard deviation of a single run)."""
        taus = np.stack([model.tau[0] for model in self.fit.models])
        return float(np.exp((self.fit.weight[:, 0] * np.log(np.maximum(taus, 1e-300))).sum()))

    def run_variance(self, flops: float, seeds: float = 1.0) -> float:
        """The variance of the mean of runs at a compute: lack of fit, and seed noise at the nearest rung."""
        if (self.fit.noise[0, self.fit.cells.mask] <= 0).any():
            return self.tau**2 / seeds
        apart = np.where(self.fit.cells.mask, np.abs(self.fit.cells.x - math.log(flops / self.c0)), np.inf)
        place = np.unravel_index(int(np.argmin(apart)), apart.shape)
        one = float(self.fit.noise[0][place]) * float(self.fit.cells.precision[place])
        return self.tau**2 + one / seeds

    def shared_e(self) -> tuple[float, float]:
        """E of all arms and its standard error."""
        models = list(zip(self.fit.weight[:, 0], self.fit.models, strict=True))
        steps = (w * float(one.steps(self.fit.residual, one.pull)[1][0, 0]) for w, one in models)
        variance = sum(w * float(one.scale[0] * one.spread[0, 0, 0]) for w, one in models)
        return float(self.fit.laws.e[0]) + sum(steps), float(np.sqrt(variance))

    def laws(self) -> ComputeFit:
        """The laws of all arms, with intervals from the model."""
        fit, confidence = self.fit, self.settings.confidence
        arms: dict[str, ArmLaw] = {}
        held = self._given_e()
        for i, (name, ladder) in enumerate(self.ladders.items()):
            found = [fit.mixture(parameter_contrast(fit.laws, i, k)) for k in range(3)]
            values = [float(one.mean[0]) for one in found]
            scatter = root_mean_square(fit.residual[0, i][fit.cells.mask[i]])
            values = _through_runs(values, ladder, self.c0, scatter)
            wide = [_span(one, confidence) for one in found]
            narrow = [_span(one, confidence) for one in held[i]]
            e = Estimate(max(values[2], 0.0), narrow[2], (max(wide[2][0], 0.0), wide[2][1]))
            gamma = Estimate(values[1], narrow[1], wide[1])
            log_a, error = Estimate(values[0], narrow[0], wide[0]), float(held[i][1].sd[0])
            arms[name] = ArmLaw(name, gamma, log_a, e, error, scatter, self.c0, flops_range(ladder))
        spare = float(fit.kept.sum() - fit.laws.log_a.size * 2 - fit.laws.e.size)
        middle = math.exp(float(np.median(fit.cells.x[fit.cells.mask]))) * self.c0
        settings, sigma = replace(self.settings, method="joint"), math.sqrt(self.run_variance(middle))
        bound = ("e at zero",) if fit.e_at_bound.any() else ()
        return ComputeFit(settings, self.c0, arms, sigma, spare, float((fit.residual**2).sum()), bound)

    def law_variance(self, arm: str, x: float, reducible: float) -> float:
        """The variance of an arm's law at log compute x."""
        # A contrast of value zero: how far the models' means differ is no variance of the printed law.
        gradient = np.array([[reducible, -x * reducible, *([1.0] if self.own_e else [])]])
        place = self.names.index(arm)
        one = Contrast((place, place), np.zeros(1), 0 * gradient, gradient, 0.0 if self.own_e else 1.0)
        found = self.fit.mixture(one)
        return float((found.weight * found.error**2).sum(axis=0)[0])

    def _given_e(self) -> list[list[Mixture]]:
        """For each arm: log A and γ if E were known, and E if the exponents were."""
        fit = self.fit
        # A shared E without a spread is a known one.
        models = tuple(replace(model, spread=0 * model.spread) for model in fit.models)
        known = fit if self.own_e else replace(fit, models=models)
        found: list[list[Mixture]] = []
        for i in range(len(self.ladders)):
            parts = [known.mixture(parameter_contrast(fit.laws, i, k)) for k in (0, 1)]
            e = fit.mixture(parameter_contrast(fit.laws, i, 2))
            # Given the exponents, E is a mean of the losses: as precise as they are.
            narrow = np.array([[m.scale[0] / max(float(m.precision.sum()), 1e-300)] for m in fit.models])
            parts.append(Mixture(e.weight, e.value, np.minimum(np.sqrt(narrow), e.error), e.freedom))
            found.append(parts)
        return found

    def range_of(self, arms: tuple[int, int]) -> tuple[float, float] | None:
        """The log compute that both arms cover; None if they never overlap."""
        own = [self.fit.cells.x[i][self.fit.cells.mask[i]] for i in arms]
        low, high = max(float(x.min()) for x in own), min(float(x.max()) for x in own)
        return (low, high) if low <= high + 0.01 else None

    def falls(self, pair: tuple[int, int]) -> bool:
        """Whether both laws fall: a flat curve reaches no lower loss, so there is no multiplier."""
        return min(float(self.fit.laws.gamma[0, i]) for i in pair) > 1e-6

    def multiplier_at(self, pair: tuple[int, int], x: float) -> tuple[float, Interval]:
        """The multiplier at the reference's log compute x, with its interval."""
        one = multiplier_contrast(self.fit.laws, pair, np.array([x]), np.ones(1))
        return _factor(self.fit.mixture(one), self.settings.confidence)

    def multipliers(self, arm: str, reference: str, at: Array, extrapolate: bool) -> list[Multiplier]:
        """The table model's multipliers at the reference's computes, whatever the method of the laws.

        Beyond the ladders only where `extrapolate`.
        """
        pair = self.names.index(reference), self.names.index(arm)
        base, other = (flops_range(self.ladders[name]) for name in (reference, arm))
        found: list[Multiplier] = []
        for flops in at if self.falls(pair) else ():
            value, (low, high) = self.multiplier_at(pair, math.log(flops / self.c0))
            if not 1 / MAX_MULTIPLIER < value < MAX_MULTIPLIER:
                continue
            inside = both_cover(base, flops, other, flops / value)
            if inside or extrapolate:
                method = "fitted (joint)"
                found.append(Multiplier(method, float(flops), value, low, high, not inside, leads=True))
        return found

    def ask(self, pairs: Sequence[tuple[str, str]]) -> list[Asked]:
        """The three questions of (reference, arm) pairs, which share the level of each with `adjust`.

        An arm that is tested at the whole level is wrong in one table of twenty; of eight such arms, one is
        wrong in a third of all tables.
        """
        level = self.rule.level
        asked: list[Asked] = []
        for a, b in pairs:
            pair = self.names.index(a), self.names.index(b)
            span = self.range_of(pair)
            found = contrasts(self.fit, pair, *(span or (0.0, 0.0)))
            tested = p_values(found, self.rule)
            slope, e = self.fit.causes(pair)
            asked.append(
                Asked(pair, span, found, tested, (self._effect(e), self._effect(slope)), [level] * 3)
            )
        judged = [one for one in asked if one.span is not None] if self.settings.adjust else []

        def share(question: int, among: list[Asked], p: list[float]) -> None:
            for one, own in zip(among, holm_levels(p, level), strict=True):
                one.levels[question] = own

        # The third question is asked only of arms whose gain grows, so only these share its level.
        share(0, judged, [float(min(one.tested.gain[0], one.tested.equivalent[0])) for one in judged])
        share(1, judged, [float(min(one.tested.slope[0], one.tested.constant[0])) for one in judged])
        growing = [one for one in judged if one.tested.growth(one.levels[1])[0] == "grows"]
        share(2, growing, [min(cause.p_value for cause in one.causes) for one in growing])
        return asked

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on (reference, arm) pairs."""
        asked = self.ask(pairs)
        count = sum(one.span is not None for one in asked) if self.settings.adjust else 1
        return [self._verdict(one, count) for one in asked]

    def _effect(self, one: Mixture) -> Effect:
        return Effect(float(one.mean[0]), _span(one, 1 - self.rule.level), float(one.p_value()[0]))

    def _factor(self, one: Mixture) -> Effect:
        value, interval = _factor(one, 1 - self.rule.level)
        return Effect(value, interval, float(one.p_value()[0]))

    def _verdict(self, one: Asked, arms: int) -> Verdict:
        pair, span, found, level = one.pair, one.span, one.found, self.rule.level
        reference, arm = (self.names[i] for i in pair)
        better, growth, cause = one.answers(one.levels)
        slope = self.fit.mixture(slope_contrast(self.fit.laws, pair))
        per_decade, per_decade_interval = self._per_decade(pair, span)
        blank = Verdict(
            arm=arm, reference=reference, better=better, growth=growth, by_what=cause,
            unadjusted=one.answers([level] * 3), rule=self.rule,
            levels=(one.levels[0], one.levels[1], one.levels[2]), arms=arms,
            flops_range=None if span is None else (self.c0 * math.exp(span[0]), self.c0 * math.exp(span[1])),
            gain=self._factor(found.gain), top=self._factor(found.top),
            p_equivalent=float(one.tested.equivalent[0]), slope=self._effect(found.slope),
            p_constant=float(one.tested.constant[0]), growth_per_decade=per_decade,
            growth_per_decade_interval=per_decade_interval,
            delta_gamma=float(slope.mean[0]), delta_gamma_interval=_span(slope, 1 - level),
            delta_e=one.causes[0], delta_gamma_free=one.causes[1], own_e=self.own_e,
            predictions=self._predictions(one),
            leave_one_out=() if span is None else self._leave_one_out(one),
            drifting=None if span is None else self._drifting(one, span),
            tolerance=() if span is None else mistuning_tolerance(
                self.fit, found, self.rule, one.levels, {pair[0]: reference, pair[1]: arm}, self.c0,
                self.settings.lr_regret,
            ),
            sentence="", what_would_change=(), unit=self.settings.unit,
        )  # fmt: skip
        worded = replace(blank, sentence=verdict_sentence(blank))
        return replace(worded, what_would_change=tuple(what_would_change(worded)))

    def _per_decade(self, pair: tuple[int, int], span: tuple[float, float] | None) -> tuple[float, Interval]:
        """The factor by which the multiplier grows per decade, the mean over the common range."""
        if span is None or not self.falls(pair):
            return math.nan, (math.nan, math.nan)
        low, high = span if span[1] - span[0] > 1e-6 else (span[0] - 0.5, span[0] + 0.5)
        weights = np.array([-1.0, 1.0]) / (high - low) * math.log(10)
        one = self.fit.mixture(multiplier_contrast(self.fit.laws, pair, np.array([low, high]), weights))
        return _factor(one, 1 - self.rule.level)

    def _drifting(self, one: Asked, span: tuple[float, float]) -> Drifting | None:
        found = self.fit.drifting()
        if found is None:
            return None
        p = p_values(contrasts(found[0], one.pair, *span), self.rule)
        return Drifting(found[1], *p.words(one.levels))

    def _leave_one_out(self, one: Asked) -> tuple[LeftOut, ...]:
        """Rungs of the two ladders without which the first or second answer is another."""
        answers, cells = one.answers(one.levels)[:2], self.fit.cells
        gain, slope = (self.fit.left_out(of) for of in (one.found.gain_of, one.found.slope_of))
        p = p_values(one.found, self.rule, gain, slope)
        return tuple(
            LeftOut(self.names[i], self.c0 * math.exp(float(cells.x[i, k])), *words)
            for i in one.pair
            for k in np.flatnonzero(cells.mask[i])
            if (words := p.words(one.levels, i * cells.x.shape[1] + int(k))) != answers
        )

    def _predictions(self, asked: Asked) -> tuple[Prediction, ...]:
        """Multipliers beyond the ladders by the exponent, and by the irreducible loss alone."""
        pair, causes, level = asked.pair, asked.causes, asked.levels[2]
        r = pair[0]
        top = float(self.ladders[self.names[r]].flops[-1])
        places = [("10× the top rung", 10 * top), ("1000× the top rung", 1000 * top)]
        if (budget := self.settings.budget) is not None:
            places.append((f"{budget:.3g} {self.settings.unit}", budget))
        laws, falling = self.fit.laws, self.falls(pair)
        e, log_a = self._irreducible_law(pair)
        found: list[Prediction] = []
        for label, flops in places:
            x = math.log(flops / self.c0)
            value, interval, other = None, None, None
            if falling and (causes[0].p_value >= level or self.own_e):
                value, interval = self.multiplier_at(pair, x)
            if falling and causes[1].p_value >= level and not self.own_e:
                gamma = float(laws.gamma[0, r])
                above = float(laws.e[0]) + math.exp(float(laws.log_a[0, r]) - gamma * x) - e
                other = exp(x - (log_a - math.log(above)) / gamma) if above > 0 else 0.0
            found.append(Prediction(label, flops, value, interval, other))
        return tuple(found)

    def _irreducible_law(self, pair: tuple[int, int]) -> tuple[float, float]:
        """E and log A of the arm if it had the reference's exponent: a linear regression."""
        r, a = pair
        own = self.fit.cells.mask[a]
        x, loss = self.fit.cells.x[a][own], self.fit.loss[0, a][own]
        falls = np.exp(-float(self.fit.laws.gamma[0, r]) * x)
        variance = self.fit.noise[0, a][own] + self.tau**2
        root = 1 / np.sqrt(np.maximum(variance, 1e-30))
        e, a_ = np.linalg.lstsq(np.stack([root, falls * root], axis=1), loss * root, rcond=None)[0]
        return float(e), math.log(max(float(a_), 1e-12))


def fit_ladders(ladders: dict[str, Ladder], settings: AnalysisRequest) -> TableJudge:
    """Fit the model of a table, without runs that are off the others, with an E for each arm if need be."""
    c0, prior = settings.c0 or default_c0(ladders[settings.reference]), settings.irreducible_loss
    most = max(8, int(math.sqrt(MAX_ELEMENTS / len(ladders))))
    ladders = {name: thin(ladder, most) for name, ladder in ladders.items()}
    ladders, left_out = without_diverged_seeds(ladders)

    def fitted(own_e: bool = False) -> TableFit:
        cells, loss, squares, paired = to_cells(list(ladders.values()), c0, settings.noise)
        held = None if prior is None or prior.sd else prior.mean
        start = starting_laws(cells, loss, own_e, held)
        known = None if prior is None else (prior.mean, prior.sd or 0.0)
        return fit_tables(cells, loss, squares, start, e_prior=known, paired=paired)

    fit = fitted()
    # One at a time, as a bad rung may make a good one look bad; and few, as laws that bend have no outliers.
    allowed = max(1, sum(len(ladder.flops) for ladder in ladders.values()) // 20)
    while len(left_out) < allowed and (outlier := find_outlier(fit, ladders)) is not None:
        left_out.append(outlier)
        ladder = ladders[outlier.arm]
        ladders = {**ladders, outlier.arm: ladder.keep(ladder.flops != outlier.flops)}
        fit = fitted()
    # One E for all arms is what tells exponents apart on short ladders, so it is kept until it is rejected.
    p_one_e = None
    clustered = fit.cells.clusters is not None
    if 1 < len(ladders) <= 200 and not clustered and fit.kept.sum() - 3 * len(ladders) >= 1:
        p_one_e = float(fit.p_one_e()[0])
        long_enough = all(len(ladder.flops) >= MIN_RUNGS_OF_OWN_E for ladder in ladders.values())
        if p_one_e < settings.level and prior is None and long_enough:
            fit = fitted(own_e=True)
    return TableJudge(ladders, settings, c0, fit.pruned(), p_one_e, tuple(left_out))


def find_outlier(fit: TableFit, ladders: dict[str, Ladder]) -> Outlier | None:
    """The rung that is furthest off the law of the others, if noise does not explain it."""
    if fit.kept.sum() - 2 * len(ladders) - 2 < MIN_SPARE or fit.cells.clusters is not None:
        return None
    p, distance = (part[0] for part in fit.outliers())
    rungs = fit.cells.mask.sum(axis=1)
    p = np.where((rungs > MIN_RUNGS_LEFT)[:, None], p, 1.0)
    i, k = np.unravel_index(int(np.argmin(p)), p.shape)
    deviation = float(distance[i, k])
    if p[i, k] >= OUTLIER_LEVEL or abs(deviation) < MIN_DEVIATION * float(fit.loss[0, i, k]):
        return None
    ladder = list(ladders.values())[int(i)]
    place, flops, loss = ladder.row_labels[int(k)], float(ladder.flops[int(k)]), float(ladder.loss[int(k)])
    return Outlier(place, ladder.arm, flops, loss, deviation, float(p[i, k]))


def without_diverged_seeds(ladders: dict[str, Ladder]) -> tuple[dict[str, Ladder], list[Outlier]]:
    """The ladders without seeds that scatter far more than those of other arms at similar compute.

    Before any fit: one diverged run would make the noise of every arm look large.
    """
    found: list[Outlier] = []
    while True:
        places = [(name, int(k)) for name, one in ladders.items() for k in np.flatnonzero(one.seeds > 1)]
        if len(places) < 3:
            return ladders, found
        logs = np.array([math.log(ladders[name].flops[k]) for name, k in places])
        seeds = np.array([ladders[name].seeds[k] for name, k in places])
        squares = np.array([ladders[name].runs[k].var() for name, k in places]) * seeds
        freedom = seeds - 1
        best: tuple[float, int] = (1.0, -1)
        for i in range(len(places)):
            # Noise falls with compute, so a rung is held against those of at most three times its compute.
            near = (np.abs(logs - logs[i]) < math.log(3)) & (np.arange(len(places)) != i)
            others, spare = float(squares[near].sum()), float(freedom[near].sum())
            if spare >= MIN_SPARE and others > 0:
                ratio = squares[i] / freedom[i] / (others / spare)
                best = min(best, (float(special.fdtrc(freedom[i], spare, ratio)) * len(places), i))
        p, i = best
        if p >= DIVERGED_LEVEL:
            return ladders, found
        name, k = places[i]
        ladder = ladders[name]
        off = np.abs(ladder.runs[k] - np.median(ladder.runs[k]))
        bad = int(np.argmax(off if len(off) > 2 else ladder.runs[k]))  # of two, the higher one diverged
        rest, loss = float(np.delete(ladder.runs[k], bad).mean()), float(ladder.runs[k][bad])
        deviation = loss - rest
        if abs(deviation) < MIN_DEVIATION * rest:
            return ladders, found
        found.append(Outlier(ladder.row_labels[k], name, float(ladder.flops[k]), loss, deviation, p, bad))
        ladders = {**ladders, name: ladder.without_seed(k, bad)}


def _span(one: Mixture, confidence: float) -> Interval:
    low, high = one.interval(confidence)
    return float(low[0]), float(high[0])


def _factor(one: Mixture, confidence: float) -> tuple[float, Interval]:
    """The exponentials of a contrast of logarithms and of its interval."""
    return exp(float(one.mean[0])), exp_interval(_span(one, confidence))
