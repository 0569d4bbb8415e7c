"""The verdict on one arm: three answers, and the evidence they rest on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from steepen.laws.distributions import Interval
from steepen.laws.verdict.questions import Better, ByWhat, DecisionRule, Growth
from steepen.laws.verdict.sensitivity import MistuningTolerance


@dataclass(frozen=True)
class Effect:
    """An estimate with its interval, the p-value of no effect, and that value adjusted for the other arms."""

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
