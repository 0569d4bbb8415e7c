"""The Chinchilla law L(N, D) = E + A/N^α + B/D^β, by summed Huber loss of log losses, MSE or log-MSE.

Variables are centred and the two amplitudes are fitted as logarithms at the centre of the data, so nothing
depends on the units of N and D. Starting points are a grid over (α, β) with E, A and B by linear least
squares, so each is near the valley of good fits; all are refined at once, and `starts_at_optimum` is the
fraction that reaches the best optimum.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.chinchilla_solver import ChinchillaProblem, bounds, grid_starts, polish, refine
from steepen.laws.fits.solver import Array

ChinchillaLoss = Literal["huber", "mse", "log-mse"]
LOSSES: tuple[ChinchillaLoss, ...] = ("huber", "mse", "log-mse")
PARAMETERS = ("e", "a", "b", "alpha", "beta")
MIN_POINTS = 6


@dataclass(frozen=True)
class ChinchillaSettings:
    """Settings of the fit: `starts_per_axis`² starting points, `bootstrap` resamples (0: no intervals)."""

    loss: ChinchillaLoss = "huber"
    delta: float = 1e-3
    starts_per_axis: int = 12
    bootstrap: int = 200
    confidence: float = 0.90
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UsageError(f"loss is {self.loss!r}; choose one of {', '.join(LOSSES)}.")
        if not self.delta > 0:
            raise UsageError(f"delta is {self.delta}; the Huber width must be greater than zero.")
        if self.starts_per_axis < 2:
            raise UsageError(f"starts_per_axis is {self.starts_per_axis}; give at least 2.")


@dataclass(frozen=True)
class ChinchillaFit:
    """The fitted law. `a` and `b` are in the units of the table: A/N^α with N as given.

    `objective` is the sum over points (of Huber terms, or of squares). `starts_at_optimum` is the fraction
    of starting points that reached it, `flags` are doubts about the solution.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    objective: float
    points: int
    starts: int
    starts_at_optimum: float
    residual_sd: float
    r_squared: float
    intervals: dict[str, tuple[float, float]]
    flags: tuple[str, ...]
    settings: ChinchillaSettings

    def predict(self, parameters: float | Array, tokens: float | Array) -> Array:
        """The law's loss."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta

    @property
    def parameters_exponent(self) -> float:
        """a in N* ∝ C^a."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float:
        """b in D* ∝ C^b."""
        return self.alpha / (self.alpha + self.beta)

    def optimum(self, flops: float, flops_per_parameter_token: float = 6.0) -> tuple[float, float, float]:
        """(N*, D*, loss) of least loss with C = 6·N·D."""
        product = flops / flops_per_parameter_token
        ratio = math.log(self.alpha * self.a) - math.log(self.beta * self.b)
        log_n = (ratio + self.beta * math.log(product)) / (self.alpha + self.beta)
        n = math.exp(log_n)
        return n, product / n, float(self.predict(n, product / n))

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        return {
            "law": "chinchilla", "form": "loss = e + a / parameters ** alpha + b / tokens ** beta",
            **asdict(self),
            "parameters_exponent": self.parameters_exponent, "tokens_exponent": self.tokens_exponent,
        }  # fmt: skip

    def summary(self) -> str:
        """The fit as text."""
        lines = [
            f"L(N, D) = {self.e:.4f} + {self.a:.5g} / N^{self.alpha:.4f} + {self.b:.5g} / D^{self.beta:.4f}",
            f"{self.settings.loss} objective {self.objective:.6e} over {self.points} points;"
            f" {self.starts_at_optimum:.0%} of"
            f" {self.starts} starts reached it; residual sd {self.residual_sd:.4f}",
            f"compute-optimal: N* ∝ C^{self.parameters_exponent:.4f}, D* ∝ C^{self.tokens_exponent:.4f}",
        ]
        for name, (low, high) in self.intervals.items():
            lines.append(f"  {name:<20} {low:.5g} to {high:.5g} ({self.settings.confidence:.0%}, bootstrap)")
        return "\n".join([*lines, *(f"flag: {flag}" for flag in self.flags)])


def fit_chinchilla(
    parameters: Array, tokens: Array, loss: Array, settings: ChinchillaSettings | None = None
) -> ChinchillaFit:
    """Fit the law to runs of N parameters on D tokens."""
    settings = settings or ChinchillaSettings()
    n, d, y = (np.asarray(part, float) for part in (parameters, tokens, loss))
    _check(n, d, y)
    centre = float(np.log(n).mean()), float(np.log(d).mean())
    problem = ChinchillaProblem(
        np.log(n) - centre[0], np.log(d) - centre[1], y, np.ones(len(y)),
        settings.loss != "mse", settings.delta if settings.loss == "huber" else None,
    )  # fmt: skip
    start = grid_starts(problem, settings.starts_per_axis)
    theta, objective = refine(problem, start, problem.weights[None], 150)
    order = np.argsort(objective)
    # Polish the best few by a quasi-Newton search with the exact gradient.
    polished = [polish(problem, theta[i]) for i in order[: 4 if problem.huber else 1]]
    best_theta, best = min(polished, key=lambda found: found[1])
    reached = objective <= best * (1 + 1e-3) + 1e-14
    flags = _flags(problem, best_theta, start, best)
    predicted = (best_theta[0] + sum(term[0] for term in problem.terms(best_theta[None]))).ravel()
    intervals = _bootstrap(problem, best_theta, centre, settings) if settings.bootstrap else {}
    e, a, b, alpha, beta = _in_table_units(best_theta[None], centre)[0]
    spread = float(((y - y.mean()) ** 2).sum())
    return ChinchillaFit(
        e=float(e), a=float(a), b=float(b), alpha=float(alpha), beta=float(beta), objective=best,
        points=len(y), starts=len(start), starts_at_optimum=float(reached.mean()),
        residual_sd=float(np.sqrt(((y - predicted) ** 2).sum() / max(len(y) - 5, 1))),
        r_squared=1 - float(((y - predicted) ** 2).sum()) / max(spread, 1e-300),
        intervals=intervals, flags=flags, settings=settings,
    )  # fmt: skip


def _check(n: Array, d: Array, y: Array) -> None:
    if not n.shape == d.shape == y.shape or n.ndim != 1:
        raise UsageError("parameters, tokens and loss must be three columns of the same length.")
    for name, values in (("parameters", n), ("tokens", d), ("loss", y)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise UsageError(f"{name} must be finite and greater than zero in every row.")
    if len(y) < MIN_POINTS:
        raise UsageError(
            f"the law has five parameters and the table {len(y)} rows; give at least {MIN_POINTS}."
        )
    for name, values in (("parameters", n), ("tokens", d)):
        if len(np.unique(values)) < 3:
            raise UsageError(
                f"{name} takes only {len(np.unique(values))} values; its exponent needs at least three."
            )


def _in_table_units(theta: Array, centre: tuple[float, float]) -> Array:
    """(E, A, B, α, β) in the table's units."""
    with np.errstate(over="ignore"):
        a = np.exp(theta[:, 1] + theta[:, 3] * centre[0])
        b = np.exp(theta[:, 2] + theta[:, 4] * centre[1])
    return np.stack([theta[:, 0], a, b, theta[:, 3], theta[:, 4]], axis=1)


def _flags(problem: ChinchillaProblem, theta: Array, start: Array, objective: float) -> tuple[str, ...]:
    found: list[str] = []
    low, high = bounds(problem)
    if np.isclose(start, theta, rtol=1e-9, atol=1e-12).all(axis=1).any():
        found.append("the solution equals one of its starts: the search did not move")
    for name, value, least, most in zip(PARAMETERS, theta, low, high, strict=True):
        if value <= least * (1 + 1e-6) + 1e-9 or value >= most * (1 - 1e-6):
            found.append(f"{name} is at its bound ({value:.4g}): the data do not determine it")
    _, slope = problem.value_and_gradient(theta)
    inside = (theta > low) & (theta < high)
    if problem.huber is None and float(np.abs(slope[inside]).max(initial=0.0)) > 1e-3 * max(objective, 1e-12):
        found.append("the gradient at the solution is not small: the search may have stopped early")
    return tuple(found)


def _bootstrap(
    problem: ChinchillaProblem, theta: Array, centre: tuple[float, float], settings: ChinchillaSettings
) -> dict[str, tuple[float, float]]:
    """Percentile intervals from a nonparametric bootstrap, with resampled points as weights."""
    rng = np.random.default_rng(settings.seed)
    count = len(problem.y)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=settings.bootstrap).astype(float)
    refit, _ = refine(problem, theta[None], weights, 60)
    values = _in_table_units(refit, centre)
    columns = dict(zip(PARAMETERS, values.T, strict=True))
    total = columns["alpha"] + columns["beta"]
    columns |= {"parameters_exponent": columns["beta"] / total, "tokens_exponent": columns["alpha"] / total}
    tail = (1 - settings.confidence) / 2
    return {
        name: (float(np.quantile(column, tail)), float(np.quantile(column, 1 - tail)))
        for name, column in columns.items()
    }
