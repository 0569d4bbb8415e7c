"""One model of a whole table of ladders, from which every test and interval is taken.

    loss(arm a, compute C) = E + A_a (C/C0)^−γ_a + lack of fit + seed noise

Seed noise has a variance by compute, from the replicates of all arms (`seed_variances`). Lack of fit has one
standard deviation τ for the table and may be correlated along a ladder. Without replicates there is one
residual variance, with a possible trend and correlation. None of these is known exactly, so contrasts of the
laws are averaged over noise models (`NoiseModel`), weighted by their restricted likelihood and a prior that
was chosen by calibration (`benchmarks/laws_calibration.py`).

Everything is batched over tables of one shape (`sets`): the measured one, or simulated ones. Arms are padded
to the same number of rungs. Only E and shared seeds connect the arms, so a table costs the sum of its arms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from scipy import special

from steepen.laws.distributions import ROUNDING_ERROR
from steepen.laws.model.laws import Array, Cells, Index, Laws, Mask, fit_laws
from steepen.laws.model.table_fit import NoiseModel, SeedVariances, TableFit, noise_model

# Every prior below was chosen by calibration (`benchmarks/laws_calibration.py`).
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


def compute_bins(cells: Cells) -> Index:
    """Bins of similar compute, half the typical spacing of rungs wide; −1 where there is no rung.

    Rungs of different arms at nearly the same compute have the same noise, so their replicates are pooled.
    """
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
    # The log of a variance estimate is biased by digamma(f/2) − log(f/2) and has variance trigamma(f/2).
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


def fit_tables(
    cells: Cells,
    loss: Array,
    squares: Array,
    start: Laws,
    *,
    dropped: Mask | None = None,
    e_prior: tuple[float, float] | None = None,
    covariance: Array | None = None,
    paired: Array | None = None,
) -> TableFit:
    """Fit the model to tables of one shape: means and sums of squares within rungs (sets, arms, rungs).

    `dropped` rungs of single tables are left out. `e_prior` is a mean and standard deviation of E (0: held).
    `covariance` is that of all errors of an arm's rungs (arms, rungs, rungs), for a table whose noise is
    known. `paired` has for each group of `cells.paired` the sum of squares within rungs of sums over arms of
    the same seed (sets, groups).
    """
    return _Fitter(cells, loss, squares, start, dropped, e_prior, paired).fit(covariance)


class _Fitter:
    def __init__(
        self, cells: Cells, loss: Array, squares: Array, start: Laws, dropped: Mask | None,
        e_prior: tuple[float, float] | None, paired: Array | None,
    ) -> None:  # fmt: skip
        self.cells, self.loss, self.laws = cells, loss, start
        self.sets = len(loss)
        self.kept = np.broadcast_to(cells.mask, loss.shape) & (True if dropped is None else ~dropped)
        self.points = self.kept.sum(axis=(1, 2)).astype(float)
        self.both = self.kept[:, :, :, None] & self.kept[:, :, None, :]
        self.eye = np.eye(cells.x.shape[1])
        self.seeds = seed_variances(cells, squares)
        mean, sd = e_prior or (0.0, np.inf)
        self.e_mean = np.full(self.sets, mean)
        self.e_precision = np.full(self.sets, np.inf if sd == 0 else sd**-2)
        if sd == 0 and not start.own_e:
            self.laws = Laws(self.e_mean, start.log_a, start.gamma)
        self.squares, self.paired = squares, paired
        groups = cells.partners if self.seeds is None else cells.paired
        self.partners: Mask | None = None  # (groups, arms, rungs)
        if groups is not None and groups.max() >= 0:
            self.partners = groups == np.unique(groups[groups >= 0])[:, None, None]

    def linearise(self, variance: Array, scale: Array | float = 1.0) -> None:
        """Fit the laws with these variances, times a scale, and take derivatives there."""
        weights = self.kept / np.where(self.kept, variance, 1.0)
        pull = self.e_precision * scale  # the objective is in units of the scale
        self.laws, _ = fit_laws(self.cells, self.kept, self.loss, weights, self.laws, (self.e_mean, pull))
        self.own = self.laws.jacobian(self.cells.x, self.kept)
        self.residual = np.where(self.kept, self.loss - self.laws.predict(self.cells.x), 0.0)
        self.at_bound = np.zeros(self.sets, bool) if self.laws.own_e else self.laws.e <= 0

    def model(
        self, covariance: Array, log_prior: Array | float, tau: Array, length: float = 0.0, *,
        shared_variance: Array | None = None, scale: Array | None = None, plain: bool = True,
    ) -> NoiseModel:  # fmt: skip
        """One noise model; `shared_variance` is that of the errors that arms share.

        With a `scale`, about the residual variance, the covariance is relative, and what multiplies it is
        estimated. Weights are restricted likelihoods: the plain ones would take the parameters for noise-free
        and prefer too little noise.
        """
        ones = self.kept[..., None].astype(float)
        held = self.at_bound | self.laws.own_e
        # A prior on E is absolute; where the covariance is relative, it is divided by the scale.
        precision = self.e_precision * (1.0 if scale is None else scale)
        prior = np.where(held, np.inf, precision)[:, None]
        shared = ones
        if shared_variance is not None and self.partners is not None:
            columns = np.moveaxis(self.partners, 0, 2) * self.kept[..., None]
            shared = np.concatenate([ones, columns.astype(float)], axis=3)
            drawn = np.broadcast_to(1 / shared_variance, (self.sets, len(self.partners)))
            prior = np.concatenate([prior, drawn], axis=1)
        covariance = np.where(self.both, covariance, self.eye)
        precision_v, inverse, lean, spread, logs = noise_model(self.own, shared, covariance, prior)
        blank, pull = np.zeros(self.sets), np.zeros_like(prior)
        to_mean = self.e_mean - (self.laws.e.mean(axis=1) if self.laws.own_e else self.laws.e)
        pull[:, 0] = np.where(np.isinf(prior[:, 0]), 0.0, prior[:, 0]) * to_mean
        found = NoiseModel(
            self.own, shared, precision_v, inverse, lean, spread, blank, np.ones(self.sets),
            np.full(self.sets, np.inf), tau, length, pull, blank, plain,
        )  # fmt: skip
        _, moved, left = found.steps(self.residual, pull)
        square = (left * self.residual).sum(axis=(1, 2))
        square = np.maximum(square + pull[:, 0] * (to_mean - moved[:, 0]), 0.0)
        parameters = self.own.shape[3] * len(self.cells.x) + (prior[:, 0] == 0)
        if scale is None:
            weight = log_prior - 0.5 * (logs + square)
            return replace(found, log_weight=weight, square=square)
        spare = np.maximum(self.points - parameters, 1e-9)
        floor = (ROUNDING_ERROR * np.abs(self.loss).max()) ** 2
        variance = np.maximum(square / spare, floor)
        weight = log_prior - 0.5 * (logs + spare * np.log(variance))
        return replace(
            found, log_weight=weight, scale=variance, freedom=spare, tau=np.sqrt(variance), square=square
        )

    def fit(self, covariance: Array | None) -> TableFit:
        cells = self.cells
        if self.seeds is not None:
            precise = np.maximum(cells.precision, 1e-300)
            noise = np.where(cells.mask, np.maximum(self.seeds.variance / precise, cells.known), 0.0)
        else:
            noise = np.broadcast_to(np.where(cells.mask, cells.known, 0.0), self.loss.shape)
        if covariance is not None:
            self.linearise(np.einsum("mrr->mr", covariance))
            self.seeds = None
            models = [self.model(covariance[None], 0.0, np.zeros(self.sets))]
        elif (noise[:, cells.mask] > 0).all():
            models = self.with_known_noise(noise)
        else:
            models = self.with_one_variance()
        return TableFit(
            cells, self.kept, self.loss, self.laws, self.residual, tuple(models), self.seeds, noise,
            self.at_bound, self.partners,
        )  # fmt: skip

    def with_one_variance(self) -> list[NoiseModel]:
        """Without replicates: one residual variance, averaged over trends and correlations.

        What the noise is cannot be told from a dozen residuals, and each kind would be wrong alone: with
        independent noise, drifting errors make false words; with correlated noise, clean tables are missed.
        """
        cells = self.cells
        relative = np.where(cells.mask, 1 / np.maximum(cells.precision, 1e-300), 1.0)
        guess = 1e-6
        self.linearise(relative, guess)
        if np.isfinite(self.e_precision).all() and (self.e_precision > 0).any():
            # A prior on E is absolute, so its pull depends on the variance: guess that first.
            square = (self.residual**2 / relative).sum(axis=(1, 2))
            guess = np.maximum(square / np.maximum(self.points - 2 * len(cells.x), 1.0), 1e-18)
            self.linearise(relative, guess)
        scale = np.broadcast_to(guess, self.sets)
        models: list[NoiseModel] = []
        for shape, shape_prior in shapes(cells):
            constant = np.ptp(shape) == 0
            sd = np.where(cells.mask, np.sqrt(relative) * shape, 1.0)
            for length, prior, correlation in correlations(
                cells, PRIOR_ALONE if constant else PRIOR_CHANGING
            ):
                for part, part_prior in ({0.0: 1.0} if self.partners is None else SHARED_PARTS).items():
                    own, shared = self.shared_part(part, correlation, sd)
                    models.append(
                        self.model(
                            own * sd[:, :, None] * sd[:, None, :], np.log(prior * shape_prior * part_prior),
                            np.zeros(self.sets), length, shared_variance=shared, scale=scale,
                            plain=bool(length == 0 and constant and not part),
                        )
                    )  # fmt: skip
        return models if self.partners is None else [self._with_shared_columns(model) for model in models]

    def shared_part(self, part: float, correlation: Array, sd: Array) -> tuple[Array, Array | None]:
        """The correlation of what each arm has alone, and the variance of a part that arms have in common."""
        if not part or self.partners is None:
            return correlation, None
        alone = np.where(self.partners.any(axis=0), np.sqrt(1 - part), 1.0)
        shared = part * np.array([(sd[group] ** 2).mean() for group in self.partners])
        return correlation * alone[:, :, None] * alone[:, None, :], shared

    def _with_shared_columns(self, model: NoiseModel) -> NoiseModel:
        """Pad what is shared to the same size in every model."""
        assert self.partners is not None
        more, none = (0, 1 + len(self.partners) - model.spread.shape[1]), (0, 0)
        if not more[1]:
            return model
        return replace(
            model, shared=np.pad(model.shared, (none, none, none, more)),
            lean=np.pad(model.lean, (none, none, none, more)),
            spread=np.pad(model.spread, (none, more, more)), pull=np.pad(model.pull, (none, more)),
        )  # fmt: skip

    def pairings(self, noise: Array) -> list[tuple[float, Array, Array | None]]:
        """Parts of the seeds' noise that arms share: log weights by their replicates, and what is shared."""
        if self.partners is None or self.paired is None or self.seeds is None:
            return [(0.0, np.zeros(self.sets), None)]
        groups = self.partners.astype(float)
        arms = groups.sum(axis=(1, 2))
        spare = (groups * self.cells.freedom).sum(axis=(1, 2)) / arms
        variance, total, mean = (
            np.einsum("gmr,bmr->bg", groups, part) for part in (self.seeds.variance, self.squares, noise)
        )
        variance, common = variance / arms, self.paired / arms
        logs: list[Array] = []
        for part, prior in PAIRED_PARTS.items():
            rest, whole = 1 - part, 1 + (arms - 1) * part
            size = spare * ((arms - 1) * np.log(rest) + np.log(whole))
            square = ((total - common) / rest + common / whole) / variance
            logs.append(np.log(prior) - 0.5 * (size + square).sum(axis=1))
        weight = np.stack(logs) - special.logsumexp(logs, axis=0)
        return [
            (part, log, part * mean / arms if part else None)
            for part, log in zip(PAIRED_PARTS, weight, strict=True)
            if log.max() > np.log(0.01)
        ]

    def with_known_noise(self, noise: Array) -> list[NoiseModel]:
        """Noise from replicates or as stated, and a lack of fit of unknown size τ.

        The best τ of a short table is often 0, and intervals that took it for known would be too short.
        """
        cells = self.cells
        pairings = self.pairings(noise)
        member = np.zeros(cells.mask.shape)
        if self.partners is not None:
            member = np.asarray(self.partners.any(axis=0), float)
        low, high = self.tau_range(noise)
        models: list[NoiseModel] = []
        for length, prior, correlation in correlations(cells, PRIOR_KNOWN):
            for fraction in (np.arange(TAUS) + 0.5) / TAUS:
                tau = np.exp(low + fraction * (high - low))
                log_prior = np.log(prior) + TAU_PRIOR * np.log(tau)
                for factor in STATED_FACTORS if self.seeds is None else (1.0,):
                    for part, log_weight, shared in pairings:
                        own = factor**2 * (1 - part * member[..., None])
                        covariance = self.covariance(noise, tau, correlation, own)
                        found = self.model(
                            covariance, log_prior + log_weight, tau, length, shared_variance=shared,
                            plain=length == 0 and factor == 1,
                        )  # fmt: skip
                        models.append(replace(found, paired=part))
        return [self._with_shared_columns(model) for model in models] if len(pairings) > 1 else models

    def covariance(
        self, noise: Array, tau: Array, correlation: Array, factor: Array | float = 1.0
    ) -> Array:  # fmt: skip
        """Of each arm's errors: a lack of fit with a standard deviation, and a factor of the noise."""
        return (tau**2)[:, None, None, None] * correlation + factor * (noise[..., None] * self.eye)

    def tau_range(self, noise: Array) -> tuple[Array, Array]:
        """Ends of log τ, outside of which the likelihood of an independent lack of fit is negligible.

        Found coarsely, then again with the laws that are fitted at the τ found: their weights depend on it.
        """
        mask = self.cells.mask
        independent = self.eye[None] + np.zeros((len(mask), 1, 1))
        self.linearise(noise + np.median(noise[:, mask], axis=1)[:, None, None])
        lowest = np.sqrt(noise[:, mask].min(axis=1))
        coarse = value = np.zeros(0)
        for last in (False, True):
            spare = np.maximum(self.points - self.own.shape[1] * 2, 1)
            spread = np.sqrt((self.residual**2).sum(axis=(1, 2)) / spare)
            ends = np.log(0.05 * lowest), np.log(3 * np.maximum(spread, lowest))
            coarse = np.exp(np.linspace(*ends, COARSE_TAUS))
            tried = [
                self.model(self.covariance(noise, tau, independent), TAU_PRIOR * np.log(tau), tau)
                for tau in coarse
            ]
            value = np.stack([model.log_weight for model in tried])
            weight = np.exp(value - value.max(axis=0))
            middle = np.exp((weight * np.log(coarse)).sum(axis=0) / weight.sum(axis=0))
            if not last:
                self.linearise(noise + (middle**2)[:, None, None])
        inside = value > value.max(axis=0) - 6
        step = np.log(coarse[1]) - np.log(coarse[0])
        low = np.log(np.where(inside, coarse, np.inf).min(axis=0)) - 0.5 * step
        high = np.log(np.where(inside, coarse, 0.0).max(axis=0)) + 0.5 * step
        return low, high
