"""A ladder that is run until its question is decided: when to stop, and which runs to make next.

After every batch there is a look: the table is fitted, every open arm is tested at the level that its look
may spend (`looks.py`), and the next batch is the cheapest that brings the information to the next look
(`next_runs.py`). Words, p-values and intervals of a look hold for a ladder that stops there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import Interval
from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.ladder import Ladder, check_ladders
from steepen.laws.looks import Looks, needed_information
from steepen.laws.next_runs import (
    QUESTIONS,
    Forecast,
    Offer,
    OpenArm,
    Question,
    effect_size,
    open_arm,
)
from steepen.laws.verdict.judge import TableJudge, fit_ladders
from steepen.laws.verdict.questions import DecisionRule

STEP = 0.2  # of the planned information, from one look to the next
MAX_GROWTH = 0.5  # of the cost so far, which a batch may add: a forecast from few runs may be far off
# Of the information that a single test would need: for the looks, giving up, and noise that is estimated.
INFLATION = 1.15
MIN_LEVEL = 1e-6  # of intervals after looks that spent nothing
# Of the level, which tests are made at: p-values of few runs that happen to scatter little are too small, and
# a ladder that stops there keeps them. With all of it, 8% of simulated claims were false.
SHARE = 0.6
Reason = Literal["decided", "no effect of this size", "out of reach", "budget", "no further runs"]


@dataclass(frozen=True)
class StoppingRule:
    """What is asked of every arm, and when a ladder has said enough.

    `effect` is the smallest compute multiplier (better), or its smallest growth per decade (grows), that is
    to be found with `power`. `level` is the family-wise error rate of the arms, `budget` the most that all
    runs may cost, in the unit of the offers. A question is given up once the chance to find the effect is
    below `futility`.
    """

    reference: str
    question: Question = "grows"
    effect: float = 1.1
    level: float = 0.05
    power: float = 0.9
    budget: float = math.inf
    futility: float = 0.2

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS:
            raise UsageError(f"question is {self.question!r}; choose {' or '.join(QUESTIONS)}.")
        if not 1 < self.effect <= 100:
            raise UsageError(f"effect is {self.effect}; give a factor above 1, such as 1.1.")
        if not self.budget > 0:
            raise UsageError(f"budget is {self.budget}; give more than zero.")


@dataclass(frozen=True)
class ArmLook:
    """An arm at a look: its contrast, the level it was tested at, and what follows.

    `interval` is the repeated confidence interval: all looks together cover with 1 − level. `p_value` counts
    the earlier looks. `chance` is the conditional power of the planned effect, within the budget.
    """

    arm: str
    word: str
    estimate: float
    interval: Interval
    fraction: float  # of the planned information
    nominal: float
    p_fixed: float
    p_value: float
    chance: float
    closed: Reason | None = None


@dataclass(frozen=True)
class Look:
    """One look: the runs and the cost so far, every arm that was open, and the batch that follows."""

    number: int
    runs: int
    cost: float
    arms: tuple[ArmLook, ...]
    batch: tuple[Offer, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for the journal."""
        return asdict(self)


@dataclass
class Stopping:
    """The looks at a ladder so far. The same runs in the same batches give the same looks."""

    rule: StoppingRule
    looks: list[Look] = field(default_factory=list[Look])
    closed: dict[str, ArmLook] = field(default_factory=dict[str, ArmLook])
    judge: TableJudge | None = None
    _tests: dict[str, Looks] = field(default_factory=dict[str, Looks])

    def look(self, ladders: Mapping[str, Ladder], offers: Sequence[Offer], spent: float) -> Look:
        """Test the open arms, and choose the next batch among the offers; `spent` is the cost so far."""
        rule = self.rule
        kept, _ = check_ladders(dict(ladders), rule.reference)
        judge = fit_ladders(kept, FitSettings(rule.reference), DecisionRule(rule.level))
        self.judge = judge
        names = [name for name in judge.ladders if name != rule.reference]
        found = [open_arm(judge, name, rule.question) for name in names if name not in self.closed]
        arms = [one for one in found if one is not None]
        claimed = sum(one.closed == "decided" for one in self.closed.values())
        level = SHARE * rule.level / max(len(names) - claimed, 1)  # Holm: what is decided hands on its share
        wanted = np.array([self._test(one).maximum for one in arms])
        own = {rule.reference, *(one.arm for one in arms)}
        forecast = Forecast(judge, arms, [one for one in offers if one.arm in own])
        path = forecast.path(target=wanted, budget=rule.budget - spent)
        reach = path[-1].information if path else forecast.now
        arm_looks = [
            self._arm(one, judge, level, float(end), last=not path)
            for one, end in zip(arms, reach, strict=True)
        ]
        self.closed |= {one.arm: one for one in arm_looks if one.closed}
        batch: list[Offer] = []
        still = np.array([one.arm not in self.closed for one in arms], bool)
        if still.any():
            open_arms = [one for one in arms if one.arm not in self.closed]
            if not still.all():
                own = {rule.reference, *(one.arm for one in open_arms)}
                forecast = Forecast(judge, open_arms, [one for one in offers if one.arm in own])
                path = forecast.path(target=wanted[still], budget=rule.budget - spent)
            target = np.minimum(forecast.now + STEP * wanted[still], wanted[still])
            for step in path:
                if batch and step.paid > MAX_GROWTH * spent:
                    break
                batch.append(step.offer)
                if (step.information >= target).all():
                    break
        runs = sum(int(ladder.seeds.sum()) for ladder in ladders.values())
        look = Look(len(self.looks) + 1, runs, spent, tuple(arm_looks), tuple(batch))
        self.looks.append(look)
        return look

    @property
    def level(self) -> float:
        """The level of single tests and intervals that accounts for all looks: the strictest of the arms'."""
        found = [one.nominal for one in self.closed.values() if one.nominal > 0]
        return min(found, default=MIN_LEVEL)

    def _test(self, arm: OpenArm) -> Looks:
        """The looks at an arm; its planned information is fixed by its first one."""
        if arm.arm not in self._tests:
            assert self.judge is not None
            count = len(self.judge.ladders) - 1
            effect = effect_size(self.rule.question, self.rule.effect, arm.gamma)
            self._tests[arm.arm] = Looks(
                needed_information(effect, SHARE * self.rule.level / count, self.rule.power, INFLATION)
            )
        return self._tests[arm.arm]

    def _arm(self, arm: OpenArm, judge: TableJudge, level: float, reach: float, *, last: bool) -> ArmLook:
        test = self._test(arm)
        nominal = test.look(arm.information, level, last=last)
        p, estimate = float(arm.mixture.p_value()[0]), arm.estimate
        effect = effect_size(self.rule.question, self.rule.effect, arm.gamma)
        outside = float(arm.mixture.p_outside(min(arm.equivalence, effect))[0])
        words = ("better", "worse", "no difference", "not resolved")
        if self.rule.question == "grows":
            words = ("grows", "shrinks", "constant", "undecided")
        word = words[3]
        if p < nominal:
            word = words[0] if estimate > 0 else words[1]
        elif outside < nominal:
            word = words[2]
        chance = test.conditional_power(p, estimate, effect, level, min(test.maximum, reach))
        closed: Reason | None = None
        if word != words[3]:
            closed = "decided"
        elif test.information[-1] >= test.maximum:
            closed = "no effect of this size"
        elif last:
            closed = "budget" if math.isfinite(self.rule.budget) else "no further runs"
        elif chance < self.rule.futility:
            closed = "out of reach" if reach < test.maximum else "no effect of this size"
        low, high = arm.mixture.interval(1 - max(nominal, MIN_LEVEL))
        return ArmLook(
            arm.arm, word, estimate, (float(low[0]), float(high[0])),
            min(test.information[-1] / test.maximum, 1.0), nominal, p, test.p_value(p), chance, closed,
        )  # fmt: skip
