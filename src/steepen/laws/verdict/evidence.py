"""The verdict on one arm, and the evidence it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from steepen.laws.distributions import Interval
from steepen.laws.hypotheses.bootstrap import LeaveOneOut, Resampling
from steepen.laws.hypotheses.nested_models import DecisionRule, Hypothesis, VerdictWord
from steepen.laws.verdict.sensitivity import MistuningTolerance, Separation


@dataclass(frozen=True)
class Prediction:
    """Losses and compute multiplier of one hypothesis at one compute.

    `multiplier_interval` is a bootstrap percentile interval; `multiplier` is NaN if a curve does not fall.
    """

    label: str
    flops: float
    reference_loss: float
    arm_loss: float
    multiplier: float
    multiplier_interval: Interval


@dataclass(frozen=True)
class HypothesisFit:
    """Least-squares fit of one hypothesis to both ladders; pairs are (reference, arm).

    `p_against_free` is the p-value of the F-test against the free model: small where the data reject the
    hypothesis, None for hypotheses that are not tested against it.
    """

    hypothesis: Hypothesis
    gamma: tuple[float, float]
    log_a: tuple[float, float]
    e: tuple[float, float]
    rss: float
    p_against_free: float | None
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything measured about one arm against the reference, and the verdict of the decision rule.

    `delta_gamma` assumes one irreducible loss for both arms, `delta_gamma_free` does not. `multiplier` is the
    exponent hypothesis' at `multiplier_flops`, the highest compute that both ladders cover; NaN where a curve
    does not fall with compute. `sigma` is the standard deviation of one run's loss.
    """

    arm: str
    reference: str
    word: VerdictWord
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
    unit: str = "FLOPs"  # of every `flops` field: what the ladders are measured along


@dataclass(frozen=True, kw_only=True)
class Verdict(Evidence):
    """The verdict on one arm: its evidence, stated in one sentence, and what would change it."""

    sentence: str
    what_would_change: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, tuples and numbers, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """The sentence, then one line for each thing that would change the verdict."""
        return "\n".join([self.sentence, *(f"  · {line}" for line in self.what_would_change)])
