"""The Chinchilla law L(N, D) = E + A/N^α + B/D^β, by summed Huber loss of log losses, MSE or log-MSE.

For looped models N is N_once + r^φ·N_rec: parameters that act once, and those that act in each of r passes.

Variables are centred and the two amplitudes are fitted as logarithms at the centre of the data, so nothing
depends on the units of N and D. Starting points are a grid over (α, β) with E, A and B by linear least
squares, so each is near the valley of good fits; all are refined at once, and `starts_at_optimum` is the
fraction that reaches the best optimum.

`tied` fits one exponent, α = β, as Gadre et al. do: four parameters, so five runs are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError, require_one_of
from steepen.laws.distributions import ROUNDING_ERROR, Interval, Prior, standard_error, t_reach
from steepen.laws.fits.size_law_solver import (
    KINDS,
    IntArray,
    Kind,
    ModelSize,
    SizeLawProblem,
    grid_starts,
    scaled_inverse,
    solve,
)
from steepen.utils.arrays import Array

ChinchillaLoss = Literal["huber", "mse", "log-mse"]
LOSSES: tuple[ChinchillaLoss, ...] = ("huber", "mse", "log-mse")
MIN_RATIO_SPREAD = 0.05  # SD of log D about its trend in log N; below it A and B are not told apart
FIXED_SD = 1e-9  # of a fixed E, in covariances


@dataclass(frozen=True)
class ChinchillaSettings:
    """Settings of the fit: `starts_per_axis`² starting points, `delta` the Huber width of log losses.

    `tied` is one exponent α = β; `irreducible_loss` what is known of E.
    """

    loss: ChinchillaLoss = "huber"
    delta: float = 1e-3
    tied: bool = False
    starts_per_axis: int = 12
    confidence: float = 0.90
    irreducible_loss: Prior | None = None

    def __post_init__(self) -> None:
        require_one_of("loss", self.loss, LOSSES)
        if not self.delta > 0:
            raise UsageError(f"delta is {self.delta}; the Huber width must be greater than zero.")
        if self.starts_per_axis < 2:
            raise UsageError(f"starts_per_axis is {self.starts_per_axis}; give at least 2.")


@dataclass(frozen=True)
class FlopsLaw:
    """Training FLOPs C = coefficient · N^exponent · D; 6·N·D unless a table says otherwise."""

    coefficient: float = 6.0
    exponent: float = 1.0

    @classmethod
    def fit(cls, parameters: Array, tokens: Array, flops: Array) -> FlopsLaw:
        """Least squares of log(C/D) on log N: attention makes FLOPs per token fall short of ∝ N."""
        exponent, level = np.polyfit(np.log(parameters), np.log(flops / tokens), 1)
        return cls(math.exp(level), float(exponent))


@dataclass(frozen=True)
class ChinchillaFit:
    """The fitted law. `a` and `b` are in the units of the table: A/N^α with N as given.

    `objective` is the sum over points (of Huber terms, or of squares). `starts_at_optimum` is the fraction
    of starting points that reached it, `flags` are doubts about the solution. `covariance` is that of
    (E, log A, log B, α, β) and φ of looped models; `degrees_of_freedom` is points (or clusters) less
    parameters. `intervals` are from the covariance with Student's t; those of A and B on a log scale.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    phi: float | None
    objective: float
    points: int
    starts: int
    starts_at_optimum: float
    residual_sd: float
    log_residual_sd: float
    r_squared: float
    intervals: dict[str, Interval]
    covariance: tuple[tuple[float, ...], ...]
    degrees_of_freedom: int
    flags: tuple[str, ...]
    settings: ChinchillaSettings
    flops_law: FlopsLaw

    def predict(self, parameters: float | Array | ModelSize, tokens: float | Array) -> Array:
        """The law's loss."""
        _, first, second, _ = self._terms(parameters, tokens)
        return self.e + first + second

    def _terms(
        self, parameters: float | Array | ModelSize, tokens: float | Array
    ) -> tuple[Array, Array, Array, Array]:
        """Effective size, the two terms, and the derivative of the logarithm of the size by φ."""
        size = parameters
        if not isinstance(size, ModelSize):
            size = ModelSize.of(np.asarray(size, float))
        n, by_phi = size.effective(self.phi or 0.0)
        return n, self.a * n**-self.alpha, self.b * np.asarray(tokens, float) ** -self.beta, by_phi

    def law_standard_error(self, parameters: float | ModelSize, tokens: float) -> float:
        """Standard error of the law's loss at N and D: what is left with infinitely many runs there."""
        n, first, second, by_phi = (float(np.squeeze(part)) for part in self._terms(parameters, tokens))
        exponents = [-first * math.log(n), -second * math.log(tokens), -self.alpha * first * by_phi]
        gradient = np.array([1.0, first, second, *exponents])[: len(self.covariance)]
        return standard_error(gradient, np.array(self.covariance))

    def forecast_interval(self, parameters: float | ModelSize, tokens: float) -> tuple[Interval, float]:
        """Interval of a further run's loss at N and D, and its standard error: law and run together."""
        value = float(np.squeeze(self.predict(parameters, tokens)))
        run = self.residual_sd if self.settings.loss == "mse" else self.log_residual_sd * value
        error = math.hypot(self.law_standard_error(parameters, tokens), run)
        reach = error * t_reach(self.settings.confidence, self.degrees_of_freedom)
        return (value - reach, value + reach), error

    @property
    def compute_exponent(self) -> float:
        """γ of the loss at the compute-optimal split: L = E + K·C^−γ."""
        return self.alpha * self.parameters_exponent

    @property
    def parameters_exponent(self) -> float:
        """a in N* ∝ C^a."""
        return self.beta / (self.alpha + self.flops_law.exponent * self.beta)

    @property
    def tokens_exponent(self) -> float:
        """b in D* ∝ C^b."""
        return self.alpha / (self.alpha + self.flops_law.exponent * self.beta)

    def optimum(self, flops: float) -> tuple[float, float, float]:
        """(N*, D*, loss) of least loss at a compute."""
        law = self.flops_law
        ratio = math.log(self.alpha * self.a) - math.log(law.exponent * self.beta * self.b)
        total = self.alpha + law.exponent * self.beta
        n = math.exp((ratio + self.beta * math.log(flops / law.coefficient)) / total)
        d = flops / (law.coefficient * n**law.exponent)
        return n, d, float(self.predict(n, d))

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        form = "loss = e + a / parameters ** alpha + b / tokens ** beta"
        names = ("parameters_exponent", "tokens_exponent", "compute_exponent")
        optima = {name: getattr(self, name) for name in names}
        if self.phi is not None:
            form, optima = form.replace("parameters", "(n_once + passes ** phi * n_rec)"), {}
        name = "chinchilla" if self.phi is None else "looped"
        return {"law": name, "form": form, **asdict(self), **optima}


def fit_chinchilla(
    parameters: Array | ModelSize,
    tokens: Array,
    loss: Array,
    settings: ChinchillaSettings | None = None,
    *,
    runs: Sequence[str] | None = None,
    flops: Array | None = None,
) -> ChinchillaFit:
    """Fit the law to runs of N parameters on D tokens; sizes with recurrence give φ too.

    `runs` names the training run of each row, where several rows (checkpoints, cooldowns) come from one:
    intervals then treat runs, not rows, as independent. `flops` are those of each row, if not 6·N·D.
    """
    settings = settings or ChinchillaSettings()
    looped = isinstance(parameters, ModelSize)
    size = parameters if isinstance(parameters, ModelSize) else ModelSize.of(np.asarray(parameters, float))
    d, y = np.asarray(tokens, float), np.asarray(loss, float)
    _check(size, d, y, settings, looped)
    problem = build_problem(size, d, y, settings, looped)
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
    start = grid_starts(problem, settings.starts_per_axis - 4 * looped)
    prior = settings.irreducible_loss
    problem, theta, objective, reached = _solve_with_prior(problem, start, prior)
    predicted = problem.predict(theta[None])[0]
    covariance = _covariance(problem, theta, cluster, df, prior)
    e, log_a, log_b, alpha, beta = (float(v) for v in theta[problem.index[:5, 0]])
    with np.errstate(over="ignore"):
        a, b = np.exp(np.array([log_a, log_b]) + np.array([alpha, beta]) * problem.centre).tolist()
    spread, free = float(((y - y.mean()) ** 2).sum()), len(y) - problem.n_parameters
    flops_law = FlopsLaw() if flops is None or looped else FlopsLaw.fit(size.stored, d, flops)
    found = ChinchillaFit(
        e=e, a=a, b=b, alpha=alpha, beta=beta, phi=float(theta[-1]) if looped else None, objective=objective,
        points=len(y), starts=len(start), starts_at_optimum=reached,
        residual_sd=float(np.sqrt(((y - predicted) ** 2).sum() / free)),
        log_residual_sd=float(np.sqrt((np.log(y / predicted) ** 2).sum() / free)),
        r_squared=1 - float(((y - predicted) ** 2).sum()) / max(spread, 1e-300),
        intervals={}, covariance=tuple(map(tuple, covariance.tolist())),
        degrees_of_freedom=df, flags=_flags(problem, theta, start, objective), settings=settings,
        flops_law=flops_law,
    )  # fmt: skip
    return replace(found, intervals=_intervals(found, covariance))


def _solve_with_prior(
    problem: SizeLawProblem, start: Array, prior: Prior | None
) -> tuple[SizeLawProblem, Array, float, float]:
    """Solve; with the penalty of a prior on E, whose weight depends on the noise that the fit leaves."""
    theta, objective, reached = solve(problem, start)
    if prior is not None and prior.sd is not None:
        # In units of the objective, a likelihood up to the noise it leaves: s² for squares, less for Huber.
        for _ in range(3):
            variance, _, inside = _noise(problem, theta)
            unit = 0.5 * variance * inside if problem.huber is not None else variance
            problem = replace(problem, e_penalty=(prior.mean, unit / prior.sd**2))
            theta, objective, reached = solve(problem, np.vstack([theta, start[:: max(len(start) // 16, 1)]]))
    return problem, theta, objective, reached


def build_problem(
    size: ModelSize, tokens: Array, loss: Array, settings: ChinchillaSettings, looped: bool
) -> SizeLawProblem:
    """The problem of one arm's law."""
    kinds: tuple[Kind, ...] = tuple(
        kind for kind in KINDS[: 5 + looped] if kind != "beta" or not settings.tied
    )
    index = [kinds.index(kind) if kind in kinds else -1 for kind in KINDS]
    if settings.tied:
        index[KINDS.index("beta")] = kinds.index("alpha")
    prior = settings.irreducible_loss
    return SizeLawProblem(
        size=size, log_tokens=np.log(tokens), y=loss, weights=np.ones(len(loss)),
        centre=(float(np.log(size.effective(0.5)[0]).mean()), float(np.log(tokens).mean())), kinds=kinds,
        index=np.repeat(np.array(index, np.intp)[:, None], len(loss), axis=1), log=settings.loss != "mse",
        huber=settings.delta if settings.loss == "huber" else None,
        fixed_e=prior.mean if prior is not None and prior.sd is None else None,
    )  # fmt: skip


def _check(size: ModelSize, d: Array, y: Array, settings: ChinchillaSettings, looped: bool) -> None:
    n = size.stored
    if not n.shape == d.shape == y.shape or n.ndim != 1:
        raise UsageError("parameters, tokens and loss must be three columns of the same length.")
    for name, values in (("parameters", n), ("tokens", d), ("loss", y)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise UsageError(f"{name} must be finite and greater than zero in every row.")
    prior = settings.irreducible_loss
    if prior is not None and prior.sd is None and prior.mean >= y.min():
        raise UsageError(f"the irreducible loss {prior} is not below the lowest loss, {y.min():g}.")
    if not looped:
        _check_ratios(n, d)  # first, as no number of such runs is enough
    count = 5 + looped - settings.tied - (prior is not None and prior.sd is None)
    if len(y) <= count:
        tie = settings.tied or looped or len(y) < count
        hint = "" if tie else ", or fit one exponent (α = β, `equal_exponents`)"
        raise UsageError(
            f"the law has {count} parameters and the table {len(y)} rows; give at least {count + 1}{hint}."
        )
    for name, values in (("parameters", n), ("tokens", d)):
        distinct, needed = len(np.unique(values)), 2 if settings.tied else 3
        if distinct < needed:
            count = "one value" if distinct == 1 else f"{distinct} values"
            raise UsageError(f"{name} takes only {count}; its term needs at least {needed}.")
    if looped and len(np.unique(size.log_passes)) < 2:
        raise UsageError("passes takes only one value; φ needs at least 2, with the same sizes.")


def _check_ratios(n: Array, d: Array) -> None:
    """Reject runs whose tokens follow from their parameters: only the sum of the two terms is seen there."""
    if min(len(np.unique(n)), len(np.unique(d))) <= 2:
        return
    slope, level = np.polyfit(np.log(n), np.log(d), 1)
    if float(np.std(np.log(d) - slope * np.log(n) - level)) < MIN_RATIO_SPREAD:
        raise UsageError(
            f"tokens follow parameters (D ∝ N^{slope:.2f} in every run), so A/N^α and B/D^β cannot be told"
            " apart; fit `law` compute to these runs, or add runs of these sizes on fewer or more tokens."
        )


def _noise(problem: SizeLawProblem, theta: Array) -> tuple[float, Array, float]:
    """Variance of a residual in the M-estimator's covariance, influences, and their mean derivative.

    Huber: not less than that of least squares, which few points need. A fit with a narrow width passes
    through as many points as it has parameters, which say nothing of the density of residuals near zero.
    """
    _, residual, _ = problem.evaluate(theta[None], problem.weights[None])
    r, free = residual[0], len(residual[0]) - problem.n_parameters
    rounding = ROUNDING_ERROR * (1.0 if problem.log else float(problem.y.mean()))
    variance = max(float((r**2).sum()) / free, rounding**2)
    if problem.huber is not None:
        clipped = np.clip(r, -problem.huber, problem.huber)
        near = int((np.abs(r) <= problem.huber).sum())
        fraction = max(near - problem.n_parameters, 1) / free
        robust = float((clipped**2).sum()) / free / fraction**2
        if robust > variance:
            return robust, clipped, fraction
    return variance, r, 1.0


def _covariance(
    problem: SizeLawProblem, theta: Array, cluster: IntArray, df: int, prior: Prior | None
) -> Array:
    """Covariance of (E, log A, log B, α, β, φ) in the table's units; cluster-robust for rows of one run."""
    variance, influence, inside = _noise(problem, theta)
    j = problem.jacobian(theta[None])[0]
    known = np.zeros(len(theta))
    if prior is not None:
        known = problem.is_e * variance / (prior.sd or FIXED_SD) ** 2
    inverse = scaled_inverse(j @ j.T + np.diag(known))
    covariance = inverse * variance
    count = int(cluster.max()) + 1
    if count < len(influence):
        score = np.zeros((count, len(theta)))
        np.add.at(score, cluster, (j * influence / inside).T)
        meat = score.T @ score * count / df + np.diag(known) * variance
        covariance = inverse @ meat @ inverse
    # From logs at the centre of the data to logs at N = D = 1: log A = θ₁ + α · centre.
    change = np.eye(len(theta))[[place for place in problem.index[:, 0] if place >= 0]]
    change[1] += change[3] * problem.centre[0]
    change[2] += change[4] * problem.centre[1]
    return change @ covariance @ change.T


def _intervals(fit: ChinchillaFit, covariance: Array) -> dict[str, Interval]:
    """t-intervals of the constants, and of the exponents along the optima."""
    quantile = t_reach(fit.settings.confidence, fit.degrees_of_freedom)
    alpha, beta, p = fit.alpha, fit.beta, fit.flops_law.exponent
    by_exponents = np.eye(len(covariance))[3:5]
    total = (alpha + p * beta) ** 2
    gradients = dict(zip(KINDS, np.eye(len(covariance)), strict=False))
    if fit.phi is None:
        gradients |= {
            "parameters_exponent": np.array([-beta, alpha]) / total @ by_exponents,
            "tokens_exponent": np.array([p * beta, -p * alpha]) / total @ by_exponents,
            "compute_exponent": np.array([p * beta**2, alpha**2]) / total @ by_exponents,
        }
    found: dict[str, Interval] = {}
    for name, gradient in gradients.items():
        value, reach = float(getattr(fit, name)), quantile * standard_error(gradient, covariance)
        if name in ("a", "b"):
            factor = math.exp(min(reach, 700.0))
            found[name] = (value / factor, value * factor)
        else:
            found[name] = (value - reach if name == "phi" else max(0.0, value - reach), value + reach)
    return found


def _flags(problem: SizeLawProblem, theta: Array, start: Array, objective: float) -> tuple[str, ...]:
    found: list[str] = []
    low, high = problem.bounds()
    if np.isclose(start, theta, rtol=1e-9, atol=1e-12).all(axis=1).any():
        found.append("the solution equals one of its starts: the search did not move")
    for name, value, least, most in zip(problem.kinds, theta, low, high, strict=True):
        if least < most and (value <= least + 1e-6 * abs(least) + 1e-9 or value >= most * (1 - 1e-6)):
            found.append(f"{name} is at its bound ({value:.4g}): the data do not determine it")
    _, slope = problem.value_and_gradient(theta)
    inside = (theta > low) & (theta < high)
    if problem.huber is None and float(np.abs(slope[inside]).max(initial=0.0)) > 1e-3 * max(objective, 1e-12):
        found.append("the gradient at the solution is not small: the search may have stopped early")
    return tuple(found)
