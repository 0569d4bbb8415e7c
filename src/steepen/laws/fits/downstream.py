"""Forecast a downstream score from compute: task NLL by a law, accuracy by a sigmoid, the suite by a factor.

B_t(C)   = E + A·(C/C0)^−α                    every series and task, Huber loss of B (or of log B)
ĉ_t(B)   = 1 / (1 + exp(s·B − b))             every task, shared by all series
score(C) = r · mean over tasks of ĉ_t(B_t(C))   r without an intercept, from measured (or predicted) means

The defaults are those of the paper's authors: residuals of B itself, Huber widths from their spread, bounded
parameters, and r from measured accuracies. Both parentheses are options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import optimize, special, stats

from steepen.errors import UsageError, nearest, require_one_of
from steepen.laws.fits.compute_law import fit_irreducible_losses, huber_width
from steepen.utils.arrays import Array

PAPER_C0 = 1e18
MIN_GAP = 0.02
MIN_TAU = 0.50

TaskResiduals = Literal["raw-nll", "log-nll"]
RatioFrom = Literal["measured", "predicted"]
TASK_RESIDUALS: tuple[TaskResiduals, ...] = ("raw-nll", "log-nll")
RATIO_FROM: tuple[RatioFrom, ...] = ("measured", "predicted")

# Bounds and least Huber widths of the authors' fits.
MAX_TASK_SCALE = 50.0
TASK_EXPONENTS = (0.005, 2.0)
MIN_TASK_WIDTH = 0.002
SIGMOID_BOUNDS = ((0.0, -20.0), (20.0, 20.0))  # (s, b), lowest and highest
MIN_ACCURACY_WIDTH = 0.005
START_FRACTIONS = (0.0, 0.3, 0.6, 0.8, 0.95)  # of the lowest NLL, where the search for E starts

# CORE of the GPT-3 models, which were never evaluated on CORE: nanochat's estimates (its
# dev/estimate_gpt3_core.ipynb) from the six tasks that the GPT-3 paper reports; the paper's references.
GPT3_CORE = {"GPT-3 2.7B": 0.3292, "GPT-3 6.7B": 0.3611, "GPT-3 13B": 0.3852, "GPT-3 175B": 0.4272}


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """A series' evaluated checkpoints: the answer NLL and centred accuracy of each task, the score."""

    flops: Array
    nll: Mapping[str, Array]
    centered: Mapping[str, Array]
    score: Array


@dataclass(frozen=True)
class TaskLaw:
    """Task NLL against compute."""

    e: float
    log_a: float
    alpha: float

    def predict(self, flops: float | Array, c0: float) -> Array:
        """The task's NLL at a compute."""
        return self.e + np.exp(self.log_a - self.alpha * np.log(np.asarray(flops, float) / c0))


@dataclass(frozen=True)
class Sigmoid:
    """Centred accuracy against task NLL: 1 / (1 + exp(s·B − b))."""

    s: float
    b: float

    def predict(self, nll: float | Array) -> Array:
        """The centred accuracy at a task NLL."""
        return np.asarray(special.expit(self.b - self.s * np.asarray(nll, float)))


@dataclass(frozen=True)
class HeldOutScore:
    """An observed score and its forecast; `compute_factor` above 1 means better than forecast."""

    series: str
    flops: float
    observed: float
    forecast: float
    error: float
    error_in_sigma: float
    compute_factor: float


@dataclass(frozen=True)
class DownstreamFit:
    """The fitted pipeline; `sigma` is the residual standard deviation of the measured scores."""

    tasks: tuple[str, ...]
    laws: dict[str, dict[str, TaskLaw]]
    sigmoids: dict[str, Sigmoid]
    r: float
    sigma: float
    c0: float
    settings: dict[str, Any]

    def task_scores(self, series: str, flops: float | Array) -> Array:
        """Predicted centred accuracy of every task (rows) at each compute (columns)."""
        if series not in self.laws:
            raise UsageError(f"series '{series}' was not fitted; did you mean {nearest(series, self.laws)}?")
        at, laws = np.atleast_1d(np.asarray(flops, float)), self.laws[series]
        return np.stack([self.sigmoids[task].predict(laws[task].predict(at, self.c0)) for task in self.tasks])

    def predict(self, series: str, flops: float | Array) -> Array:
        """The forecast full score."""
        return self.r * self.task_scores(series, flops).mean(axis=0)

    def compute_for(self, series: str, score: float, low: float = 1.0, high: float = 1e30) -> float:
        """The compute at which a series is forecast to reach a score.

        Infinite if it does not below `high`, NaN if the score is below the forecast at `low`.
        """

        def gap(log_c: float) -> float:
            return float(self.predict(series, math.exp(log_c))[0]) - score

        ends = math.log(low), math.log(high)
        if gap(ends[1]) < 0:
            return math.inf
        if gap(ends[0]) > 0:
            return math.nan
        return math.exp(float(optimize.brentq(gap, *ends, xtol=1e-10)))

    def hold_out(self, series: str, flops: float, observed: float) -> HeldOutScore:
        """Compare a checkpoint that was not fitted with its forecast."""
        forecast = float(self.predict(series, flops)[0])
        error = observed - forecast
        factor = self.compute_for(series, observed) / flops
        return HeldOutScore(series, flops, observed, forecast, error, error / max(self.sigma, 1e-300), factor)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and numbers, for JSON."""
        return {"law": "downstream", **asdict(self)}


def fit_downstream(
    series: Mapping[str, Checkpoints],
    tasks: Sequence[str] | None = None,
    *,
    c0: float = PAPER_C0,
    residuals: TaskResiduals = "raw-nll",
    ratio: RatioFrom = "measured",
    delta: float = 1e-3,
    accuracy_delta: float = 0.01,
) -> DownstreamFit:
    """Fit the pipeline to all series at once; `tasks` are those that passed the filter (default: all).

    `residuals` are those of the task laws: of the NLL, with Huber widths from their spread, or of its
    logarithm, with widths `delta` (and `accuracy_delta` for the sigmoids). `ratio` is what r regresses the
    full score on: the measured mean centred accuracy of the tasks, or the one predicted from compute.
    """
    require_one_of("residuals", residuals, TASK_RESIDUALS)
    require_one_of("ratio", ratio, RATIO_FROM)
    chosen = tuple(tasks if tasks is not None else next(iter(series.values())).nll)
    if not chosen:
        raise UsageError("no task is left to fit; loosen the filter.")
    laws = {name: _task_laws(name, points, chosen, c0, residuals, delta) for name, points in series.items()}
    sigmoids = {
        task: fit_sigmoid(
            np.concatenate([np.asarray(p.nll[task], float) for p in series.values()]),
            np.concatenate([np.asarray(p.centered[task], float) for p in series.values()]),
            accuracy_delta if residuals == "log-nll" else None,
        )
        for task in chosen
    }
    settings: dict[str, Any] = {"c0": c0, "residuals": residuals, "ratio": ratio}
    if residuals == "log-nll":
        settings |= {"delta": delta, "accuracy_delta": accuracy_delta}
    fit = DownstreamFit(chosen, laws, sigmoids, r=1.0, sigma=0.0, c0=c0, settings=settings)
    predicted = np.concatenate([fit.predict(name, one.flops) for name, one in series.items()])
    full = np.concatenate([np.asarray(points.score, float) for points in series.values()])
    mean = predicted
    if ratio == "measured":
        measured = [[np.asarray(one.centered[task], float) for task in chosen] for one in series.values()]
        mean = np.concatenate([np.mean(one, axis=0) for one in measured])
    r = score_ratio(mean, full)
    sigma = float(np.sqrt(((full - r * predicted) ** 2).sum() / max(len(full) - 1, 1)))
    return replace(fit, r=r, sigma=sigma)


def _task_laws(
    series: str, points: Checkpoints, tasks: Sequence[str], c0: float, residuals: TaskResiduals, delta: float
) -> dict[str, TaskLaw]:
    """The law of every task's NLL in a series."""
    if len(points.flops) < 4:
        raise UsageError(
            f"series '{series}' has {len(points.flops)} checkpoints; a task law needs at least 4."
        )
    for task in tasks:
        if task not in points.nll or task not in points.centered:
            known = ", ".join(points.nll)
            raise UsageError(f"series '{series}' has no task '{task}'; its tasks are {known}.")
    if residuals == "raw-nll":
        return {task: fit_task_law(points.flops, points.nll[task], c0) for task in tasks}
    losses = np.stack([np.asarray(points.nll[task], float) for task in tasks])
    found = fit_irreducible_losses(np.asarray(points.flops, float), losses, c0, "huber", delta)
    return {task: TaskLaw(*theta) for task, theta in zip(tasks, found.tolist(), strict=True)}


def score_ratio(mean: Array, score: Array) -> float:
    """The factor r of score = r · mean, by least squares without an intercept."""
    return float(mean @ score) / float(mean @ mean)


def fit_task_law(flops: Array, nll: Array, c0: float = PAPER_C0) -> TaskLaw:
    """E, A and α of one task's NLL by Huber loss of its residuals, within the authors' bounds.

    Starts are lines of log(NLL − E) for several E; the best least-squares solution sets the Huber width.
    """
    x, y = np.log(np.asarray(flops, float) / c0), np.asarray(nll, float)

    def residual(point: Array) -> Array:
        return point[0] + point[1] * np.exp(-point[2] * x) - y

    def slope(point: Array) -> Array:
        power = np.exp(-point[2] * x)
        return np.stack([np.ones_like(x), power, -point[1] * x * power], axis=1)

    highest = max(float(y.min()) - 1e-8, 1e-12)
    low = np.array([0.0, 0.0, TASK_EXPONENTS[0]])
    high = np.array([highest, MAX_TASK_SCALE, TASK_EXPONENTS[1]])
    starts: list[Array] = []
    for fraction in START_FRACTIONS:
        e = fraction * highest
        line = np.polyfit(x, np.log(np.maximum(y - e, 1e-12)), 1)
        start = np.array([e, math.exp(min(float(line[1]), 10.0)), -float(line[0])])
        starts.append(np.clip(start, low, high))
    e, a, alpha = _bounded_huber(residual, slope, starts, (low, high), MIN_TASK_WIDTH)
    return TaskLaw(e, math.log(max(a, 1e-300)), alpha)


def fit_sigmoid(nll: Array, centered: Array, delta: float | None = None) -> Sigmoid:
    """Fit the sigmoid of centred accuracy on task NLL by Huber loss, from several starting points.

    With `delta` None, the authors' way: s and b within their bounds and the Huber width from the spread of
    the least-squares residuals; otherwise unbounded, with width `delta`.
    """
    if len(nll) < 3:
        raise UsageError(f"a sigmoid needs at least three measurements; there are {len(nll)}.")
    middle, width = float(np.mean(nll)), max(float(np.std(nll)), 1e-6)
    level = float(special.logit(np.clip(np.mean(centered), 0.01, 0.99)))
    steepness = (0.3, 1.0, 3.0)  # of accuracy in standard deviations of NLL
    z = np.asarray(nll, float) if delta is None else (nll - middle) / width

    def residual(point: Array) -> Array:
        return np.asarray(special.expit(point[1] - point[0] * z)) - centered

    def slope(point: Array) -> Array:
        value = special.expit(point[1] - point[0] * z)
        steep = value * (1 - value)
        return np.stack([-z * steep, steep], axis=1)

    if delta is None:
        low, high = (np.array(bound) for bound in SIGMOID_BOUNDS)
        starts = [np.clip([k / width, level + k / width * middle], low, high) for k in steepness]
        return Sigmoid(*_bounded_huber(residual, slope, starts, (low, high), MIN_ACCURACY_WIDTH))
    exact: dict[str, Any] = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    found = [
        optimize.least_squares(residual, [steep, level], jac=slope, loss="huber", f_scale=delta, **exact)
        for steep in steepness
    ]
    best = min(found, key=lambda fit: float(fit.cost))
    s = float(best.x[0]) / width
    return Sigmoid(s, float(best.x[1]) + s * middle)


def _bounded_huber(
    residual: Callable[[Array], Array],
    slope: Callable[[Array], Array],
    starts: Sequence[Array],
    bounds: tuple[Array, Array],
    min_width: float,
) -> list[float]:
    """Bounded least squares from every start, then Huber with the width of the best one's residuals."""

    def solve(start: Array, **robust: Any) -> Any:
        return optimize.least_squares(
            residual, start, jac=slope, bounds=bounds, x_scale="jac", max_nfev=20_000,
            xtol=1e-12, ftol=1e-12, gtol=1e-12, **robust,
        )  # fmt: skip

    best = min((solve(start) for start in starts), key=lambda fit: float(fit.cost))
    width = huber_width(residual(best.x), min_width)
    return [float(value) for value in solve(best.x, loss="huber", f_scale=width).x]


@dataclass(frozen=True)
class TaskFilter:
    """Whether a task carries signal: `gap` above chance at the end, `tau` of accuracy with training."""

    passed: bool
    gap: float
    tau: float
    reason: str


def filter_tasks(
    training: Array,
    accuracy: Mapping[str, Array],
    chance: Mapping[str, float],
    *,
    min_gap: float = MIN_GAP,
    min_tau: float = MIN_TAU,
) -> dict[str, TaskFilter]:
    """Keep tasks two points above chance at the largest training amount, and with Kendall τ_b of 0.5."""
    order = np.argsort(training)
    amount = np.asarray(training, float)[order]
    found: dict[str, TaskFilter] = {}
    for task, values in accuracy.items():
        if task not in chance:
            raise UsageError(f"no chance level is given for task '{task}'.")
        ordered = np.asarray(values, float)[order]
        gap = float(ordered[-1]) - chance[task]
        tau = float(np.nan_to_num(stats.kendalltau(amount, ordered).statistic))  # NaN of constant accuracy
        reasons = [f"{gap * 100:+.2f} points from chance"] if gap < min_gap else []
        reasons += [f"τ_b = {tau:.3f}"] if tau < min_tau else []
        found[task] = TaskFilter(not reasons, gap, tau, "; ".join(reasons))
    return found
