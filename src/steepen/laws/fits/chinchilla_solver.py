"""Numerics of the Chinchilla law: objective, gradient, starting grid, batched refinement and polish."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from steepen.laws.fits.solver import Array, Mask

EXPONENT_BOUNDS = (1e-3, 5.0)


@dataclass(frozen=True, eq=False)
class ChinchillaProblem:
    """Centred data of one fit; θ = (E, log of each term at the centre, α, β), or (…, α) where β = α."""

    u: Array
    v: Array
    y: Array
    weights: Array
    log: bool
    huber: float | None
    tied: bool = False

    @property
    def n_parameters(self) -> int:
        """Number of fitted parameters: the length of θ."""
        return 4 if self.tied else 5

    def predict(self, theta: Array) -> Array:
        """The law's loss of every point, shape (starts, points)."""
        first, second = self.terms(theta)
        return np.maximum(theta[:, :1] + first + second, 1e-300)

    def terms(self, theta: Array) -> tuple[Array, Array]:
        """The parameter term and the token term of every point."""
        first, second = theta[:, 1:2] - theta[:, 3:4] * self.u, theta[:, 2:3] - theta[:, -1:] * self.v
        return np.exp(np.clip(first, -700.0, 200.0)), np.exp(np.clip(second, -700.0, 200.0))

    def evaluate(self, theta: Array, weights: Array) -> tuple[Array, Array, Array, tuple[Array, Array]]:
        """Objective, residual, weight in the normal equations, and the two terms."""
        terms = self.terms(theta)
        predicted = np.maximum(theta[:, :1] + terms[0] + terms[1], 1e-300)
        residual = np.log(self.y) - np.log(predicted) if self.log else self.y - predicted
        if self.huber is None:
            return (weights * residual**2).sum(axis=1), residual, weights, terms
        size = np.abs(residual)
        inside = size <= self.huber
        value = np.where(inside, 0.5 * residual**2, self.huber * (size - 0.5 * self.huber))
        influence = weights * np.where(inside, 1.0, self.huber / np.maximum(size, self.huber))
        return (weights * value).sum(axis=1), residual, influence, terms

    def jacobian(self, theta: Array, terms: tuple[Array, Array]) -> Array:
        """d(prediction)/dθ, or of its logarithm, shape (starts, parameters, points)."""
        first, second = terms
        slopes = [-self.u * first, -self.v * second]
        if self.tied:
            slopes = [slopes[0] + slopes[1]]
        parts = np.stack([np.ones_like(first), first, second, *slopes], axis=1)
        return parts / (theta[:, :1] + first + second)[:, None, :] if self.log else parts

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """For one θ: the objective and its exact gradient."""
        point = theta[None]
        value, residual, influence, terms = self.evaluate(point, self.weights[None])
        factor = 1.0 if self.huber is not None else 2.0
        return float(value[0]), -factor * (self.jacobian(point, terms)[0] @ (influence * residual)[0])


def grid_starts(problem: ChinchillaProblem, per_axis: int) -> Array:
    """θ for each (α, β) of a grid, with E, A, B by non-negative least squares."""
    exponents = np.geomspace(0.05, 1.5, per_axis)
    pairs = [(alpha, beta) for alpha in exponents for beta in exponents]
    if problem.tied:
        pairs = [(alpha, alpha) for alpha in np.geomspace(0.05, 1.5, 4 * per_axis)]
    e_bounds = 0.02 * problem.y.min(), 0.98 * problem.y.min()
    found: list[list[float]] = []
    for alpha, beta in pairs:
        columns = np.stack(
            [np.ones_like(problem.y), np.exp(-alpha * problem.u), np.exp(-beta * problem.v)], 1
        )
        value, _ = optimize.nnls(columns / problem.y[:, None], np.ones(len(problem.y)))
        e = float(np.clip(value[0], *e_bounds))
        small = 1e-3 * (problem.y.mean() - e)
        slopes = [alpha] if problem.tied else [alpha, beta]
        found.append([e, math.log(max(value[1], small)), math.log(max(value[2], small)), *slopes])
    return np.array(found)


def bounds(problem: ChinchillaProblem) -> tuple[Array, Array]:
    """Lower and upper bounds of θ."""
    slopes = problem.n_parameters - 3
    low = np.array([0.0, -40.0, -40.0, *[EXPONENT_BOUNDS[0]] * slopes])
    return low, np.array([problem.y.max(), 40.0, 40.0, *[EXPONENT_BOUNDS[1]] * slopes])


def refine(problem: ChinchillaProblem, start: Array, weights: Array, iterations: int) -> tuple[Array, Array]:
    """Damped Gauss–Newton (reweighted, for Huber) from all starting points or for all resamples at once."""
    low, high = bounds(problem)
    count = max(len(start), len(weights))
    theta = np.array(np.broadcast_to(start, (count, problem.n_parameters)))
    w = np.broadcast_to(weights, (count, len(problem.y)))
    objective, residual, influence, terms = problem.evaluate(theta, w)
    damping = np.full(count, 1e-2)
    busy = np.arange(count)
    for _ in range(iterations):
        if not len(busy):
            break
        j = problem.jacobian(theta[busy], (terms[0], terms[1]))
        weighted = j * influence[:, None, :]
        gradient = (weighted @ residual[:, :, None])[:, :, 0]
        here = theta[busy]
        free: Mask = ~(((here <= low) & (gradient < 0)) | ((here >= high) & (gradient > 0)))
        normal = (weighted @ np.swapaxes(j, 1, 2)) * (free[:, :, None] & free[:, None, :])
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
        pick = better[:, None]
        keep = ~done
        residual = np.where(pick, new[1], residual)[keep]
        influence = np.where(pick, new[2], influence)[keep]
        terms = (np.where(pick, new[3][0], terms[0])[keep], np.where(pick, new[3][1], terms[1])[keep])
        busy = busy[keep]
    return theta, objective


def polish(problem: ChinchillaProblem, theta: Array) -> tuple[Array, float]:
    """Refine one θ to full precision by L-BFGS-B with the exact gradient."""
    low, high = bounds(problem)
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
