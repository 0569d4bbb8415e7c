"""How often any test can find a gain, if its false words are to stay at 6% under correlated errors too.

    python benchmarks/verdict_bounds.py [draws]

The most powerful test of a scenario of `laws_calibration.py` among all that give at most 6% false words under
each of several noises: Neyman and Pearson's lemma with several null hypotheses, by its dual problem. It knows
the size of the effect and every variance and correlation; only whether there is an effect, and which of the
noises there is, is hidden from it. It may not depend on E, A and γ, nor, without replicates, on the size of
the noise. No analysis can do better, so what it misses is not for want of a better one.

`joint` asks for one test for several scenarios at once: the largest t such that it finds t times what the
oracle finds in each of them. Draws of the scenarios make this a linear programme, whose dual variables are
the least favourable mixture. The test treats the two arms alike: one half of its false words says *grows*.

`coverage` asks for the shortest intervals that cover the truth with independent errors and with AR(0.8).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from laws_calibration import PAPER, SMALL, VANILLA, Array, Scenario, alone, replicated, simulate
from scipy import optimize, special, stats

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


SIDES = ("reference's", "arm's")
BAD = [f"+0.03 at {whose} {where}" for where in ("bottom", "middle", "top") for whose in SIDES]
ASKED = ["independent", "two lowest rungs x5", *BAD]


@dataclass(frozen=True)
class Gaussian:
    """The distribution of what tables show of an effect."""

    mean: Array
    covariance: Array

    def draw(self, draws: int, rng: np.random.Generator) -> Array:
        """Draws of it."""
        noise = rng.standard_normal((draws, len(self.mean)))
        return noise @ np.linalg.cholesky(self.covariance).T + self.mean

    def log_density(self, at: Array) -> Array:
        """The log density of directions."""
        return log_density(at, self.covariance, self.mean, scaled=True)


class JointBound:
    """Densities of draws of each scenario in which an effect is to be found, under it and every noise."""

    def __init__(self, draws: int) -> None:
        pairs = {one.name: one for one in alone()}
        effect, base = tangent(pairs["independent, Op-1"], growth=True)

        def of(one: Scenario, size: float) -> Gaussian:
            mean = size * effect
            if one.off is not None:
                mean = mean + 0.03 * np.eye(len(effect))[one.off[0] * len(one.flops) + one.off[1]]
            return Gaussian(base.T @ mean, base.T @ np.kron(np.eye(2), one.covariance()) @ base)

        self.effects = [of(pairs[f"{name}, Op-1"], 1.0) for name in ASKED]
        drift = of(pairs["AR(0.8) along the ladder, null"], 0.0)
        nulls = [*(of(pairs[f"{name}, null"], 0.0) for name in ASKED), drift]
        rng = np.random.default_rng(1)
        at = [one.draw(draws, rng) for one in self.effects]
        # (scenarios drawn from, densities, draws)
        self.effect_logs = np.array([[one.log_density(each) for one in self.effects] for each in at])
        logs = np.array([[one.log_density(each) for one in nulls] for each in at])
        # Swapped arms swap the bad rung: both say a false word, so the two constraints are one.
        bad = [np.logaddexp(logs[:, i], logs[:, i + 1]) for i in range(2, len(ASKED), 2)]
        self.null_logs = np.stack([*(logs[:, i] + np.log(2) for i in (0, 1, -1)), *bad], axis=1)
        self.oracle = np.array([self._oracle(name, pairs[f"{name}, Op-1"], effect, base) for name in ASKED])

    @staticmethod
    def _oracle(name: str, one: Scenario, effect: Array, base: Array) -> float:
        """The power of the test that knows every variance and correlation, and leaves the bad rung out."""
        if one.off is not None:
            place = one.off[0] * len(one.flops) + one.off[1]
            base = base @ np.linalg.svd(base[place][None])[2][1:].T
        mean = base.T @ effect
        covariance = base.T @ np.kron(np.eye(2), one.covariance()) @ base
        return float(special.ndtr(np.sqrt(mean @ np.linalg.solve(covariance, mean)) - special.ndtri(0.975)))

    def bound(self, asked: Sequence[int], level: float) -> tuple[float, float, Array, Array]:
        """t and its standard error, the powers of the best test, and the least favourable mixture of noises.

        The dual variables are fitted on half of the draws; with any of them the dual's value on the other
        half is a bound.
        """
        asked = list(asked)
        half = self.effect_logs.shape[2] // 2
        parts: list[tuple[Array, Array]] = []
        for draws in (slice(0, half), slice(half, 2 * half)):
            effects, nulls = (
                np.concatenate([logs[i][:, draws] for i in asked], axis=1)
                for logs in (self.effect_logs[:, asked], self.null_logs)
            )
            drawn = special.logsumexp(effects, axis=0) - np.log(len(asked))
            parts.append((np.exp(effects - drawn), np.exp(np.minimum(nulls - drawn, 300))))
        effects, nulls = parts[0]
        count = effects.shape[1]
        oracle = self.oracle[asked]
        rows = np.block([[nulls / count, np.zeros((len(nulls), 1))], [-effects / count, oracle[:, None]]])
        limits = np.concatenate([np.full(len(nulls), level), np.zeros(len(asked))])
        aim = np.concatenate([np.zeros(count), [-1.0]])
        found = optimize.linprog(aim, rows, limits, bounds=[*[(0, 1)] * count, (0, None)], method="highs")
        prices = -found.ineqlin.marginals
        noises, gains = prices[: len(nulls)], prices[len(nulls) :]
        gains = gains / (gains @ oracle)
        powers = effects @ np.asarray(found.x, float)[:-1] / count
        effects, nulls = parts[1]
        value = np.maximum(gains @ effects - noises @ nulls, 0.0)
        t, error = float(value.mean() + level * noises.sum()), float(value.std() / np.sqrt(count))
        return t, error, powers, noises / max(float(noises.sum()), 1e-12)


def joint(draws: int) -> None:
    """One test for all scenarios, and for every two of them."""
    bounds = JointBound(draws)
    everything = range(len(ASKED))
    few = range(2)  # independent, two lowest rungs x5: the others do not bind
    print("\nOne test for several scenarios: it finds t times what the oracle finds in each, or more")
    for level in (0.05, 0.06):
        for asked in (few, everything):
            t, error, powers, mixture = bounds.bound(asked, level)
            print(f"false words {level:.0%}, the first {len(asked)} scenarios: t = {t:.3f} ± {error:.3f}")
            if len(asked) == 2:
                noises = ("independent", "two lowest x5", "AR(0.8)", "bad bottom", "bad middle", "bad top")
                shares = (f"{name} {part:.2f}" for name, part in zip(noises, mixture, strict=True))
                print(f"    least favourable noise: {', '.join(shares)}")
            else:
                print("    finds " + ", ".join(f"{power:.3f}" for power in powers))
    print("\nt for each scenario, and for it with each before it; false words 5%")
    for i, name in enumerate(ASKED):
        asked = [*((i, k) for k in range(i)), (i,)]
        values = [bounds.bound(each, 0.05)[0] for each in asked]
        print(f"{name:<32}{bounds.oracle[i]:7.3f} |" + "".join(f"{t:7.3f}" for t in values), flush=True)


def coverage(draws: int, points: int = 121) -> None:
    """The shortest 90% intervals, of those that cover 87% to 93% with independent errors and with AR(0.8).

    An interval moves with the effect and grows with the scatter s of the residuals, so it is a set of T =
    (estimate − truth) / s for each direction r of the residuals. Given r, T is Student's t, shifted and
    stretched; which of its values are in the set is a linear programme.
    """
    pairs = {one.name: one for one in alone()}
    print("\nShortest 90% intervals that cover with independent errors and with AR(0.8), under each of them.")
    print("Lengths are beside those of intervals that know the noise; 'like': tables that look independent.")
    print(f"{'':<10}{'shortest with':<14}{'asked':<16}{'covers':>16}{'length':>16}{'covers like':>16}")
    for growth in (False, True):
        effect, base = tangent(pairs["independent, Op-1"], growth)
        unit = base.T @ effect / np.linalg.norm(base.T @ effect)
        rest = np.linalg.svd(unit[None])[2][1:].T
        freedom = rest.shape[1]
        rng = np.random.default_rng(1)
        names = ("independent, null", "AR(0.8) along the ladder, null")
        noises = [base.T @ np.kron(np.eye(2), pairs[name].covariance()) @ base for name in names]
        inner = [rest.T @ noise @ rest for noise in noises]
        r = np.concatenate([Gaussian(np.zeros(freedom), one).draw(draws // 2, rng) for one in inner])
        r = r / np.linalg.norm(r, axis=1, keepdims=True)
        logs, places, scales, sizes = list[Array](), list[Array](), list[Array](), list[Array]()
        for noise, one in zip(noises, inner, strict=True):
            lean = np.linalg.solve(one, rest.T @ noise @ unit)
            sd = np.sqrt(unit @ noise @ unit - unit @ noise @ rest @ lean)
            square = np.einsum("bi,ij,bj->b", r, np.linalg.inv(one), r)
            logs.append(-0.5 * np.linalg.slogdet(one)[1] - 0.5 * freedom * np.log(square))
            places.append(r @ lean)
            scales.append(sd * np.sqrt(square / freedom))
            ratio = special.gammaln((freedom + 1) / 2) - special.gammaln(freedom / 2)
            sizes.append(np.sqrt(2 / square) * np.exp(ratio))
        weight = np.exp(logs - special.logsumexp(logs, axis=0)) * 2 / draws
        grid = 8 * np.max(scales, axis=0)[:, None] * np.sinh(np.linspace(-3, 3, points)) / np.sinh(3)
        step = np.gradient(grid, axis=1)
        inside, length = np.zeros((2, *grid.shape)), np.zeros((2, *grid.shape))
        for k in range(2):
            at, scale = grid - places[k][:, None], scales[k][:, None]
            lower, upper = (stats.t.cdf((at + side * step / 2) / scale, freedom) for side in (-1, 1))
            inside[k] = weight[k][:, None] * (upper - lower)
            known = 2 * special.stdtrit(freedom, 0.95) * (scales[k] * sizes[k] * weight[k]).sum()
            length[k] = (weight[k] * sizes[k])[:, None] * step / known
        like = logs[0] > logs[1]
        flat, lengths = inside.reshape(2, -1), length.reshape(2, -1)
        for k, where in enumerate(("independent", "AR(0.8)")):
            for asked, most in (("87% to 93%", 0.93), ("at least 87%", 1.0)):
                rows = np.concatenate([-flat, flat])
                found = optimize.linprog(
                    lengths[k], rows, [-0.87, -0.87, most, most], bounds=(0, 1), method="highs"
                )
                chosen = np.asarray(found.x, float)
                kept = inside * chosen.reshape(grid.shape)
                of_like = kept[:, like].sum(axis=(1, 2)) / weight[:, like].sum(axis=1)
                cells = (flat @ chosen, lengths @ chosen, of_like)
                shown = "".join(f"{a:9.3f}{b:7.3f}" for a, b in cells)
                print(f"{'growth' if growth else 'gain':<10}{where:<14}{asked:<16}{shown}", flush=True)


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
    joint(draws)
    coverage(draws // 8)


if __name__ == "__main__":
    main()
