"""The rungs of a table as arrays, the laws of its arms, and their weighted least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steepen.laws.ladder import MERGE_TOLERANCE, Ladder
from steepen.utils.arrays import Array, Index, Mask

MIN_PARTNERS = 6  # rungs that match, for errors that arms share
MAX_PARTNERED = 400  # rungs of a table in which such errors are looked for


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


def to_cells(
    ladders: Sequence[Ladder], c0: float, noise: float | None
) -> tuple[Cells, Array, Array, Array | None]:
    """The rungs of ladders as padded arrays: cells, losses and sums of squares of seeds (1, arms, rungs).

    The last is that of sums over arms of the same seed (`fit_tables`).
    """
    size = max(len(ladder.flops) for ladder in ladders)
    shape = (len(ladders), size)
    x, loss, squares, known = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    precision, freedom, mask = np.ones(shape), np.zeros(shape), np.zeros(shape, bool)
    clusters = np.full(shape, -1)
    for i, ladder in enumerate(ladders):
        own = slice(0, len(ladder.flops))
        x[i, own], loss[i, own], mask[i, own] = np.log(ladder.flops / c0), ladder.loss, True
        precision[i, own], freedom[i, own] = ladder.weights, ladder.seeds - 1
        # In units of a typical run's noise, as the precisions are, so that rungs can be pooled.
        per_seed = ladder.weights / ladder.seeds
        squares[i, own] = per_seed * [float(((runs - runs.mean()) ** 2).sum()) for runs in ladder.runs]
        stated = 0.0 if noise is None else noise**2 / ladder.seeds
        known[i, own] = np.maximum(ladder.known, stated)
        if ladder.clusters:
            numbers = {name: k for k, name in enumerate(dict.fromkeys(ladder.clusters))}
            clusters[i, own] = [numbers[name] for name in ladder.clusters]
    shared_runs = any(len(set(ladder.clusters)) < len(ladder.clusters) for ladder in ladders)
    matches = match_rungs(ladders, shape)
    enough = matches is not None and len(np.unique(matches[matches >= 0])) >= MIN_PARTNERS
    paired, sums = pair_seeds(ladders, matches)
    cells = Cells(
        x, mask, precision, freedom, known, clusters if shared_runs else None, matches if enough else None,
        paired,
    )  # fmt: skip
    return cells, loss[None], squares[None], sums


def match_rungs(ladders: Sequence[Ladder], shape: tuple[int, int]) -> Index | None:
    """Numbers of rungs of different arms that may share an error: at the same compute, else in order.

    Runs with the same seed and data order share noise, and a law that bends misses all arms alike.
    """
    if len(ladders) < 2 or sum(len(ladder.flops) for ladder in ladders) > MAX_PARTNERED:
        return None
    first = ladders[0]
    found = np.full(shape, -1)
    found[0, : len(first.flops)] = np.arange(len(first.flops))
    for i, ladder in enumerate(ladders[1:], start=1):
        apart = np.abs(np.log(ladder.flops[:, None] / first.flops))
        near = apart.min(axis=1) < MERGE_TOLERANCE
        if near.any():
            found[i, : len(near)] = np.where(near, apart.argmin(axis=1), -1)
        elif abs(len(ladder.flops) - len(first.flops)) <= 1:
            found[i, : len(near)] = np.arange(len(near))
    places, counts = np.unique(found, return_counts=True)
    return np.where(np.isin(found, places[counts > 1]), found, -1)


def pair_seeds(ladders: Sequence[Ladder], matches: Index | None) -> tuple[Index | None, Array | None]:
    """Matching rungs whose replicates have the same seeds, and squares of sums over arms (`fit_tables`)."""
    if matches is None:
        return None, None
    found, sums = np.full(matches.shape, -1), list[float]()
    for place in np.unique(matches[matches >= 0]):
        members: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for i, k in np.argwhere(matches == place).tolist():
            names = ladders[i].seed_names[k] if ladders[i].seed_names else ()
            if len(set(names)) == len(names) > 1 and ladders[i].weights[k] == len(names):
                members.setdefault(tuple(sorted(names)), []).append((i, k))
        for names, own in members.items():
            if len(own) < 2:
                continue
            total = np.zeros(len(names))
            for i, k in own:
                runs = ladders[i].runs[k][np.argsort(ladders[i].seed_names[k])]
                total += runs - runs.mean()
                found[i, k] = len(sums)
            sums.append(float((total**2).sum()))
    return (found, np.array([sums])) if sums else (None, None)


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

    def step(at: Laws, damping: Array) -> Laws:
        own = at.jacobian(x, kept)
        residual = np.where(kept, loss - at.predict(x), 0.0)
        weighted = own * weights[..., None]
        normal, right = np.swapaxes(own, 2, 3) @ weighted, np.einsum("bmri,bmr->bmi", weighted, residual)
        diagonal = np.einsum("bmii->bmi", normal)
        ridge = np.where(diagonal > 0, diagonal * damping[:, None, None], 1.0)
        inverse = np.linalg.inv(normal + ridge[..., None] * np.eye(own.shape[3]))
        by = np.einsum("bmij,bmj->bmi", inverse, right)
        if at.own_e:
            e = np.clip(at.e + by[:, :, 2], 0.0, top[:, None])
        else:
            # Only E connects the arms: its step is the Schur complement's, theirs follow it one by one, so
            # a table costs the sum of its arms.
            mixed = weighted.sum(axis=2)
            lean = np.einsum("bmij,bmj->bmi", inverse, mixed)
            total = weights.sum(axis=(1, 2)) + pull
            schur = total * (1 + damping) - (mixed * lean).sum(axis=(1, 2))
            towards = (weights * residual).sum(axis=(1, 2)) - (mixed * by).sum(axis=(1, 2))
            move = (towards + pull * (mean - at.e)) / np.maximum(schur, 1e-300)
            e = np.where(held, at.e, np.clip(at.e + move, 0.0, top))
            by = by - lean * (e - at.e)[:, None, None]
        return Laws(
            e, np.clip(at.log_a + by[:, :, 0], -40, 40), np.clip(at.gamma + by[:, :, 1], -1, 5)
        )  # fmt: skip

    best, damping = objective(laws), np.full(len(loss), 1e-3)
    for _ in range(200):
        moved = step(laws, damping)
        value = objective(moved)
        better = value <= best
        small = np.where(better, best - value, 0.0) <= 1e-10 * best
        pick = better[:, None]
        e = np.where(pick if laws.own_e else better, moved.e, laws.e)
        laws = Laws(e, np.where(pick, moved.log_a, laws.log_a), np.where(pick, moved.gamma, laws.gamma))
        best = np.where(better, value, best)
        done = (better & small & (damping < 1e-2)) | (damping > 1e9)
        damping = np.where(better, damping * 0.1, damping * 8).clip(1e-10, 1e10)
        if done.all():
            break
    return laws, best


def starting_laws(cells: Cells, loss: Array, own_e: bool = False, e: float | None = None) -> Laws:
    """The best of several fits of each table, all rungs independent.

    Given E the law is a line of log(loss − E), so the starts are the lines for several parts of the lowest
    loss: the search in E has several minima.
    """
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
