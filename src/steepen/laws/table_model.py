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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy import special

from steepen.laws.distributions import ROUNDING_ERROR, f_p_value

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

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
LENGTHS = (0.0, 0.7, 3.7, 10.0)
PRIOR_ALONE = (0.28, 0.28, 0.16, 0.28)
PRIOR_KNOWN = (0.97, 0.01, 0.01, 0.01)
TRENDS = (1.0, 5.0, 0.3)  # SD at the lowest compute over SD at the highest, without replicates
TREND_PRIOR = (0.7, 0.2, 0.1)
CLUSTER_CORRELATIONS = (0.3, 0.6, 0.9)  # of rungs that share a training run
SHARED_PARTS = (0.0, 0.5, 0.9)  # of the noise, by rungs of different arms that match
SHARED_PRIOR = (0.8, 0.1, 0.1)
STATED_FACTORS = (1.0, 0.5)  # of a stated noise, which may be larger than the scatter


@dataclass(frozen=True, eq=False)
class Cells:
    """Rungs of all arms, (arms, rungs) padded: log compute, which exist, and how well each mean is known.

    `precision` is the number of seeds, or the sum of the rows' weights, `freedom` the seeds less one. `known`
    is a stated variance of the mean, 0 for none. `clusters` numbers rungs of an arm that share a training
    run, `partners` rungs of different arms that have the same seeds; −1: none.
    """

    x: Array
    mask: Mask
    precision: Array
    freedom: Array
    known: Array
    clusters: Index | None = None
    partners: Index | None = None


@dataclass(frozen=True, eq=False)
class Laws:
    """Laws of each table: log A and γ (sets, arms), and E: (sets,), or (sets, arms) if each has its own."""

    e: Array
    log_a: Array
    gamma: Array

    @property
    def own_e(self) -> bool:
        """Whether every arm has its own E."""
        return self.e.ndim == 2

    def reducible(self, x: Array) -> Array:
        """The loss above E at log compute x (arms, rungs)."""
        return np.exp(np.clip(self.log_a[:, :, None] - self.gamma[:, :, None] * x, -60.0, 60.0))

    def predict(self, x: Array) -> Array:
        """The loss at log compute x (arms, rungs)."""
        return (self.e[:, :, None] if self.own_e else self.e[:, None, None]) + self.reducible(x)

    def jacobian(self, x: Array, kept: Mask) -> Array:
        """Derivatives by each arm's log A and γ, and its E where it has its own."""
        reducible = self.reducible(x) * kept
        own_e = [np.broadcast_to(kept.astype(float), reducible.shape)] if self.own_e else []
        return np.stack([reducible, -x * reducible, *own_e], axis=3)


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

    def steps(self, data: Array, pull: Array | float = 0.0) -> tuple[Array, Array, Array]:
        """Steps of the arms' parameters and of what is shared, and V⁻¹ times the residual (sets, arms,
        rungs).

        `pull` is the prior precision of what is shared times the distance to its prior mean.
        """
        weighted = np.einsum("bmrs,bms->bmr", self.precision, data)
        right = np.einsum("bmri,bmr->bmi", self.own, weighted)
        alone = np.einsum("bmij,bmj->bmi", self.inverse, right)
        rest = np.einsum("bmrg,bmr->bg", self.shared, weighted) - np.einsum("bmig,bmi->bg", self.lean, right)
        shared = np.einsum("bgh,bh->bg", self.spread, rest + pull)
        own = alone - np.einsum("bmig,bg->bmi", self.lean, shared)
        left = (
            data - np.einsum("bmri,bmi->bmr", self.own, own) - np.einsum("bmrg,bg->bmr", self.shared, shared)
        )
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
class Contrast:
    """A function of the laws of two arms (reference, arm): its value, and its gradient by their parameters.

    `e` is the derivative by a shared E.
    """

    arms: tuple[int, int]
    value: Array
    first: Array
    second: Array
    e: float = 0.0


def slope_contrast(laws: Laws, arms: tuple[int, int]) -> Contrast:
    """Δγ, arm less reference."""
    one = np.zeros((len(laws.gamma), 3 if laws.own_e else 2))
    one[:, 1] = 1.0
    return Contrast(arms, laws.gamma[:, arms[1]] - laws.gamma[:, arms[0]], -one, one)


def parameter_contrast(laws: Laws, arm: int, index: int) -> Contrast:
    """One parameter of an arm's law: log A (0), γ (1) or E (2)."""
    zero = np.zeros((len(laws.gamma), 3 if laws.own_e else 2))
    one = zero.copy()
    value = (laws.log_a, laws.gamma, laws.e)[index]
    shared_e = index == 2 and not laws.own_e
    if not shared_e:
        one[:, index] = 1.0
    return Contrast((arm, arm), value if shared_e else value[:, arm], zero, one, float(shared_e))


def multiplier_contrast(laws: Laws, arms: tuple[int, int], at: Array, weights: Array) -> Contrast:
    """A weighted sum of log multipliers at the reference's log computes `at`."""
    r, a = arms
    x = at[None, :]
    gamma = np.where(np.abs(laws.gamma[:, a]) < 1e-6, 1e-6, laws.gamma[:, a])[:, None]
    reducible = np.exp(np.clip(laws.log_a[:, r : r + 1] - laws.gamma[:, r : r + 1] * x, -60, 60))
    gap = laws.e[:, r : r + 1] - laws.e[:, a : a + 1] if laws.own_e else 0.0
    above = np.maximum(reducible + gap, 1e-3 * reducible)  # the arm's reducible loss at the reference's loss
    needed = (laws.log_a[:, a : a + 1] - np.log(above)) / gamma
    share = reducible / above / gamma
    first, second = [share, -x * share], [-1 / gamma + 0 * x, needed / gamma]
    if laws.own_e:
        first, second = [*first, 1 / above / gamma], [*second, -1 / above / gamma]
    by_first, by_second = (np.stack([part @ weights for part in parts], axis=1) for parts in (first, second))
    return Contrast(arms, (x - needed) @ weights, by_first, by_second)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The distribution of a contrast: Student's t under each noise model (models, sets), with weights."""

    weight: Array
    value: Array
    error: Array
    freedom: Array

    def below(self, limit: Array | float) -> Array:
        """The probability that the contrast is below a limit, for each table."""
        z = (limit - self.value) / np.maximum(self.error, 1e-300)
        finite = np.minimum(self.freedom, 1e6)
        each = np.where(self.freedom > 1e6, special.ndtr(z), special.stdtr(finite, z))
        return np.asarray((self.weight * each).sum(axis=0), float)

    def p_value(self) -> Array:
        """Two-sided p-value of zero."""
        below = self.below(0.0)
        return np.minimum(1.0, 2 * np.minimum(below, 1 - below))

    def p_outside(self, margin: Array | float) -> Array:
        """p-value of the two one-sided tests that show the contrast within ± `margin`."""
        return np.maximum(self.below(-margin), 1 - self.below(margin))

    @property
    def mean(self) -> Array:
        """The estimate."""
        return (self.weight * self.value).sum(axis=0)

    @property
    def sd(self) -> Array:
        """The standard error."""
        return np.sqrt((self.weight * (self.error**2 + (self.value - self.mean) ** 2)).sum(axis=0))

    def interval(self, confidence: float) -> tuple[Array, Array]:
        """The interval between equal tails."""
        tail = (1 - confidence) / 2
        return self._quantile(tail), self._quantile(1 - tail)

    def _quantile(self, probability: float) -> Array:
        reach = 100 * self.error.max(axis=0) + np.abs(self.value - self.mean).max(axis=0)
        low, high = self.mean - reach, self.mean + reach
        for _ in range(60):
            middle = 0.5 * (low + high)
            under = self.below(middle) < probability
            low, high = np.where(under, middle, low), np.where(under, high, middle)
        return 0.5 * (low + high)


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
    steps = [
        np.diff(np.sort(row[own])) for row, own in zip(cells.x, cells.mask, strict=True) if own.sum() > 1
    ]
    width = 0.5 * float(np.median(np.concatenate(steps).astype(float))) if steps else 1.0
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


@dataclass(frozen=True, eq=False)
class TableFit:
    """The laws of each table, and the noise models that contrasts are averaged over."""

    cells: Cells
    kept: Mask
    loss: Array
    laws: Laws
    residual: Array
    models: tuple[NoiseModel, ...]
    seeds: SeedVariances | None
    noise: Array  # variance of each rung's mean without lack of fit, (sets, arms, rungs); 0: not known
    e_at_bound: Mask = field(default_factory=lambda: np.zeros(0, bool))

    @cached_property
    def weight(self) -> Array:
        """The weight of each noise model, (models, sets)."""
        logs = np.stack([model.log_weight for model in self.models])
        found = np.exp(logs - logs.max(axis=0))
        return found / found.sum(axis=0)

    @cached_property
    def _solutions(self) -> dict[int, tuple[Array, Array, Array]]:
        return {}

    def _solved(self, model: NoiseModel) -> tuple[Array, Array, Array]:
        """The steps of a noise model for the residuals."""
        if id(model) not in self._solutions:
            self._solutions[id(model)] = model.steps(self.residual, model.pull)
        return self._solutions[id(model)]

    def pruned(self) -> TableFit:
        """A single table's fit without noise models of no weight."""
        kept = [model for model, weight in zip(self.models, self.weight[:, 0], strict=True) if weight > 1e-5]
        return replace(self, models=tuple(kept))

    def mixture(self, contrast: Contrast) -> Mixture:
        """The distribution of a contrast."""
        found = [self._under(contrast, model)[:3] for model in self.models]
        value, error, freedom = (np.stack(parts) for parts in zip(*found, strict=True))
        return Mixture(self.weight, value, error, freedom)

    def _under(self, contrast: Contrast, model: NoiseModel) -> tuple[Array, Array, Array, Array]:
        """Value, standard error, degrees of freedom and coefficients of the losses under one noise model."""
        own, shared, _ = self._solved(model)
        r, a = contrast.arms
        value = contrast.value + (contrast.first * own[:, r] + contrast.second * own[:, a]).sum(axis=1)
        value = value + contrast.e * shared[:, 0]
        gradient = np.zeros((*own.shape[:2], own.shape[2]))
        gradient[:, r] += contrast.first
        gradient[:, a] += contrast.second
        u = -np.einsum("bmig,bmi->bg", model.lean, gradient)
        u[:, 0] += contrast.e
        alone = np.einsum("bmij,bmj->bmi", model.inverse, gradient)
        common = np.einsum("bgh,bh->bg", model.spread, u)
        variance = np.maximum((alone * gradient).sum(axis=(1, 2)) + (common * u).sum(axis=1), 0.0)
        step = alone - np.einsum("bmig,bg->bmi", model.lean, common)
        fitted = np.einsum("bmri,bmi->bmr", model.own, step) + np.einsum("bmrg,bg->bmr", model.shared, common)
        coefficient = np.einsum("bmrs,bms->bmr", model.precision, fitted)
        freedom = model.freedom
        if self.seeds is not None:  # Satterthwaite: which part of the variance is each bin's estimate
            part = coefficient**2 * self.noise
            uncertain = np.zeros(len(variance))
            for b in range(self.seeds.freedom.shape[1]):
                share = (part * (self.seeds.bins == b)).sum(axis=(1, 2))
                uncertain = uncertain + share**2 / self.seeds.freedom[:, b]
            freedom = np.clip(variance**2 / np.maximum(uncertain, 1e-300), 1.0, 1e9)
        return value, np.sqrt(variance * model.scale), freedom, coefficient

    def deletions(self, model: NoiseModel) -> tuple[Array, Array]:
        """Pe and the diagonal of P for every rung: what is needed to leave each out."""
        weighted = model.precision @ model.own
        rest = model.precision @ model.shared - weighted @ model.lean
        diagonal = (
            np.einsum("bmrr->bmr", model.precision)
            - np.einsum("bmri,bmij,bmrj->bmr", weighted, model.inverse, weighted, optimize=True)
            - np.einsum("bmrg,bgh,bmrh->bmr", rest, model.spread, rest, optimize=True)
        )
        floor = 1e-9 * np.einsum("bmrr->bmr", model.precision)
        return self._solved(model)[2], np.maximum(diagonal, floor)

    def outliers(self) -> tuple[Array, Array]:
        """p-value of each rung being on the law of the others, and its distance from it (sets, arms, rungs).

        The t-test of leaving the rung out, with the scale of the others, corrected for the number of rungs.
        Noise is independent here: correlated models would explain a bad rung at the end of a ladder.
        """
        plain = [k for k, model in enumerate(self.models) if model.plain]
        weight = self.weight[plain] / np.maximum(self.weight[plain].sum(axis=0), 1e-300)
        points = self.kept.sum(axis=(1, 2)).astype(float)
        q = self.models[0].own.shape[3]
        spare = np.maximum(points - q * len(self.cells.x) - 2, 1.0)[:, None, None]
        p, distance = np.zeros(self.loss.shape), np.zeros(self.loss.shape)
        for share, k in zip(weight, plain, strict=True):
            model = self.models[k]
            left, diagonal = self.deletions(model)
            fall = left**2 / diagonal
            others = np.maximum(
                model.square[:, None, None] - fall, 1e-12 * model.square[:, None, None] + 1e-300
            )
            t = np.sqrt(fall * spare / others)
            p += share[:, None, None] * 2 * special.stdtr(spare, -t)
            distance += share[:, None, None] * left / diagonal
        return np.where(self.kept, np.minimum(1.0, p * points[:, None, None]), 1.0), distance

    def left_out(self, contrast: Contrast) -> Mixture:
        """The contrast of the first table without each of its rungs, (models, rungs of all arms)."""
        parts: list[tuple[Array, ...]] = []
        logs: list[Array] = []
        for model in self.models:
            value, error, freedom, coefficient = self._under(contrast, model)
            left, diagonal = (part[0].ravel() for part in self.deletions(model))
            c = coefficient[0].ravel()
            fall = left**2 / diagonal
            scale, weight, spare = _refitted(model, model.square[0] - fall, np.log(diagonal), 1.0)
            variance = error[0] ** 2 / model.scale[0] + c**2 / diagonal
            parts.append(
                (value[0] - c * left / diagonal, np.sqrt(variance * scale), freedom[0] + 0 * c + spare)
            )
            logs.append(weight)
        return _mixture(logs, parts)

    def shifted(self, contrast: Contrast, direction: Array, sizes: Array) -> Mixture:
        """The contrast of the first table if its losses were lower by sizes × direction (arms, rungs)."""
        parts: list[tuple[Array, ...]] = []
        logs: list[Array] = []
        kept = direction * self.kept[0]
        for model in self.models:
            value, error, freedom, coefficient = self._under(contrast, model)
            projected = model.steps(np.broadcast_to(kept, self.residual.shape))[2][0]
            first, second = float((projected * self.residual[0]).sum()), float((projected * kept).sum())
            square = model.square[0] - 2 * sizes * first + sizes**2 * second
            scale, weight, _ = _refitted(model, square, 0.0 * sizes, 0.0)
            moved = value[0] - sizes * float((coefficient[0] * kept).sum())
            error = error[0] / np.sqrt(model.scale[0])
            parts.append((moved, error * np.sqrt(scale), freedom[0] + 0 * sizes))
            logs.append(weight)
        return _mixture(logs, parts)

    def with_error(self, contrast: Contrast, direction: Array) -> tuple[Mixture, Mixture]:
        """The contrast, and the size of an error in the given direction (arms, rungs), if it is fitted too.

        The direction is a further column of the linearised model: all rungs of an arm for its own E, one rung
        to leave that rung out.
        """
        changed, sizes = list[tuple[Array, ...]](), list[tuple[Array, ...]]()
        kept = direction * self.kept
        for model in self.models:
            value, error, freedom, coefficient = self._under(contrast, model)
            projected = model.steps(np.broadcast_to(kept, self.residual.shape))[2]
            information = np.maximum((projected * kept).sum(axis=(1, 2)), 1e-300)
            size = (projected * self.residual).sum(axis=(1, 2)) / information
            moved = (coefficient * kept).sum(axis=(1, 2))
            total = np.sqrt(error**2 + moved**2 / information * model.scale)
            changed.append((value - moved * size, total, freedom))
            sizes.append((size, np.sqrt(model.scale / information), freedom))
        logs = [model.log_weight for model in self.models]
        return _mixture(logs, changed), _mixture(logs, sizes)

    def p_one_e(self) -> Array:
        """p-value of one E for all arms against one for each, averaged over the noise models."""
        arms, sets = len(self.cells.x), len(self.loss)
        found = np.zeros(sets)
        for share, model in zip(self.weight, self.models, strict=True):
            left = self._solved(model)[2].sum(axis=2)[:, 1:]
            information = np.zeros((sets, arms - 1, arms - 1))
            for arm in range(1, arms):
                direction = np.zeros(self.loss.shape)
                direction[:, arm] = self.kept[:, arm]
                information[:, arm - 1] = model.steps(direction)[2].sum(axis=2)[:, 1:]
            step = np.einsum("bij,bj->bi", np.linalg.pinv(information, hermitian=True), left)
            fall = np.maximum((left * step).sum(axis=1), 0.0)
            extra = arms - 1.0
            if np.isfinite(model.freedom).all():
                spare = model.freedom - extra
                rest = np.maximum(model.square - fall, 1e-30) / np.maximum(spare, 1e-9)
                p = np.where(spare >= 1, f_p_value(fall / extra / rest, extra, np.maximum(spare, 1.0)), 1.0)
            else:
                p = cast(Array, special.chdtrc(extra, fall))
            found = found + share * p
        return found


def _refitted(
    model: NoiseModel, square: Array, log_determinant: Array, fewer: float
) -> tuple[Array, Array, Array | float]:
    """Scale, log weight and change of freedom of a model for other residuals of the first table."""
    square = np.maximum(square, 1e-30)
    if not np.isfinite(model.freedom[0]):
        return (
            np.ones_like(square),
            model.log_weight[0] - 0.5 * (square - model.square[0] + log_determinant),
            0.0,
        )
    spare = max(float(model.freedom[0]) - fewer, 1e-9)
    scale = square / spare
    before = float(model.freedom[0]) * np.log(model.scale[0])
    weight = model.log_weight[0] - 0.5 * (log_determinant + spare * np.log(scale) - before)
    return scale, weight, -fewer


def _mixture(logs: list[Array], parts: list[tuple[Array, ...]]) -> Mixture:
    stacked = np.stack(logs)
    weight = np.exp(stacked - stacked.max(axis=0))
    columns = (np.stack(part) for part in zip(*parts, strict=True))
    return Mixture(weight / weight.sum(axis=0), *columns)


def fit_laws(
    cells: Cells, kept: Mask, loss: Array, weights: Array, start: Laws, prior: tuple[Array, Array]
) -> tuple[Laws, Array]:
    """Weighted least squares of every table by damped Gauss–Newton steps; the laws and their objectives.

    `prior` are the mean and precision of a shared E (infinite: held).
    """
    mean, precision = prior
    held, pull = np.isinf(precision), np.where(np.isinf(precision), 0.0, precision)
    laws, x = start, cells.x
    top = np.where(kept, loss, 0.0).max(axis=(1, 2))

    def objective(at: Laws) -> Array:
        found = (weights * np.where(kept, loss - at.predict(x), 0.0) ** 2).sum(axis=(1, 2))
        return found if at.own_e else found + pull * (at.e - mean) ** 2

    best, damping = objective(laws), np.full(len(loss), 1e-3)
    for _ in range(200):
        own = laws.jacobian(x, kept)
        residual = np.where(kept, loss - laws.predict(x), 0.0)
        weighted = own * weights[..., None]
        normal, right = np.swapaxes(own, 2, 3) @ weighted, np.einsum("bmri,bmr->bmi", weighted, residual)
        diagonal = np.einsum("bmii->bmi", normal)
        ridge = np.where(diagonal > 0, diagonal * damping[:, None, None], 1.0)
        inverse = np.linalg.inv(normal + ridge[..., None] * np.eye(own.shape[3]))
        step = np.einsum("bmij,bmj->bmi", inverse, right)
        if laws.own_e:
            e = np.clip(laws.e + step[:, :, 2], 0.0, top[:, None])
        else:
            mixed = weighted.sum(axis=2)
            lean = np.einsum("bmij,bmj->bmi", inverse, mixed)
            total = weights.sum(axis=(1, 2)) + pull
            schur = total * (1 + damping) - (mixed * lean).sum(axis=(1, 2))
            towards = (weights * residual).sum(axis=(1, 2)) - (mixed * step).sum(axis=(1, 2))
            move = (towards + pull * (mean - laws.e)) / np.maximum(schur, 1e-300)
            e = np.where(held, laws.e, np.clip(laws.e + move, 0.0, top))
            step = step - lean * (e - laws.e)[:, None, None]
        moved = Laws(
            e, np.clip(laws.log_a + step[:, :, 0], -40, 40), np.clip(laws.gamma + step[:, :, 1], -1, 5)
        )
        value = objective(moved)
        better = value <= best
        small = np.where(better, best - value, 0.0) <= 1e-10 * best
        pick = better[:, None]
        laws = Laws(
            np.where(pick if laws.own_e else better, moved.e, laws.e),
            np.where(pick, moved.log_a, laws.log_a),
            np.where(pick, moved.gamma, laws.gamma),
        )
        best = np.where(better, value, best)
        done = (better & small & (damping < 1e-2)) | (damping > 1e9)
        damping = np.where(better, damping * 0.1, damping * 8).clip(1e-10, 1e10)
        if done.all():
            break
    return laws, best


def starting_laws(cells: Cells, loss: Array, own_e: bool = False, e: float | None = None) -> Laws:
    """The best of several fits of a single table (1, arms, rungs), for the start of others."""
    fractions = np.array([0.0, 0.3, 0.6, 0.8, 0.93] if e is None else [0.0])
    mask = cells.mask
    lowest = np.where(mask, loss[0], np.inf).min(axis=1)
    begin = np.outer(fractions, lowest if own_e else np.full(len(lowest), lowest.min()))
    if e is not None:
        begin = np.full((1, len(lowest)), min(e, 0.999 * float(lowest.min())))
    rest = np.log(np.where(mask, np.maximum(loss - begin[:, :, None], 1e-9), 1.0))
    weight = mask / mask.sum(axis=1, keepdims=True)
    x0 = (weight * cells.x).sum(axis=1, keepdims=True)
    across = (weight * (cells.x - x0) ** 2).sum(axis=1)
    gamma = -(weight * (cells.x - x0) * rest).sum(axis=2) / np.maximum(across, 1e-12)
    log_a = (weight * rest).sum(axis=2) + gamma * x0[:, 0]
    start = Laws(begin if own_e else begin[:, 0], log_a, gamma)
    many = np.repeat(loss, len(begin), axis=0)
    kept = np.broadcast_to(mask, many.shape)
    held = np.full(len(begin), 0.0 if e is None else np.inf)
    laws, value = fit_laws(cells, kept, many, kept * cells.precision, start, (begin[:, 0], held))
    best = int(np.argmin(value))
    return Laws(laws.e[best : best + 1], laws.log_a[best : best + 1], laws.gamma[best : best + 1])


def correlations(cells: Cells, prior: Sequence[float]) -> list[tuple[float, float, Array]]:
    """Length, prior and correlation (arms, rungs, rungs) of every lack of fit that is allowed for."""
    size = cells.x.shape[1]
    apart = np.abs(cells.x[:, :, None] - cells.x[:, None, :])
    found: list[tuple[float, float, Array]] = []
    for length, weight in zip(LENGTHS, prior, strict=True):
        found.append((length, weight, np.exp(-apart / length) if length else np.eye(size) + 0 * apart))
    if cells.clusters is None:
        return found
    same = (cells.clusters[:, :, None] == cells.clusters[:, None, :]) & (cells.clusters >= 0)[:, :, None]
    same &= same.sum(axis=2, keepdims=True) > 1
    several = same.any(axis=2)
    clustered: list[tuple[float, float, Array]] = []
    for rho in CLUSTER_CORRELATIONS:
        alone = np.where(several, np.sqrt(1 - rho), 1.0)
        for length, weight, correlation in found:
            clustered.append(
                (length, weight, rho * same + correlation * alone[:, :, None] * alone[:, None, :])
            )
    return clustered


def fit_tables(
    cells: Cells,
    loss: Array,
    squares: Array,
    start: Laws,
    *,
    dropped: Mask | None = None,
    e_prior: tuple[float, float] | None = None,
    covariance: Array | None = None,
) -> TableFit:
    """Fit the model to tables of one shape: means and sums of squares within rungs (sets, arms, rungs).

    `dropped` rungs of single tables are left out. `e_prior` is a mean and standard deviation of E (0: held).
    `covariance` is that of all errors of an arm's rungs (arms, rungs, rungs), for a table whose noise is
    known.
    """
    return _Fitter(cells, loss, squares, start, dropped, e_prior).fit(covariance)


class _Fitter:
    def __init__(
        self,
        cells: Cells,
        loss: Array,
        squares: Array,
        start: Laws,
        dropped: Mask | None,
        e_prior: tuple[float, float] | None,
    ) -> None:
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
        groups = cells.partners
        self.partners = (
            None
            if groups is None or groups.max() < 0
            else groups == np.unique(groups[groups >= 0])[:, None, None]
        )  # (groups, arms, rungs)

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
        """One noise model; `shared_variance` is that of the errors that arms share (groups,)."""
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
        blank = np.zeros(self.sets)
        found = NoiseModel(
            self.own, shared, precision_v, inverse, lean, spread, blank, np.ones(self.sets),
            np.full(self.sets, np.inf), tau, length, self.pull(prior), blank, plain,
        )  # fmt: skip
        _, moved, left = found.steps(self.residual, found.pull)
        square = (left * self.residual).sum(axis=(1, 2))
        square = np.maximum(square + found.pull[:, 0] * (self.e_mean - self._e - moved[:, 0]), 0.0)
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

    def pull(self, prior: Array) -> Array:
        found = np.zeros_like(prior)
        finite = np.where(np.isinf(prior[:, 0]), 0.0, prior[:, 0])
        found[:, 0] = finite * (self.e_mean - self._e)
        return found

    @property
    def _e(self) -> Array:
        return self.laws.e.mean(axis=1) if self.laws.own_e else self.laws.e

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
            self.at_bound,
        )  # fmt: skip

    def shares(self) -> list[tuple[float, float]]:
        """Parts of the noise that arms may share, with their priors."""
        parts = zip(SHARED_PARTS, SHARED_PRIOR, strict=True)
        return [(0.0, 1.0)] if self.partners is None else list(parts)

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
        x = cells.x[cells.mask]
        place = (cells.x - x.min()) / max(float(np.ptp(x)), 1e-12)
        models: list[NoiseModel] = []
        for trend, trend_prior in zip(TRENDS, TREND_PRIOR, strict=True):
            sd = np.sqrt(relative) * np.where(cells.mask, trend ** (0.5 - place), 1.0)
            for length, prior, correlation in correlations(cells, PRIOR_ALONE):
                for part, part_prior in self.shares():
                    own = correlation
                    shared = None
                    if part and self.partners is not None:
                        alone = np.where(self.partners.any(axis=0), np.sqrt(1 - part), 1.0)
                        own = correlation * alone[:, :, None] * alone[:, None, :]
                        shared = part * np.array([(sd[group] ** 2).mean() for group in self.partners])
                    models.append(
                        self.model(
                            own * sd[:, :, None] * sd[:, None, :], np.log(prior * trend_prior * part_prior),
                            np.zeros(self.sets), length, absolute=False, shared_variance=shared,
                            scale=np.broadcast_to(guess, self.sets),
                            plain=length == 0 and trend == 1 and not part,
                        )
                    )  # fmt: skip
        if len(self.shares()) > 1:
            models = [self._with_shared_columns(model) for model in models]
        return models

    def _with_shared_columns(self, model: NoiseModel) -> NoiseModel:
        """Pad what is shared to the same size in every model."""
        assert self.partners is not None
        missing = 1 + len(self.partners) - model.spread.shape[1]
        if not missing:
            return model
        return replace(
            model,
            shared=np.pad(model.shared, ((0, 0), (0, 0), (0, 0), (0, missing))),
            lean=np.pad(model.lean, ((0, 0), (0, 0), (0, 0), (0, missing))),
            spread=np.pad(model.spread, ((0, 0), (0, missing), (0, missing))),
            pull=np.pad(model.pull, ((0, 0), (0, missing))),
        )

    def with_known_noise(self, noise: Array) -> list[NoiseModel]:
        """Noise from replicates or as stated, and a lack of fit of unknown size."""
        cells, mask = self.cells, self.cells.mask
        replicated = self.seeds is not None
        independent = self.eye[None] + np.zeros((len(cells.x), 1, 1))
        diagonal = noise[..., None] * self.eye

        def covariance(tau: Array, correlation: Array, factor: float = 1.0) -> Array:
            return (tau**2)[:, None, None, None] * correlation + factor * diagonal

        self.linearise(noise + np.median(noise[:, mask], axis=1)[:, None, None])
        lowest = np.sqrt(noise[:, mask].min(axis=1))
        # Where the likelihood of τ lies: coarsely, for an independent lack of fit.
        coarse = value = np.zeros(0)
        for last in (False, True):
            spread = np.sqrt(
                (self.residual**2).sum(axis=(1, 2)) / np.maximum(self.points - self.own.shape[1] * 2, 1)
            )
            ends = np.log(0.05 * lowest), np.log(3 * np.maximum(spread, lowest))
            coarse = np.exp(np.linspace(*ends, COARSE_TAUS))
            value = np.stack(
                [
                    self.model(covariance(tau, independent), TAU_PRIOR * np.log(tau), tau).log_weight
                    for tau in coarse
                ]
            )
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
                    models.append(
                        self.model(
                            covariance(tau, correlation, factor**2), log_prior, tau, length,
                            plain=length == 0 and factor == 1,
                        )
                    )  # fmt: skip
        return models
