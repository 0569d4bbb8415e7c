"""The data-constrained study: on repeated data, is compute better spent on parameters or on passes?

Every part is a set of families: runs over depth × passes, with one rule for the weight decay, on one number
of epochs. Each family is sliced at matched compute (`_add_family`); the grid over weight decays is then
compared with one pass, decay retuned at every size (`_compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from steepen.laws.verdict.multipliers import interpolate_compute
from steepen.model.arm import Arm
from steepen.model.arms import family_arm, find_arm
from steepen.runs.spec import DataConfig
from steepen.studies import plotting as plot
from steepen.studies.answer import Axis, Draft, Panel, Series, Study
from steepen.studies.cells import Cell, Cells, Plan, measure, table
from steepen.studies.context import StudyContext
from steepen.studies.design import matched_compute as families
from steepen.studies.design.matched_compute import (
    ComputeSlice,
    convex_envelope,
    envelope_compute,
    slice_families,
)
from steepen.studies.registry import choose_parts
from steepen.studies.sweeps import Optima, find_optima
from steepen.utils.arrays import Array
from steepen.utils.formatting import compute_factor
from steepen.utils.rows import Rows, grouped

REGIMES = "Passes under repetition of the data"
CONTROLS = "Controls: sharing weights, and the operator"
DECAYS = "Passes at each weight decay"
MAIN = "Parameters or passes on repeated data"
SECTION = "Section 5, Looped Transformers in the Data-Constrained Regime"
Make = Callable[[int], Arm]  # an arm with so many passes
TIED: tuple[Make, str] = partial(families.operator_arm, "loop"), "operator-1"
# Families of the controls, and the arm whose base recipe they are trained with.
CONTROL_FAMILIES: dict[str, tuple[Make, str]] = {
    "tied vanilla": (partial(family_arm, "tied-vanilla"), "vanilla"),
    "untied vanilla": (lambda k: family_arm("tied-vanilla" if k == 1 else "untied-vanilla", k), "vanilla"),
    "untied with the operator": (partial(families.operator_arm, "untied"), "operator-1"),
}


@dataclass(frozen=True)
class Family:
    """Runs over depth × passes, as findings, values, figures and tables name them."""

    title: str
    key: str
    group: str  # the figure of its panels, of which it has a column
    short: str  # the title of that column
    cells: Cells
    reference: Cells = Rows()  # runs of another family, whose frontier is dashed  # noqa: RUF009


def data_constrained(context: StudyContext, *, parts: Sequence[str] = ()) -> Study:
    """Section "Looped Transformers in the Data-Constrained Regime" (5) and its appendix.

    `grid`: depth × passes × weight decay of the tied operator family on a pool that is repeated: slices at
    matched compute, the marginal gain of passes at each depth, the best weight decay by depth and passes.
    `regimes`: the same at one weight decay on fresh data and with fewer repeats. `controls`: tied and
    untied cores without the operator, and untied cores with it. Every run sees the base tokens.
    """
    wanted = choose_parts("data-constrained", parts)
    grid = context.preset.grids.data_constrained
    repeated = _regime(grid.epochs[-1])
    cells = yield from measure(context, [plan for part in wanted for plan in _plans(context, part)])
    draft, columns = Draft(runs=cells.column("run")), list[Panel]()
    if "grid" in wanted:
        _grid(draft, columns, context, cells.where(part="grid"))
    if "regimes" in wanted:
        for epochs in grid.epochs:
            own, regime = cells.where(part="regimes", epochs=epochs), _regime(epochs)
            family = Family(f"tied, {regime}", f"regime {epochs}", REGIMES, regime, own)
            _add_family(draft, columns, family, grid.budgets)
    if "controls" in wanted:
        for name in CONTROL_FAMILIES:
            own, reference = (
                cells.where(part="controls", control=name, reference=one) for one in (False, True)
            )
            family = Family(f"{name}, {repeated}", f"control {name}", CONTROLS, name, own, reference)
            _add_family(draft, columns, family, grid.budgets)
            _compare_control(draft, family, grid.budgets)
    # A group is a grid: a column for each family, its three panels from top to bottom.
    for own in grouped(columns, lambda panel: panel.group).values():
        draft.panels += [replace(one, columns=len(own) // 3) for row in range(3) for one in own[row::3]]
    draft.warnings.append(
        "every point is one run: the noise of seeds is not measured, and differences below it do not tell "
        "which number of passes is best"
    )
    draft.method += [
        f"Every run sees about {context.preset.base_tokens:,} tokens; the repeated pools are that many "
        "divided by their epochs. Base recipe, constant over sizes, weight decay apart.",
        "Slices at matched compute interpolate each number of passes between neighbouring depths (loss "
        "linear in compute, never beyond).",
        context.sweep_flops_method,
    ]
    question = "With repeated data, is compute better spent on parameters or on passes?"
    return draft.answer("data-constrained", question, SECTION)


def _regime(epochs: int) -> str:
    return "fresh data" if epochs == 1 else f"{epochs} epochs"


def _plans(context: StudyContext, part: str) -> list[Plan]:
    grid = context.preset.grids.data_constrained
    last, few = grid.epochs[-1], sorted(grid.control_passes)
    if part == "grid":
        decays = sorted(grid.decays)
        families = [(*TIED, last, sorted(grid.passes), decay, {"part": part}) for decay in decays]
    elif part == "regimes":
        families = [(*TIED, epochs, few, grid.decay, {"part": part}) for epochs in grid.epochs]
    else:
        families = [
            (*family, last, few, grid.decay, {"part": part, "control": name, "reference": reference})
            for name, control in CONTROL_FAMILIES.items()
            for reference, family in ((False, control), (True, TIED))
        ]
    return [plan for family in families for plan in _family_plans(context, *family)]


def _family_plans(
    context: StudyContext, family: Make, owner: str, epochs: int, passes: Sequence[int],
    decay: float, values: dict[str, Any],
) -> list[Plan]:  # fmt: skip
    """Runs of a family over depth × passes, with the recipe of `owner` at one weight decay."""
    preset = context.preset
    recipe = context.constant_recipe(find_arm(owner))
    recipe = replace(recipe, base=replace(recipe.base, weight_decay=decay))
    pool = None if epochs == 1 else preset.base_tokens // epochs
    tokens = preset.fixed_tokens
    if pool is not None:  # whole batches in every epoch of the pool
        data = DataConfig(context.data.identity, pool_tokens=pool, epochs=epochs)
        tokens = preset.batch_tokens * data.max_steps(pool, preset.context, preset.batch_tokens)
    tokens = float(max(tokens, preset.batch_tokens))
    plans: list[Plan] = []
    for depth, count in product(preset.grids.data_constrained.depths, passes):
        run = recipe.at_budget(family(count), depth, context.size_rule, tokens=tokens)
        spec = context.spec(run, pool_tokens=pool, epochs=None if pool is None else epochs)
        flops = spec.tokens * context.flops_per_token(spec.arm, depth)
        varied = {"epochs": epochs, "decay": decay, "depth": depth, "passes": count, "flops": flops}
        plans.append((spec, values | varied))
    return plans


def _add_family(draft: Draft, columns: list[Panel], family: Family, budgets: int) -> list[ComputeSlice]:
    """Add a family's slices at matched compute: a sentence, a table, values and its column of panels."""
    slices = families.matched_compute_slices(family.cells, budgets, "linear")
    loss, gains = families.loss_panel(family.short, family.cells), _gains(family.cells)
    if family.reference.having("loss"):
        label = "frontier of tied passes with the operator"
        edge = plot.line(label, *_frontier(family.reference), role="control", style="dashed")
        loss = replace(loss, series=(*loss.series, edge), caption=f"Dashed: {label}.")
    rows = (loss, families.slice_panel(family.short, slices), _gains_panel(family.short, gains))
    draft.findings.append(families.range_sentence(family.title, slices))
    columns += [replace(one, group=family.group) for one in rows]
    draft.tables.append(families.slice_table(f"{family.title}: best passes at matched compute", slices))
    values = {"slices": families.slice_values(slices), "gains": gains.dicts("depth", "passes", "difference")}
    draft.values[family.key] = values
    return slices


def _frontier(cells: Rows[Any]) -> tuple[Array, Array]:
    """The lower convex envelope of loss against compute, of the runs that finished."""
    runs = cells.having("loss")
    return convex_envelope(runs.array("flops"), runs.array("loss"))


def _gains(cells: Cells) -> Cells:
    """The finished runs with L(K) − L(1) at their depth: negative where passes help."""
    finished = cells.having("loss")
    base = {cell["depth"]: cell.loss for cell in finished.where(passes=1)}
    known = Rows(filter(lambda cell: cell["depth"] in base, finished))
    return known.map(lambda cell: cell.plus(difference=cell.loss - base[cell["depth"]]))


def _gains_panel(title: str, gains: Cells) -> Panel:
    return Panel(
        title, Axis("passes K", "log"), Axis("loss − loss at K = 1"),
        tuple(plot.joined_curves(gains, "passes", "difference", "depth", runs=False)), (("y", 0.0, "K = 1"),),
        "At fixed stored depth: more passes cost more compute here.",
    )  # fmt: skip


def _compare_control(draft: Draft, family: Family, budgets: int) -> None:
    """Add how far a control lies from tied passes with the operator, where both have a best loss."""
    base = families.matched_compute_slices(family.reference, budgets, "linear")
    at = np.array([row.budget for row in base])
    own = slice_families(families.pass_ladders(family.cells), at, interpolation="linear") if base else []
    gaps = [
        [row.budget, row.best.loss - other.best.loss]
        for row, other in zip(own, base, strict=True)
        if row.best is not None and other.best is not None
    ]
    if gaps:
        differences = [gap for _, gap in gaps]
        draft.findings.append(
            f"{family.short}: at matched compute its best loss lies {min(differences):+.4f} to "
            f"{max(differences):+.4f} from that of tied passes with the operator, and below it at "
            f"{sum(gap < 0 for gap in differences)} of {len(gaps)} budgets."
        )
        draft.values[family.key]["above_tied_with_operator"] = gaps


def _grid(draft: Draft, columns: list[Panel], context: StudyContext, cells: Cells) -> None:
    grid = context.preset.grids.data_constrained
    regime = _regime(grid.epochs[-1])
    slices: dict[float, list[ComputeSlice]] = {}
    for decay, own in cells.by("decay").items():
        title, short = f"tied, {regime}, decay {decay:g}", f"weight decay {decay:g}"
        family = Family(title, f"decay {decay:g}", DECAYS, short, own)
        slices[decay] = _add_family(draft, columns, family, grid.budgets)
    # The decay that is best at one pass, depth by depth, then held over all passes.
    one_pass = cells.where(passes=1).by("depth")
    chosen: dict[int, float] = {
        depth: min(own, key=lambda c: c.loss)["decay"] for depth, own in one_pass.items()
    }
    tuned: Cells = Rows(filter(lambda cell: chosen[cell["depth"]] == cell["decay"], cells))
    title, short = f"tied, {regime}, decay chosen at K = 1", f"{regime}, decay of K = 1"
    _add_family(draft, columns, Family(title, "tuned decay", REGIMES, short, tuned), grid.budgets)
    # Through the five lowest: over the whole grid (the paper's: a factor of 32) loss is no parabola.
    optima = find_optima(cells, ("depth", "passes"), "decay", nearest=5)
    named = {"depth": "depth", "passes": "passes", "weight decay": "x", "inside": "interior", "loss": "loss"}
    caption = "Vertices of parabolas of log loss against log weight decay; not inside: the best measured."
    draft.tables.insert(0, table("Best weight decay by depth and passes", optima, caption, named))
    fixed = cells.where(decay=grid.decay)
    main = (
        families.slice_panel(f"at matched compute, decay {grid.decay:g}", slices[grid.decay]),
        _gains_panel(f"marginal gain of passes, decay {grid.decay:g}", _gains(fixed)),
        _compute_use_panel(tuned, fixed, grid.decay),
        _decay_panel(optima),
    )
    draft.panels += [replace(panel, group=MAIN, columns=2, lead=True) for panel in main]
    draft.panels += _decay_sweeps(optima)
    depths = _effective_depths(tuned, fixed, slices[grid.decay])
    if depths:
        x, sizes, passes = zip(*depths, strict=True)
        draft.panels.append(depth_comparison(x, sizes, passes, grid.decay))
        _, by_size, by_passes = depths[-1]
        draft.findings.append(
            f"KL effective depth at the largest common budget: {by_passes:.1f} with more passes, "
            f"{by_size:.1f} with more parameters."
        )
    draft.values["decay"] = {
        "chosen_at_one_pass": chosen,
        "optima": optima.dicts("depth", "passes", decay="x", interior="interior"),
    }
    _compare(draft, context, tuned, fixed)


def _compare(draft: Draft, context: StudyContext, tuned: Cells, fixed: Cells) -> None:
    """Put the answer first: the compute that passes need for the best loss of more parameters."""
    decay, noise = context.preset.grids.data_constrained.decay, context.preset.grids.chain.threshold
    ratio, retuned = _cheapest_depth(tuned, fixed), _cheapest_depth(tuned, tuned)
    frontier, lowered = _frontier_factor(tuned, fixed), frontier_gap(fixed, tuned)
    found = [
        "No depth reaches, by passes alone at fixed decay, the best loss of adding parameters with decay "
        "retuned."
        if ratio is None
        else f"Adding passes at d{ratio[0]} with decay {decay:g} reaches the best loss of adding "
        f"parameters (one pass, decay retuned at every size) with {compute_factor(ratio[1])}."
    ]
    if frontier is not None:
        ends = [_frontier_factor(tuned, fixed, change) for change in (-noise, noise)]
        known = " and ".join(compute_factor(end) for end in ends if end is not None)
        found.append(
            f"The lower convex envelope of all runs at decay {decay:g} reaches that loss with "
            f"{compute_factor(frontier)}; were it {noise:g} nats lower or higher, with {known}."
        )
    if retuned is not None and lowered is not None:
        found.append(
            f"With decay retuned at every size for the passes too, d{retuned[0]} reaches it with "
            f"{compute_factor(retuned[1])}; retuning lowers the frontier of all passes by at most"
            f" {lowered:.3f} nats."
        )
    draft.findings[:0] = found
    draft.values["decay"] |= {
        "loops_against_size": ratio and {"depth": ratio[0], "factor": ratio[1]},
        "frontier_factor": frontier,
        "retuned_loops_against_size": retuned and {"depth": retuned[0], "factor": retuned[1]},
        "retuning_lowers_frontier_by": lowered,
    }


def _decay_panel(optima: Optima) -> Panel:
    series: list[Series] = []
    hollow: dict[str, Any] = {"role": "censored", "filled": False, "note": "best measured"}
    for depth, own in optima.by("depth").items():
        label, curve = plot.family_curve("depth", depth)
        for interior, look in ((True, {}), (False, hollow)):
            if some := own.where(interior=interior):
                series.append(plot.points(label, some.column("passes"), some.column("x"), **look, **curve))
        series.append(plot.line(label, own.column("passes"), own.column("x"), **curve))
    return Panel(
        "best weight decay by depth and passes", Axis("passes K", "log"), Axis("best weight decay", "log"),
        tuple(series),
        caption="Hollow: the best of the decays tried, an end of the sweep or near it; no optimum.",
    )  # fmt: skip


def _decay_sweeps(optima: Optima) -> list[Panel]:
    """Loss against weight decay, one panel for each stored depth, one curve for each number of passes."""
    axes = Axis("weight decay", "log"), Axis("validation loss", "log")
    caption = "Stars: vertices of parabolas through the five lowest; hollow: best measured."
    fields: dict[str, Any] = {"group": "Weight decay at each stored depth", "columns": 4}
    panels: list[Panel] = []
    for depth, at in optima.by("depth").items():
        series: list[Series] = []
        for one in at:
            series += plot.joined_curves(one.cells, "decay", "loss", "passes")
            label, curve = plot.family_curve("passes", one["passes"])
            series.append(plot.optimum_star(label, one.vertex, **curve))
        panels.append(Panel(f"d{depth}", *axes, tuple(series), caption=caption, **fields))
    return panels


def depth_comparison(
    budgets: Sequence[float], by_size: Sequence[float], by_passes: Sequence[float], decay: float
) -> Panel:
    """KL effective depths of the best model at each budget: more parameters against more passes."""
    series = [
        *plot.measured_curve("more parameters, decay retuned", budgets, by_size),
        *plot.measured_curve(f"more passes, decay {decay:g}", budgets, by_passes),
    ]
    return Panel(
        "KL effective depth of the best model at each budget", Axis("compute (FLOPs)", "log"),
        Axis("KL effective depth (blocks)"), tuple(series), caption="Interpolated between neighbouring runs.",
    )  # fmt: skip


def _effective_depths(
    tuned: Cells, fixed: Cells, slices: Sequence[ComputeSlice]
) -> list[tuple[float, float, float]]:
    """(budget, KL effective depth with more parameters, with more passes) where both were evaluated.

    Between runs, the depth is interpolated linearly in log compute, and in log K at the best K.
    """
    sizes = _depth_ladder(tuned.where(passes=1))
    ladders = {count: _depth_ladder(own) for count, own in fixed.by("passes").items()}
    found: list[tuple[float, float, float]] = []
    for row in slices:
        at = float(np.log(row.budget))
        known = {
            float(np.log(count)): float(np.interp(at, *own))
            for count, own in ladders.items()
            if len(own[0]) >= 2 and own[0][0] <= at <= own[0][-1]
        }
        if row.best is not None and len(known) >= 2 and len(sizes[0]) >= 2:
            by_passes = float(np.interp(np.log(row.best.x), list(known), list(known.values())))
            found.append((row.budget, float(np.interp(at, *sizes)), by_passes))
    return found


def _depth_ladder(cells: Cells) -> tuple[Array, Array]:
    """Log compute and KL effective depth of the runs that have it, in order of compute."""
    flops, depth = (cells.having("kl_depth").array(name) for name in ("flops", "kl_depth"))
    order = np.argsort(flops)
    return np.log(flops[order]), depth[order]


def _compute_use_panel(tuned: Cells, fixed: Cells, decay: float) -> Panel:
    """More parameters (one pass) against more passes (the frontier over all depths), by weight decay."""
    series: list[Series] = []
    kinds = ("decay retuned", tuned, "solid", "dashed"), (f"decay {decay:g}", fixed, "dotted", "solid")
    for variant, cells, by_size, by_passes in kinds:
        runs = cells.having("loss")
        own = runs.where(passes=1)
        name, x, y = f"more parameters, {variant}", own.column("flops"), own.column("loss")
        series.append(plot.points(name, x, y, own.column("run"), filled=by_size == "solid"))
        series.append(plot.joined(name, x, y, style=by_size))
        if len(runs) >= 2:
            series.append(plot.line(f"more passes, {variant}", *_frontier(runs), style=by_passes))
    best, factor = _best_one_pass(tuned), _frontier_factor(tuned, fixed)
    if best is not None and factor is not None:
        label = f"{compute_factor(factor)} for the best loss of more parameters"
        ends = (best["flops"] / factor, best["flops"])
        series.append(plot.line(label, ends, (best.loss, best.loss), role="control"))
    return Panel(
        "compute spent on parameters or on passes", Axis("compute (FLOPs)", "log"), Axis("validation loss"),
        tuple(series), caption="More passes: the lower convex envelope of all depths and numbers of passes.",
    )  # fmt: skip


def _best_one_pass(tuned: Cells) -> Cell | None:
    """The run of one pass with the lowest loss: the best that more parameters reach."""
    return min(tuned.where(passes=1).having("loss"), key=lambda cell: cell.loss, default=None)


def _cheapest_depth(tuned: Cells, cells: Cells) -> tuple[int, float] | None:
    """The depth whose passes reach the best tuned one-pass loss with least compute, and the compute ratio.

    A depth that has this loss at one pass is left out: it would be compared with itself.
    """
    best = _best_one_pass(tuned)
    if best is None:
        return None
    reached = [
        (float(interpolate_compute(own.array("flops"), own.array("loss"), np.array([best.loss]))[0]), depth)
        for depth, own in cells.having("loss").by("depth").items()
        if len(own) >= 2 and all(cell.loss > best.loss for cell in own.where(passes=1))
    ]
    needed, depth = min((one for one in reached if np.isfinite(one[0])), default=(np.nan, 0))
    return (depth, best["flops"] / needed) if depth else None


def frontier_gap(fixed: Rows[Any], tuned: Rows[Any]) -> float | None:
    """The largest loss by which `_frontier` of `tuned` lies below that of `fixed`, where both have runs."""
    if min(len(fixed.having("loss")), len(tuned.having("loss"))) < 2:
        return None
    edges = [_frontier(fixed), _frontier(tuned)]
    # Beyond its best run a frontier is flat.
    low, high = max(x[0] for x, _ in edges), max(x[-1] for x, _ in edges)
    if not low < high:
        return None
    x = np.linspace(low, high, 500)
    first, second = (np.interp(x, *edge) for edge in edges)
    return max(0.0, float((first - second).max()))


def _frontier_factor(tuned: Cells, fixed: Cells, change: float = 0.0) -> float | None:
    """Compute of the best tuned one-pass run over that of all passes' frontier at its loss plus `change`."""
    best, runs = _best_one_pass(tuned), fixed.having("loss")
    if best is None or len(runs) < 2:
        return None
    needed = envelope_compute(runs.array("flops"), runs.array("loss"), best.loss + change)
    return best["flops"] / needed if np.isfinite(needed) else None
