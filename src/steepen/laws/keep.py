"""Keep this change? The answer for automatic searches: above the noise of seeds, and at another scale too?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steepen.errors import UsageError, require_reference
from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.distributions import ROUNDING_ERROR, f_p_value, required_noncentrality, t_quantile
from steepen.laws.ladder import Ladder
from steepen.laws.registered_forecasts import nearest_rung
from steepen.laws.verdict.evidence import Verdict
from steepen.tables.table import MIN_ARM_RUNGS, MIN_REFERENCE_RUNGS
from steepen.utils.arrays import Array
from steepen.utils.formatting import format_flops

Answer = Literal["yes", "no", "undecided"]
ANOTHER_SCALE = 2.0  # times the compute: closer rungs are one scale
CONFIRM_AT = 4.0  # times the compute where a confirmation is suggested
POWER = 0.8  # of the seeds that are suggested
MOST_SEEDS = 50  # above which more seeds are not suggested


@dataclass(frozen=True)
class ScaleGain:
    """An arm against the reference at one compute; `gain` is the reference's loss minus the arm's.

    Gains below `noise_floor` are not told from the noise of seeds; it is infinite where nothing was repeated.
    """

    flops: float
    gain: float
    noise_floor: float
    p_value: float
    seeds: int
    reference_seeds: int
    seed_sd: float

    @property
    def answer(self) -> Literal["better", "worse", "not resolved"]:
        """Whether the gain is above the noise floor."""
        if abs(self.gain) <= self.noise_floor:
            return "not resolved"
        return "better" if self.gain > 0 else "worse"


@dataclass(frozen=True)
class KeepAnswer:
    """Whether to keep an arm in place of the reference, why, and what would decide it.

    `level` is that of one test: the level asked for, shared among the `tried` changes. `verdict` is that of
    the laws, where the ladders are long enough for laws.
    """

    arm: str
    reference: str
    answer: Answer
    reason: str
    next_step: str
    level: float
    tried: int
    scales: tuple[ScaleGain, ...]
    verdict: Verdict | None = None


def keep_change(
    ladders: Mapping[str, Ladder],
    arm: str | None,
    reference: str,
    *,
    level: float = 0.05,
    tried: int | None = None,
    noise: float | None = None,
    unit: str = "FLOPs",
) -> KeepAnswer:
    """Answer by the laws where both ladders have enough rungs, else by differences at equal compute.

    `tried` is the number of changes that share the level: by default the table's arms but the reference.
    """
    others = [name for name in ladders if name != reference]
    require_reference(reference, ladders)
    if arm is None and len(others) != 1:
        raise UsageError(f"name the change with `arm`; the arms are {', '.join(ladders)}.")
    arm = others[0] if arm is None else arm
    if arm not in others:
        raise UsageError(f"there is no arm '{arm}' beside the reference; there are {', '.join(others)}.")
    tried = max(len(others), 1) if tried is None else tried
    level /= tried
    scales = _scale_gains(ladders, arm, reference, level, noise)
    enough = len(ladders[reference].flops) >= MIN_REFERENCE_RUNGS and len(ladders[arm].flops) >= MIN_ARM_RUNGS
    if enough:
        settings = AnalysisRequest(
            reference, method="joint", noise=noise, level=level, adjust=False, draws=100, unit=unit
        )
        verdict = analyse(dict(ladders), settings).verdicts.get(arm)
        if verdict is not None:
            answer, reason = _by_laws(verdict)
            change = next(iter(verdict.what_would_change), "") if answer == "undecided" else ""
            return KeepAnswer(arm, reference, answer, reason, change, level, tried, scales, verdict)
    if not scales:
        raise UsageError(
            f"'{arm}' and '{reference}' have no runs at the same {unit}; run both at one compute, or "
            f"{MIN_ARM_RUNGS} rungs of '{arm}' and {MIN_REFERENCE_RUNGS} of '{reference}' for laws."
        )
    answer, reason, next_step = _by_scales(scales, level, unit)
    return KeepAnswer(arm, reference, answer, reason, next_step, level, tried, scales)


def _by_laws(verdict: Verdict) -> tuple[Answer, str]:
    """Yes, if the arm is better over the range and at its top, where the next run will be."""
    low, high = verdict.top.interval
    if verdict.better == "better" and low > 1:
        return "yes", verdict.sentence
    if verdict.better in ("worse", "no difference") or high < 1:
        return "no", verdict.sentence
    if verdict.better == "better":
        at_top = f"at the top of the range it is not resolved (multiplier {low:.2f}–{high:.2f})"
        return "undecided", f"{verdict.sentence} But {at_top}."
    return "undecided", verdict.sentence


def _by_scales(scales: Sequence[ScaleGain], level: float, unit: str) -> tuple[Answer, str, str]:
    """Yes, if the arm is better at the largest scale and at another one."""
    top = scales[-1]
    listed = "; ".join(
        f"{one.gain:+.4f} at {format_flops(one.flops)} {unit} (noise floor {one.noise_floor:.4f})"
        for one in scales
    )
    at_top = f"{format_flops(top.flops)} {unit}"
    if math.isinf(top.noise_floor):
        reason = f"The gain is {top.gain:+.4f} at {at_top}, and nothing was repeated: the noise is unknown."
        repeat = f"Repeat both at {at_top} with two more seeds, or give the SD of a seed with `noise`."
        return "undecided", reason, repeat
    if top.answer == "worse":
        return "no", f"It is worse at the largest scale. Gains: {listed}.", ""
    if top.answer == "not resolved":
        reason = f"The gain is within the noise of seeds. Gains: {listed}."
        return "undecided", reason, _more_seeds(top, level, at_top)
    confirmed = [one for one in scales if one.answer == "better" and one.flops * ANOTHER_SCALE <= top.flops]
    if confirmed:
        return "yes", f"It is better at {len(confirmed) + 1} scales. Gains: {listed}.", ""
    seeds = max(2, min(top.seeds, top.reference_seeds))
    reason = f"It is better at one scale; gains at one scale often vanish at another. Gains: {listed}."
    where = f"{format_flops(top.flops * CONFIRM_AT)} {unit}"
    return "undecided", reason, f"Confirm at another scale: run both at {where} with {seeds} seeds each."


def _more_seeds(scale: ScaleGain, level: float, where: str) -> str:
    """How many seeds resolve the gain that was seen."""
    if scale.gain <= 0:
        return "Try another change: this one shows no gain."
    for seeds in range(max(scale.seeds, scale.reference_seeds) + 1, MOST_SEEDS):
        reached = seeds / 2 * (scale.gain / scale.seed_sd) ** 2
        if reached >= required_noncentrality(2.0 * (seeds - 1), level, POWER):
            return f"{seeds} seeds of each at {where} would resolve a gain of {scale.gain:.4f}."
    return f"Try another change: a gain of {scale.gain:.4f} takes more than {MOST_SEEDS} seeds of each."


def _scale_gains(
    ladders: Mapping[str, Ladder], arm: str, reference: str, level: float, noise: float | None
) -> tuple[ScaleGain, ...]:
    """The differences at every compute that both arms have, against the noise of seeds there.

    The variance is pooled over the seeds of all arms at that compute, or, where nothing was repeated there,
    at all smaller ones: noise falls with compute, so that is no underestimate.
    """
    found: list[ScaleGain] = []
    for rung, flops in enumerate(ladders[arm].flops.tolist()):
        other = nearest_rung(ladders[reference], flops)
        if other is None:
            continue
        own, base = ladders[arm].runs[rung], ladders[reference].runs[other]
        variance, df = (noise**2, math.inf) if noise else _seed_variance(ladders, flops)
        variance = max(variance, (ROUNDING_ERROR * float(base.mean())) ** 2)
        error = math.sqrt(variance * (1 / len(own) + 1 / len(base)))
        gain = float(base.mean() - own.mean())
        floor = float(t_quantile(1 - level / 2, np.array(df))) * error
        p_value = float(f_p_value(np.array((gain / error) ** 2), 1, np.array(df)))
        found.append(ScaleGain(flops, gain, floor, p_value, len(own), len(base), math.sqrt(variance)))
    return tuple(found)


def _seed_variance(ladders: Mapping[str, Ladder], flops: float) -> tuple[float, float]:
    """The variance of a seed at a compute, and its degrees of freedom (0: nothing repeated)."""
    smaller, here = list[Array](), list[Array]()  # losses of the seeds of rungs
    for ladder in ladders.values():
        same = nearest_rung(ladder, flops)
        for rung, runs in enumerate(ladder.runs):
            if len(runs) > 1 and (rung == same or ladder.flops[rung] < flops):
                (here if rung == same else smaller).append(runs)
    parts = here or smaller
    df = sum(len(runs) - 1.0 for runs in parts)
    squares = sum(float(((runs - runs.mean()) ** 2).sum()) for runs in parts)
    return (squares / df if df else 1.0), df
