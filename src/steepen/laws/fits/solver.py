"""Batched least squares for sums of an irreducible loss and a power law.

One model covers every compute-law fit:

    loss_j = (irreducible · θ)_j + exp((constants · θ)_j − x_j · (exponents · θ)_j),   x = log(C / C0)

A `Design` says which parameters each point uses, so nested hypotheses differ only in three small matrices.
The solver is a damped Gauss–Newton (Levenberg–Marquardt) method vectorized over data sets: bootstrap draws,
simulated ladders, ladders with a rung left out, starting points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

GAMMA_BOUNDS = (-1.0, 5.0)
LOG_CONSTANT_BOUNDS = (-40.0, 40.0)
# Larger batches are solved in blocks: to bound memory, and so that a matrix product stays in cache and below
# the size from which OpenBLAS uses threads, which cost more than they save here.
MAX_JACOBIAN_ELEMENTS = 4_000_000
MAX_MULTIPLICATIONS = 4 * 65536
MAX_PARAMETERS_AS_PRODUCTS = 8  # more: the products of columns would take more memory than the Jacobian
WARM_DAMPING = 1e-5
TOLERANCE = 1e-9  # relative change of the objective at convergence


@dataclass(frozen=True, eq=False)
class Design:
    """Which E, log A and γ each point uses: one (points × parameters) matrix for each."""

    irreducible: Array
    constants: Array
    exponents: Array

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of irreducible losses, log constants and exponents, in their order in θ."""
        return self.irreducible.shape[1], self.constants.shape[1], self.exponents.shape[1]

    @property
    def n_parameters(self) -> int:
        """The length of θ."""
        return sum(self.sizes)

    def split(self, theta: Array) -> tuple[Array, Array, Array]:
        """θ of shape (…, parameters) as irreducible losses, log constants and exponents."""
        first, second, _ = self.sizes
        return theta[..., :first], theta[..., first : first + second], theta[..., first + second :]

    def predict(self, theta: Array, x: Array) -> Array:
        """The modelled loss of every point, shape (…, points)."""
        model = ModelAt(self, x)
        return model.irreducible_loss(theta) + model.reducible_loss(theta)


class ModelAt:
    """A design at given points: (points × parameters) matrices I and K of E = I·θ and log(L − E) = K·θ.

    The Jacobian is J = I + r·K with r = L − E, so the normal equations JᵀWJ are sums of three matrix products
    with w, w·r and w·r², for all data sets at once.
    """

    def __init__(self, design: Design, x: Array) -> None:
        self.n_parameters = design.n_parameters
        zeros = np.zeros_like
        self.irreducible = np.hstack([design.irreducible, zeros(design.constants), zeros(design.exponents)])
        self.log = np.hstack([zeros(design.irreducible), design.constants, -x[:, None] * design.exponents])

    def irreducible_loss(self, theta: Array) -> Array:
        """E of every point, shape (…, points)."""
        return theta @ self.irreducible.T

    def reducible_loss(self, theta: Array) -> Array:
        """L − E of every point, bounded by e^200 so that a bad trial step cannot overflow."""
        return np.exp(np.minimum(theta @ self.log.T, 200.0))

    @cached_property
    def _products(self) -> tuple[Array, Array, Array]:
        """Products of columns of I with I, of I with K, and of K with K: (points, parameters²) each."""
        i, k = self.irreducible, self.log

        def outer(a: Array, b: Array) -> Array:
            return (a[:, :, None] * b[:, None, :]).reshape(len(a), -1)

        return outer(i, i), outer(i, k) + outer(k, i), outer(k, k)

    def normal_equations(self, reducible: Array, w: Array, residual: Array) -> tuple[Array, Array]:
        """JᵀWJ and JᵀW·residual of each data set, for weights and residuals of shape (data sets, points)."""
        first = w * reducible
        gradient = (w * residual) @ self.irreducible + (first * residual) @ self.log
        if self.n_parameters > MAX_PARAMETERS_AS_PRODUCTS:
            j = self.irreducible + reducible[:, :, None] * self.log
            return np.swapaxes(j * w[:, :, None], 1, 2) @ j, gradient
        one, two, three = self._products
        normal = w @ one + first @ two + (first * reducible) @ three
        return normal.reshape(len(w), self.n_parameters, self.n_parameters), gradient


@dataclass(frozen=True, eq=False)
class Solution:
    """Parameters, objective and convergence flag of each data set."""

    theta: Array
    objective: Array
    converged: Mask

    def improve_rows(self, rows: Mask, other: Solution) -> Solution:
        """Replace the given rows by another fit to them where its objective is lower."""
        theta, objective, converged = self.theta.copy(), self.objective.copy(), self.converged.copy()
        best = best_of(Solution(theta[rows], objective[rows], converged[rows]), other)
        theta[rows], objective[rows], converged[rows] = best.theta, best.objective, best.converged
        return Solution(theta, objective, converged)


def one_hot(groups: NDArray[np.intp], count: int) -> Array:
    """A (points × count) matrix with a one where the point belongs to the group."""
    return np.eye(count)[groups]


def starting_points(design: Design, x: Array, y: Array, fraction: float) -> Array:
    """Starting θ of each data set: E at `fraction` of the lowest loss, the rest by log–log regression."""
    irreducible = np.stack(
        [fraction * y[..., column > 0].min(axis=-1) for column in design.irreducible.T], axis=-1
    )  # (…, irreducible losses)
    rest = np.log(np.maximum(y - irreducible @ design.irreducible.T, 1e-12))
    linear = np.concatenate([design.constants, -x[:, None] * design.exponents], axis=1)
    lines = rest @ np.linalg.pinv(linear).T
    return np.concatenate([irreducible, lines], axis=-1, dtype=np.float64)


def solve(
    design: Design,
    x: Array,
    y: Array,
    start: Array,
    *,
    weights: Array | None = None,
    fixed: Mask | None = None,
    log: bool = False,
    huber: float | None = None,
    iterations: int = 200,
    warm: bool = False,
) -> Solution:
    """Minimize the weighted sum of squares (or Huber loss) of each row of `y` from each row of `start`.

    `log` fits log losses; `huber` is the width δ of the quadratic part. `fixed` marks parameters held at
    their start. E is bounded by 0 and the highest loss. `warm`: the starts are fits to similar data, so the
    first steps need next to no damping. All arrays broadcast to (data sets, …).
    """
    count = max(len(np.atleast_2d(part)) for part in (y, start, y if weights is None else weights))
    if design.n_parameters > MAX_PARAMETERS_AS_PRODUCTS:
        block = max(1, MAX_JACOBIAN_ELEMENTS // (len(x) * design.n_parameters))
    else:
        block = max(64, MAX_MULTIPLICATIONS // (len(x) * design.n_parameters**2))
    if count > block:
        parts = [
            solve(
                design, x, *(_rows(part, count, i, block) for part in (y, start)),
                weights=None if weights is None else _rows(weights, count, i, block),
                fixed=None if fixed is None else _rows(fixed, count, i, block),
                log=log, huber=huber, iterations=iterations, warm=warm,
            )
            for i in range(0, count, block)
        ]  # fmt: skip
        return Solution(
            np.concatenate([part.theta for part in parts]),
            np.concatenate([part.objective for part in parts]),
            np.concatenate([part.converged for part in parts]),
        )
    theta = np.array(np.broadcast_to(start, (count, design.n_parameters)), dtype=float)
    y = np.broadcast_to(y, (count, len(x)))
    w = np.ones_like(y) if weights is None else np.broadcast_to(weights, y.shape)
    frozen = None if fixed is None else np.broadcast_to(fixed, theta.shape)
    low, high = parameter_bounds(design, y)
    clipped = np.clip(theta, low, high)
    theta = clipped if frozen is None else np.where(frozen, theta, clipped)

    model = ModelAt(design, x)
    at = _evaluate(model, y, w, theta, log=log, huber=huber)
    answer = Solution(theta.copy(), np.array(at.objective), np.zeros(count, bool))
    damping, previous = np.full(count, WARM_DAMPING if warm else 1e-3), np.zeros(count)
    tiny = 1e-28 * np.square(y).sum(axis=1)
    rows = np.arange(count)  # the data sets that have not converged; all arrays below hold these only
    for _ in range(iterations):
        step = _step(model, theta, at, frozen=frozen, limits=(low, high), damping=damping)
        moved = np.minimum(np.maximum(theta + step, low), high)
        if frozen is not None:
            moved = np.where(frozen, theta, moved)
        trial = _evaluate(model, y, w, moved, log=log, huber=huber)
        better = trial.objective <= at.objective
        # Converged: a nearly undamped step changes nothing (a strongly damped one may just be small), or no
        # step improves the objective. From a warm start also where the next step would change nothing, since
        # changes shrink by a steady factor or faster.
        change, negligible = at.objective - trial.objective, TOLERANCE * at.objective + tiny
        small = np.abs(change) <= negligible
        if warm:
            with np.errstate(over="ignore"):  # of absurd losses
                small |= better & (change < 0.1 * previous) & (change * change <= negligible * previous)
        done = (small & (damping < 1e-2)) | (damping > 1e9)
        previous = np.where(better, change, 0.0)
        if better.all():
            theta, at = moved, trial
        else:
            theta = np.where(better[:, None], moved, theta)
            at = at.replace_rows(better, trial)
        damping = np.where(better, damping * 0.1, damping * 8.0).clip(1e-12, 1e10)
        if done.any():
            finished = rows[done]
            answer.theta[finished], answer.objective[finished] = theta[done], at.objective[done]
            answer.converged[finished] = True
            busy = ~done
            if not busy.any():
                return answer
            rows, y, w, tiny, damping = rows[busy], y[busy], w[busy], tiny[busy], damping[busy]
            theta, at, previous = theta[busy], at.rows(busy), previous[busy]
            low, high = low[busy], high[busy]
            frozen = None if frozen is None else frozen[busy]
    answer.theta[rows], answer.objective[rows] = theta, at.objective
    return answer


def solve_multistart(
    design: Design,
    x: Array,
    y: Array,
    *,
    fractions: tuple[float, ...] = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97),
    weights: Array | None = None,
    log: bool = False,
    huber: float | None = None,
) -> Solution:
    """`solve` from several automatic starting points; the best for each data set."""
    y = np.atleast_2d(y)
    begin = [starting_points(design, x, y, fraction) for fraction in fractions]
    # A start in a flat valley takes long to arrive, so after a few iterations only the best go on.
    found = solve_from_starts(
        design, x, y, begin, weights=weights, log=log, huber=huber, iterations=15, keep=2
    )
    if found.converged.all():
        return found
    return solve(design, x, y, found.theta, weights=weights, log=log, huber=huber, iterations=400)


def solve_from_starts(
    design: Design,
    x: Array,
    y: Array,
    begin: Sequence[Array],
    *,
    weights: Array | None = None,
    fixed: Mask | None = None,
    log: bool = False,
    huber: float | None = None,
    iterations: int,
    keep: int | None = None,
) -> Solution:
    """`solve` from each of several arrays of starting points; the best for each data set.

    With `keep`, the best few of each data set are continued for 80 iterations more.
    """
    count, many = len(begin[0]), len(begin)

    def for_each(part: NDArray[Any]) -> NDArray[Any]:
        return np.tile(np.broadcast_to(part, (count, np.shape(part)[-1])), (many, 1))

    found = solve(
        design, x, for_each(y), np.concatenate(begin),
        weights=None if weights is None else for_each(weights),
        fixed=None if fixed is None else for_each(fixed),
        log=log, huber=huber, iterations=iterations,
    )  # fmt: skip
    if keep is not None and not found.converged.all():
        order = found.objective.reshape(many, count).argsort(axis=0)[:keep]
        best = [found.theta[place * count + np.arange(count)] for place in order]
        return solve_from_starts(
            design, x, y, best, weights=weights, fixed=fixed, log=log, huber=huber, iterations=80
        )
    place = found.objective.reshape(many, count).argmin(axis=0) * count + np.arange(count)
    return Solution(found.theta[place], found.objective[place], found.converged[place])


def best_of(first: Solution, second: Solution) -> Solution:
    """For each data set, whichever of two solutions has the lower objective."""
    take = second.objective < first.objective
    return Solution(
        np.where(take[:, None], second.theta, first.theta),
        np.where(take, second.objective, first.objective),
        np.where(take, second.converged, first.converged),
    )


def jacobian(design: Design, x: Array, theta: Array, log: bool = False) -> Array:
    """d(prediction)/dθ (or of its logarithm), shape (data sets, points, parameters)."""
    model = ModelAt(design, x)
    reducible = model.reducible_loss(theta)
    found = model.irreducible + reducible[:, :, None] * model.log
    if log:
        total = model.irreducible_loss(theta) + reducible
        found /= np.maximum(total, 1e-300)[:, :, None]
    return found


def unscaled_covariance(
    design: Design, x: Array, theta: Array, *, weights: Array | None = None, log: bool = False
) -> Array:
    """(JᵀJ)⁻¹ at θ for each data set; times the noise variance it is the parameters' covariance."""
    j = jacobian(design, x, np.atleast_2d(theta), log)
    w = np.ones(j.shape[:2]) if weights is None else np.broadcast_to(weights, j.shape[:2])
    scale = np.sqrt((w[:, :, None] * j * j).sum(axis=1)) + 1e-300
    j = j / scale[:, None, :]
    normal = np.swapaxes(j * w[:, :, None], 1, 2) @ j
    return _inverse(normal) / scale[:, :, None] / scale[:, None, :]


def _inverse(matrices: Array) -> Array:
    """Inverses of symmetric matrices with unit diagonals, pseudoinverses where one is nearly singular."""
    try:
        found = np.linalg.inv(matrices)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.pinv(matrices, hermitian=True), float)
    diagonal = np.einsum("bii->bi", found)
    singular = ~((diagonal > 0) & (diagonal < 1e10)).all(axis=1)
    if singular.any():
        found[singular] = np.linalg.pinv(matrices[singular], hermitian=True)
    return np.asarray(found, float)


def _rows(part: NDArray[Any], count: int, first: int, block: int) -> NDArray[Any]:
    """Rows `first` to `first + block` of an array broadcast to `count` rows."""
    return np.broadcast_to(np.atleast_2d(part), (count, np.shape(part)[-1]))[first : first + block]


def parameter_bounds(design: Design, y: Array) -> tuple[Array, Array]:
    """Lower and upper bounds of θ: E in [0, highest loss], the others only against overflow."""
    n_irreducible, n_constant, n_exponent = design.sizes
    count = len(y)
    low = [np.zeros((count, n_irreducible)), np.full((count, n_constant), LOG_CONSTANT_BOUNDS[0])]
    high = [
        np.repeat(y.max(axis=1)[:, None], n_irreducible, 1),
        np.full((count, n_constant), LOG_CONSTANT_BOUNDS[1]),
    ]
    low.append(np.full((count, n_exponent), GAMMA_BOUNDS[0]))
    high.append(np.full((count, n_exponent), GAMMA_BOUNDS[1]))
    return np.concatenate(low, axis=1), np.concatenate(high, axis=1)


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """Objective, reducible losses, and weights and residuals for the normal equations, at some θ."""

    objective: Array
    reducible: Array
    weights: Array
    residual: Array

    def rows(self, chosen: Mask) -> _Evaluation:
        return _Evaluation(*(part[chosen] for part in self._parts))

    def replace_rows(self, chosen: Mask, other: _Evaluation) -> _Evaluation:
        """The evaluation with the chosen rows of another."""
        objective, *rest = zip(self._parts, other._parts, strict=True)
        return _Evaluation(
            np.where(chosen, objective[1], objective[0]),
            *(np.where(chosen[:, None], new, old) for old, new in rest),
        )

    @property
    def _parts(self) -> tuple[Array, ...]:
        return self.objective, self.reducible, self.weights, self.residual


def _evaluate(
    model: ModelAt, y: Array, w: Array, theta: Array, *, log: bool, huber: float | None
) -> _Evaluation:
    reducible = model.reducible_loss(theta)
    predicted = np.maximum(model.irreducible_loss(theta) + reducible, 1e-300)
    residual = np.log(y / predicted) if log else y - predicted
    if huber is None:
        weights, value = w, residual * residual
    else:
        size = np.abs(residual)
        inside = size <= huber
        value = np.where(inside, 0.5 * residual * residual, huber * (size - 0.5 * huber))
        weights = w * np.where(inside, 1.0, huber / np.maximum(size, huber))
    objective = np.einsum("ij,ij->i", w, value)
    if log:  # the Jacobian of log L is that of L over L
        return _Evaluation(objective, reducible, weights / predicted**2, residual * predicted)
    return _Evaluation(objective, reducible, weights, residual)


def _step(
    model: ModelAt,
    theta: Array,
    at: _Evaluation,
    *,
    frozen: Mask | None,
    limits: tuple[Array, Array],
    damping: Array,
) -> Array:
    """The damped Gauss–Newton step of each data set; parameters at an active bound do not move."""
    low, high = limits
    normal, gradient = model.normal_equations(at.reducible, at.weights, at.residual)
    held = ((theta <= low) & (gradient < 0)) | ((theta >= high) & (gradient > 0))
    if frozen is not None:
        held |= frozen
    if held.any():
        free = ~held
        normal *= free[:, :, None] & free[:, None, :]
        gradient = np.where(free, gradient, 0.0)
    diagonal = np.einsum("bii->bi", normal)
    inverse = 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    normal *= inverse[:, :, None]
    normal *= inverse[:, None, :]
    diagonal[...] = 1.0 + damping[:, None]
    return np.linalg.solve(normal, (gradient * inverse)[:, :, None])[:, :, 0] * inverse
