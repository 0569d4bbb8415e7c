"""A ladder that is run until its question is decided: when to stop, and which runs to make next.

The first batch are cheap rungs, until they tell how large the noise is. After every further batch there is a
look: the table is fitted, every open arm is tested at the level that its look may spend (`looks.py`), and the
next batch is the cheapest that brings the information to the next look (`next_runs.py`). Words, p-values and
intervals of a look hold for a ladder that stops there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import Interval
from steepen.laws.fits.compute_law import AnalysisRequest
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder, check_ladders
from steepen.laws.looks import Looks, conditional_power, needed_information
from steepen.laws.next_runs import Forecast, Offer, OpenArm, Question, Step, effect_size, open_arm
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.judge import TableJudge, fit_ladders
from steepen.utils.arrays import Array

STEP = 0.15  # of the planned information, from one look to the next
MAX_GROWTH = 0.25  # of the cost so far, which a batch may add: a forecast from few runs may be far off
# Rungs beyond the parameters of the laws, before the first test: fewer hardly tell how large the lack of fit
# is, and a ladder that stops because it shows little by chance makes false claims.
MIN_SPARE = 12
# Information is that of a normal test with the same interval at CAUTION, so that noise that few rungs tell
# spends little of the level. Such an interval stays wider than a normal test's: this part is planned.
CAUTION, CAUTION_Z, PLANNED = 0.997, 2.967738, 0.88
MOST = 0.3  # of the planned information, which a look may count: small scatter has to last for several looks
SHARE = 0.8  # of the level, which tests are made at, for tables that scatter little by chance nevertheless
EARLY = 0.3  # of the planned information: before it, only what the budget cannot answer is given up
MIN_LEVEL = 1e-6  # of intervals after looks that spent nothing
WORDS: dict[Question, tuple[str, str, str, str]] = {
    "better": ("better", "worse", "no difference", "not resolved"),
    "grows": ("grows", "shrinks", "constant", "undecided"),
}
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
    futility: float = 0.15

    def __post_init__(self) -> None:
        if self.question not in WORDS:
            raise UsageError(f"question is {self.question!r}; choose {' or '.join(WORDS)}.")
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
    """The looks at a ladder so far. The same runs in the same batches give the same looks.

    `noise` is the standard deviation of a run, where it is known. `judges` are the fits of the looks that
    closed an arm.
    """

    rule: StoppingRule
    noise: float | None = None
    looks: list[Look] = field(default_factory=list[Look])
    closed: dict[str, ArmLook] = field(default_factory=dict[str, ArmLook])
    judge: TableJudge | None = None
    judges: dict[str, TableJudge] = field(default_factory=dict[str, TableJudge])
    _tests: dict[str, Looks] = field(default_factory=dict[str, Looks])

    def look(self, ladders: Mapping[str, Ladder], offers: Sequence[Offer], spent: float) -> Look:
        """Test the open arms, and choose the next batch among the offers; `spent` is the cost so far."""
        rule = self.rule
        kept, _ = check_ladders(dict(ladders), rule.reference)
        settings = AnalysisRequest(rule.reference, level=rule.level, noise=self.noise)
        self.judge = judge = fit_ladders(kept, settings)
        names = [name for name in judge.ladders if name != rule.reference]
        found = [open_arm(judge, name, rule.question) for name in names if name not in self.closed]
        arms = [one for one in found if one is not None]
        left = rule.budget - spent
        batch = [] if self.looks else self._more_rungs(arms, offers, min(spent, left))
        if batch:
            arm_looks = [self._untested(one) for one in arms]
        else:
            wanted = {one.arm: self._wanted(one) for one in arms}
            forecast, path = self._path(arms, offers, wanted, left)
            reach = path[-1].information if path else forecast.now
            arm_looks = self._tested(arms, wanted, reach, last=not path)
            self.closed |= {one.arm: one for one in arm_looks if one.closed}
            self.judges |= {one.arm: judge for one in arm_looks if one.closed}
            still = [one for one in arms if one.arm not in self.closed]
            if still and len(still) < len(arms):
                forecast, path = self._path(still, offers, wanted, left)
            planned = np.array([wanted[one.arm] for one in still])
            for step in path if still else []:
                if batch and step.paid > MAX_GROWTH * spent:
                    break
                batch.append(step.offer)
                if (step.information >= np.minimum(forecast.now + STEP * planned, planned)).all():
                    break
        runs = sum(int(ladder.seeds.sum()) for ladder in ladders.values())
        look = Look(len(self.looks) + 1, runs, spent, tuple(arm_looks), tuple(batch))
        self.looks.append(look)
        return look

    def _of(self, arms: Sequence[OpenArm], offers: Sequence[Offer]) -> list[Offer]:
        own = {self.rule.reference, *(one.arm for one in arms)}
        return [one for one in offers if one.arm in own]

    def _more_rungs(self, arms: Sequence[OpenArm], offers: Sequence[Offer], most: float) -> list[Offer]:
        """The cheapest new rungs that the first test waits for, as far as they cost no more than `most`."""
        assert self.judge is not None
        cells = self.judge.fit.cells
        missing = MIN_SPARE + 2 * len(cells.x) + 1 - int(cells.mask.sum())
        batch: list[Offer] = []
        for one in sorted(self._of(arms, offers), key=lambda one: one.cost):
            apart = np.abs(np.log(self.judge.ladders[one.arm].flops / one.flops)).min()
            if len(batch) >= missing or one.cost > most:
                break
            if apart > MERGE_TOLERANCE:
                batch.append(one)
                most -= one.cost
        return batch

    def _untested(self, arm: OpenArm) -> ArmLook:
        (low, high), p = arm.mixture.interval(1 - MIN_LEVEL), float(arm.mixture.p_value()[0])
        interval = float(low[0]), float(high[0])
        return ArmLook(arm.arm, WORDS[self.rule.question][3], arm.estimate, interval, 0.0, 0.0, p, 1.0, 1.0)

    def _path(
        self, arms: Sequence[OpenArm], offers: Sequence[Offer], wanted: Mapping[str, float], left: float
    ) -> tuple[Forecast, list[Step]]:
        """The cheapest runs with the information wanted of every arm, for at most what is `left`."""
        assert self.judge is not None
        forecast = Forecast(self.judge, arms, self._of(arms, offers))
        return forecast, forecast.path(target=np.array([wanted[one.arm] for one in arms]), budget=left)

    @property
    def _planned(self) -> float:
        """The information that is planned, for an effect of 1."""
        assert self.judge is not None
        level = SHARE * self.rule.level / (len(self.judge.ladders) - 1)
        return PLANNED * needed_information(1.0, level, self.rule.power)

    def _effect(self, arm: OpenArm) -> float:
        return effect_size(self.rule.question, self.rule.effect, arm.gamma)

    def _information(self, arm: OpenArm) -> float:
        """For an effect of 1, and cautiously."""
        return arm.information_at(CAUTION, CAUTION_Z) * self._effect(arm) ** 2

    def _wanted(self, arm: OpenArm) -> float:
        """What is planned, as forecasts count information; while a look may not count it yet, some more."""
        wanted = self._planned * arm.information / max(self._information(arm), 1e-300)
        test = self._tests.get(arm.arm)
        counted = test.information[-1] / test.maximum if test and test.information else 0.0
        return max(wanted, (1 + STEP) * arm.information) if counted + MOST < 1 else wanted

    def _tested(
        self, arms: Sequence[OpenArm], wanted: Mapping[str, float], reach: Array, *, last: bool
    ) -> list[ArmLook]:
        """Every open arm at this look. An arm that is decided hands its share of the level on (Holm)."""
        assert self.judge is not None
        claimed = sum(one.closed == "decided" for one in self.closed.values())
        before = {one.arm: self._tests.get(one.arm) or Looks(self._planned) for one in arms}
        found: dict[str, ArmLook] = {}
        left = list(range(len(arms)))
        while left:
            level = SHARE * self.rule.level / max(len(self.judge.ladders) - 1 - claimed, 1)
            for k in left:
                test = self._tests[arms[k].arm] = deepcopy(before[arms[k].arm])
                ends = wanted[arms[k].arm], float(reach[k])
                found[arms[k].arm] = self._arm(arms[k], test, level, *ends, last=last)
            rest = [k for k in left if found[arms[k].arm].closed != "decided"]
            claimed, left = claimed + len(left) - len(rest), rest if len(rest) < len(left) else []
        return list(found.values())

    def level(self, arm: str) -> float:
        """The level of an arm's single tests and intervals that accounts for all looks: its last look's."""
        return max(self.closed[arm].nominal, MIN_LEVEL) if arm in self.closed else MIN_LEVEL

    def verdicts(self, lr_regret: float | None = None) -> dict[str, Verdict]:
        """The verdict on every closed arm, with the runs and at the level of the look that closed it.

        Runs that were made for other arms since then do not change what the look has answered. No difference,
        and a constant gain, are no larger than the effect asked, as in the look.
        """
        reference, effect = self.rule.reference, self.rule.effect
        found: dict[str, Verdict] = {}
        for arm, judge in self.judges.items():
            known = replace(judge.settings, level=self.level(arm), adjust=False, lr_regret=lr_regret)
            if self.rule.question == "better":
                known = replace(known, equivalence=min(known.equivalence, effect - 1))
            else:
                known = replace(known, margin=min(known.margin, math.log10(effect)))
            [found[arm]] = replace(judge, settings=known).judge([(reference, arm)])
        return found

    def _arm(
        self, arm: OpenArm, test: Looks, level: float, wanted: float, reach: float, *, last: bool
    ) -> ArmLook:
        effect = self._effect(arm)
        counted = (test.information[-1] if test.information else 0.0) + MOST * test.maximum
        nominal = test.look(min(self._information(arm), counted), level, last=last)
        p, estimate = float(arm.mixture.p_value()[0]), arm.estimate
        outside = float(arm.mixture.p_outside(min(arm.equivalence, effect))[0])
        words = WORDS[self.rule.question]
        word = words[3]
        if p < nominal:
            word = words[0] if estimate > 0 else words[1]
        elif outside < nominal:
            word = words[2]
        square = effect**2
        end = min(wanted, reach) * square
        chance = conditional_power(p, estimate, arm.information * square, end, level)
        # The most that the budget may bring, should the noise be no larger than it seems.
        hoped = reach * square * arm.information_at(0.5, 0.67449) / arm.information
        closed: Reason | None = None
        if word != words[3]:
            closed = "decided"
        elif test.information[-1] >= test.maximum:
            closed = "no effect of this size"
        elif last:
            closed = "budget" if math.isfinite(self.rule.budget) else "no further runs"
        elif chance < self.rule.futility and (
            test.information[-1] >= EARLY * test.maximum or hoped < EARLY * test.maximum
        ):
            closed = "out of reach" if reach < wanted else "no effect of this size"
        low, high = arm.mixture.interval(1 - max(nominal, MIN_LEVEL))
        return ArmLook(
            arm.arm, word, estimate, (float(low[0]), float(high[0])),
            min(test.information[-1] / test.maximum, 1.0), nominal, p, test.p_value(p), chance, closed,
        )  # fmt: skip
