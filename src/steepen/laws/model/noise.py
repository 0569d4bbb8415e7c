"""What the noise of a table may be: seed variances, correlations, changes with compute; and their priors.

Priors were chosen by calibration (`benchmarks/laws_calibration.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy import special

from steepen.laws.model.laws import Array, Cells, Index

MAX_PRIOR_FREEDOM = 50.0  # of a trend of the seed variance
TAUS = 7  # values of τ that a contrast is averaged over, for each correlation
COARSE_TAUS = 12
# The prior density of τ is τ^(TAU_PRIOR − 1): integrable at 0, where a short table often has its maximum, and
# flat enough to leave τ there. 1 covers 95% with 90% intervals on four rungs, 0.65 covers 92%.
TAU_PRIOR = 0.65
# Correlation of the lack of fit along a ladder: exp(−|Δ log C| / length). A slow error bends no ladder, it
# shifts and tilts it, so a table says little about it: without replicates the prior decides between false
# words with correlated errors and missed ones with independent errors. Where replicates or a stated noise
# explain the scatter, it must be seen.
LENGTHS = (0.0, 3.7, 10.0)
PRIOR_KNOWN = (0.97, 0.015, 0.015)
PRIOR_ALONE = (0.42, 0.1, 0.48)
# Without replicates the noise may also change with compute. Residuals that are large at the bottom look
# correlated to a model with one variance, and the reverse, so one of the two is usually enough.
PRIOR_CHANGING = (0.9, 0.05, 0.05)
PRIOR_CONSTANT = 0.4
TRENDS = {4.0: 0.2, 16.0: 0.2, 0.3: 0.1}  # SD at the lowest compute over SD at the highest, with priors
NOISY_BOTTOMS = {0.0: 0.15, 0.25: 0.35}  # part of the rungs, at least one, that are noisier; with priors
NOISY = 5.0  # SD of those over that of the others
CLUSTER_CORRELATIONS = (0.3, 0.6, 0.9)  # of rungs that share a training run
# Part of the noise that matching rungs of different arms share, with priors.
SHARED_PARTS = {0.0: 0.8, 0.2: 0.1, 0.5: 0.05, 0.9: 0.05}
PAIRED_PARTS = {0.0: 0.8, 0.5: 0.1, 0.9: 0.1}  # of the noise of a seed, by the same seed of different arms
STATED_FACTORS = (1.0, 0.5)  # of a stated noise, which may be larger than the scatter


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """Generalised least squares of the linearised laws under one covariance of the noise.

    `own` are the derivatives by the arms' parameters (sets, arms, rungs, q) and `shared` by what arms share:
    E, then the errors of shared seeds. `precision` is V⁻¹ of each arm. `inverse` is the covariance of each
    arm's parameters given what is shared, `lean` how they follow it, `spread` its covariance. `log_weight`
    is the log restricted likelihood times the prior.
    """

    own: Array
    shared: Array
    precision: Array
    inverse: Array
    lean: Array
    spread: Array
    log_weight: Array
    scale: Array  # variance by which the covariance is multiplied: 1 where it is absolute
    freedom: Array
    tau: Array
    length: float
    pull: Array  # of a prior on what is shared: its precision times the distance to its mean
    square: Array  # eᵀPe of the residuals
    plain: bool  # independent, without a trend
    paired: float = 0.0  # part of the seeds' noise that arms share

    def steps(self, data: Array, pull: Array | float = 0.0) -> tuple[Array, Array, Array]:
        """Steps of the arms' parameters and of what is shared, and V⁻¹ times what is left of the data.

        `pull` is the prior precision of what is shared times the distance to its prior mean.
        """
        weighted = np.einsum("bmrs,bms->bmr", self.precision, data)
        right = np.einsum("bmri,bmr->bmi", self.own, weighted)
        alone = np.einsum("bmij,bmj->bmi", self.inverse, right)
        rest = np.einsum("bmrg,bmr->bg", self.shared, weighted) - np.einsum("bmig,bmi->bg", self.lean, right)
        shared = np.einsum("bgh,bh->bg", self.spread, rest + pull)
        own = alone - np.einsum("bmig,bg->bmi", self.lean, shared)
        left = data - np.einsum("bmri,bmi->bmr", self.own, own)
        left = left - np.einsum("bmrg,bg->bmr", self.shared, shared)
        return own, shared, np.einsum("bmrs,bms->bmr", self.precision, left)


def noise_model(
    own: Array, shared: Array, covariance: Array, prior: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """V⁻¹, each arm's inverse, lean and the spread of what is shared (`NoiseModel`), and log |V| |XᵀV⁻¹X|.

    `prior` is the precision of what is shared (sets, shared); infinite: it is held.
    """
    precision = np.linalg.inv(covariance)
    weighted = precision @ own
    normal = np.swapaxes(own, 2, 3) @ weighted
    scale = np.sqrt(np.einsum("bmii->bmi", normal))
    scale = np.where(scale > 0, scale, 1.0)
    scaled = normal / scale[..., :, None] / scale[..., None, :]
    q = own.shape[3]
    scaled[..., range(q), range(q)] = 1.0 + 1e-12
    inverse = np.linalg.inv(scaled) / scale[..., :, None] / scale[..., None, :]
    mixed = np.swapaxes(weighted, 2, 3) @ shared
    lean = inverse @ mixed
    alone = np.einsum("bmrg,bmrs,bmsh->bgh", shared, precision, shared, optimize=True)
    schur = alone - np.einsum("bmig,bmih->bgh", mixed, lean)
    held = np.isinf(prior) | (np.einsum("bgg->bg", schur) + prior <= 0)
    both = held[:, :, None] | held[:, None, :]
    size = schur.shape[1]
    schur = np.where(both, 0.0, schur + np.where(held, 0.0, prior)[:, :, None] * np.eye(size))
    spread = np.where(both, 0.0, np.linalg.inv(schur + held[:, :, None] * np.eye(size)))
    logs = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(scaled)[1] + 2 * np.log(scale).sum(axis=2)
    with np.errstate(divide="ignore"):
        drawn = np.where(held | (prior == 0), 0.0, np.log(np.where(prior > 0, prior, 1.0))).sum(axis=1)
    total = logs.sum(axis=1) + np.linalg.slogdet(schur + held[:, :, None] * np.eye(size))[1] - drawn
    return np.asarray(precision, float), inverse, lean, np.asarray(spread, float), np.asarray(total, float)


@dataclass(frozen=True, eq=False)
class SeedVariances:
    """The variance of one seed at each rung (sets, arms, rungs), by bins of compute.

    `freedom` are the degrees of freedom of each bin's variance (sets, bins), the trend's included.
    """

    variance: Array
    freedom: Array
    bins: Index


def compute_bins(cells: Cells) -> Index:
    """Bins of similar compute, half the typical spacing of rungs wide; −1 where there is no rung."""
    x = cells.x[cells.mask]
    steps = np.concatenate([np.diff(np.sort(row[own])) for row, own in zip(cells.x, cells.mask, strict=True)])
    width = 0.5 * float(np.median(steps.astype(float))) if len(steps) else 1.0
    found, begin, number = np.zeros(len(x), int), -np.inf, -1
    for i in np.argsort(x, kind="stable"):
        if x[i] > begin + width:
            begin, number = float(x[i]), number + 1
        found[i] = number
    bins = np.full(cells.x.shape, -1)
    bins[cells.mask] = found
    return bins


def seed_variances(cells: Cells, squares: Array) -> SeedVariances | None:
    """The variance of one seed by compute, from sums of squares within rungs; None without replicates.

    The replicates of a bin have few degrees of freedom, so its variance is shrunk to a trend in log compute
    that falls or stays (empirical Bayes: the scatter of the bins about the trend says how much). Above the
    last replicates the variance stays what it is there: noise is not assumed to fall further.
    """
    if not (squares[:, cells.mask & (cells.freedom > 0)] > 0).any():
        return None
    bins = compute_bins(cells)
    member = np.stack([bins == b for b in range(int(bins.max()) + 1)]).astype(float)
    freedom = (member * cells.freedom).sum(axis=(1, 2))
    sums = np.einsum("bmr,kmr->bk", squares, member)
    place = (member * np.where(cells.mask, cells.x, 0.0)).sum(axis=(1, 2)) / member.sum(axis=(1, 2))
    has = freedom > 0
    at, half = place[has], freedom[has] / 2
    positive = np.maximum(sums[:, has], 1e-24 * np.maximum(sums.max(axis=1, keepdims=True), 1e-30))
    logs = np.log(positive / freedom[has]) - special.digamma(half) + np.log(half)
    noise = cast(Array, special.polygamma(1, half))
    weight = 1 / noise
    mean = logs @ weight / weight.sum()
    centre = float(at @ weight / weight.sum())
    trended = int(has.sum()) >= 3
    slope = np.zeros(len(logs))
    if trended:
        slope = np.minimum(logs @ (weight * (at - centre)) / (weight @ (at - centre) ** 2), 0.0)
    prior = np.full(len(logs), 4.0)  # of a single bin
    spare = int(has.sum()) - 1 - trended
    if spare > 0:
        scatter = (logs - mean[:, None] - slope[:, None] * (at - centre)) ** 2
        excess = np.maximum(scatter.sum(axis=1) / spare - noise.mean(), 1e-3)
        prior = np.clip(2 * _inverse_trigamma(excess), 1.0, MAX_PRIOR_FREEDOM)
    reach = np.minimum(place, at.max()) if trended else np.full(len(place), centre)
    base = np.exp(mean[:, None] + slope[:, None] * (reach - centre))
    shrunk = (prior[:, None] * base + sums) / (prior[:, None] + freedom)
    total = np.clip(prior[:, None] + freedom, 1.0, max(float(freedom.sum()), 1.0))
    return SeedVariances(shrunk[:, np.maximum(bins, 0)], total, bins)


def _inverse_trigamma(y: Array) -> Array:
    x = 0.5 + 1 / y
    for _ in range(30):
        value = special.polygamma(1, x)
        x = x + value * (1 - value / y) / special.polygamma(2, x)
    return x


def correlations(cells: Cells, prior: Sequence[float]) -> list[tuple[float, float, Array]]:
    """Length, prior and correlation (arms, rungs, rungs) of every lack of fit that is allowed for."""
    apart = np.abs(cells.x[:, :, None] - cells.x[:, None, :])
    alone = np.eye(cells.x.shape[1]) + 0 * apart
    found = [
        (length, weight, np.exp(-apart / length) if length else alone)
        for length, weight in zip(LENGTHS, prior, strict=True)
    ]
    if cells.clusters is None:
        return found
    same = (cells.clusters[:, :, None] == cells.clusters[:, None, :]) & (cells.clusters >= 0)[:, :, None]
    same &= same.sum(axis=2, keepdims=True) > 1
    clustered: list[tuple[float, float, Array]] = []
    for rho in CLUSTER_CORRELATIONS:
        own = np.where(same.any(axis=2), np.sqrt(1 - rho), 1.0)
        for length, weight, correlation in found:
            clustered.append((length, weight, rho * same + correlation * own[:, :, None] * own[:, None, :]))
    return clustered


def shapes(cells: Cells) -> list[tuple[Array, float]]:
    """Ways in which the standard deviation may change along the ladders, with their priors."""
    x = cells.x[cells.mask]
    place = (cells.x - x.min()) / max(float(np.ptp(x)), 1e-12)
    order = np.argsort(np.argsort(np.where(cells.mask, cells.x, np.inf), axis=1), axis=1)
    count = cells.mask.sum(axis=1, keepdims=True)
    changing = 1 - PRIOR_CONSTANT
    noisy = {part: order < np.maximum(np.ceil(part * count), 1) for part in NOISY_BOTTOMS}
    return [
        (np.ones_like(cells.x), PRIOR_CONSTANT),
        *((trend ** (0.5 - place), changing * prior) for trend, prior in TRENDS.items()),
        *((np.where(noisy[part], NOISY, 1.0), changing * prior) for part, prior in NOISY_BOTTOMS.items()),
    ]
