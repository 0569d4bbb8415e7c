"""The compute law L(C) = E + A·(C/C0)^−γ: settings, laws with intervals, and the paper's way of fitting.

The paper's way takes E from the reference alone by a Huber fit, then a regression of log(L − E) per arm. By
default as its authors' code does it: residuals of the loss itself, Huber width from their spread, and the
reference's own exponent from the regression too. The paper's text leaves these open; `loss="huber"` (log
losses, width 1e-3) with `reference_law="free-fit"` is another reading of it. The joint way, one model of all
arms, is in `verdict.judge`; `steepen.laws.analysis.fit_compute` chooses between them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from steepen.errors import UsageError, require_one_of
from steepen.laws.distributions import ROUNDING_ERROR, Interval, Prior, t_interval, t_reach
from steepen.laws.ladder import Ladder
from steepen.laws.model.laws import Cells, fit_laws, starting_laws
from steepen.laws.verdict.questions import DecisionRule
from steepen.utils.arrays import Array

# raw-huber: Huber of losses, width from their spread (the authors' code); huber: of log losses, δ = 1e-3.
Loss = Literal["raw-huber", "huber", "mse", "log-mse"]
MethodChoice = Literal["both", "joint", "paper"]
ReferenceLaw = Literal["regression", "free-fit"]
Interpolate = Literal["raw-loss", "log-loss"]
METHODS: tuple[MethodChoice, ...] = get_args(MethodChoice)
LOSSES: tuple[Loss, ...] = get_args(Loss)
REFERENCE_LAWS: tuple[ReferenceLaw, ...] = get_args(ReferenceLaw)
INTERPOLATIONS: tuple[Interpolate, ...] = get_args(Interpolate)
HUBER_WIDTH = 1e-3  # of log losses
MAX_REWEIGHTINGS = 300
NORMAL_MAD = 0.67448975  # median absolute deviation of a standard normal


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
class AnalysisRequest:
    """Settings of a fit and of all that is said about it.

    `method` is whose laws are printed: `joint` (of the model that verdicts rest on), `paper`, or `both`.
    `loss` and `reference_law` are of the paper's method: its objective for E, and where it takes the
    reference's own γ and A from, the regression at E like every other arm or the free fit that gave E. `c0`
    None is the geometric mean of the reference's compute. `interpolate` is of measured multipliers, whose
    intervals have `draws` draws. `level` is the family-wise error rate of each question, of the whole table
    with `adjust` (Holm) and of each arm without it; `margin` is the largest |Δγ|/γ of a constant gain,
    `equivalence` the largest difference in compute of *no difference*. `irreducible_loss` is what is known
    of E. `every_pair` compares all arms with each other. `budget` is a further compute to predict at.
    `lr_regret` is the loss penalty of a learning rate off by a factor of 2 (`regret` of a sweep), with
    which tolerated penalties are also given as factors. `unit` is that of the ladders' x axis, for
    sentences.
    """

    reference: str
    method: MethodChoice = "both"
    loss: Loss = "raw-huber"
    reference_law: ReferenceLaw = "regression"
    interpolate: Interpolate = "raw-loss"
    c0: float | None = None
    confidence: float = 0.90
    noise: float | None = None
    level: float = 0.05
    adjust: bool = True
    margin: float = 0.025
    equivalence: float = 0.05
    irreducible_loss: Prior | None = None
    every_pair: bool = False
    draws: int = 2000
    seed: int = 0
    budget: float | None = None
    extrapolate: bool = False
    lr_regret: float | None = None
    unit: str = "FLOPs"

    def __post_init__(self) -> None:
        require_one_of("method", self.method, METHODS)
        require_one_of("loss", self.loss, LOSSES)
        require_one_of("reference_law", self.reference_law, REFERENCE_LAWS)
        require_one_of("interpolate", self.interpolate, INTERPOLATIONS)
        if not 0 < self.confidence < 1:
            raise UsageError(
                f"confidence is {self.confidence}; give a fraction between 0 and 1, such as 0.9."
            )
        for name in ("c0", "noise"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}; give a finite number greater than zero.")
        if self.draws < 100:
            raise UsageError(f"draws is {self.draws}; an interval needs at least 100.")
        if self.lr_regret is not None and not self.lr_regret > 0:
            raise UsageError(f"lr_regret is {self.lr_regret}; give a loss greater than zero.")
        if self.budget is not None and not self.budget > 0:
            raise UsageError(f"budget is {self.budget}; give FLOPs greater than zero.")
        _ = self.rule

    @property
    def rule(self) -> DecisionRule:
        """The rule that turns test results into verdicts."""
        return DecisionRule(self.level, self.margin, self.equivalence)


@dataclass(frozen=True)
class ComputeFit:
    """The laws of every arm by one method, and its settings."""

    settings: AnalysisRequest
    c0: float
    arms: dict[str, ArmLaw]
    sigma: float
    degrees_of_freedom: float
    objective: float
    at_bound: tuple[str, ...] = ()
    # Covariance of (E, every log A, every γ), of the paper's method only; not in JSON.
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)), repr=False, compare=False)

    def variance(self, by: dict[str, tuple[float, float]], by_e: float = 0.0) -> float:
        """The variance of what has these derivatives by E and by arms' log A and γ (the delta method)."""
        names = list(self.arms)
        gradient = np.zeros(1 + 2 * len(names))
        gradient[0] = by_e
        for arm, derivatives in by.items():
            place = 1 + names.index(arm)
            gradient[[place, place + len(names)]] = derivatives
        return max(float(gradient @ self.covariance @ gradient), 0.0)

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


def fit_paper(ladders: dict[str, Ladder], settings: AnalysisRequest) -> ComputeFit:
    """Fit every arm's law with the reference's E; intervals with and without the error of E."""
    base = ladders[settings.reference]
    c0 = settings.c0 or default_c0(base)
    fit = fit_irreducible_loss(base, c0, settings.loss, settings.noise)
    e = float(fit.theta[0])
    for ladder in ladders.values():
        for loss, row in zip(ladder.loss, ladder.row_labels, strict=True):
            if loss <= e:
                raise UsageError(
                    f"{row}: the loss {loss:g} of arm '{ladder.arm}' is not above the irreducible loss"
                    f" E = {e:.4f} fitted on '{base.arm}', so log(L − E) does not exist; correct the row, or"
                    " fit one E to all arms with --method joint."
                )
    df = len(base.flops) - 3 if settings.noise is None else math.inf
    errors = np.sqrt(np.maximum(np.diag(fit.covariance), 0.0))
    given_gamma = np.linalg.pinv(np.linalg.pinv(fit.covariance, hermitian=True)[:2, :2], hermitian=True)
    given = t_interval(e, math.sqrt(max(given_gamma[0, 0], 0.0)), df, settings.confidence)
    low, high = t_interval(e, float(errors[0]), df, settings.confidence)
    e_estimate = Estimate(e, given, (max(0.0, low), high))
    arms: dict[str, ArmLaw] = {}
    by_e = np.zeros(1 + 2 * len(ladders))  # derivative of every parameter by E
    by_e[0] = 1.0
    joint = np.zeros((len(by_e), len(by_e)))
    for i, (name, ladder) in enumerate(ladders.items()):
        value, given_e, sd, nu = _fit_log_log_line(ladder, c0, e, settings.noise)
        if name == settings.reference:
            slope, rest, total, total_nu = _own_error_of_e(fit, df)
            if settings.reference_law == "free-fit":
                value = fit.theta[[2, 1]]
        else:
            slope, rest, total, total_nu = _error_of_e(value, given_e, nu, ladder, c0, fit, df)
        columns = [1 + len(ladders) + i, 1 + i]
        by_e[columns], joint[np.ix_(columns, columns)] = slope, rest
        error = np.sqrt(np.diag(given_e))
        gamma, log_a = (
            Estimate(
                float(value[k]),
                t_interval(float(value[k]), float(error[k]), nu, settings.confidence),
                t_interval(float(value[k]), float(total[k]), float(total_nu[k]), settings.confidence),
            )
            for k in range(2)
        )
        arms[name] = ArmLaw(name, gamma, log_a, e_estimate, float(error[0]), sd, c0, flops_range(ladder))
    joint += np.outer(by_e, by_e) * fit.covariance[0, 0]
    return ComputeFit(
        replace(settings, method="paper"), c0, arms, fit.sigma, float(df), fit.objective, fit.at_bound, joint
    )


def _own_error_of_e(fit: IrreducibleLossFit, df: float) -> tuple[Array, Array, Array, Array]:
    """The error of E in (γ, log A) of the reference, whose runs E comes from: the errors of the free fit.

    Derivatives by E, covariance given E, and the standard errors of both together with degrees of freedom.
    """
    covariance = fit.covariance
    slope = covariance[0, [2, 1]] / max(covariance[0, 0], 1e-300)
    rest = covariance[np.ix_([2, 1], [2, 1])] - np.outer(slope, slope) * covariance[0, 0]
    total = np.sqrt(np.maximum(np.diag(covariance), 0.0))[[2, 1]]
    return slope, rest, total, np.array([df, df], float)


def _error_of_e(
    value: Array, given_e: Array, nu: float, ladder: Ladder, c0: float, fit: IrreducibleLossFit, df: float
) -> tuple[Array, Array, Array, Array]:
    """The same of another arm: E comes from other runs than its line, so errors add (Satterthwaite)."""
    below = _fit_log_log_line(ladder, c0, float(fit.theta[0]) - 1e-6)[0]  # a step up may pass a loss
    slope = (value - below) / 1e-6
    error, from_e = np.sqrt(np.diag(given_e)), slope * math.sqrt(max(fit.covariance[0, 0], 0.0))
    total = np.sqrt(error**2 + from_e**2)
    parts = error**4 / max(nu, 1e-9) + from_e**4 / max(df, 1e-9)
    return slope, given_e, total, np.where(parts > 0, total**4 / np.maximum(parts, 1e-300), nu)


@dataclass(frozen=True, eq=False)
class IrreducibleLossFit:
    """E, log A, γ of one ladder with their covariance."""

    theta: Array
    covariance: Array
    sigma: float
    objective: float
    at_bound: tuple[str, ...]


def fit_irreducible_loss(
    ladder: Ladder, c0: float, loss: Loss = "raw-huber", noise: float | None = None
) -> IrreducibleLossFit:
    """The three-parameter law of one ladder: Huber of losses or log losses, or least squares of either.

    The Huber width of `raw-huber` is `huber_width` of the least-squares residuals. `noise` is a known
    standard deviation of the loss; without it the scatter about the law is used.
    """
    x = np.log(ladder.flops / c0)
    log = loss in ("huber", "log-mse")
    weights = ladder.weights
    found, huber = _three_parameters(x, ladder.loss[None], loss, HUBER_WIDTH, weights)
    theta = found[0]
    reducible = np.exp(theta[1] - theta[2] * x)
    predicted = theta[0] + reducible
    residual = np.log(ladder.loss / predicted) if log else ladder.loss - predicted
    free = max(len(x) - 3, 1)
    rounding = ROUNDING_ERROR * (1.0 if log else float(ladder.loss.mean()))
    variance = max(float((weights * residual**2).sum()) / free, rounding**2)
    if noise is not None:
        variance = (noise / (float(ladder.loss.mean()) if log else 1.0)) ** 2
    elif huber is not None:
        # Variance of an M-estimator. With a few points, most of them beyond δ, it is far too small, so the
        # least-squares variance is a lower bound (the two agree where every residual is inside δ).
        inside = np.abs(residual) <= huber
        clipped = np.clip(residual, -huber, huber)
        fraction = max(float(inside.mean()), 1.0 / len(x))
        variance = max(float((weights * clipped**2).sum()) / free / fraction**2, variance)
    jacobian = np.stack([np.ones_like(x), reducible, -x * reducible], axis=1)
    jacobian *= np.sqrt(weights)[:, None] / (predicted[:, None] if log else 1.0)
    size = np.sqrt((jacobian**2).sum(axis=0)) + 1e-300
    jacobian /= size
    covariance = np.linalg.pinv(jacobian.T @ jacobian, hermitian=True) / np.outer(size, size) * variance
    bound = ("e at zero",) if theta[0] <= 0 else ()
    sigma = math.sqrt(variance) * (float(ladder.loss.mean()) if log else 1.0)
    value = residual**2
    if huber is not None:
        far = np.abs(residual)
        value = np.where(far <= huber, 0.5 * value, huber * (far - 0.5 * huber))
    return IrreducibleLossFit(theta, covariance, sigma, float((weights * value).sum()), bound)


def fit_irreducible_losses(
    flops: Array, losses: Array, c0: float, loss: Literal["huber", "mse"], delta: float = HUBER_WIDTH
) -> Array:
    """(E, log A, γ) of many curves measured at the same compute, one curve a row of `losses`."""
    return _three_parameters(np.log(flops / c0), losses, loss, delta, np.ones(len(flops)))[0]


def huber_width(residual: Array, minimum: float = 1e-6) -> float:
    """1.345 robust standard deviations: the Huber width of 95% efficiency for normal errors.

    The robust standard deviation is the median absolute deviation from the median, over 0.6745.
    """
    deviation = float(np.median(np.abs(residual - np.median(residual))))
    return max(1.345 * deviation / NORMAL_MAD, minimum)


def _three_parameters(
    x: Array, y: Array, loss: Loss, delta: float, weights: Array
) -> tuple[Array, float | None]:
    """(E, log A, γ) of every row of `y`, and the Huber width used (None for least squares)."""
    mask, zero = np.ones((1, len(x)), bool), np.zeros((1, len(x)))
    cells, data = Cells(x[None], mask, weights[None], zero, zero), y[:, None, :]
    laws, log = starting_laws(cells, data), loss in ("huber", "log-mse")
    huber = delta if loss == "huber" else None
    if loss == "raw-huber":
        huber = huber_width((data - laws.predict(cells.x)).ravel())
    kept, free = np.broadcast_to(mask, data.shape), (np.zeros(len(y)), np.zeros(len(y)))
    for _ in range(MAX_REWEIGHTINGS if log or huber else 0):
        # Residuals of log losses are those of the loss over the prediction; far ones count less (Huber).
        predicted = np.maximum(laws.predict(cells.x), 1e-300)
        residual = np.log(data / predicted) if log else data - predicted
        near = 1.0 if huber is None else huber / np.maximum(np.abs(residual), huber)
        scale = predicted if log else np.ones_like(predicted)
        target = predicted + scale * residual
        moved, _ = fit_laws(cells, kept, target, weights * near / scale**2, laws, free)
        change = max(np.abs(moved.e - laws.e).max(), np.abs(moved.gamma - laws.gamma).max())
        laws = moved
        if change < 1e-11:
            break
    return np.stack([laws.e, laws.log_a[:, 0], laws.gamma[:, 0]], axis=1), huber


def _fit_log_log_line(
    ladder: Ladder, c0: float, e: float, noise: float | None = None
) -> tuple[Array, Array, float, float]:
    """Regression of log(L − e) on log C: (γ, log A), their covariance, residual sd of the loss, df."""
    x, z, w = np.log(ladder.flops / c0), np.log(ladder.loss - e), ladder.weights
    design = np.stack([-x, np.ones_like(x)], axis=1)
    inverse = np.asarray(np.linalg.inv((design * w[:, None]).T @ design), np.float64)
    value = inverse @ (design * w[:, None]).T @ z
    residual = z - design @ value
    sd = root_mean_square(residual * (ladder.loss - e))
    if noise is not None:  # known in the loss, so in its logarithm different at every rung
        known = w * (noise / (ladder.loss - e)) ** 2
        return value, inverse @ ((design * known[:, None]).T @ design) @ inverse, sd, math.inf
    nu = len(x) - 2
    variance = max(float((w * residual**2).sum()) / max(nu, 1), ROUNDING_ERROR**2)
    return value, inverse * variance, sd, float(nu)
