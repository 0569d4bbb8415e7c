"""Which fraction of the blocks belongs in the core.

Allocations cost different amounts, so each is compared with a compute frontier that touches the parabola of
every size (`fit_envelope`), which also gives the drift of the best share with size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from steepen.errors import UsageError
from steepen.laws.distributions import ROUNDING_ERROR, t_p_value
from steepen.model.arm import AllocationRule, Arm
from steepen.studies.answer import Axis, Draft, Panel, Study
from steepen.studies.cells import Cells, Plan, measure, table
from steepen.studies.context import Arms, StudyContext, find_one_arm
from steepen.studies.plotting import CURVE_POINTS, family, line, measured_curves, sweep_curves
from steepen.studies.sweeps import Optima, find_optima, vertices_by
from steepen.utils.arrays import Array

SECTION = "Appendix A.2.1, Allocating Blocks across the Prelude, Core, and Coda"
COLUMNS = {"depth": "depth", "best fraction": "x", "inside": "interior", "regret there": "loss"}
MIN_SIZES_FOR_FLOOR = 3  # fewer points of contact leave the irreducible loss of the frontier open


def allocation(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Allocating Blocks across the Prelude, Core, and Coda".

    Tied two-pass models of several stored depths, with every core size, on the base tokens under the base
    recipe. As a larger core costs more, each is compared with a common compute frontier: a power law above an
    irreducible loss, fitted together with a parabola in the core fraction for each depth, so that it touches
    each at its best fraction.
    """
    depths, tokens = context.preset.grids.allocation.depths, context.preset.fixed_tokens
    arm = find_one_arm(arms or ("loop-2",), "allocation")
    recipe, rule = context.constant_recipe(arm), context.size_rule
    # An allocation exists at one depth only, so the (constant) rate is anchored there.
    plans: list[Plan] = []
    for depth in depths:
        own = replace(recipe, base_depth=depth)
        for core in range(1, depth):
            run = own.at_budget(_allocated(arm, depth, core), depth, rule, tokens=tokens)
            plans.append((run, {"depth": depth, "fraction": core / depth}))
    measured = yield from measure(context, plans)
    cells = measured.having("loss")
    columns = (cells.array(name) for name in ("depth", "flops", "fraction", "loss"))
    edge = fit_envelope(*columns)
    cells = cells.map(lambda cell: cell.plus(regret=cell.loss - edge.predict(cell["flops"])))
    best = find_optima(cells, ("depth",), "fraction", "regret", log=False)
    found = best.by("depth")
    draft = Draft(
        findings=[_sentence(arm.name, edge, best)],
        values={
            "best": {one["depth"]: {"fraction": one.x, "interior": one.interior} for one in best},
            "frontier_exponent": -edge.exponent,
            "frontier_irreducible_loss": edge.irreducible_loss,
            "drift_exponent": edge.drift,
            "drift_error": edge.drift_error,
            "drift_p": edge.p_drift,
        },
        panels=_panels(cells, edge, best),
        tables=[table("Best core fractions", best, columns=COLUMNS)],
        warnings=[
            f"d{depth} has too few allocations for a parabola" for depth in depths if depth not in found
        ],
        method=[
            f"{tokens:,} tokens each, base recipe; the frontier is a power law above an irreducible loss "
            "(none with two depths), fitted together with a parabola in the core fraction for each depth, "
            "which it touches.",
            "The drift test counts that the depths share the frontier, so that its error moves all.",
            context.sweep_flops_method,
        ],
        runs=measured.column("run"),
    )
    draft.warnings += [
        f"d{one['depth']}: the best fraction lies outside the sweep, or the regret has no minimum"
        for one in best.where(interior=False)
    ]
    return draft.answer("allocation", "Which fraction of the blocks belongs in the core?", SECTION)


def _allocated(arm: Arm, depth: int, core: int) -> Arm:
    """The blocks outside the core, split evenly; an odd block going to the coda (the family's rule)."""
    prelude = (depth - core) // 2
    coda = depth - core - prelude
    name = f"{arm.name}-{prelude}-{core}-{coda}"
    split = AllocationRule(prelude=prelude, coda=coda)
    return replace(arm, name=name, title=f"{arm.title}, {prelude}/{core}/{coda}", allocation=split)


def _sentence(name: str, edge: Envelope, best: Optima) -> str:
    inside = best.where(interior=True)
    if not inside:
        return f"{name}: no depth's best core fraction lies inside its sweep."
    found = (
        f"{name}: the best core fraction averages {inside.array('x').mean():.2f} over {len(inside)} depths"
    )
    if edge.p_drift is not None:
        verb = "drifts" if edge.p_drift < 0.05 else "does not measurably drift"
        found += (
            f" and {verb} with depth (exponent {edge.drift:+.2f} ± {edge.drift_error:.2f}, "
            f"p = {edge.p_drift:.2g})"
        )
    return f"{found}; an even split has 1/3."


def _panels(cells: Cells, edge: Envelope, best: Optima) -> list[Panel]:
    x = np.geomspace(min(cells.column("flops")), max(cells.column("flops")), CURVE_POINTS).tolist()
    frontier = line("frontier", x, [edge.predict(value) for value in x], role="fit", style="dashed")
    loss = (*measured_curves(family(cells, "depth"), "flops", "loss", join=False), frontier)
    vertices = vertices_by("depth", best)
    regret = sweep_curves(cells, "fraction", "regret", "depth", vertices, log=False, note="best")
    axes = Axis("core blocks / stored blocks"), Axis("loss above the frontier")
    return [
        Panel("Loss against compute", Axis("compute (FLOPs)", "log"), Axis("validation loss"), loss),
        Panel("Regret against the core fraction", *axes, tuple(regret)),
    ]


@dataclass(frozen=True)
class Envelope:
    """L = E + A·(C/C0)^−γ + b_s·(share − share_s)², one parabola for each size s.

    `drift` is the exponent of share_s against size, by generalised least squares: the sizes' errors are
    correlated, as they share the frontier. `p_drift` is None if no degree of freedom is left.
    """

    irreducible_loss: float
    coefficient: float
    exponent: float  # γ, positive
    c0: float
    shares: Mapping[float, float]  # best share by size, where it is inside the sweep
    drift: float | None
    drift_error: float | None
    p_drift: float | None
    residual_sd: float

    def predict(self, flops: float) -> float:
        """The frontier's loss at a compute."""
        return self.irreducible_loss + self.coefficient * (flops / self.c0) ** -self.exponent


def fit_envelope(size: Array, flops: Array, share: Array, loss: Array) -> Envelope:
    """Fit the frontier and all parabolas together by least squares.

    `size`, `flops`, `share` and `loss` have one entry per run. A size with fewer than three runs takes no
    part. With two sizes the frontier is a power law without an irreducible loss.
    """
    values, counts = np.unique(size, return_counts=True)
    sizes = values[counts >= 3]
    if len(sizes) < 2:
        raise UsageError(
            "a compute frontier needs two sizes with three runs each; add depths or allocations."
        )
    used = np.isin(size, sizes)
    group = np.searchsorted(sizes, size[used])
    c, f, y = flops[used], share[used], loss[used]
    c0 = float(np.exp(np.log(c).mean()))
    x = np.log(c / c0)
    with_floor = len(sizes) >= MIN_SIZES_FOR_FLOOR
    low = np.array([f[group == i].min() for i in range(len(sizes))])
    high = np.array([f[group == i].max() for i in range(len(sizes))])

    def residual(theta: Array) -> Array:
        where, bend = theta[3 : 3 + len(sizes)][group], theta[3 + len(sizes) :][group]
        return theta[0] + np.exp(theta[1] - theta[2] * x) + bend * (f - where) ** 2 - y

    best = None
    smallest = float(y.min())
    for floor in (0.0, 0.5 * smallest, 0.8 * smallest) if with_floor else (0.0,):
        slope, level = np.polyfit(x, np.log(y - floor), 1)
        count = len(sizes)
        start = np.array([floor, level, max(1e-3, -slope), *((low + high) / 2), *np.full(count, 0.1)])
        lower = np.array([0.0, -50.0, 1e-6, *(low - (high - low)), *np.zeros(count)])
        upper = np.array([0.999 * smallest if with_floor else 1e-12, 50.0, 10.0, *(high + (high - low)),
                          *np.full(count, np.inf)])  # fmt: skip
        start = np.clip(start, lower + 1e-13, upper - 1e-13)
        found = optimize.least_squares(residual, start, bounds=(lower, upper), x_scale="jac", xtol=1e-14,
                                       ftol=1e-14, gtol=1e-14, max_nfev=2000)  # fmt: skip
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    theta = best.x
    fitted = 2 + with_floor + 2 * len(sizes)
    free = len(y) - fitted
    variance = max(2 * float(best.cost) / max(free, 1), (ROUNDING_ERROR * smallest) ** 2)
    jacobian = np.asarray(best.jac, np.float64)[:, 0 if with_floor else 1 :]
    covariance = np.asarray(np.linalg.pinv(jacobian.T @ jacobian), np.float64) * variance
    first = 3 if with_floor else 2
    locations = theta[3 : 3 + len(sizes)]
    inside = (low < locations) & (locations < high) & (theta[3 + len(sizes) :] > 0)
    block = covariance[first : first + len(sizes), first : first + len(sizes)]
    drift, error, p = _drift(sizes[inside], locations[inside], block[np.ix_(inside, inside)], free)
    shares = dict(zip(sizes[inside].tolist(), locations[inside].tolist(), strict=True))
    floor = float(theta[0]) if with_floor else 0.0
    return Envelope(
        floor, math.exp(float(theta[1])), float(theta[2]), c0, shares, drift, error, p, math.sqrt(variance)
    )


def _drift(
    sizes: Array, shares: Array, covariance: Array, free: int
) -> tuple[float | None, float | None, float | None]:
    """Exponent of the share against size, its standard error and p value."""
    if len(sizes) < 2:
        return None, None, None
    u = np.log(sizes)
    design = np.stack([np.ones_like(u), u - u.mean()], axis=1)
    weight = np.linalg.pinv(covariance / np.outer(shares, shares))  # of the logarithms
    inverse = np.linalg.pinv(design.T @ weight @ design)
    value = float((inverse @ design.T @ weight @ np.log(shares))[1])
    error = math.sqrt(max(float(inverse[1, 1]), 0.0))
    if free < 1:
        return value, None, None
    return value, error, t_p_value(value, error, free)
