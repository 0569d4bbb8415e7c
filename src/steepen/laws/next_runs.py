"""What further runs would do to an answer: their information per cost, and the chance that they settle it.

The fitted model of a table (`TableJudge`) is linear in its laws, so a further run changes the variance of a
contrast by an amount that does not depend on its loss. Lack of fit limits what seeds of one rung can tell,
and where it is correlated along a ladder, what rungs between rungs can: both are those of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from scipy import special

from steepen.laws.ladder import MERGE_TOLERANCE
from steepen.laws.looks import needed_information
from steepen.laws.model.laws import Laws
from steepen.laws.model.table_fit import Contrast, Mixture, slope_contrast
from steepen.laws.verdict.judge import TableJudge
from steepen.laws.verdict.questions import Contrasts, contrasts
from steepen.utils.arrays import Array

Question = Literal["better", "grows", "by-what"]
QUESTIONS: tuple[Question, ...] = get_args(Question)  # in the order of a verdict's answers
OPEN_WORDS = ("not resolved", "undecided", "either")
MAX_SEEDS = 5  # of a rung that are offered
RUNGS_ABOVE = 2  # that are offered above a ladder
WIDEST_GAP = 1.3  # rungs closer than this factor have none offered between them
WITHIN_RUNG = 0.5  # part of the scatter that is a seed's, where no rung has two runs
WITHIN_DRIFT = 0.05  # the same, of scatter that is correlated along the ladder
MAX_STEPS = 80  # runs that are looked ahead
# What is believed of an effect before any run: multipliers beyond 1.5, or that grow by more than 1.3 per
# decade, are rare. Without it a table that says little would promise that a few runs say much.
PRIOR_FACTOR: dict[Question, float] = {"better": 1.5, "grows": 1.3, "by-what": 1.3}


def effect_size(question: Question, factor: float, gamma: float) -> float:
    """A compute multiplier (better), or its growth per decade, in units of the contrast."""
    return math.log(factor) if question == "better" else abs(gamma) * math.log(factor) / math.log(10)


@dataclass(frozen=True)
class Offer:
    """A run that could be made: `cost` is in the unit that is to be saved, `most` how many there can be."""

    arm: str
    flops: float
    cost: float
    most: int = 1
    depth: int | None = None
    new_rung: bool = True


def table_offers(
    judge: TableJudge,
    arms: Sequence[str],
    highest: float = math.inf,
    depths: Mapping[str, Mapping[int, float]] | None = None,
) -> list[Offer]:
    """Further seeds of the rungs of a table, rungs between them, and some above, for the given arms.

    `depths` are the depths of arms that can be made, with their compute: other rungs of theirs are not
    offered. Nothing is offered below a ladder: laws are least certain to hold there.
    """
    names = [judge.settings.reference, *arms]
    places = np.sort(np.concatenate([judge.ladders[name].flops for name in names]))
    rungs = [float(places[0])]
    for flops in places.tolist():
        if flops > rungs[-1] * (1 + MERGE_TOLERANCE):
            rungs.append(flops)
    ratios = np.array(rungs[1:]) / np.array(rungs[:-1])
    ratio = max(float(np.median(ratios)), WIDEST_GAP)
    between = [
        low * math.sqrt(high / low) for low, high in pairwise(rungs)
        if high > low * WIDEST_GAP
    ]  # fmt: skip
    above = [rungs[-1] * ratio**k for k in range(1, RUNGS_ABOVE + 1)]
    anywhere = [(flops, None) for flops in sorted([*rungs, *between, *above])]
    found: list[Offer] = []
    for name in names:
        ladder = judge.ladders[name]
        own = [(flops, depth) for depth, flops in (depths or {}).get(name, {}).items()]
        for flops, depth in own or anywhere:
            if not float(ladder.flops[0]) * (1 - MERGE_TOLERANCE) <= flops <= highest:
                continue
            near = np.flatnonzero(np.abs(np.log(ladder.flops / flops)) < MERGE_TOLERANCE)
            have = int(ladder.seeds[near[0]]) if len(near) else 0
            if have < MAX_SEEDS:
                at = float(ladder.flops[near[0]]) if len(near) else flops
                found.append(Offer(name, at, at, MAX_SEEDS - have, depth, not len(near)))
    return found


@dataclass(frozen=True)
class OpenArm:
    """An arm whose question is open: where its contrast stands.

    `free`, for *by what*, is Δγ estimated with an E of the arm's own. It is `contrast` if the gain grows by
    the exponent alone and 0 if by E alone, so its information tells the two apart.
    """

    arm: str
    contrast: Contrast
    mixture: Mixture
    gamma: float
    equivalence: float  # largest contrast of no difference, or of a constant gain
    free: Mixture | None = None

    @property
    def estimate(self) -> float:
        """The contrast."""
        return float(self.mixture.mean[0])

    @cached_property
    def information(self) -> float:
        """That of a normal test with the same 95% interval, so that unknown noise counts."""
        return self.information_at(0.95, 1.959964)

    def information_at(self, confidence: float, z: float) -> float:
        """That of a normal test with the same interval, which is `z` standard errors to each side."""
        low, high = (self.free or self.mixture).interval(confidence)
        return (2 * z / max(float(high[0] - low[0]), 1e-300)) ** 2


def open_arm(judge: TableJudge, arm: str, question: Question) -> OpenArm | None:
    """Where the question about an arm stands; None if its ladder and the reference's do not overlap."""
    pair = judge.names.index(judge.settings.reference), judge.names.index(arm)
    span = judge.range_of(pair)
    if span is None:
        return None
    found: Contrasts = contrasts(judge.fit, pair, *span)
    gamma = float(found.gamma[0])
    if question == "by-what":
        slope = slope_contrast(judge.fit.laws, pair)
        return OpenArm(arm, slope, judge.fit.mixture(slope), gamma, 0.0, judge.fit.causes(pair)[0])
    if question == "better":
        return OpenArm(arm, found.gain_of, found.gain, gamma, math.log1p(judge.rule.equivalence))
    return OpenArm(arm, found.slope_of, found.slope, gamma, judge.rule.margin * abs(gamma))


@dataclass(frozen=True, eq=False)
class _Noise:
    """A noise model by log compute: variance shared by the runs of a rung, that of a run, and correlation."""

    weight: float
    length: float
    rung: Array
    seed: Array


@dataclass(frozen=True, eq=False)
class _Given:
    """What runs leave open under a noise model, updated run by run without factorising anew.

    Of the offers: `seed` and `left` are the variance of a run and the covariance of their rungs' errors,
    `columns` the derivatives, both without what the runs foretell of those errors; `least` bounds a run's
    variance. `normal` is the information about the parameters.
    """

    weight: float
    seed: Array
    least: Array
    left: Array
    columns: Array
    normal: Array

    @property
    def variance(self) -> Array:
        """That of a run of each offer about its law."""
        return np.maximum(np.diag(self.left) + self.seed, self.least)

    @property
    def spread(self) -> Array:
        """The covariance of the parameters."""
        scale = np.sqrt(np.diag(self.normal))
        scale = np.where(scale > 0, scale, 1.0)  # a column of zeros: E is held
        scaled = self.normal / scale[:, None] / scale + 1e-11 * np.eye(len(scale))
        return np.asarray(np.linalg.inv(scaled) / scale[:, None] / scale, float)

    def with_run(self, offer: int) -> _Given:
        """With one more run, of this offer."""
        variance, error, own = self.variance[offer], self.left[offer], self.columns[offer]
        foretold = error / variance
        return replace(
            self, left=self.left - np.outer(foretold, error), columns=self.columns - np.outer(foretold, own),
            normal=self.normal + np.outer(own, own) / variance,
        )  # fmt: skip


class Forecast:
    """The information of the open arms' contrasts after further runs, by the model of a table."""

    def __init__(self, judge: TableJudge, arms: Sequence[OpenArm], offers: Sequence[Offer]) -> None:
        self.judge, self.arms, self.offers = judge, arms, list(offers)
        fit, c0 = judge.fit, judge.c0
        places, rungs = np.nonzero(fit.cells.mask)
        self.arm = np.concatenate([places, [judge.names.index(one.arm) for one in self.offers]]).astype(int)
        self.x = np.concatenate(
            [fit.cells.x[places, rungs], [math.log(one.flops / c0) for one in self.offers]]
        )
        self.count = len(places)
        self.runs = fit.cells.precision[places, rungs]
        self.columns = self._columns(fit.laws)
        self.gradients = np.stack([self._gradient(one.contrast) for one in arms], axis=1)
        self.cost = np.array([one.cost for one in self.offers])
        same = (self.arm[:, None] == self.arm) & (np.abs(self.x[:, None] - self.x) < MERGE_TOLERANCE)
        own = self.arm[:, None] == self.arm
        apart = np.abs(self.x[:, None] - self.x)
        self.shared = [  # of every pair of runs, the covariance of their rungs' errors
            np.sqrt(np.outer(one.rung, one.rung))
            * np.where(same, 1.0, own * np.exp(-apart / one.length) if one.length else 0.0)
            for one in self.noises
        ]
        self.begun = [self._given(k) for k in range(len(self.noises))]
        start = self._information(self.begun)
        actual = np.array([one.information for one in arms])
        self.scale = actual / np.maximum(start, 1e-300)
        self.now = actual

    @cached_property
    def noises(self) -> list[_Noise]:
        """The noise models of the fit, one for each correlation, at every run and offer."""
        fit = self.judge.fit
        own = fit.cells.mask
        known = bool((fit.noise[0][own] > 0).all())
        order = np.argsort(fit.cells.x[own], kind="stable")
        at = fit.cells.x[own][order]

        def along(values: Array) -> Array:
            return np.exp(np.interp(self.x, at, np.log(np.maximum(values[own][order], 1e-300))))

        found: list[_Noise] = []
        for length in sorted({model.length for model in fit.models}):
            places = [k for k, model in enumerate(fit.models) if model.length == length]
            weights = fit.weight[places, 0]
            part = float(weights.sum())
            if part < 1e-3:
                continue
            if known:
                taus = np.array([float(fit.models[k].tau[0]) for k in places])
                rung = np.full(len(self.x), float(weights @ taus**2) / part)
                seed = along(fit.noise[0] * fit.cells.precision)
            else:
                total = np.zeros(own.shape)
                for weight, k in zip(weights, places, strict=True):
                    model = fit.models[k]
                    diagonal = np.einsum("mrr->mr", np.linalg.inv(model.precision[0]))
                    total += weight / part * float(model.scale[0]) * diagonal * fit.cells.precision
                whole = along(total)
                seed = whole * (WITHIN_DRIFT if length else WITHIN_RUNG)
                rung = whole - seed
            found.append(_Noise(part, length, rung, seed))
        return found

    def _columns(self, laws: Laws) -> Array:
        """Derivatives of the losses by the arms' parameters and a shared E, a row for each run and offer.

        Before that one, arms that have an E of their own have a column for what theirs is above it.
        """
        log_a, gamma = laws.log_a[0][self.arm], laws.gamma[0][self.arm]
        reducible = np.exp(np.clip(log_a - gamma * self.x, -60, 60))
        ones = np.ones(len(self.x))
        per_arm = [reducible, -self.x * reducible, *([ones] if laws.own_e else [])]
        size = len(self.judge.names) * len(per_arm)
        free = [] if laws.own_e else [self.judge.names.index(one.arm) for one in self.arms if one.free]
        found = np.zeros((len(self.x), size + len(free) + 1))
        for k, arm in enumerate(free):
            found[self.arm == arm, size + k] = 1.0
        for k, column in enumerate(per_arm):
            found[np.arange(len(self.x)), self.arm * len(per_arm) + k] = column
        held = laws.own_e or bool(self.judge.fit.e_at_bound.any())
        found[:, -1] = 0.0 if held else 1.0
        return found

    def _gradient(self, contrast: Contrast) -> Array:
        size = contrast.first.shape[1]
        found = np.zeros(self.columns.shape[1])
        for arm, part in zip(contrast.arms, (contrast.first[0], contrast.second[0]), strict=True):
            found[arm * size : (arm + 1) * size] += part
        found[-1] += contrast.e
        return found

    def _given(self, k: int) -> _Given:
        """What the runs of the table leave open under a noise model."""
        noise, shared = self.noises[k], self.shared[k]
        made, offered = slice(0, self.count), slice(self.count, None)
        known, cross = self.columns[made], shared[offered, made]
        precision = np.linalg.inv(shared[made, made] + np.diag(noise.seed[made] / self.runs))
        weighted = cross @ precision
        left = shared[offered, offered] - weighted @ cross.T
        least = 1e-9 * (np.diag(shared)[offered] + noise.seed[offered])
        return _Given(
            noise.weight, noise.seed[offered], least, np.asarray(left, float),
            self.columns[offered] - weighted @ known,
            known.T @ precision @ known,
        )  # fmt: skip

    def _information(self, given: Sequence[_Given]) -> Array:
        variance = np.zeros(len(self.arms))
        for one in given:
            variance += one.weight * np.einsum("pa,pq,qa->a", self.gradients, one.spread, self.gradients)
        return 1 / np.maximum(variance, 1e-300)

    def after_each(self, given: Sequence[_Given] | None = None, made: int = 0) -> Array:
        """The information with one further run, for each offer (offers, arms); `made` runs are in `given`."""
        variance = np.zeros((len(self.offers), len(self.arms)))
        for one in self.begun if given is None else given:
            spread = one.spread
            lean = one.columns @ spread
            total = one.variance + np.einsum("op,op->o", lean, one.columns)
            before = np.einsum("pa,pq,qa->a", self.gradients, spread, self.gradients)
            variance += one.weight * np.maximum(
                before - (lean @ self.gradients) ** 2 / total[:, None], 1e-12 * before
            )
        # Unknown noise counts less with every run: the part of the scale that is due to it fades.
        runs = self.runs.sum()
        fading = runs / (runs + made + 1)
        return self.scale**fading / np.maximum(variance, 1e-300)

    def path(
        self, *, target: Array | None = None, budget: float = math.inf, steps: int = MAX_STEPS
    ) -> list[Step]:
        """Run after run, each with the most information for its cost, until all arms have the target.

        What counts is the relative fall of the contrasts' variances, of arms below the target.
        """
        given = self.begun
        left = np.array([one.most for one in self.offers])
        known, found, paid = self.now, list[Step](), 0.0
        while len(found) < steps and (left > 0).any():
            wanted = np.ones(len(known), bool) if target is None else known < target
            affordable = (left > 0) & (paid + self.cost <= budget)
            if not wanted.any() or not affordable.any():
                break
            after = self.after_each(given, len(found))
            gain = (1 - known / np.maximum(after, known))[:, wanted].sum(axis=1)
            rate = np.where(affordable, gain / np.maximum(self.cost, 1e-300), -1.0)
            best = int(np.argmax(rate))
            if gain[best] <= 0:
                break
            known = np.maximum(after[best], known)
            paid += float(self.cost[best])
            left[best] -= 1
            given = [one.with_run(best) for one in given]
            found.append(Step(self.offers[best], known, paid))
        return found


@dataclass(frozen=True, eq=False)
class Step:
    """A run of a path: the information of every open arm with it, and the cost of the path so far."""

    offer: Offer
    information: Array
    paid: float


def settling_chance(arm: OpenArm, question: Question, information: float, level: float) -> float:
    """The chance that a test at `level` has an answer once the contrast has this information.

    The effect is as the table says, given the prior of `PRIOR_FACTOR`. *By what* is answered once the
    exponent alone, or E alone, is rejected: they differ in Δγ by the growth, so that is what has to be found.
    """
    if arm.free is not None:
        own = replace(arm, free=None).information
        growth = own * arm.estimate / (own + effect_size(question, PRIOR_FACTOR[question], arm.gamma) ** -2)
        return float(special.ndtr(abs(growth) * math.sqrt(information) - special.ndtri(1 - level / 2)))
    known = arm.information
    more = max(information - known, 0.0)
    total = known + more
    prior = effect_size(question, PRIOR_FACTOR[question], arm.gamma) ** -2
    believed, variance = known * arm.estimate / (known + prior), 1 / (known + prior)
    mean = (known * arm.estimate + more * believed) / total
    spread = math.sqrt(max(more**2 * variance + more, 1e-12 * total)) / total
    edge = float(special.ndtri(1 - level / 2)) / math.sqrt(total)
    inside = arm.equivalence - float(special.ndtri(1 - level)) / math.sqrt(total)
    found = float(special.ndtr((mean - edge) / spread) + special.ndtr((-edge - mean) / spread))
    if inside > 0:
        found += float(special.ndtr((inside - mean) / spread) - special.ndtr((-inside - mean) / spread))
    return min(found, 1.0)


Advice = Literal["settled", "go on", "not worth going on"]
AHEAD = (1, 3, 10)  # runs after which the chance of an answer is given
ENOUGH, HOPELESS = 0.95, 0.10  # chances of an answer at which looking ahead ends, or is given up
SHOWN = 10


@dataclass(frozen=True)
class NextRun:
    """A run, what it does to the open questions, and what it costs.

    `gain` is the fall of the contrasts' variances, the mean over the open arms; `gain_per_cost` that relative
    to the best run's. `chance` is that of an answer right after it, for the arm that gains most. `what` is
    `run`; `sweep` for a rung whose learning rate should first be swept again, at these multiples of it
    (`rates`); or `finish` for one that should end its decay.
    """

    what: Literal["run", "sweep", "finish"]
    arm: str
    flops: float
    depth: int | None
    new_rung: bool
    cost: float
    gain: float
    gain_per_cost: float
    chance: float
    reason: str = ""
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outlook:
    """Where the question about an arm stands, and the chance of an answer after further runs of the path.

    `to_end` and `runs_to_end` are what is expected to be spent until there is an answer or it is given up.
    """

    arm: str
    word: str
    advice: Advice
    p_value: float
    chances: tuple[float, ...]  # after AHEAD runs
    reachable: float  # the chance at the end of the path
    runs_to_end: float
    to_end: float


@dataclass(frozen=True)
class NextRuns:
    """The next runs of a table, ranked, and the outlook of each arm."""

    question: Question
    reference: str
    unit: str
    level: float
    arms: tuple[Outlook, ...]
    ranked: tuple[NextRun, ...]
    path: tuple[Offer, ...]  # the first runs of the cheapest way on, in order

    @property
    def advice(self) -> Advice:
        """That of the table: go on while it is worth it for some arm."""
        found = {one.advice for one in self.arms}
        return "go on" if "go on" in found else "settled" if found <= {"settled"} else "not worth going on"


@dataclass(frozen=True)
class Suspect:
    """A rung that may be mistuned: runs at these multiples of its learning rate come before further runs.

    Without any, its run is to be made again with a decay that ends.
    """

    arm: str
    flops: float
    reason: str
    cost: float = 0.0
    depth: int | None = None
    rates: tuple[float, ...] = ()


def choose_next(
    judge: TableJudge,
    question: Question,
    offers: Sequence[Offer],
    *,
    words: Mapping[str, str],
    levels: Mapping[str, float],
    unit: str = "FLOPs",
    budget: float = math.inf,
    suspects: Sequence[Suspect] = (),
) -> NextRuns:
    """Rank the offers by what they do to the open arms, and look ahead along the cheapest path.

    `words` are the answers so far and `levels` what each arm is tested at. A path counts an answer once: a
    test after every run needs the levels of `stopping.py`. Suspects come first, whatever is open: a rung that
    is mistuned may be why an answer is what it is.
    """
    found = [open_arm(judge, name, question) for name in words]
    arms = [one for one in found if one is not None]
    still = [one for one in arms if words[one.arm] in OPEN_WORDS]
    settled = [
        Outlook(one.arm, words[one.arm], "settled", _p(one), (1.0,) * len(AHEAD), 1.0, 0.0, 0.0)
        for one in arms
        if one not in still
    ]
    ranked = [
        NextRun("sweep" if one.rates else "finish", one.arm, one.flops, one.depth, False, one.cost,
                0.0, 0.0, 0.0, one.reason, one.rates)
        for one in suspects if one.cost <= budget
    ]  # fmt: skip
    if not still or not offers:
        return NextRuns(
            question, judge.settings.reference, unit, judge.rule.level, tuple(settled), tuple(ranked), ()
        )
    own = {judge.settings.reference, *(one.arm for one in still)}
    forecast = Forecast(judge, still, [one for one in offers if one.arm in own])
    path = forecast.path(budget=budget)
    outlooks = [
        _outlook(one, question, words[one.arm], levels[one.arm], [step.information[i] for step in path], path)
        for i, one in enumerate(still)
    ]
    after = forecast.after_each()
    gains = (1 - forecast.now / np.maximum(after, forecast.now)).mean(axis=1)
    rates = gains / np.maximum(forecast.cost, 1e-300)
    order = [i for i in np.argsort(-rates).tolist() if gains[i] > 0 and forecast.cost[i] <= budget]
    for i in order[:SHOWN]:
        offer = forecast.offers[i]
        chance = max(
            settling_chance(one, question, float(after[i, k]), levels[one.arm]) for k, one in enumerate(still)
        )
        relative = float(rates[i] / rates[order[0]])
        ranked.append(
            NextRun("run", offer.arm, offer.flops, offer.depth, offer.new_rung, offer.cost, float(gains[i]),
                    relative, chance)
        )  # fmt: skip
    return NextRuns(
        question, judge.settings.reference, unit, judge.rule.level,
        tuple(sorted([*settled, *outlooks], key=lambda one: list(words).index(one.arm))),
        tuple(ranked), tuple(step.offer for step in path[:SHOWN]),
    )  # fmt: skip


def _p(arm: OpenArm) -> float:
    return float((arm.free or arm.mixture).p_value()[0])


def _outlook(
    arm: OpenArm, question: Question, word: str, level: float, information: Sequence[float], path: list[Step]
) -> Outlook:
    chances = np.maximum.accumulate(
        [0.0, *(settling_chance(arm, question, float(one), level) for one in information)]
    )
    costs = np.diff([0.0, *(step.paid for step in path)])
    end = next((k for k, chance in enumerate(chances) if chance >= ENOUGH), len(path))
    goes_on = 1 - chances[:end]
    reachable = float(chances[-1])
    return Outlook(
        arm.arm, word, "not worth going on" if reachable < HOPELESS else "go on",
        _p(arm),
        tuple(float(chances[min(k, len(path))]) for k in AHEAD), reachable,
        float(goes_on.sum()), float(goes_on @ costs[:end]),
    )  # fmt: skip


@dataclass(frozen=True)
class FurtherRuns:
    """The cheapest further runs that give a table power `goal` for an effect; `power` is what they reach.

    No runs: it has it already.
    """

    question: Question
    goal: float
    power: float
    path: tuple[Step, ...]


def runs_for_power(
    judge: TableJudge, arm: str, question: Question, effect: float, goal: float, level: float
) -> FurtherRuns:
    """The cheapest further runs of an arm and the reference that find an effect of this size."""
    one = open_arm(judge, arm, question)
    if one is None:
        return FurtherRuns(question, goal, 0.0, ())
    forecast = Forecast(judge, [one], table_offers(judge, [arm]))
    path = forecast.path(target=np.array([needed_information(max(effect, 1e-12), level, goal)]))
    known = float(path[-1].information[0]) if path else one.information
    edge = float(special.ndtri(1 - level / 2))
    return FurtherRuns(question, goal, float(special.ndtr(effect * math.sqrt(known) - edge)), tuple(path))
