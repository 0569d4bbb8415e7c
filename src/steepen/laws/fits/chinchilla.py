"""The Chinchilla law L(N, D) = E + A/N^α + B/D^β, by summed Huber loss of log losses, MSE or log-MSE.

Variables are centred and the two amplitudes are fitted as logarithms at the centre of the data, so nothing
depends on the units of N and D. Starting points are a grid over (α, β) with E, A and B by linear least
squares, so each is near the valley of good fits; all are refined at once, and `starts_at_optimum` is the
fraction that reaches the best optimum.

`tied` fits one exponent, α = β, as Gadre et al. do: four parameters, so five runs are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steepen.errors import UsageError
from steepen.laws.distributions import ROUNDING_ERROR, Interval, t_quantile
from steepen.laws.fits.chinchilla_solver import ChinchillaProblem, bounds, grid_starts, polish, refine
from steepen.laws.fits.solver import Array
from steepen.utils.formatting import percent

IntArray = NDArray[np.intp]
ChinchillaLoss = Literal["huber", "mse", "log-mse"]
LOSSES: tuple[ChinchillaLoss, ...] = ("huber", "mse", "log-mse")
PARAMETERS = ("e", "a", "b", "alpha", "beta")
MIN_BOOTSTRAP_POINTS = 20  # with fewer runs (or clusters) resamples are too alike, or have no law


@dataclass(frozen=True)
class ChinchillaSettings:
    """Settings of the fit: `starts_per_axis`² starting points, `bootstrap` resamples (0: no intervals).

    `delta` is the Huber width of log losses, `tied` one exponent α = β.
    """

    loss: ChinchillaLoss = "huber"
    delta: float = 1e-3
    tied: bool = False
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
    of starting points that reached it, `flags` are doubts about the solution. `intervals` are bootstrap
    percentiles, or from the covariance where there are too few runs to resample (`interval_method`).
    `covariance` is that of (E, log A, log B, α, β), `degrees_of_freedom` points (or clusters) less
    parameters.
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
    log_residual_sd: float
    r_squared: float
    intervals: dict[str, Interval]
    interval_method: Literal["bootstrap", "covariance", "none"]
    covariance: tuple[tuple[float, ...], ...]
    degrees_of_freedom: int
    flags: tuple[str, ...]
    settings: ChinchillaSettings

    def predict(self, parameters: float | Array, tokens: float | Array) -> Array:
        """The law's loss."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta

    def law_standard_error(self, parameters: float, tokens: float) -> float:
        """Standard error of the law's loss at N and D: what is left with infinitely many runs there."""
        first, second = self.a * parameters**-self.alpha, self.b * tokens**-self.beta
        gradient = np.array(
            [1.0, first, second, -first * math.log(parameters), -second * math.log(tokens)]
        )  # fmt: skip
        return math.sqrt(max(float(gradient @ np.array(self.covariance) @ gradient), 0.0))

    def forecast_interval(self, parameters: float, tokens: float) -> tuple[Interval, float]:
        """Interval of a further run's loss at N and D, and its standard error: law and run together."""
        value = float(self.predict(parameters, tokens))
        run = self.residual_sd if self.settings.loss == "mse" else self.log_residual_sd * value
        error = math.hypot(self.law_standard_error(parameters, tokens), run)
        reach = error * float(
            t_quantile((1 + self.settings.confidence) / 2, np.array(float(self.degrees_of_freedom)))
        )
        return (value - reach, value + reach), error

    @property
    def compute_exponent(self) -> float:
        """γ of the loss at the compute-optimal split: L = E + K·C^−γ."""
        return self.alpha * self.beta / (self.alpha + self.beta)

    @property
    def compute_exponent_error(self) -> float:
        """Standard error of the compute exponent."""
        total = (self.alpha + self.beta) ** 2
        gradient = np.array([self.beta**2, self.alpha**2]) / total
        block = np.array(self.covariance)[3:, 3:]
        return math.sqrt(max(float(gradient @ block @ gradient), 0.0))

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
            "compute_exponent": self.compute_exponent,
        }  # fmt: skip

    def summary(self) -> str:
        """The fit as text."""
        lines = [
            f"L(N, D) = {self.e:.4f} + {self.a:.5g} / N^{self.alpha:.4f} + {self.b:.5g} / D^{self.beta:.4f}",
            f"{self.settings.loss} objective {self.objective:.6e} over {self.points} points;"
            f" {self.starts_at_optimum:.0%} of"
            f" {self.starts} starts reached it; residual sd {self.residual_sd:.4f}",
            f"compute-optimal: N* ∝ C^{self.parameters_exponent:.4f}, D* ∝ C^{self.tokens_exponent:.4f},"
            f" L − E ∝ C^−{self.compute_exponent:.4f}",
        ]
        for name, (low, high) in self.intervals.items():
            if self.settings.tied and name in ("beta", "parameters_exponent", "tokens_exponent"):
                continue
            lines.append(
                f"  {name:<20} {low:.5g} to {high:.5g} ({percent(self.settings.confidence)},"
                f" {self.interval_method})"
            )
        return "\n".join([*lines, *(f"flag: {flag}" for flag in self.flags)])


def fit_chinchilla(
    parameters: Array,
    tokens: Array,
    loss: Array,
    settings: ChinchillaSettings | None = None,
    *,
    runs: Sequence[str] | None = None,
) -> ChinchillaFit:
    """Fit the law to runs of N parameters on D tokens.

    `runs` names the training run of each row, where several rows (checkpoints, cooldowns) come from one:
    intervals then treat runs, not rows, as independent.
    """
    settings = settings or ChinchillaSettings()
    n, d, y = (np.asarray(part, float) for part in (parameters, tokens, loss))
    _check(n, d, y, settings)
    centre = float(np.log(n).mean()), float(np.log(d).mean())
    problem = ChinchillaProblem(
        np.log(n) - centre[0], np.log(d) - centre[1], y, np.ones(len(y)),
        settings.loss != "mse", settings.delta if settings.loss == "huber" else None, settings.tied,
    )  # fmt: skip
    cluster: IntArray = np.arange(len(y), dtype=np.intp)
    if runs is not None:
        cluster = np.unique(np.asarray(runs), return_inverse=True)[1].astype(np.intp)
    clusters = int(cluster.max()) + 1
    df = clusters - problem.n_parameters
    if df < 1:
        raise UsageError(
            f"the law has {problem.n_parameters} parameters and the table {clusters} runs; give more runs"
            " than parameters."
        )
    start = grid_starts(problem, settings.starts_per_axis)
    theta, objective = refine(problem, start, problem.weights[None], 150)
    order = np.argsort(objective)
    # Polish the best few by a quasi-Newton search with the exact gradient.
    polished = [polish(problem, theta[i]) for i in order[: 4 if problem.huber else 1]]
    best_theta, best = min(polished, key=lambda found: found[1])
    reached = objective <= best * (1 + 1e-3) + 1e-14
    flags = _flags(problem, best_theta, start, best)
    predicted = problem.predict(best_theta[None])[0]
    covariance = _covariance(problem, best_theta, centre, cluster, df)
    e, a, b, alpha, beta = (float(value) for value in _in_table_units(best_theta[None], centre)[0])
    method: Literal["bootstrap", "covariance", "none"] = "none"
    intervals: dict[str, Interval] = {}
    if settings.bootstrap:
        if clusters >= MIN_BOOTSTRAP_POINTS:
            method, intervals = "bootstrap", _bootstrap(problem, best_theta, centre, settings, cluster)
        else:
            method = "covariance"
            intervals = _wald_intervals((e, a, b, alpha, beta), covariance, df, settings.confidence)
    spread, free = float(((y - y.mean()) ** 2).sum()), len(y) - problem.n_parameters
    return ChinchillaFit(
        e=e, a=a, b=b, alpha=alpha, beta=beta, objective=best,
        points=len(y), starts=len(start), starts_at_optimum=float(reached.mean()),
        residual_sd=float(np.sqrt(((y - predicted) ** 2).sum() / free)),
        log_residual_sd=float(np.sqrt((np.log(y / predicted) ** 2).sum() / free)),
        r_squared=1 - float(((y - predicted) ** 2).sum()) / max(spread, 1e-300),
        intervals=intervals, interval_method=method, covariance=tuple(map(tuple, covariance.tolist())),
        degrees_of_freedom=df, flags=flags, settings=settings,
    )  # fmt: skip


def _check(n: Array, d: Array, y: Array, settings: ChinchillaSettings) -> None:
    if not n.shape == d.shape == y.shape or n.ndim != 1:
        raise UsageError("parameters, tokens and loss must be three columns of the same length.")
    for name, values in (("parameters", n), ("tokens", d), ("loss", y)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise UsageError(f"{name} must be finite and greater than zero in every row.")
    parameters, least = ("four", 5) if settings.tied else ("five", 6)
    if len(y) < least:
        hint = "" if settings.tied or len(y) < 5 else ", or fit one exponent (α = β) with --equal-exponents"
        raise UsageError(
            f"the law has {parameters} parameters and the table {len(y)} rows; give at least {least}{hint}."
        )
    for name, values in (("parameters", n), ("tokens", d)):
        count, needed = len(np.unique(values)), 2 if settings.tied else 3
        if count < needed:
            raise UsageError(f"{name} takes only {count} values; its term needs at least {needed}.")


def _covariance(
    problem: ChinchillaProblem, theta: Array, centre: tuple[float, float], cluster: IntArray, df: int
) -> Array:
    """Covariance of (E, log A, log B, α, β) in the table's units.

    Huber: that of an M-estimator, and not less than that of least squares, which few points need. Rows of
    one run: a cluster-robust sandwich.
    """
    _, residual, _, terms = problem.evaluate(theta[None], problem.weights[None])
    j, r = problem.jacobian(theta[None], terms)[0], residual[0]
    scale = np.sqrt((j**2).sum(axis=1))
    scale[scale == 0] = 1.0
    inverse = np.linalg.pinv((j / scale[:, None]) @ (j / scale[:, None]).T, hermitian=True)
    inverse = inverse / np.outer(scale, scale)
    free = len(r) - len(theta)
    rounding = ROUNDING_ERROR * (1.0 if problem.log else float(problem.y.mean()))
    variance = max(float((r**2).sum()) / free, rounding**2)
    influence, inside = r, 1.0
    if problem.huber is not None:
        clipped = np.clip(r, -problem.huber, problem.huber)
        fraction = max(float((np.abs(r) <= problem.huber).mean()), 1.0 / len(r))
        robust = float((clipped**2).sum()) / free / fraction**2
        if robust > variance:
            variance, influence, inside = robust, clipped, fraction
    covariance = inverse * variance
    count = int(cluster.max()) + 1
    if count < len(r):
        score = np.zeros((count, len(theta)))
        np.add.at(score, cluster, (j * influence / inside).T)
        meat = score.T @ score * count / df
        covariance = inverse @ meat @ inverse
    # From logs at the centre of the data to logs at N = D = 1: log A = θ₁ + α · mean log N.
    change = np.zeros((5, len(theta)))
    change[[0, 1, 2, 3], [0, 1, 2, 3]] = 1.0
    change[4, -1] = 1.0
    change[1, 3], change[2, -1] = centre
    return change @ covariance @ change.T


def _wald_intervals(
    value: tuple[float, float, float, float, float], covariance: Array, df: int, confidence: float
) -> dict[str, Interval]:
    """t-intervals; those of A and B on a log scale."""
    quantile = float(t_quantile((1 + confidence) / 2, np.array(float(df))))
    reach = quantile * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    found: dict[str, Interval] = {}
    for i, (name, centre) in enumerate(zip(PARAMETERS, value, strict=True)):
        if name in ("a", "b"):
            factor = math.exp(min(float(reach[i]), 700.0))
            found[name] = (centre / factor, centre * factor)
        else:
            found[name] = (max(0.0, centre - float(reach[i])), centre + float(reach[i]))
    alpha, beta = value[3:]
    gradient = np.array([-beta, alpha]) / (alpha + beta) ** 2  # of β/(α + β)
    error = math.sqrt(max(float(gradient @ covariance[3:, 3:] @ gradient), 0.0))
    for name, centre in (
        ("parameters_exponent", beta / (alpha + beta)),
        ("tokens_exponent", alpha / (alpha + beta)),
    ):
        found[name] = (centre - quantile * error, centre + quantile * error)
    return found


def _in_table_units(theta: Array, centre: tuple[float, float]) -> Array:
    """(E, A, B, α, β) in the table's units."""
    with np.errstate(over="ignore"):
        a = np.exp(theta[:, 1] + theta[:, 3] * centre[0])
        b = np.exp(theta[:, 2] + theta[:, -1] * centre[1])
    return np.stack([theta[:, 0], a, b, theta[:, 3], theta[:, -1]], axis=1)


def _flags(problem: ChinchillaProblem, theta: Array, start: Array, objective: float) -> tuple[str, ...]:
    found: list[str] = []
    low, high = bounds(problem)
    if np.isclose(start, theta, rtol=1e-9, atol=1e-12).all(axis=1).any():
        found.append("the solution equals one of its starts: the search did not move")
    for name, value, least, most in zip(PARAMETERS, theta, low, high, strict=False):
        if value <= least * (1 + 1e-6) + 1e-9 or value >= most * (1 - 1e-6):
            found.append(f"{name} is at its bound ({value:.4g}): the data do not determine it")
    _, slope = problem.value_and_gradient(theta)
    inside = (theta > low) & (theta < high)
    if problem.huber is None and float(np.abs(slope[inside]).max(initial=0.0)) > 1e-3 * max(objective, 1e-12):
        found.append("the gradient at the solution is not small: the search may have stopped early")
    return tuple(found)


def _bootstrap(
    problem: ChinchillaProblem,
    theta: Array,
    centre: tuple[float, float],
    settings: ChinchillaSettings,
    cluster: IntArray,
) -> dict[str, Interval]:
    """Percentile intervals from a nonparametric bootstrap of runs, with resampled points as weights."""
    rng = np.random.default_rng(settings.seed)
    count = int(cluster.max()) + 1
    weights = rng.multinomial(count, np.full(count, 1 / count), size=settings.bootstrap).astype(float)
    weights = weights[:, cluster]
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
