"""The laws of a table's arms, and their weighted least squares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steepen.utils.arrays import Array, Index, Mask


@dataclass(frozen=True, eq=False)
class Cells:
    """Rungs of all arms, (arms, rungs) padded: log compute, which exist, and how well each mean is known.

    `precision` is the number of seeds, or the sum of the rows' weights, `freedom` the seeds less one. `known`
    is a stated variance of the mean, 0 for none. `clusters` numbers rungs of an arm that share a training
    run, `partners` rungs of different arms that may share errors, `paired` those whose replicates have the
    same seeds; −1: none.
    """

    x: Array
    mask: Mask
    precision: Array
    freedom: Array
    known: Array
    clusters: Index | None = None
    partners: Index | None = None
    paired: Index | None = None


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
        log_a, gamma = (
            np.clip(laws.log_a + step[:, :, 0], -40, 40),
            np.clip(laws.gamma + step[:, :, 1], -1, 5),
        )
        moved = Laws(e, log_a, gamma)
        value = objective(moved)
        better = value <= best
        small = np.where(better, best - value, 0.0) <= 1e-10 * best
        pick = better[:, None]
        e = np.where(pick if laws.own_e else better, e, laws.e)
        laws = Laws(e, np.where(pick, log_a, laws.log_a), np.where(pick, gamma, laws.gamma))
        best = np.where(better, value, best)
        done = (better & small & (damping < 1e-2)) | (damping > 1e9)
        damping = np.where(better, damping * 0.1, damping * 8).clip(1e-10, 1e10)
        if done.all():
            break
    return laws, best


def starting_laws(cells: Cells, loss: Array, own_e: bool = False, e: float | None = None) -> Laws:
    """The best of several fits of each table, all rungs independent."""
    fractions = np.array([0.0, 0.3, 0.6, 0.8, 0.93] if e is None else [0.0])
    mask, sets, starts = cells.mask, len(loss), len(fractions)
    lowest = np.where(mask, loss, np.inf).min(axis=2)
    if not own_e:
        lowest = np.broadcast_to(lowest.min(axis=1, keepdims=True), lowest.shape)
    begin = (fractions[:, None] * lowest[:, None, :]).reshape(sets * starts, -1)
    if e is not None:
        begin = np.minimum(e, 0.999 * lowest)
    many = np.repeat(loss, starts, axis=0)
    rest = np.log(np.where(mask, np.maximum(many - begin[:, :, None], 1e-9), 1.0))
    weight = mask / mask.sum(axis=1, keepdims=True)
    x0 = (weight * cells.x).sum(axis=1, keepdims=True)
    across = (weight * (cells.x - x0) ** 2).sum(axis=1)
    gamma = -(weight * (cells.x - x0) * rest).sum(axis=2) / np.maximum(across, 1e-12)
    log_a = (weight * rest).sum(axis=2) + gamma * x0[:, 0]
    start = Laws(begin if own_e else begin[:, 0], log_a, gamma)
    kept = np.broadcast_to(mask, many.shape)
    held = np.full(len(begin), 0.0 if e is None else np.inf)
    laws, value = fit_laws(cells, kept, many, kept * cells.precision, start, (begin[:, 0], held))
    best = value.reshape(sets, starts).argmin(axis=1) + starts * np.arange(sets)
    return Laws(laws.e[best], laws.log_a[best], laws.gamma[best])
