"""Numerics of laws in model size and tokens: objective, gradient, starting grid, batched refinement, polish.

One model covers the Chinchilla law, its form with α = β, looped models, and two arms that share constants:

    L = E + A·(m^½·N)^−α + B·(m^½·D)^−β,   N = N_once + r^φ·N_rec,   log m = level + growth·x + ratio·z

Models without recurrence have N_rec = 0. m is for comparisons: the multiplier of an arm that reaches a loss
of the reference's law with m times fewer N·D, where x is log(N·D) and z log(D/N), both about their means.
`index` says which entry of θ is each point's E, log A, log B, α, … (−1: none), so forms that share constants
differ in small integer arrays only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from steepen.utils.arrays import Array, Mask

IntArray = NDArray[np.intp]
Kind = Literal["e", "a", "b", "alpha", "beta", "phi", "level", "growth", "ratio"]
KINDS: tuple[Kind, ...] = ("e", "a", "b", "alpha", "beta", "phi", "level", "growth", "ratio")
BOUNDS: dict[Kind, tuple[float, float]] = {
    "a": (-40.0, 40.0), "b": (-40.0, 40.0), "alpha": (1e-3, 5.0), "beta": (1e-3, 5.0), "phi": (-2.0, 4.0),
    "level": (-40.0, 40.0), "growth": (-0.9, 9.0), "ratio": (-10.0, 10.0),
}  # fmt: skip
PHI_STARTS = (0.2, 0.8)


@dataclass(frozen=True, eq=False)
class ModelSize:
    """Parameters of each run: `once` are applied once per token, `recurrent` in each of the passes."""

    once: Array
    recurrent: Array
    log_passes: Array

    @classmethod
    def of(cls, parameters: Array) -> ModelSize:
        """The sizes of models without recurrence."""
        return cls(parameters, np.zeros_like(parameters), np.zeros_like(parameters))

    @property
    def stored(self) -> Array:
        """Number of parameters."""
        return self.once + self.recurrent

    def effective(self, phi: float | Array) -> tuple[Array, Array]:
        """N_once + r^φ·N_rec, and the derivative of its logarithm by φ."""
        looped = self.recurrent * np.exp(phi * self.log_passes)
        size = self.once + looped
        return size, looped / size * self.log_passes


@dataclass(frozen=True, eq=False)
class SizeLawProblem:
    """Data of one fit, sizes and tokens as logarithms about `centre`; A and B are those at the centre.

    `kinds` is what each entry of θ is. `whitening` (points × points) is applied to residuals, for correlated
    noise. `fixed_e` holds every E; `e_penalty` (mean, weight) adds weight·(E − mean)² to the objective.
    """

    size: ModelSize
    log_tokens: Array
    y: Array
    weights: Array
    centre: tuple[float, float]
    kinds: tuple[Kind, ...]
    index: IntArray  # (kinds, points)
    multiplier_columns: tuple[Array | float, ...] = (1.0, 0.0, 0.0)  # 1, x and z above
    log: bool = True
    huber: float | None = None
    whitening: Array | None = None
    fixed_e: float | None = None
    e_penalty: tuple[float, float] | None = None

    @property
    def n_parameters(self) -> int:
        """The length of θ, less a fixed E."""
        return len(self.kinds) - (self.fixed_e is not None) * self.kinds.count("e")

    @property
    def is_e(self) -> Array:
        """1 for the entries of θ that are an irreducible loss."""
        return np.array([float(kind == "e") for kind in self.kinds])

    def _evaluate(self, theta: Array) -> tuple[list[Array], Array, Array, Array, Array, Array]:
        """Constants, log size and log tokens about the centre, the size and token terms, d log N/dφ."""
        padded = np.concatenate([theta, np.zeros((len(theta), 1))], axis=1)
        constants = [padded[:, row] for row in self.index]
        _, a, b, alpha, beta, phi, *multiplier = constants
        size, by_phi = self.size.effective(phi)
        shift = 0.5 * sum(value * x for value, x in zip(multiplier, self.multiplier_columns, strict=True))
        u, v = np.log(size) - self.centre[0] + shift, self.log_tokens - self.centre[1] + shift
        first, second = (np.exp(np.clip(part, -700.0, 200.0)) for part in (a - alpha * u, b - beta * v))
        return constants, u, v, first, second, by_phi

    def predict(self, theta: Array) -> Array:
        """The law's loss of every point, shape (starts, points)."""
        constants, _, _, first, second, _ = self._evaluate(theta)
        return np.maximum(constants[0] + first + second, 1e-300)

    def evaluate(self, theta: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Objective, residual, and weight in the normal equations."""
        predicted = self.predict(theta)
        residual = np.log(self.y) - np.log(predicted) if self.log else self.y - predicted
        if self.whitening is not None:
            residual = residual @ self.whitening.T
        penalty = 0.0
        if self.e_penalty is not None:
            mean, weight = self.e_penalty
            penalty = weight * ((theta - mean) ** 2 @ self.is_e)
        if self.huber is None:
            return (weights * residual**2).sum(axis=1) + penalty, residual, weights
        size = np.abs(residual)
        inside = size <= self.huber
        value = np.where(inside, 0.5 * residual**2, self.huber * (size - 0.5 * self.huber))
        influence = weights * np.where(inside, 1.0, self.huber / np.maximum(size, self.huber))
        return (weights * value).sum(axis=1) + penalty, residual, influence

    def jacobian(self, theta: Array) -> Array:
        """d(prediction)/dθ, or of its logarithm, shape (starts, parameters, points)."""
        (e, _, _, alpha, beta, *_), u, v, first, second, by_phi = self._evaluate(theta)
        by_shift = -0.5 * (alpha * first + beta * second)
        parts = [np.ones_like(e), first, second, -u * first, -v * second, -alpha * by_phi * first]
        parts += [by_shift * x for x in self.multiplier_columns]
        found = np.zeros((len(theta), len(self.kinds) + 1, len(self.y)))
        points = np.arange(len(self.y))
        for row, part in zip(self.index, parts, strict=True):
            found[:, row, points] += part / (e + first + second) if self.log else part
        found = found[:, :-1]
        return found if self.whitening is None else found @ self.whitening.T

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """For one θ: the objective and its exact gradient."""
        point = theta[None]
        value, residual, influence = self.evaluate(point, self.weights[None])
        factor = 1.0 if self.huber is not None else 2.0
        slope = -factor * (self.jacobian(point)[0] @ (influence * residual)[0])
        if self.e_penalty is not None:
            slope = slope + 2 * self.e_penalty[1] * (theta - self.e_penalty[0]) * self.is_e
        return float(value[0]), slope

    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper bounds of θ."""
        e = (0.0, float(self.y.max())) if self.fixed_e is None else (self.fixed_e, self.fixed_e)
        low, high = zip(*({**BOUNDS, "e": e}[kind] for kind in self.kinds), strict=True)
        return np.array(low), np.array(high)


def grid_starts(problem: SizeLawProblem, per_axis: int) -> Array:
    """θ for each (α, β) of a grid (and φ), with E, A, B by non-negative least squares; for one arm."""
    exponents = np.geomspace(0.05, 1.5, per_axis)
    tied, looped = "beta" not in problem.kinds, "phi" in problem.kinds
    pairs = [(a, a) for a in np.geomspace(0.05, 1.5, 4 * per_axis)] if tied else product(exponents, exponents)
    y, found = problem.y, list[list[float]]()
    for (alpha, beta), phi in product(pairs, PHI_STARTS if looped else (0.0,)):
        u = np.log(problem.size.effective(phi)[0]) - problem.centre[0]
        v = problem.log_tokens - problem.centre[1]
        columns = np.stack([np.ones_like(y), np.exp(-alpha * u), np.exp(-beta * v)], 1) / y[:, None]
        if problem.fixed_e is None:
            value, _ = optimize.nnls(columns, np.ones(len(y)))
            e = float(np.clip(value[0], 0.02 * y.min(), 0.98 * y.min()))
        else:
            e = problem.fixed_e
            value = np.array([e, *optimize.nnls(columns[:, 1:], 1 - e / y)[0]])
        small = 1e-3 * max(y.mean() - e, 1e-3)
        logs = [math.log(max(value[1], small)), math.log(max(value[2], small))]
        found.append([e, *logs, alpha, *([] if tied else [beta]), *([phi] if looped else [])])
    return np.array(found)


def refine(problem: SizeLawProblem, start: Array, weights: Array, iterations: int) -> tuple[Array, Array]:
    """Damped Gauss–Newton (reweighted, for Huber) from all starting points or for all resamples at once."""
    low, high = problem.bounds()
    count = max(len(start), len(weights))
    theta = np.clip(np.broadcast_to(start, (count, len(problem.kinds))), low, high)
    w = np.broadcast_to(weights, (count, len(problem.y)))
    objective, residual, influence = problem.evaluate(theta, w)
    damping = np.full(count, 1e-2)
    busy = np.arange(count)
    mean, penalty = problem.e_penalty or (0.0, 0.0)
    # Of the penalty, in units of the squared residuals' normal equations (Huber has a factor of one half).
    penalty *= (1.0 if problem.huber is None else 2.0) * problem.is_e
    for _ in range(iterations):
        if not len(busy):
            break
        here = theta[busy]
        j = problem.jacobian(here)
        weighted = j * influence[:, None, :]
        gradient = (weighted @ residual[:, :, None])[:, :, 0] - penalty * (here - mean)
        free: Mask = ~(((here <= low) & (gradient < 0)) | ((here >= high) & (gradient > 0)) | (low == high))
        normal = weighted @ np.swapaxes(j, 1, 2) + np.diag(penalty)
        normal = normal * (free[:, :, None] & free[:, None, :])
        diagonal = np.einsum("bii->bi", normal)
        scale = np.sqrt(np.where(free & (diagonal > 0), diagonal, 1.0))
        normal = normal / scale[:, :, None] / scale[:, None, :]
        np.einsum("bii->bi", normal)[...] = np.where(free, 1.0 + damping[busy, None], 1.0)
        step = np.linalg.solve(normal, (np.where(free, gradient, 0.0) / scale)[:, :, None])[:, :, 0] / scale
        trial = np.clip(here + step, low, high)
        new = problem.evaluate(trial, w[busy])
        better = new[0] <= objective[busy]
        gain = np.abs(objective[busy] - new[0])
        done = (gain <= 1e-10 * objective[busy]) & (damping[busy] < 1e-1) | (damping[busy] > 1e9)
        theta[busy[better]], objective[busy[better]] = trial[better], new[0][better]
        damping[busy] = np.clip(np.where(better, damping[busy] * 0.2, damping[busy] * 6.0), 1e-12, 1e10)
        keep = ~done
        residual = np.where(better[:, None], new[1], residual)[keep]
        influence = np.where(better[:, None], new[2], influence)[keep]
        busy = busy[keep]
    return theta, objective


def polish(problem: SizeLawProblem, theta: Array) -> tuple[Array, float]:
    """Refine one θ to full precision by L-BFGS-B with the exact gradient."""
    low, high = problem.bounds()
    value, _ = problem.value_and_gradient(theta)
    best = theta
    for _ in range(3):
        # The objective is of order 1e-3 or less; unscaled, the tolerances would stop the search early.
        factor = 1.0 / max(value, 1e-300)

        def scaled(point: Array, factor: float = factor) -> tuple[float, Array]:
            inner, slope = problem.value_and_gradient(np.asarray(point, float))
            return inner * factor, slope * factor

        found = optimize.minimize(
            scaled, best, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)),
            options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30},
        )  # fmt: skip
        now, _ = problem.value_and_gradient(found.x)
        if not now < value * (1 - 1e-12):
            break
        value, best = now, np.asarray(found.x, float)
    return best, value


def scaled_inverse(normal: Array) -> Array:
    """The pseudo-inverse of normal equations whose columns differ in scale by many orders."""
    scale = np.sqrt(np.diag(normal))
    outer = np.outer(*[np.where(scale > 0, scale, 1.0)] * 2)
    return np.linalg.pinv(normal / outer, hermitian=True) / outer


def solve(problem: SizeLawProblem, start: Array) -> tuple[Array, float, float]:
    """The best θ from all starting points, its objective, and the fraction of starts that reached it."""
    theta, objective = refine(problem, start, problem.weights[None], 150)
    # Polish the best few: reweighting stops short of the optimum where Huber terms are linear.
    nearest = np.argsort(objective)[: 4 if problem.huber else 1]
    best, value = min((polish(problem, theta[i]) for i in nearest), key=lambda found: found[1])
    return best, value, float((objective <= value * (1 + 1e-3) + 1e-14).mean())
