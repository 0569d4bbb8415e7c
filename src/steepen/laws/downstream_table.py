"""Forecast a task's accuracy from a table of runs: compute → loss → accuracy.

Three chains, which differ in the second step; the first is L(C) = E + A·(C/C0)^−γ for each arm.

    gadre   accuracy = a + exp(k − e^s·L)               (Gadre et al. 2024: error = ε − k·exp(−γL))
    olmo    accuracy = b + a / (1 + exp(e^s·(L − L0)))  (Bhagia et al. 2024)
    paper   accuracy = 1 / (1 + exp(s·L − b))           (centred accuracy; for suites `fits/downstream.py`)

Without a loss column the error itself follows a power law in compute (`direct`); without FLOPs only the
second step is fitted, and targets are losses. Intervals are from refits to resampled residuals of both steps;
a column `run` names the training run of each row, and rows of one run are resampled together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from steepen.errors import UsageError, require_one_of
from steepen.laws.arm_fits import held_rows
from steepen.laws.distributions import Interval
from steepen.laws.fits.compute_law import fit_irreducible_losses
from steepen.tables.table import Table
from steepen.tables.table_selection import parse_hold_outs
from steepen.utils.arrays import Array, Mask, take_rows

Chain = Literal["gadre", "olmo", "paper", "direct"]
CHAINS: tuple[Chain, ...] = ("gadre", "olmo", "paper", "direct")
Link = Literal["gadre", "olmo", "paper"]
LINK_PARAMETERS: dict[Link, int] = {"gadre": 3, "olmo": 4, "paper": 2}
ITERATIONS = 1000  # an olmo curve without a bend in the data runs away slowly, towards an exponential
TOLERANCE = 1e-10  # relative change of the sum of squares at convergence
MIN_RUNS = 4  # of an arm, for its law of loss
DRAWS = 200
CONFIDENCE = 0.90


@dataclass(frozen=True)
class TaskForecast:
    """The accuracy forecast at `at` FLOPs (a loss without a FLOPs column); `observed` if it was held out."""

    arm: str
    at: float
    accuracy: float
    interval: Interval
    observed: float | None = None

    @property
    def error(self) -> float | None:
        """Observed minus forecast."""
        return None if self.observed is None else self.observed - self.accuracy


@dataclass(frozen=True)
class TaskForecasts:
    """The fitted chain, the check on held-out runs (fitted without them) and the forecasts (with them)."""

    chain: Chain
    by_loss: bool  # targets are losses: the table has no FLOPs
    is_error: bool  # the table has an error, not an accuracy: printed as such
    runs: dict[str, int]
    laws: dict[str, tuple[float, float, float]]  # E, log A, γ of each arm
    c0: float
    link: tuple[float, ...]
    residual_sd: float
    confidence: float
    hold_out: tuple[TaskForecast, ...]
    targets: tuple[TaskForecast, ...]


@dataclass(frozen=True, eq=False)
class _Rows:
    arm: tuple[str, ...]
    flops: Array | None
    loss: Array | None
    accuracy: Array
    is_error: bool
    run: NDArray[np.intp]  # number of each row's training run


def resample_residuals(
    residuals: Array, run: NDArray[np.intp], draws: int, rng: np.random.Generator
) -> Array:
    """Resampled residuals (draws, rows). Rows of one run keep theirs, with a common random sign."""
    if len(np.unique(run)) == len(run):
        return rng.choice(residuals, (draws, len(residuals)))
    return residuals * rng.choice([-1.0, 1.0], (draws, int(run.max()) + 1))[:, run]


def forecast_table(
    table: Table,
    chain: Chain = "gadre",
    *,
    targets: Sequence[float] = (),
    hold_out: Sequence[str] | None = None,
) -> TaskForecasts:
    """Fit a chain to columns flops, loss, accuracy or error (and arm), check it on held-out runs, forecast.

    `hold_out` is FLOPS or ARM:FLOPS (a loss where there are no FLOPs); None holds out each arm's largest run.
    """
    require_one_of("`chain`", chain, CHAINS)
    rows = _read(table)
    if rows.loss is None:
        chain = "direct"
    if chain == "direct" and rows.flops is None:
        raise UsageError("a direct law of the error needs a flops column.")
    held = _held_out(rows, hold_out, table)
    if held.all():
        raise UsageError("every run is held out; nothing is left to fit.")
    rng = np.random.default_rng(0)
    tail = (1 - CONFIDENCE) / 2

    def forecasts(fit: _Fit, at: Sequence[tuple[str, float, float | None]]) -> tuple[TaskForecast, ...]:
        found: list[TaskForecast] = []
        for arm, where, observed in at:
            low, high = np.quantile(fit.draw(arm, where, rng), [tail, 1 - tail]).tolist()
            found.append(TaskForecast(arm, where, fit.predict(arm, where), (low, high), observed))
        return tuple(found)

    checked: tuple[TaskForecast, ...] = ()
    if held.any():
        x = rows.loss if rows.flops is None else rows.flops
        assert x is not None
        at = [(rows.arm[i], float(x[i]), float(rows.accuracy[i])) for i in np.flatnonzero(held)]
        checked = forecasts(_Fit(take_rows(rows, ~held), chain, rng), at)
    whole = _Fit(rows if hold_out is None else take_rows(rows, ~held), chain, rng)
    arms = list(dict.fromkeys(rows.arm)) if rows.flops is not None else [""]
    predicted = forecasts(whole, [(arm, float(target), None) for target in targets for arm in arms])
    return TaskForecasts(
        chain=chain, by_loss=rows.flops is None, is_error=rows.is_error,
        runs={arm: whole.rows.arm.count(arm) for arm in dict.fromkeys(whole.rows.arm)},
        laws={arm: (float(t[0]), float(t[1]), float(t[2])) for arm, (t, *_) in whole.laws.items()},
        c0=whole.c0, link=tuple(map(float, whole.link.theta)) if whole.link else (),
        residual_sd=whole.residual_sd, confidence=CONFIDENCE,
        hold_out=checked, targets=predicted,
    )  # fmt: skip


def _read(table: Table) -> _Rows:
    is_error = not table.has("accuracy") and table.has("error")
    if not is_error:
        table.require(["accuracy"])
    score = table.numbers("error" if is_error else "accuracy", positive=False)
    if (score > 1).any():
        raise UsageError(f"{table.source}: accuracy or error is above 1; give fractions, not percent.")
    flops = table.numbers("flops") if table.has("flops") else None
    loss = table.numbers("loss") if table.has("loss") else None
    if flops is None and loss is None:
        table.require(["flops", "loss"])
    arm = table.names("arm") if table.has("arm", aliases=False) else [""] * len(table)
    names = table.training_runs() or [str(i) for i in range(len(table))]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    run = np.array([numbers[name] for name in names], np.intp)
    return _Rows(tuple(arm), flops, loss, 1 - score if is_error else score, is_error, run)


def _held_out(rows: _Rows, hold_out: Sequence[str] | None, table: Table) -> Mask:
    """The rows to hold out: by default the largest run of each arm that has more than enough."""
    held = np.zeros(len(rows.arm), bool)
    arms = np.array(rows.arm)
    x = -rows.loss if rows.flops is None and rows.loss is not None else rows.flops
    assert x is not None
    if hold_out is None:
        for arm in dict.fromkeys(rows.arm):
            own = np.flatnonzero(arms == arm)
            if len(own) > MIN_RUNS + 1:
                held[own[np.argmax(x[own])]] = True
        return held
    hold_outs = parse_hold_outs(hold_out, list(dict.fromkeys(rows.arm)), table)
    if any(one.table is not None for one in hold_outs):
        raise UsageError("hold runs of the table itself out of a forecast: FLOPS or ARM:FLOPS.")
    if rows.flops is None:  # a hold-out is then a loss, and holds the runs at or below it out
        for one in hold_outs:
            held |= (-x <= one.flops) & ((arms == one.arm) if one.arm else True)
        return held
    return held_rows(hold_outs, arms, x)


class _Step(NamedTuple):
    """One step of a chain: its parameters, residuals of a further run, and refits to resampled residuals."""

    theta: Array
    residuals: Array
    draws: Array

    @classmethod
    def fit(
        cls, y: Array, run: NDArray[np.intp], rng: np.random.Generator,
        fit: Callable[[Array, Array | None], Array], curve: Callable[[Array], Array],
    ) -> _Step:  # fmt: skip
        """Fit `y` by `fit` (sets of y, starting point → parameters), whose predictions are `curve`."""
        theta = fit(y[None], None)[0]
        predicted = curve(theta)
        # Residuals of a fit are smaller than errors: by the parameters that it spent.
        residuals = (y - predicted) * np.sqrt(len(y) / max(len(y) - len(theta), 1))
        return cls(theta, residuals, fit(predicted + resample_residuals(residuals, run, DRAWS, rng), theta))


class _Fit:
    """A chain fitted to some rows, with refits to resampled residuals of each step."""

    def __init__(self, rows: _Rows, chain: Chain, rng: np.random.Generator) -> None:
        self.rows: _Rows = rows
        self.chain: Chain = chain
        self.c0 = 1.0 if rows.flops is None else float(np.exp(np.log(rows.flops).mean()))
        target = 1 - rows.accuracy if chain == "direct" else rows.loss
        assert target is not None
        self.laws: dict[str, _Step] = {}
        for arm in dict.fromkeys(rows.arm if rows.flops is not None else ()):
            self.laws[arm] = self._fit_law(rows, target, arm, rng)
        self.link = None if chain == "direct" else _fit_curve(chain, target, rows, rng)
        steps = [self.link] if self.link else self.laws.values()
        residuals = np.concatenate([step.residuals for step in steps])
        self.residual_sd = float(np.sqrt((residuals**2).mean()))

    def _fit_law(self, rows: _Rows, target: Array, arm: str, rng: np.random.Generator) -> _Step:
        """The law of an arm's loss, or of its error, in compute."""
        own = np.array(rows.arm) == arm
        if own.sum() < MIN_RUNS:
            what = f"arm {arm!r}" if arm else "the table"
            raise UsageError(f"{what} has {own.sum()} runs to fit; its law needs at least {MIN_RUNS}.")
        assert rows.flops is not None
        x = rows.flops[own]
        return _Step.fit(
            target[own], rows.run[own], rng,
            lambda y, _: fit_irreducible_losses(x, y, self.c0, "mse"), lambda theta: self._law(theta, x),
        )  # fmt: skip

    def _law(self, theta: Array, flops: float | Array) -> Array:
        return np.asarray(theta[0] + np.exp(theta[1] - theta[2] * np.log(np.asarray(flops) / self.c0)))

    def predict(self, arm: str, at: float) -> float:
        """The accuracy at a compute (or loss)."""
        value = self._law(self.laws[arm].theta, at) if self.laws else np.asarray(at)
        if self.chain == "direct" or self.link is None:
            return float(1 - value)
        return float(accuracy_at(self.chain, self.link.theta, value)[0])

    def draw(self, arm: str, at: float, rng: np.random.Generator) -> Array:
        """Accuracies of a further run: refitted laws and links, and the scatter of the last step."""
        values = np.full(DRAWS, at)
        if self.laws:  # the run's own deviation from its law carries over to the second step
            law = self.laws[arm]
            values = self._law(law.draws.T, at) + rng.choice(law.residuals, DRAWS)
        if self.chain == "direct" or self.link is None:
            return 1 - values
        found = accuracy_at(self.chain, self.link.draws, values[:, None])[:, 0]
        return found + rng.choice(self.link.residuals, DRAWS)


def _fit_curve(link: Link, loss: Array, rows: _Rows, rng: np.random.Generator) -> _Step:
    """The curve from loss to accuracy, shared by all arms."""
    count = LINK_PARAMETERS[link]
    if len(loss) <= count:
        raise UsageError(f"the {link} chain needs more than {count} runs; there are {len(loss)}.")

    def fit(accuracy: Array, start: Array | None) -> Array:
        if start is None:
            return fit_link(link, loss, accuracy[0])[None]
        return refit_link(link, loss, accuracy, start)

    return _Step.fit(rows.accuracy, rows.run, rng, fit, lambda theta: accuracy_at(link, theta, loss))


def accuracy_at(link: Link, parameters: Array, loss: float | Array) -> Array:
    """Accuracies of parameters (…, parameters) at losses that broadcast to (…, points)."""
    return CURVES[link](np.asarray(parameters, float), np.asarray(loss, float))[0]


def fit_link(link: Link, loss: Array, accuracy: Array) -> Array:
    """Parameters of the best fit of one set of accuracies, from several starting points."""
    low, high = float(accuracy.min()), float(accuracy.max())
    middle, spread = float(np.median(loss)), max(float(np.ptp(loss)), 1e-6)
    starts: list[list[float]] = []
    for rate in (0.3 / spread, 1 / spread, 3 / spread, 10 / spread):
        if link == "gadre":
            scale = np.log(max(high - low, 1e-6)) + rate * float(loss.min())
            starts.append([low - 0.01, scale, np.log(rate)])
        elif link == "olmo":
            starts += [[low, 1.5 * (high - low) + 1e-6, np.log(rate), m] for m in (middle, float(loss.min()))]
        else:
            starts.append([rate, rate * middle])
    found, objective = _fit(link, loss, np.tile(accuracy, (len(starts), 1)), np.array(starts))
    return found[objective.argmin()]


def refit_link(link: Link, loss: Array, accuracy: Array, start: Array) -> Array:
    """Parameters (sets, parameters) fitted to each row of `accuracy` from one starting point."""
    return _fit(link, loss, accuracy, np.tile(start, (len(accuracy), 1)))[0]


def _fit(link: Link, loss: Array, accuracy: Array, start: Array) -> tuple[Array, Array]:
    """Levenberg–Marquardt on every row: parameters and sums of squares."""
    curve = CURVES[link]
    answer, objectives = start.copy(), np.full(len(start), np.inf)
    rows, theta, damping = np.arange(len(start)), start.copy(), np.full(len(start), 1e-3)
    value, j = curve(theta, loss)
    residual = accuracy - value
    objective = (residual**2).sum(axis=1)
    for _ in range(ITERATIONS):
        normal = np.swapaxes(j, 1, 2) @ j
        diagonal = np.einsum("bii->bi", normal)
        scale = np.sqrt(np.maximum(diagonal, 1e-300))
        normal /= scale[:, :, None] * scale[:, None, :]
        diagonal[...] = 1 + damping[:, None]
        gradient = np.einsum("bni,bn->bi", j, residual) / scale
        trial = theta + np.linalg.solve(normal, gradient[:, :, None])[:, :, 0] / scale
        value, slope = curve(trial, loss)
        rest = accuracy[rows] - value
        new = (rest**2).sum(axis=1)
        better = new <= objective
        small = np.abs(objective - new) <= TOLERANCE * objective + 1e-24
        done = (small & (damping < 1e-2)) | (damping > 1e9)
        theta, j = np.where(better[:, None], trial, theta), np.where(better[:, None, None], slope, j)
        residual = np.where(better[:, None], rest, residual)
        objective = np.where(better, new, objective)
        damping = np.where(better, damping * 0.1, damping * 8).clip(1e-12, 1e10)
        answer[rows], objectives[rows] = theta, objective
        if done.all():
            break
        if done.any():
            busy = ~done
            rows, theta, damping, j = rows[busy], theta[busy], damping[busy], j[busy]
            residual, objective = residual[busy], objective[busy]
    return answer, objectives


def _gadre(p: Array, loss: Array) -> tuple[Array, Array]:
    offset, scale, rate = p[..., 0:1], p[..., 1:2], np.exp(np.minimum(p[..., 2:3], 50.0))
    gain = np.exp(np.clip(scale - rate * loss, -700, 50))
    return offset + gain, np.stack([np.ones_like(gain), gain, -rate * loss * gain], axis=-1)


def _olmo(p: Array, loss: Array) -> tuple[Array, Array]:
    offset, scale, rate = p[..., 0:1], p[..., 1:2], np.exp(np.minimum(p[..., 2:3], 50.0))
    beyond = loss - p[..., 3:4]
    part = special.expit(-rate * beyond)
    steep = scale * rate * part * (1 - part)
    return offset + scale * part, np.stack([np.ones_like(part), part, -beyond * steep, steep], axis=-1)


def _paper(p: Array, loss: Array) -> tuple[Array, Array]:
    value = special.expit(p[..., 1:2] - p[..., 0:1] * loss)
    steep = value * (1 - value)
    return value, np.stack([-loss * steep, steep], axis=-1)


# Accuracies (…, points) of parameters at losses, and their derivatives (…, points, parameters).
CURVES: dict[Link, Callable[[Array, Array], tuple[Array, Array]]] = {
    "gadre": _gadre,
    "olmo": _olmo,
    "paper": _paper,
}
