"""Types of the compute law L(C) = E + A·(C/C0)^−γ: settings of a fit, and fitted laws with their intervals.

The fits are in `verdict.judge` and `paper_method`; `steepen.laws.analysis.fit_compute` chooses between them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError, require_one_of
from steepen.laws.distributions import Interval, t_reach
from steepen.laws.ladder import Ladder
from steepen.utils.arrays import Array

# raw-huber: Huber of losses, width from their spread (the authors' code); huber: of log losses, δ = 1e-3.
Loss = Literal["raw-huber", "huber", "mse", "log-mse"]
Method = Literal["paper", "joint"]
ReferenceLaw = Literal["regression", "free-fit"]
LOSSES: tuple[Loss, ...] = ("raw-huber", "huber", "mse", "log-mse")
REFERENCE_LAWS: tuple[ReferenceLaw, ...] = ("regression", "free-fit")


@dataclass(frozen=True)
class Estimate:
    """A value with two intervals; `conditional` holds E fixed (for E itself: the exponents)."""

    value: float
    conditional: Interval
    unconditional: Interval


@dataclass(frozen=True)
class ArmLaw:
    """One arm's law. `log_a` is the natural logarithm of the reducible loss at C0."""

    arm: str
    gamma: Estimate
    log_a: Estimate
    e: Estimate
    slope_standard_error: float
    residual_sd: float
    c0: float
    flops_range: tuple[float, float]

    def predict(self, flops: float | Array) -> Array:
        """The law's loss at a compute."""
        x = np.log(np.asarray(flops, float) / self.c0)
        return self.e.value + np.exp(self.log_a.value - self.gamma.value * x)

    def compute_for(self, loss: float | Array) -> Array:
        """The compute at which the law reaches a loss; infinite at or below E."""
        above = np.asarray(loss, float) - self.e.value
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = self.c0 * np.exp((self.log_a.value - np.log(above)) / self.gamma.value)
        return np.where(above > 0, value, np.inf)


@dataclass(frozen=True)
class FitSettings:
    """Settings of a compute-law fit; `c0` None is the geometric mean of the reference's compute.

    `loss` is the objective for E in the paper's method; `delta` is the Huber width of `huber`.
    `reference_law` is where that method takes the reference's own γ and A from: the regression at E like
    every other arm, or the free fit that gave E.
    """

    reference: str
    method: Method = "joint"
    loss: Loss = "raw-huber"
    delta: float = 1e-3
    reference_law: ReferenceLaw = "regression"
    c0: float | None = None
    confidence: float = 0.90
    noise: float | None = None

    def __post_init__(self) -> None:
        require_one_of("loss", self.loss, LOSSES)
        require_one_of("reference_law", self.reference_law, REFERENCE_LAWS)
        if not 0 < self.confidence < 1:
            raise UsageError(
                f"confidence is {self.confidence}; give a fraction between 0 and 1, such as 0.9."
            )
        for name, value in (("delta", self.delta), ("c0", self.c0), ("noise", self.noise)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}; give a finite number greater than zero.")


@dataclass(frozen=True)
class ComputeFit:
    """The laws of every arm by one method, and its settings."""

    settings: FitSettings
    c0: float
    arms: dict[str, ArmLaw]
    sigma: float
    degrees_of_freedom: float
    objective: float
    at_bound: tuple[str, ...] = ()
    # Covariance of `theta`, for confidence bands; not in JSON.
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)), repr=False, compare=False)

    @property
    def theta(self) -> Array:
        """(E, every log A, every γ) in the order of `arms`."""
        laws = list(self.arms.values())
        return np.array([laws[0].e.value, *(a.log_a.value for a in laws), *(a.gamma.value for a in laws)])

    @property
    def quantile(self) -> float:
        """Student's t for the settings' confidence and the fit's degrees of freedom."""
        return t_reach(self.settings.confidence, self.degrees_of_freedom)


def law_dict(law: ArmLaw) -> dict[str, Any]:
    """One arm's law as plain data: values at the top, intervals below."""
    parts = {"gamma": law.gamma, "log_a": law.log_a, "e": law.e}
    intervals = {name: asdict(part) for name, part in parts.items()}
    return {
        **{name: one.pop("value") for name, one in intervals.items()},
        "intervals": intervals,
        "slope_standard_error": law.slope_standard_error,
        "residual_sd": law.residual_sd,
        "flops_range": list(law.flops_range),
    }


def default_c0(ladder: Ladder) -> float:
    """The geometric mean of a ladder's compute, where A and γ are least correlated."""
    return float(np.exp(np.log(ladder.flops).mean()))


def root_mean_square(residual: Array) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(residual**2)))


def flops_range(ladder: Ladder) -> tuple[float, float]:
    """A ladder's lowest and highest compute."""
    return float(ladder.flops[0]), float(ladder.flops[-1])
