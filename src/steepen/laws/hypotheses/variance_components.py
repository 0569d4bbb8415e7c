"""Weights of rungs with different numbers of seeds, where seeds of a rung share an error.

The variance of a rung's mean is τ² + s²/k: a rung component τ², which more seeds do not reduce, and the
scatter of k seeds. Weights proportional to k alone would trust a rung of ten seeds ten times as much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steepen.laws.fits.solver import Array, Design, one_hot, solve_multistart
from steepen.laws.ladder import Ladder

MIN_SEED_FREEDOM = 2  # degrees of freedom of the scatter within rungs
BISECTIONS = 60


def rung_component_weights(design: Design, x: Array, y: Array, seeds: Array, within: Array) -> Array:
    """Weights 1/(τ² + s²/k) of each data set's rungs, relative to a single run: (sets, points).

    τ² is such that the weighted residuals about separate laws have their expected size (the method of
    Mandel and Paule). `seeds` holds the k of each point, `within` the variance s² of each data set.
    """
    weights = np.broadcast_to(seeds, y.shape)
    freedom = y.shape[1] - design.n_parameters
    if freedom < 1:
        return np.array(weights)
    spread = within[:, None] / seeds
    for _ in range(3):
        found = solve_multistart(design, x, y, fractions=(0.5, 0.8, 0.95), weights=weights)
        square = (y - design.predict(found.theta, x)) ** 2
        low, high = np.zeros(len(y)), 10 * square.sum(axis=1)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            above = (square / (middle[:, None] + spread)).sum(axis=1) > freedom
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        rung = 0.5 * (low + high)[:, None]
        weights = (rung + within[:, None]) / (rung + spread)
    return weights


def with_rung_component(ladders: dict[str, Ladder], c0: float) -> dict[str, Ladder]:
    """The ladders with weights that allow for errors shared by the seeds of a rung.

    Unchanged where every rung has the same number of seeds (all weights are then equal), where no rung has
    several, or where the table gives its own weights.
    """
    parts = list(ladders.values())
    seeds = np.concatenate([ladder.seeds for ladder in parts])
    freedom = int((seeds - 1).sum())
    own = any(not np.array_equal(ladder.weights, ladder.seeds) for ladder in parts)
    if own or freedom < MIN_SEED_FREEDOM or np.ptp(seeds) == 0:
        return ladders
    squares = sum(float(((runs - runs.mean()) ** 2).sum()) for ladder in parts for runs in ladder.runs)
    within = squares / freedom
    if within <= 0:
        return ladders
    group = np.concatenate([np.full(len(ladder.flops), i) for i, ladder in enumerate(parts)])
    separate = one_hot(group, len(parts))
    x = np.log(np.concatenate([ladder.flops for ladder in parts]) / c0)
    y = np.concatenate([ladder.loss for ladder in parts])
    weights = rung_component_weights(
        Design(separate, separate, separate), x, y[None], seeds, np.array([within])
    )[0]
    return {
        name: replace(ladder, weights=weights[group == i]) for i, (name, ladder) in enumerate(ladders.items())
    }


def held_out_weights(
    held: dict[str, Ladder], ladders: dict[str, Ladder], weighted: dict[str, Ladder], sigma: float
) -> dict[str, Array]:
    """Precisions σ²/(τ² + s²/k) of held-out rungs, where σ is the noise of the fit to the `weighted` ladders.

    s² is from the scatter of all seeds, τ² what the variances σ²/weight of the fitted rungs have beyond s²/k.
    The ladders' own weights where too few rungs have several seeds, or where a table gives weights.
    """
    everything = [*ladders.values(), *held.values()]
    own = any(not np.array_equal(ladder.weights, ladder.seeds) for ladder in everything)
    freedom = sum(len(runs) - 1 for ladder in everything for runs in ladder.runs)
    if own or freedom < MIN_SEED_FREEDOM:
        return {name: ladder.weights for name, ladder in held.items()}
    per_seed = float(np.mean(np.concatenate([1 / ladder.seeds for ladder in ladders.values()])))
    of_rungs = sigma**2 * float(np.mean(np.concatenate([1 / ladder.weights for ladder in weighted.values()])))
    squares = sum(len(runs) * float(runs.var()) for ladder in everything for runs in ladder.runs)
    within = min(squares / freedom, of_rungs / per_seed)
    rung = of_rungs - within * per_seed
    return {name: sigma**2 / (rung + within / ladder.seeds) for name, ladder in held.items()}
