"""The joint method: one E and every arm's A and γ fitted to all losses at once by least squares.

Every number has two intervals: conditional on E, and unconditional by profile likelihood. The unconditional
interval is often ten times wider. With many arms it is from the covariance, which covers as often.
"""

from __future__ import annotations

import math

import numpy as np

from steepen.laws.distributions import ROUNDING_ERROR, Interval, t_quantile
from steepen.laws.fits.compute_law import (
    ArmLaw,
    ComputeFit,
    Estimate,
    FitSettings,
    default_c0,
    flops_range,
    root_mean_square,
    symmetric_interval,
)
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Array, Design, jacobian, one_hot, solve_multistart, unscaled_covariance
from steepen.laws.ladder import Ladder

MAX_PROFILED_ARMS = 16  # a profile refits every arm at every step of every interval


def fit_joint(ladders: dict[str, Ladder], settings: FitSettings) -> ComputeFit:
    """Fit one E and every arm's A and γ to all losses at once by least squares."""
    c0 = settings.c0 or default_c0(ladders[settings.reference])
    names = list(ladders)
    group = np.concatenate([np.full(len(ladders[name].flops), i) for i, name in enumerate(names)])
    x = np.log(np.concatenate([ladder.flops for ladder in ladders.values()]) / c0)
    y = np.concatenate([ladder.loss for ladder in ladders.values()])
    weights = np.concatenate([ladder.weights for ladder in ladders.values()])
    own = one_hot(group, len(names))
    design = Design(np.ones((len(x), 1)), own, own)
    best = solve_multistart(design, x, y, weights=weights, log=settings.fits_log_loss)
    theta, rss = best.theta[0], float(best.objective[0])
    df = math.inf if settings.noise else float(len(x) - design.n_parameters)
    variance = _variance(rss, len(x) - design.n_parameters, y, settings)
    quantile = float(t_quantile((1 + settings.confidence) / 2, np.array(df)))
    covariance = unscaled_covariance(design, x, theta, weights=weights, log=settings.fits_log_loss)[0]
    fit = LeastSquaresFit(design, x, y, weights, theta, rss, variance, settings.fits_log_loss)
    if len(names) <= MAX_PROFILED_ARMS:
        wide = profile_intervals(fit, list(range(design.n_parameters)), covariance, quantile)
    else:
        errors = np.sqrt(np.maximum(np.diag(covariance) * variance, 0.0))
        wide = [symmetric_interval(float(t), quantile * float(s)) for t, s in zip(theta, errors, strict=True)]
        wide[0] = (max(0.0, wide[0][0]), wide[0][1])
    j = jacobian(design, x, theta[None], settings.fits_log_loss)[0]

    def conditional(held: list[int]) -> dict[int, Interval]:
        """Intervals of all other parameters, with these held at their estimates."""
        free = [i for i in range(design.n_parameters) if i not in held]
        part = j[:, free]
        block = np.linalg.pinv((part * weights[:, None]).T @ part, hermitian=True)
        reach = quantile * np.sqrt(np.maximum(np.diag(block) * variance, 0.0))
        return {i: symmetric_interval(float(theta[i]), float(r)) for i, r in zip(free, reach, strict=True)}

    gammas = [1 + len(names) + i for i in range(len(names))]
    given_e = conditional([0])
    e = Estimate(float(theta[0]), conditional(gammas)[0], wide[0])
    arms: dict[str, ArmLaw] = {}
    for i, name in enumerate(names):
        a, g = 1 + i, gammas[i]
        given = given_e[g]
        arms[name] = ArmLaw(
            arm=name,
            gamma=Estimate(float(theta[g]), given, wide[g]),
            log_a=Estimate(float(theta[a]), given_e[a], wide[a]),
            e=e,
            slope_standard_error=(given[1] - given[0]) / (2 * quantile),
            residual_sd=root_mean_square((y - design.predict(theta, x))[group == i]),
            c0=c0,
            flops_range=flops_range(ladders[name]),
        )
    bound = ("e at zero",) if theta[0] <= 0 else ()
    sigma = math.sqrt(variance) * (float(y.mean()) if settings.fits_log_loss else 1.0)
    return ComputeFit(settings, c0, arms, sigma, df, rss, bound, covariance * variance)


def _variance(rss: float, df: int, y: Array, settings: FitSettings) -> float:
    scale = float(y.mean()) if settings.fits_log_loss else 1.0
    if settings.noise:
        return (settings.noise / scale) ** 2
    rounding = ROUNDING_ERROR * (1.0 if settings.fits_log_loss else float(y.mean()))
    return max(rss / max(df, 1), rounding**2)
