"""Which fraction of the blocks belongs in the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.envelope import Envelope, fit_envelope
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.model.arm import AllocationRule, Arm
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, Table
from steepen.studies.context import Arms, StudyContext, find_arms, loss_or_inf
from steepen.studies.plotting import (
    CURVE_POINTS,
    family_curve,
    finite_or_none,
    line,
    optimum_star,
    parabola_or_segments,
    points,
)
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.2.1, Allocating Blocks across the Prelude, Core, and Coda"


@dataclass(frozen=True)
class AllocationRun:
    """One allocation of one depth."""

    depth: int
    core: int
    flops: float
    loss: float
    run: str

    @property
    def fraction(self) -> float:
        """Share of the stored blocks in the core."""
        return self.core / self.depth


def allocation(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Allocating Blocks across the Prelude, Core, and Coda".

    Tied two-pass models of several stored depths, with every core size, on the base tokens under the base
    recipe. As a larger core costs more, each is compared with a common compute frontier: a power law above an
    irreducible loss, fitted together with a parabola in the core fraction for each depth, so that it touches
    each at its best fraction.
    """
    grid = context.preset.grids.allocation
    chosen = find_arms(arms or ("loop-2",))
    if len(chosen) != 1:
        raise UsageError("allocation works on one arm at a time, e.g. --arms loop-2.")
    arm = chosen[0]
    recipe = replace(context.recipe(arm), learning_rate_exponent=0.0)
    tokens = context.preset.fixed_tokens
    keys = [(depth, core) for depth in grid.depths for core in range(1, depth)]
    # An allocation exists at one depth only, so the (constant) rate is anchored there.
    planned_runs = [
        replace(recipe, base_depth=depth).at_budget(
            _allocated(arm, depth, core), depth, context.size_rule, tokens=tokens
        )
        for depth, core in keys
    ]
    specs = [context.spec(planned) for planned in planned_runs]
    losses = [loss_or_inf(record) for record in (yield specs)]
    cells = [
        AllocationRun(depth, core, context.sweep_flops(planned), loss, spec.hash)
        for (depth, core), planned, spec, loss in zip(keys, planned_runs, specs, losses, strict=True)
        if np.isfinite(loss)
    ]
    edge = _frontier(cells)
    best: dict[int, Vertex] = {}
    notes: list[str] = []
    for depth in grid.depths:
        own = [cell for cell in cells if cell.depth == depth]
        if len(own) < 3:
            notes.append(f"d{depth} has too few allocations for a parabola")
            continue
        regret = np.array([cell.loss - edge.predict(cell.flops) for cell in own])
        best[depth] = find_vertex(np.array([c.fraction for c in own]), regret, log_x=False, log_loss=False)
        if not best[depth].interior:
            notes.append(f"d{depth}: the best fraction lies outside the sweep, or the regret has no minimum")
    return _answer(context, arm, cells, edge, best, notes)


def _allocated(arm: Arm, depth: int, core: int) -> Arm:
    """The blocks outside the core, split evenly; an odd block going to the coda (the family's rule)."""
    prelude = (depth - core) // 2
    coda = depth - core - prelude
    name = f"{arm.name}-{prelude}-{core}-{coda}"
    split = AllocationRule(prelude=prelude, coda=coda)
    return replace(arm, name=name, title=f"{arm.title}, {prelude}/{core}/{coda}", allocation=split)


def _frontier(cells: Sequence[AllocationRun]) -> Envelope:
    columns = [(cell.depth, cell.flops, cell.fraction, cell.loss) for cell in cells]
    depth, flops, fraction, loss = np.array(columns, float).reshape(-1, 4).T
    return fit_envelope(depth, flops, fraction, loss)


def _answer(
    context: StudyContext,
    arm: Arm,
    cells: Sequence[AllocationRun],
    edge: Envelope,
    best: dict[int, Vertex],
    notes: Sequence[str],
) -> Answer:
    inside = {depth: vertex for depth, vertex in best.items() if vertex.interior}
    if not inside:
        found = f"{arm.name}: no depth's best core fraction lies inside its sweep."
    else:
        mean = float(np.mean([v.x for v in inside.values()]))
        found = f"{arm.name}: the best core fraction averages {mean:.2f} over {len(inside)} depths"
        if edge.p_drift is not None:
            verb = "drifts" if edge.p_drift < 0.05 else "does not measurably drift"
            found += (
                f" and {verb} with depth (exponent {edge.drift:+.2f} ± {edge.drift_error:.2f}, "
                f"p = {edge.p_drift:.2g})"
            )
        found += "; an even split has 1/3."
    loss: list[Series] = []
    regrets: list[Series] = []
    for depth in sorted({cell.depth for cell in cells}):
        own = [cell for cell in cells if cell.depth == depth]
        label, curve = family_curve("depth", depth)
        runs = [cell.run for cell in own]
        loss.append(points(label, [c.flops for c in own], [c.loss for c in own], runs, **curve))
        y = [cell.loss - edge.predict(cell.flops) for cell in own]
        x = [cell.fraction for cell in own]
        regrets.append(points(label, x, y, runs, **curve))
        if depth in best:
            regrets += parabola_or_segments(label, x, y, best[depth], log=False, **curve)
            regrets.append(optimum_star(label, best[depth], note="best", **curve))
    x = np.geomspace(min(c.flops for c in cells), max(c.flops for c in cells), CURVE_POINTS).tolist()
    loss.append(line("frontier", x, [edge.predict(value) for value in x], role="fit", style="dashed"))
    return Answer(
        study="allocation",
        question="Which fraction of the blocks belongs in the core?",
        section=SECTION,
        findings=(found,),
        values=json_safe(
            {
                "best": {str(depth): {"fraction": v.x, "interior": v.interior} for depth, v in best.items()},
                "frontier_exponent": -edge.exponent,
                "frontier_irreducible_loss": edge.irreducible_loss,
                "drift_exponent": edge.drift,
                "drift_error": edge.drift_error,
                "drift_p": edge.p_drift,
            }
        ),
        panels=(
            Panel("Loss against compute", Axis("compute (FLOPs)", "log"), Axis("validation loss"),
                  tuple(loss)),
            Panel("Regret against the core fraction", Axis("core blocks / stored blocks"),
                  Axis("loss above the frontier"), tuple(regrets)),
        ),
        tables=(
            Table(
                "Best core fractions",
                ("depth", "best fraction", "inside", "regret there"),
                tuple((depth, v.x, v.interior, finite_or_none(v.loss))
                      for depth, v in best.items()),
            ),
        ),
        warnings=tuple(notes),
        method=(
            f"{context.preset.fixed_tokens:,} tokens each, base recipe; the frontier is a power law above an "
            "irreducible loss (none with two depths), fitted together with a parabola in the core fraction "
            "for each depth, which it touches.",
            "The drift test counts that the depths share the frontier, so that its error moves all.",
            context.sweep_flops_method,
        ),
        runs=tuple(cell.run for cell in cells),
    )  # fmt: skip
