"""Compute multipliers m(C) = C / C_arm: how many times less compute an arm needs for the reference's loss.

Two methods, which need not agree, so every value names its method: `interpolated` between measurements, as in
the paper's figures, and `fitted`, from the ratio of two fitted laws. Interpolation is linear in log compute,
of the loss (`raw-loss`: the paper's printed values) or of its logarithm (`log-loss`: the paper's words).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steepen.errors import require_one_of
from steepen.laws.distributions import Interval, exp_or_infinity
from steepen.laws.fits.compute_law import INTERPOLATIONS, ComputeFit, Interpolate
from steepen.laws.ladder import Ladder
from steepen.utils.arrays import Array

MAX_MULTIPLIER = 1e30  # beyond it, or its inverse, a curve does not fall


@dataclass(frozen=True)
class Multiplier:
    """A multiplier with its interval at the reference's `flops`; `extrapolated`: beyond the ladders.

    `leads`: of the fit that figures draw (one method, and no hypothesis that the data reject).
    """

    method: str
    flops: float
    value: float
    low: float
    high: float
    extrapolated: bool = False
    leads: bool = False


def interpolate_compute(
    flops: Array, loss: Array, target: Array, interpolate: Interpolate = "raw-loss"
) -> Array:
    """The compute at which a measured curve first falls to each target loss, linear in log compute.

    `loss` is (…, rungs) and `target` (…, targets); NaN where the curve never crosses the target.
    """
    require_one_of("interpolate", interpolate, INTERPOLATIONS)
    log_c = np.log(flops)
    height, wanted = (loss, target) if interpolate == "raw-loss" else (np.log(loss), np.log(target))
    above, below, level = height[..., None, :-1], height[..., None, 1:], wanted[..., :, None]
    crosses = (above >= level) & (level >= below) & (above > below)
    first = crosses.argmax(axis=-1)
    fraction = (above - level) / np.where(above > below, above - below, 1.0)
    where = log_c[:-1] + fraction * np.diff(log_c)
    value = np.take_along_axis(where, first[..., None], axis=-1)[..., 0]
    reached = crosses.any(axis=-1)
    return np.where(reached, np.exp(np.where(reached, value, 0.0)), np.nan)


def interpolated_multipliers(
    reference: Ladder,
    arm: Ladder,
    *,
    sigmas: tuple[Array, Array] | None = None,
    confidence: float = 0.90,
    draws: int = 2000,
    seed: int = 0,
    interpolate: Interpolate = "raw-loss",
) -> list[Multiplier]:
    """Multipliers at the reference's rungs whose loss lies within the arm's measured losses.

    The interval comes from noise simulated at every rung, whose standard deviations are `sigmas`.
    """
    value = reference.flops / interpolate_compute(arm.flops, arm.loss, reference.loss, interpolate)
    rng = np.random.default_rng(seed)
    spread = value[None]
    cells = len(reference.flops) * len(arm.flops)
    draws = min(draws, max(50, 50_000_000 // cells))  # of ladders with thousands of rungs fewer are made
    if sigmas is not None and draws > 0:
        targets, losses = (
            np.maximum(ladder.loss + sigma * rng.standard_normal((draws, len(ladder.loss))), 1e-9)
            for ladder, sigma in zip((reference, arm), sigmas, strict=True)
        )
        # Every draw compares each point with each segment, so draws go in blocks that fit in memory.
        size = max(1, 2_000_000 // cells)
        blocks = [slice(k, k + size) for k in range(0, draws, size)]
        needed = [interpolate_compute(arm.flops, losses[k], targets[k], interpolate) for k in blocks]
        spread = reference.flops / np.concatenate(needed)
    tail = (1 - confidence) / 2
    multipliers: list[Multiplier] = []
    for flops, one, column in zip(reference.flops.tolist(), value.tolist(), spread.T, strict=True):
        if math.isfinite(one):
            ends = np.quantile(column[np.isfinite(column)], [tail, 1 - tail]).tolist()
            multipliers.append(Multiplier("interpolated", flops, one, *ends))
    return multipliers


def both_cover(reference: Interval, flops: float, arm: Interval, needed: float) -> bool:
    """Whether the reference's ladder covers the compute, and the arm's what it needs instead."""
    slack = 1 + 1e-9
    return all(
        low / slack <= value <= high * slack for (low, high), value in ((reference, flops), (arm, needed))
    )


def fitted_multipliers(
    fit: ComputeFit, arm: str, flops: Array, *, extrapolate: bool = False, leads: bool = False
) -> list[Multiplier]:
    """Multipliers from the fitted laws at the reference's compute; beyond the ladders with `extrapolate`."""
    base, other = fit.arms[fit.settings.reference], fit.arms[arm]
    steep = other.gamma.value
    multipliers: list[Multiplier] = []
    if min(steep, base.gamma.value) < 1e-9:
        return multipliers  # a flat curve reaches no lower loss
    for value in flops.tolist():
        x = math.log(value / fit.c0)
        needed = (other.log_a.value - base.log_a.value + base.gamma.value * x) / steep
        # The shared E cancels, so only log A and γ contribute to the error.
        by = {arm: (-1 / steep, needed / steep), base.arm: (1 / steep, -x / steep)}
        half_width = fit.quantile * math.sqrt(fit.variance(by))
        log_m = x - needed
        inside = both_cover(base.flops_range, value, other.flops_range, fit.c0 * exp_or_infinity(needed))
        if inside or extrapolate:
            ends = (exp_or_infinity(log_m + part) for part in (0.0, -half_width, half_width))
            method = f"fitted ({fit.settings.method})"
            multipliers.append(Multiplier(method, value, *ends, extrapolated=not inside, leads=leads))
    return multipliers
