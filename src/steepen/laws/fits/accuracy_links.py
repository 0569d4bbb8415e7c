"""Curves from loss to accuracy, fitted by least squares to many sets of accuracies at once.

gadre   a + exp(k − e^s·L)            parameters a, k, s
olmo    b + a / (1 + exp(e^s·(L − m)))    b, a, s, m
paper   1 / (1 + exp(s·L − b))        s, b
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy import special

from steepen.utils.arrays import Array

Link = Literal["gadre", "olmo", "paper"]
LINK_PARAMETERS: dict[Link, int] = {"gadre": 3, "olmo": 4, "paper": 2}
ITERATIONS = 1000  # an olmo curve without a bend in the data runs away slowly, towards an exponential
TOLERANCE = 1e-10  # relative change of the sum of squares at convergence


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
