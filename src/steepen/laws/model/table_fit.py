"""A fitted table: the distribution of any contrast, and what changes it.

A contrast is a function of the laws of two arms; its distribution is a mixture over noise models, each of
which is generalised least squares of the linearised laws.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
from scipy import special

from steepen.laws.distributions import f_p_value
from steepen.laws.model.laws import Array, Cells, Index, Laws, Mask


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

    def below(self, limit: Array | float, side: float = 1.0) -> Array:
        """The probability that the contrast is below a limit (with `side` −1: above), for each table."""
        z = side * (limit - self.value) / np.maximum(self.error, 1e-300)
        finite = np.minimum(self.freedom, 1e6)
        each = np.where(self.freedom > 1e6, special.ndtr(z), special.stdtr(finite, z))
        return np.asarray((self.weight * each).sum(axis=0), float)

    def p_value(self) -> Array:
        """Two-sided p-value of zero."""
        return np.minimum(1.0, 2 * np.minimum(self.below(0.0), self.below(0.0, -1.0)))

    def p_outside(self, margin: Array | float) -> Array:
        """p-value of the two one-sided tests that show the contrast within ± `margin`."""
        return np.maximum(self.below(-margin), self.below(margin, -1.0))

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
    groups: Mask | None = None  # rungs that share errors, (groups, arms, rungs)

    @cached_property
    def weight(self) -> Array:
        """The weight of each noise model, (models, sets)."""
        logs = np.stack([model.log_weight for model in self.models])
        found = np.exp(logs - logs.max(axis=0))
        return found / found.sum(axis=0)

    @cached_property
    def _solved(self) -> dict[NoiseModel, tuple[Array, Array, Array]]:
        """The steps of each noise model for the residuals."""
        return {model: model.steps(self.residual, model.pull) for model in self.models}

    def pruned(self) -> TableFit:
        """A single table's fit without noise models of no weight."""
        kept = [model for model, weight in zip(self.models, self.weight[:, 0], strict=True) if weight > 1e-5]
        return replace(self, models=tuple(kept))

    def drifting(self) -> tuple[TableFit, float] | None:
        """A single table's fit with correlated errors only, and their weight; None without such models."""
        drifts = np.array([model.length > 0 for model in self.models])
        models = tuple(model for model in self.models if model.length)
        return (replace(self, models=models), float(self.weight[drifts, 0].sum())) if models else None

    def mixture(self, contrast: Contrast) -> Mixture:
        """The distribution of a contrast."""
        found = [self._under(contrast, model)[:3] for model in self.models]
        value, error, freedom = (np.stack(parts) for parts in zip(*found, strict=True))
        return Mixture(self.weight, value, error, freedom)

    def _under(self, contrast: Contrast, model: NoiseModel) -> tuple[Array, Array, Array, Array]:
        """Value, standard error, degrees of freedom and coefficients of the losses under one noise model."""
        own, shared, _ = self._solved[model]
        r, a = contrast.arms
        value = contrast.value + (contrast.first * own[:, r] + contrast.second * own[:, a]).sum(axis=1)
        value = value + contrast.e * shared[:, 0]
        gradient = np.zeros(own.shape)
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
        if self.seeds is not None:
            # Satterthwaite: which part of the variance is each bin's estimate. A contrast that hangs on one
            # rung has that bin's few degrees of freedom, an average over many rungs has nearly all.
            part = coefficient**2 * self.noise
            if model.paired and self.groups is not None:
                part = part * (1 - model.paired * self.groups.any(axis=0))
                size = self.groups.sum(axis=(1, 2))
                sums, noise = (np.einsum("gmr,bmr->bg", self.groups, a) for a in (coefficient, self.noise))
                shared = model.paired * sums**2 * noise / size**2
                part = part + np.einsum("bg,gmr->bmr", shared, self.groups)
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
        return self._solved[model][2], np.maximum(diagonal, floor)

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
            square = model.square[:, None, None]
            others = np.maximum(square - fall, 1e-12 * square + 1e-300)
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

    def causes(self, arms: tuple[int, int]) -> tuple[Mixture, Mixture]:
        """Δγ and ΔE of an arm, fitted together: an E of its own is an error that all its losses share."""
        slope, (r, a) = slope_contrast(self.laws, arms), arms
        if self.laws.own_e:
            e = np.array([[0.0, 0.0, 1.0]])
            delta = Contrast(arms, self.laws.e[:, a] - self.laws.e[:, r], -e, e)
            return self.mixture(slope), self.mixture(delta)
        direction = np.zeros(self.cells.x.shape)
        direction[a] = self.cells.mask[a]
        return self.with_error(slope, direction)

    def p_one_e(self) -> Array:
        """p-value of one E for all arms against one for each, averaged over the noise models.

        A score test: whether the residuals of each arm pull an E of its own away from the common one.
        """
        arms, sets = len(self.cells.x), len(self.loss)
        found = np.zeros(sets)
        for share, model in zip(self.weight, self.models, strict=True):
            left = self._solved[model][2].sum(axis=2)[:, 1:]
            information = np.zeros((sets, arms - 1, arms - 1))
            for arm in range(1, arms):
                direction = np.zeros(self.loss.shape)
                direction[:, arm] = self.kept[:, arm]
                information[:, arm - 1] = model.steps(direction)[2].sum(axis=2)[:, 1:]
            step = np.einsum("bij,bj->bi", np.linalg.pinv(information, hermitian=True), left)
            fall = np.maximum((left * step).sum(axis=1), 0.0)
            extra = arms - 1.0
            p = cast(Array, special.chdtrc(extra, fall))
            if np.isfinite(model.freedom).all():
                spare = model.freedom - extra
                rest = np.maximum(model.square - fall, 1e-30) / np.maximum(spare, 1e-9)
                p = np.where(spare >= 1, f_p_value(fall / extra / rest, extra, np.maximum(spare, 1.0)), 1.0)
            found = found + share * p
        return found


def _refitted(
    model: NoiseModel, square: Array, log_determinant: Array, fewer: float
) -> tuple[Array, Array, Array | float]:
    """Scale, log weight and change of freedom of a model for other residuals of the first table."""
    square = np.maximum(square, 1e-30)
    if not np.isfinite(model.freedom[0]):
        weight = model.log_weight[0] - 0.5 * (square - model.square[0] + log_determinant)
        return np.ones_like(square), weight, 0.0
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
