"""Which fraction of the blocks belongs in the core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steepen.model.arm import AllocationRule, Arm
from steepen.studies.answer import Axis, Draft, Panel, Study
from steepen.studies.cells import Cells, Plan, measure, table
from steepen.studies.context import Arms, StudyContext, find_one_arm
from steepen.studies.design.envelope import Envelope, fit_envelope
from steepen.studies.plotting import CURVE_POINTS, family, line, measured_curves, sweep_curves
from steepen.studies.sweeps import Optima, find_optima, vertices_by

SECTION = "Appendix A.2.1, Allocating Blocks across the Prelude, Core, and Coda"
COLUMNS = {"depth": "depth", "best fraction": "x", "inside": "interior", "regret there": "loss"}


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
