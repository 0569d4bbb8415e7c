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

from dataclasses import replace

import numpy as np
from scipy import special

from steepen.laws.distributions import ROUNDING_ERROR
from steepen.laws.model.laws import Array, Cells, Laws, Mask, fit_laws
from steepen.laws.model.noise import (
    COARSE_TAUS,
    PAIRED_PARTS,
    PRIOR_ALONE,
    PRIOR_CHANGING,
    PRIOR_KNOWN,
    SHARED_PARTS,
    STATED_FACTORS,
    TAU_PRIOR,
    TAUS,
    NoiseModel,
    correlations,
    noise_model,
    seed_variances,
    shapes,
)
from steepen.laws.model.table_fit import TableFit


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
        absolute: bool = True, shared_variance: Array | None = None, scale: Array | None = None,
        plain: bool = True,
    ) -> NoiseModel:  # fmt: skip
        """One noise model; `shared_variance` is that of the errors that arms share."""
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
        if absolute:
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
        """Without replicates: one residual variance, averaged over trends and correlations."""
        cells = self.cells
        relative = np.where(cells.mask, 1 / np.maximum(cells.precision, 1e-300), 1.0)
        guess = 1e-6
        self.linearise(relative, guess)
        if np.isfinite(self.e_precision).all() and (self.e_precision > 0).any():
            square = (self.residual**2 / relative).sum(axis=(1, 2))
            guess = np.maximum(square / np.maximum(self.points - 2 * len(cells.x), 1.0), 1e-18)
            self.linearise(relative, guess)
        models: list[NoiseModel] = []
        shares = {0.0: 1.0} if self.partners is None else SHARED_PARTS  # that arms may have in common
        for shape, shape_prior in shapes(cells):
            constant = np.ptp(shape) == 0
            sd = np.where(cells.mask, np.sqrt(relative) * shape, 1.0)
            lengths = PRIOR_ALONE if constant else PRIOR_CHANGING
            for length, prior, correlation in correlations(cells, lengths):
                for part, part_prior in shares.items():
                    own = correlation
                    shared = None
                    if part and self.partners is not None:
                        alone = np.where(self.partners.any(axis=0), np.sqrt(1 - part), 1.0)
                        own = correlation * alone[:, :, None] * alone[:, None, :]
                        shared = part * np.array([(sd[group] ** 2).mean() for group in self.partners])
                    models.append(
                        self.model(
                            own * sd[:, :, None] * sd[:, None, :], np.log(prior * shape_prior * part_prior),
                            np.zeros(self.sets), length, absolute=False, shared_variance=shared,
                            scale=np.broadcast_to(guess, self.sets),
                            plain=bool(length == 0 and constant and not part),
                        )
                    )  # fmt: skip
        return models if self.partners is None else [self._with_shared_columns(model) for model in models]

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
        """Noise from replicates or as stated, and a lack of fit of unknown size."""
        cells, mask = self.cells, self.cells.mask
        replicated = self.seeds is not None
        independent = self.eye[None] + np.zeros((len(cells.x), 1, 1))
        diagonal = noise[..., None] * self.eye

        def covariance(tau: Array, correlation: Array, factor: Array | float = 1.0) -> Array:
            return (tau**2)[:, None, None, None] * correlation + factor * diagonal

        pairings = self.pairings(noise)
        member = np.zeros(mask.shape)
        if self.partners is not None:
            member = np.asarray(self.partners.any(axis=0), float)

        self.linearise(noise + np.median(noise[:, mask], axis=1)[:, None, None])
        lowest = np.sqrt(noise[:, mask].min(axis=1))
        # Where the likelihood of τ lies: coarsely, for an independent lack of fit.
        coarse = value = np.zeros(0)
        for last in (False, True):
            spare = np.maximum(self.points - self.own.shape[1] * 2, 1)
            spread = np.sqrt((self.residual**2).sum(axis=(1, 2)) / spare)
            ends = np.log(0.05 * lowest), np.log(3 * np.maximum(spread, lowest))
            coarse = np.exp(np.linspace(*ends, COARSE_TAUS))
            tried = [self.model(covariance(tau, independent), TAU_PRIOR * np.log(tau), tau) for tau in coarse]
            value = np.stack([model.log_weight for model in tried])
            weight = np.exp(value - value.max(axis=0))
            middle = np.exp((weight * np.log(coarse)).sum(axis=0) / weight.sum(axis=0))
            if not last:
                self.linearise(noise + (middle**2)[:, None, None])
        inside = value > value.max(axis=0) - 6
        step = np.log(coarse[1]) - np.log(coarse[0])
        low = np.log(np.where(inside, coarse, np.inf).min(axis=0)) - 0.5 * step
        high = np.log(np.where(inside, coarse, 0.0).max(axis=0)) + 0.5 * step
        models: list[NoiseModel] = []
        for length, prior, correlation in correlations(cells, PRIOR_KNOWN):
            for fraction in (np.arange(TAUS) + 0.5) / TAUS:
                tau = np.exp(low + fraction * (high - low))
                log_prior = np.log(prior) + TAU_PRIOR * np.log(tau)
                for factor in (1.0,) if replicated else STATED_FACTORS:
                    for part, log_weight, shared in pairings:
                        own = factor**2 * (1 - part * member[..., None])
                        found = self.model(
                            covariance(tau, correlation, own), log_prior + log_weight, tau, length,
                            plain=length == 0 and factor == 1, shared_variance=shared,
                        )  # fmt: skip
                        models.append(replace(found, paired=part))
        return [self._with_shared_columns(model) for model in models] if len(pairings) > 1 else models
