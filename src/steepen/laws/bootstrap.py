"""Resampled ladders: residuals exchanged between rungs, or seeds drawn again within each rung."""

from __future__ import annotations

import numpy as np

from steepen.laws.ladder import Ladder
from steepen.laws.readings import PairFits, Rule
from steepen.laws.solver import Array, jacobian, unscaled_covariance


def residual_draws(fits: PairFits, y: Array, rule: Rule, draws: int, rng: np.random.Generator) -> Array:
    """Ladders made of the free reading plus its residuals, shuffled with replacement.

    Residuals are first scaled by their leverage, or the draws would scatter less than the measurements do.
    """
    design, x, weights = fits.designs["free"], fits.pair.x, fits.weights[0]
    theta = fits.solutions["free"].theta[:1]
    predicted = design.predict(theta, x)[0]
    residual = np.log(y / predicted) if rule.log else y - predicted
    j = jacobian(design, x, theta, rule.log)[0]
    inverse = unscaled_covariance(design, x, theta, weights=weights, log=rule.log)[0]
    leverage = np.einsum("ni,ij,nj->n", j, inverse, j) * weights
    scaled = residual * np.sqrt(weights) / np.sqrt(np.maximum(1.0 - leverage, 1e-3))
    scaled -= scaled.mean()
    noise = scaled[rng.integers(len(x), size=(draws, len(x)))] / np.sqrt(weights)
    return predicted * np.exp(noise) if rule.log else predicted + noise


def seed_draws(ladders: tuple[Ladder, Ladder], draws: int, rng: np.random.Generator) -> Array | None:
    """Rung means after drawing each rung's seeds again; None where no rung has two.

    With k seeds a plain redraw scatters too little by (k − 1)/k, so deviations from the rung's mean are stretched.
    """
    if all(len(runs) < 2 for ladder in ladders for runs in ladder.runs):
        return None
    columns: list[Array] = []
    for ladder in ladders:
        for runs in ladder.runs:
            count = len(runs)
            if count < 2:
                columns.append(np.full(draws, runs[0]))
                continue
            deviation = (runs - runs.mean()) * np.sqrt(count / (count - 1))
            columns.append(runs.mean() + deviation[rng.integers(count, size=(draws, count))].mean(axis=1))
    return np.stack(columns, axis=1)
