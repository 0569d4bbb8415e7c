"""How often any test can find a gain, if its false words are to stay at 6% under correlated errors too.

    python benchmarks/verdict_bounds.py [draws]

The most powerful test of a scenario of `laws_calibration.py` among all that give at most 6% false words under
each of several noises: Neyman and Pearson's lemma with several null hypotheses, by its dual problem. It knows
the size of the effect and every variance and correlation; only whether there is an effect, and which of the
noises there is, is hidden from it. It may not depend on E, A and γ, nor, without replicates, on the size of
the noise. No analysis can do better, so what it misses is not for want of a better one.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from laws_calibration import PAPER, SMALL, VANILLA, Array, Scenario, alone, replicated, simulate
from scipy import optimize, special

from steepen.laws.model.table_fit import multiplier_contrast, slope_contrast

LEVEL = 0.06


def tangent(one: Scenario, growth: bool) -> tuple[Array, Array]:
    """The effect on all losses, and an orthonormal base of what is left without laws that have no effect."""
    tables = simulate(one, 1, np.random.default_rng(0))
    laws, x = tables.laws, tables.cells.x
    arms, rungs = x.shape
    own = laws.jacobian(x, tables.cells.mask)[0]
    columns = np.zeros((arms, rungs, 1 + 2 * arms))
    columns[..., 0] = 1.0
    for arm in range(arms):
        columns[arm, :, 1 + 2 * arm : 3 + 2 * arm] = own[arm]
    points = np.linspace(x.min(), x.max(), 9)
    contrast = (
        slope_contrast(laws, (0, 1))
        if growth
        else multiplier_contrast(laws, (0, 1), points, np.full(9, 1 / 9))
    )
    gradient = np.concatenate([[0.0], contrast.first[0], contrast.second[0], np.zeros(2 * (arms - 2))])
    design = columns.reshape(arms * rungs, -1)
    effect = design @ gradient * float(contrast.value[0]) / float(gradient @ gradient)
    # Directions of the laws along which the contrast does not change.
    still = np.linalg.svd(gradient[None])[2][1:]
    nuisance = design @ still.T
    base = np.linalg.svd(nuisance / np.linalg.norm(nuisance, axis=0))[0][:, nuisance.shape[1] :]
    return effect, base


def log_density(at: Array, covariance: Array, mean: Array, scaled: bool) -> Array:
    """Log density of a normal vector, or of its direction where its size is not known."""
    inverse = np.linalg.inv(covariance)
    fixed = -0.5 * np.linalg.slogdet(covariance)[1]
    if not scaled:
        return fixed - 0.5 * np.einsum("bi,ij,bj->b", at - mean, inverse, at - mean)
    size = at.shape[1]
    square = np.einsum("bi,ij,bj->b", at, inverse, at)
    along = at @ inverse @ mean / np.sqrt(square)
    # ∫ s^(size − 1) exp(−½ |s·at − mean|²) ds
    s = np.linspace(0, 1, 400)[1:] * (np.abs(along)[:, None] + np.sqrt(size) + 12)
    exponent = (size - 1) * np.log(s) - 0.5 * s**2 + along[:, None] * s
    total = special.logsumexp(exponent, axis=1) + np.log(s[:, 0])
    return fixed - 0.5 * size * np.log(square) - 0.5 * mean @ inverse @ mean + total


def bound(one: Scenario, nulls: list[Scenario], *, growth: bool, scaled: bool, draws: int) -> float:
    """The power of the best two-sided test for `one` with false words at LEVEL under every one of `nulls`."""
    effect, base = tangent(one, growth)
    if one.off is not None:  # its rung is known to be bad
        noisy = one.off[0] * len(one.flops) + one.off[1]
        bad = base.T @ np.eye(len(effect))[:, noisy]
        base = base @ np.linalg.svd(bad[None])[2][1:].T

    def covariance(of: Scenario) -> Array:
        return base.T @ np.kron(np.eye(one.arms + 1), of.covariance()) @ base

    mean, own = base.T @ effect, covariance(one)
    noise = np.random.default_rng(1).standard_normal((draws, len(mean)))
    at = noise @ np.linalg.cholesky(own).T + mean
    there = np.logaddexp(*(log_density(at, own, sign * mean, scaled) for sign in (1, -1))) - np.log(2)
    logs = [log_density(at, covariance(null), 0 * mean, scaled) for null in nulls]
    ratios = np.exp(np.clip(np.stack(logs) - there, -700, 700))

    def dual(log_prices: Array) -> float:
        prices = np.exp(log_prices)
        return float(np.maximum(1 - prices @ ratios, 0).mean() + LEVEL * prices.sum())

    found = [
        optimize.minimize(dual, np.full(len(nulls), begin), method="Nelder-Mead", options={"maxiter": 800})
        for begin in (-1.5, 0.0, 1.5)
    ]
    return min(float(each.fun) for each in found)


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    print(f"The most that any test finds with false words at {LEVEL:.0%} under each noise, {draws} draws\n")
    pairs = {one.name: one for one in alone()}
    clean, low = pairs["independent, null"], pairs["two lowest rungs x5, null"]
    drift = {
        rho: Scenario("", PAPER, VANILLA, VANILLA, lack_of_fit=2e-3, correlation=rho) for rho in (0.8, 0.9)
    }
    print(
        f"{'Pairs without replicates, Op-1 grows':<44}{'own noise':>12}{'or AR(0.8)':>12}{'or AR(0.9)':>12}"
    )
    for name in (
        "independent",
        "two lowest rungs x5",
        "+0.03 at reference's bottom",
        "+0.03 at arm's bottom",
    ):
        one = pairs[f"{name}, Op-1"]
        base = [replace(one, off=None)] if one.off else [clean, low] if "x5" in name else [clean]
        rows = [base, [*base, drift[0.8]], [*base, drift[0.8], drift[0.9]]]
        values = [bound(one, nulls, growth=True, scaled=True, draws=draws) for nulls in rows]
        print(f"{name:<44}" + "".join(f"{value:12.3f}" for value in values), flush=True)
    print(f"\n{'Six arms with replicates':<44}{'own noise':>12}{'or AR(0.8) .01':>16}")
    for one in replicated():
        if any(
            part in one.name
            for part in ("falling, 1.15x", "falling, grows", "+ .004, 1.15x", "+ .004, grows")
        ):
            null = replace(one, reference=SMALL, arm=SMALL)
            drifting = replace(null, lack_of_fit=0.01, correlation=0.8)
            grows = "grows" in one.name
            values = [
                bound(one, nulls, growth=grows, scaled=False, draws=draws)
                for nulls in ([null], [null, drifting])
            ]
            print(f"{one.name:<44}{values[0]:12.3f}{values[1]:16.3f}", flush=True)


if __name__ == "__main__":
    main()
