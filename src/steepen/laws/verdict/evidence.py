"""The verdict on one arm, and the evidence it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from steepen.laws.distributions import Interval
from steepen.laws.hypotheses.bootstrap import LeaveOneOut, Resampling
from steepen.laws.hypotheses.nested_models import (
    ByWhat,
    DecisionRule,
    Growth,
    Hypothesis,
    VerdictLabel,
    verdict_label,
)
from steepen.laws.hypotheses.noise_checks import NoiseKind
from steepen.laws.verdict.compare import Outlier
from steepen.laws.verdict.multipliers import Multiplier
from steepen.laws.verdict.sensitivity import MistuningTolerance, Separation

SIMPLE_HYPOTHESES: tuple[Hypothesis, ...] = ("exponent", "irreducible")


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


@dataclass(frozen=True)
class Crossing:
    """The first compute above the ladders at which two fitted laws cross, infinite where they do not.

    `interval` is a bootstrap percentile interval.
    """

    flops: float
    interval: Interval


@dataclass(frozen=True)
class NoiseCheckResult:
    """One check of the noise (`noise_checks`), and its consequence for the answer to the first question.

    `estimate` is the ratio of standard deviations at the lowest and highest compute (`trend`) or the
    correlation of neighbouring rungs (`correlation`); the `p_…` are tests averaged over noise models.
    """

    kind: NoiseKind
    p_value: float
    estimate: float
    p_difference: float
    p_slope: float
    p_shift: float
    consequence: Literal["none", "fragile", "undecided"]


@dataclass(frozen=True)
class Demotion:
    """The answers that a failed noise check turned into *undecided*."""

    growth: Growth
    by_what: ByWhat | None
    kind: NoiseKind


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything measured about one arm against the reference, and the two answers of the decision rule.

    `growth` says whether the gain grows with compute; `by_what`, only where it grows, whether by the exponent
    or the irreducible loss. They hold at `level`, the arm's share of `rule.level` where several arms are
    judged (`arms`); `unadjusted_growth` and `unadjusted_by_what` hold at `rule.level` itself.

    `leading` is the hypothesis that numbers are taken from: `exponent` unless it is rejected, then
    `irreducible`, and `free` if both are. `growth_per_decade` is the factor by which the multiplier grows per
    decade of compute, the mean over the compute that both ladders cover. `multiplier` is the one at
    `multiplier_flops`, the highest compute that both ladders cover; NaN where a curve does not fall with
    compute, and `multiplier_extrapolated` where the arm's ladder does not cover the compute that it needs.
    `delta_gamma` assumes one irreducible loss for both arms, `delta_gamma_free` does not.

    Intervals of Δγ, ΔE and growth have confidence 1 − `level`, like the tests; `equivalence_interval`, which
    must lie inside the margin for a constant gain, has 1 − 2 · `level` (two one-sided tests). `sigma` is the
    standard deviation of one run's loss.

    `fragile` says why the answer to the first question might not hold, `by_what_fragile` the second; an
    answer is a claim (`claim`, `by_what_claim`) only without such a reason. `outlier` is a rung that was left
    out of everything here, because it is off the law of the others. `demoted` is set where a noise check made
    the answer *undecided*. `robust_growth` and `robust_by_what` are the answers of fits with Huber weights.
    `paired`: runs of both ladders with the same seeds have correlated errors, and the tests rest on their
    differences. `p_scatter` is small where the residuals scatter more than a stated noise, which is then not
    used.
    """

    arm: str
    reference: str
    growth: Growth
    by_what: ByWhat | None
    unadjusted_growth: Growth
    unadjusted_by_what: ByWhat | None
    robust_growth: Growth
    robust_by_what: ByWhat | None
    fragile: tuple[str, ...]
    by_what_fragile: tuple[str, ...]
    demoted: Demotion | None
    noise_checks: tuple[NoiseCheckResult, ...]
    outlier: Outlier | None
    p_scatter: float
    rule: DecisionRule
    level: float
    arms: int
    leading: Hypothesis
    growth_per_decade: float
    growth_per_decade_interval: Interval
    delta_gamma: float
    delta_gamma_interval: Interval
    equivalence_interval: Interval
    delta_e: float
    p_difference: float
    p_slope: float
    p_slope_one_sided: float
    p_shift: float
    p_exponent_hypothesis: float
    p_irreducible_hypothesis: float
    delta_gamma_free: float
    delta_gamma_free_interval: Interval
    delta_e_free: float
    delta_e_free_interval: Interval
    free_crossing: Crossing
    sigma: float
    multiplier: float
    multiplier_flops: float
    leading_multipliers: tuple[Multiplier, ...]
    paired: bool
    c0: float
    hypotheses: dict[Hypothesis, HypothesisFit]
    bootstraps: tuple[Resampling, ...]
    leave_one_out: tuple[LeaveOneOut, ...]
    separation: Separation
    tolerance: tuple[MistuningTolerance, ...]
    multiplier_extrapolated: bool = False
    unit: str = "FLOPs"  # of every `flops` field: what the ladders are measured along

    @property
    def word(self) -> VerdictLabel:
        """Both answers as one word."""
        return verdict_label(self.growth, self.by_what)

    @property
    def marked_word(self) -> str:
        """The word, with "?" behind an answer that is fragile and therefore not a claim."""
        growth, _, by_what = self.word.partition(": ")
        marked = growth + "?" * bool(self.fragile)
        return f"{marked}: {by_what}{'?' * bool(self.by_what_fragile)}" if by_what else marked

    @property
    def p_demoted(self) -> float | None:
        """p-value of the demoted answer with the noise that the residuals show; None if none was demoted."""
        if self.demoted is None:
            return None
        check = next(check for check in self.noise_checks if check.kind == self.demoted.kind)
        sloped = self.demoted.growth in ("grows", "shrinks")
        return max(check.p_slope if sloped else check.p_shift, check.p_difference)

    @property
    def claim(self) -> bool:
        """Whether the first answer is a claim: shown, and not fragile."""
        return self.growth != "undecided" and not self.fragile

    @property
    def by_what_claim(self) -> bool:
        """Whether the second answer is a claim too."""
        return self.claim and self.by_what is not None and not self.by_what_fragile

    def rejected(self, hypothesis: Hypothesis) -> bool:
        """Whether the data reject the exponent or the irreducible-loss hypothesis at the arm's level."""
        p = {"exponent": self.p_exponent_hypothesis, "irreducible": self.p_irreducible_hypothesis}
        return p.get(hypothesis, 1.0) < self.level

    @property
    def tenable(self) -> tuple[Hypothesis, ...]:
        """Hypotheses that may be extrapolated: those not rejected, or the free fit if both are."""
        simple: list[Hypothesis] = [name for name in SIMPLE_HYPOTHESES if not self.rejected(name)]
        return tuple(simple or ["free"])


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict(Evidence):
    """The verdict on one arm: its evidence, stated in words, and what would change it."""

    sentence: str
    what_would_change: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<{self.arm} against {self.reference}: {self.marked_word}>"

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, tuples and numbers, for JSON; a rejected hypothesis has no predictions."""
        found: dict[str, Any] = {
            "word": self.word,
            "claim": self.claim,
            "by_what_claim": self.by_what_claim,
            **asdict(self),
        }
        for name in SIMPLE_HYPOTHESES:
            if self.rejected(name):
                found["hypotheses"][name]["predictions"] = ()
        return found

    def summary(self) -> str:
        """The sentence, then one line for each thing that would change the verdict."""
        return "\n".join([self.sentence, *(f"  · {line}" for line in self.what_would_change)])
