"""The verdict on one arm: three answers, the evidence they rest on, and both in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from steepen.laws.distributions import Interval
from steepen.laws.verdict.questions import (
    MAX_LOSS_PENALTY,
    Better,
    ByWhat,
    DecisionRule,
    DriftShape,
    Growth,
    MistuningTolerance,
)
from steepen.utils.formatting import cost_axis, format_flops, percent

BY_WHAT_PHRASES = {
    "exponent": "by a larger exponent",
    "irreducible loss": "by a lower irreducible loss",
    "both": "by a larger exponent and a lower irreducible loss",
    "either": "by a larger exponent or a lower irreducible loss, not separable here",
}
DRIFT_WORDS: dict[DriftShape, str] = {
    "top rung": "at once",
    "linear": "linearly",
    "quadratic": "quadratically",
}
MAX_NAMED = 3  # rungs in a line
SMALLEST_P = 1e-99  # smaller ones are not told apart


@dataclass(frozen=True)
class Effect:
    """An estimate with its interval, and the p-value of no effect."""

    value: float
    interval: Interval
    p_value: float


@dataclass(frozen=True)
class Prediction:
    """The compute multiplier beyond the ladders, by each hypothesis; None where it is rejected."""

    label: str
    flops: float
    exponent: float | None
    exponent_interval: Interval | None
    irreducible: float | None


@dataclass(frozen=True)
class LeftOut:
    """A rung without which an answer is another."""

    arm: str
    flops: float
    better: Better
    growth: Growth


@dataclass(frozen=True)
class Drifting:
    """The answers if the errors drifted along the ladders, and the weight of that in the model."""

    weight: float
    better: Better
    growth: Growth


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict:
    """Everything about one arm against the reference.

    `better` holds in `flops_range`, the compute that both ladders cover (None: they never overlap): `gain`
    is the multiplier averaged over it, `top` the one at its top. `growth` is about `slope`: Δγ, or where
    arms have an E of their own, the slope of the log multiplier; `growth_per_decade` is the factor per
    decade. `by_what`, only where the gain grows, rests on `delta_e` and `delta_gamma_free`, fitted together:
    `p_value` of the first is that of the exponent alone, of the second that of the irreducible loss alone.

    Intervals have confidence 1 − `rule.level`, before sharing the level among `arms`; `levels` are those at
    which the three questions were judged, `unadjusted` the answers at `rule.level` itself. `leave_one_out`
    are rungs without which the first or second answer is another; `drifting` is None where the data exclude
    errors that are correlated along a ladder.
    """

    arm: str
    reference: str
    better: Better
    growth: Growth
    by_what: ByWhat | None
    unadjusted: tuple[Better, Growth, ByWhat | None]
    rule: DecisionRule
    levels: tuple[float, float, float]
    arms: int
    flops_range: Interval | None
    gain: Effect
    top: Effect
    p_equivalent: float
    slope: Effect
    p_constant: float
    growth_per_decade: float
    growth_per_decade_interval: Interval
    delta_gamma: float
    delta_gamma_interval: Interval
    delta_e: Effect
    delta_gamma_free: Effect
    own_e: bool
    predictions: tuple[Prediction, ...]
    leave_one_out: tuple[LeftOut, ...]
    drifting: Drifting | None
    tolerance: tuple[MistuningTolerance, ...]
    sentence: str
    what_would_change: tuple[str, ...]
    unit: str = "FLOPs"

    @property
    def word(self) -> str:
        """The three answers in a few words."""
        return f"{self.better}; {self.growth}" + (f": {self.by_what}" if self.by_what else "")

    def __repr__(self) -> str:
        return f"<{self.arm} against {self.reference}: {self.word}>"

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, tuples and numbers, for JSON."""
        better, growth, by_what = self.unadjusted
        return {
            "word": self.word,
            **asdict(self),
            "unadjusted": {"better": better, "growth": growth, "by_what": by_what},
        }

    def summary(self) -> str:
        """The sentence, then one line for each thing that would change the verdict."""
        return "\n".join([self.sentence, *(f"  · {line}" for line in self.what_would_change)])


def times(value: float) -> str:
    """A factor: 1.081×, 12.3×, or "more than a million ×"."""
    if value > 1e6:
        return "more than a million ×"
    return f"{value:.3f}×" if value < 10 else f"{value:.3g}×"


def p_text(p: float) -> str:
    """A p-value: "p = 0.012"."""
    return f"p = {p:.2g}" if p >= SMALLEST_P else f"p < {SMALLEST_P:.0g}"


def saving(value: float, cost: str = "compute") -> str:
    """A multiplier in words: "1.28× less compute", "2.44× more compute"."""
    if math.isnan(value):
        return f"an unknown factor of {cost}"
    return f"{times(value)} less {cost}" if value >= 1 else f"{times(1 / value)} more {cost}"


def _saving_range(value: float, interval: tuple[float, float]) -> str:
    """A multiplier's interval, of more compute where `saving` says more of the multiplier itself."""
    low, high = interval
    if value < 1:
        low, high = (1 / end if end else math.inf for end in (high, low))
    return f"{low:.3f} to {high:.3f}"


def verdict_sentence(v: Verdict) -> str:
    """The three answers of a verdict's fields, each with its numbers."""
    head = f"{v.arm} against {v.reference}: "
    if v.flops_range is None:
        return (
            f"{head}the ladders never overlap in {_cost(v)}, so nothing is compared. Train one of them"
            " where the other was measured."
        )
    return f"{head}{_better(v)} {_growth(v)}{_unadjusted(v)}"


def _better(v: Verdict) -> str:
    gain = v.gain
    low, high = v.flops_range or (math.nan, math.nan)
    span = f"from {format_flops(low, 2)} to {format_flops(high, 2)} {v.unit}"
    cost, confidence = _cost(v), _percent(v)
    margin = f"±{100 * v.rule.equivalence:g}%"
    if v.better in ("better", "worse"):
        interval = f"({confidence} {_saving_range(gain.value, gain.interval)}; {p_text(gain.p_value)})"
        at_top = f"at the top {saving(v.top.value, cost)} ({_saving_range(v.top.value, v.top.interval)})"
        return f"{v.better}. It needs {saving(gain.value, cost)} on average {span} {interval}, {at_top}."
    if v.better == "no difference":
        return (
            f"no difference within {margin} of {cost}: multiplier {gain.value:.3f} on average {span}"
            f" ({confidence} {gain.interval[0]:.3f} to {gain.interval[1]:.3f}; {p_text(v.p_equivalent)})."
        )
    return (
        f"not resolved. The multiplier is {gain.value:.3f} on average {span} ({confidence}"
        f" {gain.interval[0]:.3f} to {gain.interval[1]:.3f}; {p_text(gain.p_value)}); neither a difference"
        f" nor its absence within {margin} is shown."
    )


def _growth(v: Verdict) -> str:
    slope = v.slope
    low, high = v.delta_gamma_interval
    confidence = _percent(v)
    delta = f"Δγ = {v.delta_gamma:+.4f} ({confidence} {low:+.4f} to {high:+.4f}; {p_text(slope.p_value)})"
    per_decade = v.growth_per_decade_interval
    factor = (
        f"×{v.growth_per_decade:.3f} per decade ({per_decade[0]:.3f} to {per_decade[1]:.3f})"
        if math.isfinite(v.growth_per_decade)
        else "by a factor that is not known"
    )
    if v.growth == "grows":
        cause = BY_WHAT_PHRASES[v.by_what or "either"]
        # Only of a better arm is there a gain.
        what = "The gain grows with {}" if v.better == "better" else "It gains ground as {} grows"
        return f"{what.format(_cost(v))}, {cause}: {factor}; {delta}{_cause(v)}."
    if v.growth == "shrinks":
        return f"It loses ground as {_cost(v)} grows: {factor}; {delta}."
    if v.growth == "constant":
        what = "difference" if v.better == "no difference" else "factor"
        return f"The {what} is constant: {delta}, within ±{100 * v.rule.margin:g}% of γ."
    return f"Whether that changes with {_cost(v)} is undecided: {delta}."


def _cause(v: Verdict) -> str:
    if v.by_what in (None, "either"):
        return ""
    rejected = {
        "exponent": ("a lower irreducible loss alone", v.delta_gamma_free.p_value),
        "irreducible loss": ("a larger exponent alone", v.delta_e.p_value),
        "both": ("either alone", max(v.delta_gamma_free.p_value, v.delta_e.p_value)),
    }
    what, p = rejected[v.by_what]
    return f"; {what} is rejected ({p_text(p)})"


def _unadjusted(v: Verdict) -> str:
    """The answers at the level of a single arm, where sharing the level among arms changed them."""
    better, growth, by_what = v.unadjusted
    named = [word for word, own in ((better, v.better), (growth, v.growth)) if word != own]
    if by_what not in (None, v.by_what) and growth == v.growth:
        named.append(f"{growth} {BY_WHAT_PHRASES[by_what]}")
    return f" Without sharing the level among {v.arms} arms: {', '.join(named)}." if named else ""


def what_would_change(v: Verdict) -> list[str]:
    """What would change the answers: mistuned recipes, and rungs that decide."""
    if v.flops_range is None:
        return []
    tolerances = v.tolerance
    lines = [line for one in tolerances if one.shape == "top rung" for line in _top_rung(v, one)]
    smooth = [
        one for one in tolerances if one.shape != "top rung" and one.penalty_changing_answer is not None
    ]
    if smooth:
        one = min(smooth, key=lambda one: one.penalty_changing_answer or math.inf)
        lines.append(
            f"a recipe of {one.ladder} that gets worse with {_cost(v)}, {DRIFT_WORDS[one.shape]} in its"
            f" logarithm to a loss {one.penalty_changing_answer:.4f} too high at its top rung{_lr(one)},"
            f" would make it '{_words(v, one.changed_better, one.changed_growth)}'"
        )
    drifting = v.drifting
    if drifting and (words := _words(v, drifting.better, drifting.growth)):
        weight = "under 1%" if drifting.weight < 0.01 else f"{drifting.weight:.0%}"
        lines.append(
            f"errors that drift along a ladder, a model to which these rungs give {weight} of the weight,"
            f" would make it '{words}'"
        )
    left = v.leave_one_out
    if not left:
        lines.append("leaving out any one rung changes neither answer")
        return lines
    each = "; ".join(
        f"without {one.arm} at {format_flops(one.flops, 2)}: {_words(v, one.better, one.growth)}"
        for one in left[:MAX_NAMED]
    )
    more = f"; and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
    lines.append(f"leaving out one rung changes it ({each}{more})")
    return lines


def _top_rung(v: Verdict, one: MistuningTolerance) -> list[str]:
    rung = f"the top rung of {one.ladder} ({format_flops(one.flops, 2)} {v.unit})"
    lines: list[str] = []
    if one.penalty_changing_answer is not None:
        lines.append(
            f"re-sweep the learning rate at {rung}: a loss {one.penalty_changing_answer:.4f} too high"
            f" there{_lr(one)} would make it '{_words(v, one.changed_better, one.changed_growth)}'"
        )
    else:
        lines.append(f"no loss up to {MAX_LOSS_PENALTY:.0%} too high at {rung} would change an answer")
    if one.penalty_explaining_growth is not None:
        what = "the growth" if v.growth == "grows" else "the loss of ground"
        lines.append(
            f"a loss {one.penalty_explaining_growth:.4f} too high at {rung} would by itself explain {what}"
        )
    return lines


def _words(v: Verdict, better: str, growth: str) -> str:
    """The answers that differ from the verdict's."""
    return "; ".join(word for word, own in ((better, v.better), (growth, v.growth)) if word != own)


def _lr(one: MistuningTolerance) -> str:
    return "" if one.lr_factor is None else f" (a learning rate off by ×{one.lr_factor:.2f})"


def _cost(v: Verdict) -> str:
    return cost_axis(v.unit).noun


def _percent(v: Verdict) -> str:
    return percent(1 - v.rule.level)
