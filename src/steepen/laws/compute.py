"""The compute law L(C) = E + A·(C/C0)^−γ of every arm: the paper's way, and jointly.

The paper's way takes E from the reference arm alone (summed Huber loss of log losses) and then treats it as known:
every other arm is a straight line of log(L − E) against log C. Its standard error is conditional on that E. The joint
way fits one E and every arm's A and γ to all losses at once by least squares. Both report intervals conditional on E
and unconditional ones; the difference between the two is often a factor of ten.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from scipy import stats

from steepen.errors import UsageError
from steepen.laws.intervals import Fitted, Interval, profile_intervals
from steepen.laws.ladder import Ladder, check_ladders
from steepen.laws.readings import ROUNDING, t_quantile
from steepen.laws.solver import Array, Design, jacobian, one_hot, solve_anew, unscaled_covariance

Loss = Literal["huber", "mse", "log-mse"]
Method = Literal["paper", "joint"]
LOSSES: tuple[Loss, ...] = ("huber", "mse", "log-mse")


@dataclass(frozen=True)
class Estimate:
    """A number with two intervals: `conditional` holds E (for E itself: the exponents) as if known."""

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
    slope_error: float
    residual_sd: float
    c0: float
    flops_range: tuple[float, float]

    def predict(self, flops: float | Array) -> Array:
        """The law's loss at a compute."""
        x = np.log(np.asarray(flops, float) / self.c0)
        return self.e.value + np.exp(self.log_a.value - self.gamma.value * x)

    def compute_for(self, loss: float | Array) -> Array:
        """The compute at which the law reaches a loss; infinite at or below its floor."""
        above = np.asarray(loss, float) - self.e.value
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.c0 * np.exp((self.log_a.value - np.log(above)) / self.gamma.value)
        return np.where(above > 0, value, np.inf)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a compute-law fit. `c0` None means the reference's geometric-mean compute."""

    reference: str
    method: Method = "joint"
    loss: Loss = "huber"
    delta: float = 1e-3
    c0: float | None = None
    confidence: float = 0.90
    noise: float | None = None

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UsageError(f"loss is {self.loss!r}; choose one of {', '.join(LOSSES)}.")
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; give a share between 0 and 1, such as 0.9.")
        for name, value in (("delta", self.delta), ("c0", self.c0), ("noise", self.noise)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}; give a finite number greater than zero.")

    @property
    def log(self) -> bool:
        """Whether the joint way compares log losses."""
        return self.loss == "log-mse"


@dataclass(frozen=True)
class ComputeFit:
    """The laws of every arm by one method, with the settings that made them."""

    settings: Settings
    c0: float
    arms: dict[str, ArmLaw]
    sigma: float
    freedom: float
    objective: float
    at_bound: tuple[str, ...] = ()
    # Of (E, every log A, every γ) in the order of `arms`; kept for bands, not for JSON.
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)), repr=False, compare=False)

    @property
    def theta(self) -> Array:
        """(E, every log A, every γ) in the order of `arms`."""
        laws = list(self.arms.values())
        return np.array([laws[0].e.value, *(a.log_a.value for a in laws), *(a.gamma.value for a in laws)])

    @property
    def quantile(self) -> float:
        """Student's t for the settings' confidence and the fit's degrees of freedom."""
        return float(t_quantile((1 + self.settings.confidence) / 2, np.array(self.freedom)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "settings": asdict(self.settings), "c0": self.c0, "sigma": self.sigma, "freedom": self.freedom,
            "objective": self.objective, "at_bound": list(self.at_bound),
            "arms": {name: law_dict(law) for name, law in self.arms.items()},
        }  # fmt: skip

    def summary(self) -> str:
        """The laws as lines of text."""
        per = f"{self.settings.confidence:.0%}"
        head = f"compute law, {self.settings.method} way, C0 = {self.c0:.4g}, scatter {self.sigma:.2g}"
        lines = [head, f"{'arm':<20} {'γ':>8} {per + ' interval':>20} {'given E':>20} {'log A':>8} {'E':>8}"]
        for law in self.arms.values():
            wide, narrow = law.gamma.unconditional, law.gamma.conditional
            lines.append(
                f"{law.arm:<20} {law.gamma.value:8.4f} {wide[0]:10.4f}–{wide[1]:.4f}   {narrow[0]:10.4f}–{narrow[1]:.4f}"
                f"   {law.log_a.value:8.4f} {law.e.value:8.4f}"
            )
        return "\n".join(lines)


def law_dict(law: ArmLaw) -> dict[str, Any]:
    """One arm's law as plain data: values at the top, intervals below."""
    parts = {"gamma": law.gamma, "log_a": law.log_a, "e": law.e}
    return {
        **{name: part.value for name, part in parts.items()},
        "intervals": {
            name: {"conditional": list(part.conditional), "unconditional": list(part.unconditional)}
            for name, part in parts.items()
        },
        "slope_error": law.slope_error,
        "residual_sd": law.residual_sd,
        "flops_range": list(law.flops_range),
    }


def default_c0(ladder: Ladder) -> float:
    """The geometric mean of a ladder's compute, where its constant and exponent are least entangled."""
    return float(np.exp(np.log(ladder.flops).mean()))


def fit_compute(ladders: dict[str, Ladder], settings: Settings) -> ComputeFit:
    """Fit every arm's law in the way the settings name."""
    check_ladders(ladders, settings.reference)
    return _fit_joint(ladders, settings) if settings.method == "joint" else _fit_paper(ladders, settings)


def _fit_joint(ladders: dict[str, Ladder], settings: Settings) -> ComputeFit:
    c0 = settings.c0 or default_c0(ladders[settings.reference])
    names = list(ladders)
    group = np.concatenate([np.full(len(ladders[name].flops), i) for i, name in enumerate(names)])
    x = np.log(np.concatenate([ladder.flops for ladder in ladders.values()]) / c0)
    y = np.concatenate([ladder.loss for ladder in ladders.values()])
    weights = np.concatenate([ladder.seeds for ladder in ladders.values()])
    own = one_hot(group, len(names))
    design = Design(np.ones((len(x), 1)), own, own)
    best = solve_anew(design, x, y, weights=weights, log=settings.log)
    theta, rss = best.theta[0], float(best.objective[0])
    freedom = math.inf if settings.noise else float(len(x) - design.parameters)
    variance = _variance(rss, len(x) - design.parameters, y, settings)
    quantile = float(t_quantile((1 + settings.confidence) / 2, np.array(freedom)))
    covariance = unscaled_covariance(design, x, theta, weights=weights, log=settings.log)[0]
    fit = Fitted(design, x, y, weights, theta, rss, variance, settings.log)
    wide = profile_intervals(fit, list(range(design.parameters)), covariance, quantile)

    def conditional(index: int, held: list[int]) -> Interval:
        free = [i for i in range(design.parameters) if i not in held]
        j = jacobian(design, x, theta[None], settings.log)[0][:, free]
        block = np.linalg.pinv((j * weights[:, None]).T @ j, hermitian=True)
        error = math.sqrt(max(block[free.index(index), free.index(index)] * variance, 0.0))
        return _around(float(theta[index]), quantile * error)

    gammas = [1 + len(names) + i for i in range(len(names))]
    e = Estimate(float(theta[0]), conditional(0, gammas), wide[0])
    arms: dict[str, ArmLaw] = {}
    for i, name in enumerate(names):
        a, g = 1 + i, gammas[i]
        given = conditional(g, [0])
        arms[name] = ArmLaw(
            arm=name,
            gamma=Estimate(float(theta[g]), given, wide[g]),
            log_a=Estimate(float(theta[a]), conditional(a, [0]), wide[a]),
            e=e,
            slope_error=(given[1] - given[0]) / (2 * quantile),
            residual_sd=_spread((y - design.predict(theta, x))[group == i]),
            c0=c0,
            flops_range=_range(ladders[name]),
        )
    bound = ("e at zero",) if theta[0] <= 0 else ()
    sigma = math.sqrt(variance) * (float(y.mean()) if settings.log else 1.0)
    return ComputeFit(settings, c0, arms, sigma, freedom, rss, bound, covariance * variance)


def _fit_paper(ladders: dict[str, Ladder], settings: Settings) -> ComputeFit:
    base = ladders[settings.reference]
    c0 = settings.c0 or default_c0(base)
    fit = fit_floor(base, c0, settings.loss, settings.delta)
    e = float(fit.theta[0])
    for ladder in ladders.values():
        for loss, place in zip(ladder.loss, ladder.places, strict=True):
            if loss <= e:
                raise UsageError(
                    f"{place}: the loss {loss:g} of arm '{ladder.arm}' is not above the floor E = {e:.4f} fitted on"
                    f" '{base.arm}', so log(L − E) does not exist; correct the row, or fit all arms' floor together"
                    " with the joint method."
                )
    freedom = len(base.flops) - 3
    quantile = float(t_quantile((1 + settings.confidence) / 2, np.array(float(freedom))))
    errors = np.sqrt(np.maximum(np.diag(fit.covariance), 0.0))
    given_gamma = np.linalg.pinv(np.linalg.pinv(fit.covariance, hermitian=True)[:2, :2], hermitian=True)
    e_estimate = Estimate(
        e,
        _around(e, quantile * math.sqrt(max(given_gamma[0, 0], 0.0))),
        (max(0.0, e - quantile * float(errors[0])), e + quantile * float(errors[0])),
    )
    arms: dict[str, ArmLaw] = {}
    carrier = np.zeros(1 + 2 * len(ladders))  # how every parameter moves with E
    carrier[0] = 1.0
    joint = np.zeros((len(carrier), len(carrier)))
    for i, (name, ladder) in enumerate(ladders.items()):
        value, inverse, sd, nu = _line(ladder, c0, e)
        error = np.sqrt(np.diag(inverse))
        own = [1 + len(ladders) + i, 1 + i]
        if name == settings.reference:
            value = np.array([fit.theta[2], fit.theta[1]])
            total, total_nu = errors[[2, 1]], np.array([freedom, freedom], float)
            carrier[own] = fit.covariance[0, [2, 1]] / max(fit.covariance[0, 0], 1e-300)
            left = fit.covariance[np.ix_([2, 1], [2, 1])] - np.outer(carrier[own], carrier[own]) * fit.covariance[0, 0]
            joint[np.ix_(own, own)] = left
        else:
            # E comes from other runs than the line, so their errors add; the degrees of freedom by Satterthwaite.
            slope = (_line(ladder, c0, e + 1e-6)[0] - value) / 1e-6
            carried = slope * errors[0]
            carrier[own], joint[np.ix_(own, own)] = slope, inverse
            total = np.sqrt(error**2 + carried**2)
            parts = error**4 / max(nu, 1e-9) + carried**4 / max(freedom, 1e-9)
            total_nu = np.where(parts > 0, total**4 / np.maximum(parts, 1e-300), nu)
        narrow = float(t_quantile((1 + settings.confidence) / 2, np.array(float(nu))))
        wide = t_quantile((1 + settings.confidence) / 2, total_nu)
        estimates = [
            Estimate(float(value[i]), _around(float(value[i]), narrow * error[i]), _around(float(value[i]), wide[i] * total[i]))
            for i in range(2)
        ]
        arms[name] = ArmLaw(name, *estimates, e_estimate, float(error[0]), sd, c0, _range(ladder))
    joint += np.outer(carrier, carrier) * fit.covariance[0, 0]
    return ComputeFit(settings, c0, arms, fit.sigma, float(freedom), fit.objective, fit.at_bound, joint)


@dataclass(frozen=True, eq=False)
class FloorFit:
    """E, log A, γ of one ladder with their covariance."""

    theta: Array
    covariance: Array
    sigma: float
    objective: float
    at_bound: tuple[str, ...]


def fit_floor(ladder: Ladder, c0: float, loss: Loss = "huber", delta: float = 1e-3) -> FloorFit:
    """The three-parameter law of one ladder: summed Huber of log losses, or least squares (of log losses)."""
    x = np.log(ladder.flops / c0)
    ones = np.ones((len(x), 1))
    design = Design(ones, ones, ones)
    log = loss != "mse"
    huber = delta if loss == "huber" else None
    weights = ladder.seeds
    best = solve_anew(design, x, ladder.loss, weights=weights, log=log, huber=huber)
    theta = best.theta[0]
    predicted = design.predict(theta, x)
    residual = np.log(ladder.loss / predicted) if log else ladder.loss - predicted
    free = max(len(x) - 3, 1)
    rounding = ROUNDING * (1.0 if log else float(ladder.loss.mean()))
    if huber is None:
        variance = max(float((weights * residual**2).sum()) / free, rounding**2)
    else:
        # An M-estimator's variance; where every residual is inside δ it is that of least squares.
        inside = np.abs(residual) <= huber
        clipped = np.clip(residual, -huber, huber)
        share = max(float(inside.mean()), 1.0 / len(x))
        variance = max(float((weights * clipped**2).sum()) / free / share**2, rounding**2)
    covariance = unscaled_covariance(design, x, theta, weights=weights, log=log)[0] * variance
    bound = ("e at zero",) if theta[0] <= 0 else ()
    sigma = math.sqrt(variance) * (float(ladder.loss.mean()) if log else 1.0)
    return FloorFit(theta, covariance, sigma, float(best.objective[0]), bound)


def _line(ladder: Ladder, c0: float, e: float) -> tuple[Array, Array, float, int]:
    """Log–log regression above a given floor: (γ, log A), their covariance, residual sd in loss, freedom."""
    x, z, w = np.log(ladder.flops / c0), np.log(ladder.loss - e), ladder.seeds
    design = np.stack([-x, np.ones_like(x)], axis=1)
    inverse = np.linalg.inv((design * w[:, None]).T @ design)
    value = inverse @ (design * w[:, None]).T @ z
    residual = z - design @ value
    nu = len(x) - 2
    variance = max(float((w * residual**2).sum()) / max(nu, 1), ROUNDING**2)
    return value, inverse * variance, _spread(residual * (ladder.loss - e)), nu


def _variance(rss: float, freedom: int, y: Array, settings: Settings) -> float:
    scale = float(y.mean()) if settings.log else 1.0
    if settings.noise:
        return (settings.noise / scale) ** 2
    rounding = ROUNDING * (1.0 if settings.log else float(y.mean()))
    return max(rss / max(freedom, 1), rounding**2)


def _around(value: float, reach: float) -> Interval:
    return value - float(reach), value + float(reach)


def _spread(residual: Array) -> float:
    return float(np.sqrt(np.mean(residual**2)))


def _range(ladder: Ladder) -> tuple[float, float]:
    return float(ladder.flops[0]), float(ladder.flops[-1])


def lack_of_fit(ladders: dict[str, Ladder], fit: ComputeFit) -> float | None:
    """p-value that rungs scatter about their laws no more than their seeds do; None where no rung has two seeds."""
    within = sum(float(((runs - runs.mean()) ** 2).sum()) for ladder in ladders.values() for runs in ladder.runs)
    inner = sum(len(runs) - 1 for ladder in ladders.values() for runs in ladder.runs)
    if inner == 0 or within <= 0 or not math.isfinite(fit.freedom) or fit.freedom <= 0:
        return None
    between = sum(
        float((ladder.seeds * (ladder.loss - fit.arms[name].predict(ladder.flops)) ** 2).sum())
        for name, ladder in ladders.items()
    )
    return float(stats.f.sf((between / fit.freedom) / (within / inner), fit.freedom, inner))
