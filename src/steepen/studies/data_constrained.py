"""The data-constrained study: on repeated data, is compute better spent on parameters or on passes?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.matched_compute import ComputeSlice, convex_envelope, envelope_compute, slice_families
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.verdict.multipliers import interpolate_compute
from steepen.model.arm import Arm
from steepen.model.arms import find_arm, loop, tied_vanilla, untied, untied_vanilla
from steepen.recipe.recipe import Recipe
from steepen.runs.spec import DataConfig, RunSpec
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, Table
from steepen.studies.context import StudyContext, kl_depth_of_record, loss_or_inf
from steepen.studies.design.pass_families import (
    PassRun,
    loss_panel,
    matched_compute_slices,
    pass_ladders,
    range_sentence,
    slice_panel,
    slice_table,
    slice_values,
)
from steepen.studies.driver.run_concurrently import RunGenerator, run_concurrently
from steepen.studies.plotting import family_curve, line, optimum_star, points
from steepen.utils.json_io import json_safe

REGIMES = "Passes under repetition of the data"
CONTROLS = "Controls: sharing weights, and the operator"
DECAYS = "Passes at each weight decay"
MAIN = "Parameters or passes on repeated data"
SECTION = "Section 5, Looped Transformers in the Data-Constrained Regime"
PARTS = ("grid", "regimes", "controls")


@dataclass
class PartResults:
    """Accumulated findings, panels, tables, values and runs of the parts."""

    findings: list[str] = field(default_factory=list[str])
    panels: list[Panel] = field(default_factory=list[Panel])
    tables: list[Table] = field(default_factory=list[Table])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    runs: list[str] = field(default_factory=list[str])
    # Columns of a group: the three panels of each family, from top to bottom.
    columns: dict[str, list[tuple[Panel, ...]]] = field(default_factory=dict[str, list[tuple[Panel, ...]]])

    def grids(self) -> list[Panel]:
        """The panels of every group, row by row."""
        return [
            replace(panel, columns=len(own))
            for own in self.columns.values()
            for row in zip(*own, strict=True)
            for panel in row
        ]


Family = Callable[[int], Arm]
LineStyle = Literal["solid", "dashed", "dotted"]


def data_constrained(context: StudyContext, *, parts: Sequence[str] = ()) -> Study:
    """Section "Looped Transformers in the Data-Constrained Regime" (5) and its appendix.

    `grid`: depth × passes × weight decay of the tied operator family on a pool that is repeated: slices at
    matched compute, the marginal gain of passes at each depth, the best weight decay by depth and passes.
    `regimes`: the same at one weight decay on fresh data and with fewer repeats. `controls`: tied and
    untied cores without the operator, and untied cores with it. Every run sees the base tokens.
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part!r} is not known here: use {', '.join(PARTS)}.")
    wanted = parts or PARTS
    grid = context.preset.grids.data_constrained
    found = PartResults()
    works: list[RunGenerator] = []
    if "grid" in wanted:
        works.append(_grid(context, found))
    if "regimes" in wanted:
        for epochs in grid.epochs:
            names = (f"tied, {_regime(epochs)}", f"regime {epochs}", REGIMES, _regime(epochs))
            works.append(_family(context, found, names, tied, _recipe(context), epochs))
    if "controls" in wanted:
        vanilla_recipe = replace(context.recipe(find_arm("vanilla")), learning_rate_exponent=0.0)
        for name, family, recipe in (
            ("tied vanilla", tied_vanilla, vanilla_recipe),
            ("untied vanilla", _untied_without_operator, vanilla_recipe),
            ("untied with the operator", _untied, _recipe(context)),
        ):
            names = (f"{name}, {_regime(grid.epochs[-1])}", f"control {name}", CONTROLS, name)
            works.append(_control(context, found, names, family, recipe))
    yield from run_concurrently(works)
    found.panels += found.grids()
    return Answer(
        study="data-constrained",
        question="With repeated data, is compute better spent on parameters or on passes?",
        section=SECTION,
        findings=tuple(found.findings),
        values=json_safe(found.values),
        panels=tuple(found.panels),
        tables=tuple(found.tables),
        method=(
            f"Every run sees about {context.preset.base_tokens:,} tokens; the repeated pools are that many "
            "divided by their epochs. Base recipe, constant over sizes, weight decay apart.",
            "Slices at matched compute interpolate each number of passes between neighbouring depths (loss "
            "linear in compute, never beyond).",
            context.sweep_flops_method,
        ),
        runs=tuple(dict.fromkeys(found.runs)),
    )


def tied(count: int) -> Arm:
    """The tied operator family; one pass is Operator-1."""
    return find_arm("operator-1") if count == 1 else loop(count)


def _untied(count: int) -> Arm:
    return find_arm("operator-1") if count == 1 else untied(count)


def _untied_without_operator(count: int) -> Arm:
    return tied_vanilla(1) if count == 1 else untied_vanilla(count)


def _recipe(context: StudyContext) -> Recipe:
    return replace(context.recipe(find_arm("operator-1")), learning_rate_exponent=0.0)


def _regime(epochs: int) -> str:
    return "fresh data" if epochs == 1 else f"{epochs} epochs"


def _spec(context: StudyContext, arm: Arm, recipe: Recipe, depth: int, epochs: int, decay: float) -> RunSpec:
    preset = context.preset
    pool = None if epochs == 1 else preset.base_tokens // epochs
    tokens = preset.fixed_tokens
    if pool is not None:  # whole batches in every epoch of the pool
        data = DataConfig(context.data.identity, pool_tokens=pool, epochs=epochs)
        tokens = preset.batch_tokens * data.max_steps(pool, preset.context, preset.batch_tokens)
    recipe = replace(recipe, base=replace(recipe.base, weight_decay=decay))
    planned = recipe.at_budget(arm, depth, context.size_rule, tokens=float(max(tokens, preset.batch_tokens)))
    return context.spec(planned, pool_tokens=pool, epochs=epochs if pool is not None else None)


def _cells(
    context: StudyContext, family: Family, recipe: Recipe, epochs: int, passes: Sequence[int], decay: float
) -> RunGenerator:
    depths = context.preset.grids.data_constrained.depths
    keys = [(depth, count) for depth in depths for count in sorted(passes)]
    specs = [_spec(context, family(count), recipe, depth, epochs, decay) for depth, count in keys]
    records = yield specs
    return [
        PassRun(
            depth, count, _flops(context, spec), loss_or_inf(record), spec.hash, kl_depth_of_record(record)
        )
        for (depth, count), spec, record in zip(keys, specs, records, strict=True)
    ]


def _flops(context: StudyContext, spec: RunSpec) -> float:
    return spec.tokens * context.flops_per_token(spec.arm, spec.shape.depth)


def _add_slices(
    found: PartResults,
    name: str,
    cells: Sequence[PassRun],
    budgets: int,
    key: str,
    *,
    group: str,
    short: str,
    reference: Sequence[PassRun] = (),
) -> list[ComputeSlice]:
    """Three panels of a family in the columns of a group; `short` is the column's name.

    `reference` are runs of another family, whose frontier is drawn dashed.
    """
    slices = matched_compute_slices(cells, budgets, "linear")
    found.findings.append(range_sentence(name, slices))
    loss = loss_panel(short, cells)
    if reference:
        edge = _frontier_line(reference)
        loss = replace(loss, series=(*loss.series, edge), caption=f"Dashed: {edge.label}.")
    rows = (loss, slice_panel(short, slices), replace(_gains_panel(short, cells), title=short))
    found.columns.setdefault(group, []).append(tuple(replace(panel, group=group) for panel in rows))
    found.tables.append(slice_table(f"{name}: best passes at matched compute", slices))
    found.values[key] = {"slices": slice_values(slices), "gains": _gains(cells)}
    found.runs += [cell.run for cell in cells]
    return slices


def _frontier_line(cells: Sequence[PassRun]) -> Series:
    runs = [cell for cell in cells if np.isfinite(cell.loss)]
    x, y = convex_envelope(np.array([c.flops for c in runs]), np.array([c.loss for c in runs]))
    note = "frontier of tied passes with the operator"
    return line(note, x, y, role="control", style="dashed")


def _family(
    context: StudyContext,
    found: PartResults,
    names: tuple[str, str, str, str],
    family: Family,
    recipe: Recipe,
    epochs: int,
) -> RunGenerator:
    """One family of passes at one decay: its slices at matched compute, under a title, a key and a group."""
    grid = context.preset.grids.data_constrained
    cells: list[PassRun] = yield from _cells(context, family, recipe, epochs, grid.control_passes, grid.decay)
    title, key, group, short = names
    _add_slices(found, title, cells, grid.budgets, key, group=group, short=short)


def _control(
    context: StudyContext,
    found: PartResults,
    names: tuple[str, str, str, str],
    family: Family,
    recipe: Recipe,
) -> RunGenerator:
    """A control beside the tied family with the operator, on the repeated pool."""
    grid = context.preset.grids.data_constrained
    epochs = grid.epochs[-1]
    works = [
        _cells(context, own, given, epochs, grid.control_passes, grid.decay)
        for own, given in ((family, recipe), (tied, _recipe(context)))
    ]
    cells, reference = yield from run_concurrently(works)
    title, key, group, short = names
    _add_slices(found, title, cells, grid.budgets, key, group=group, short=short, reference=reference)
    found.runs += [cell.run for cell in reference]
    base = matched_compute_slices(reference, grid.budgets, "linear")
    budgets = np.array([row.budget for row in base])
    own = slice_families(pass_ladders(cells), budgets, interpolation="linear") if base else []
    gaps = [
        (row.budget, row.best.loss - other.best.loss)
        for row, other in zip(own, base, strict=True)
        if row.best is not None and other.best is not None
    ]
    if gaps:
        better = [budget for budget, gap in gaps if gap < 0]
        low, high = min(gap for _, gap in gaps), max(gap for _, gap in gaps)
        found.findings.append(
            f"{short}: at matched compute its best loss lies {low:+.4f} to {high:+.4f} from that of tied "
            f"passes with the operator, and below it at {len(better)} of {len(gaps)} budgets."
        )
        found.values[key]["above_tied_with_operator"] = [list(gap) for gap in gaps]


def _grid(context: StudyContext, found: PartResults) -> RunGenerator:
    grid = context.preset.grids.data_constrained
    epochs = grid.epochs[-1]
    decays = sorted(grid.decays)
    swept: list[list[PassRun]] = yield from run_concurrently(
        [_cells(context, tied, _recipe(context), epochs, grid.passes, decay) for decay in decays]
    )
    by_decay = dict(zip(decays, swept, strict=True))
    at_fixed_decay: list[ComputeSlice] = []
    for decay, cells in by_decay.items():
        slices = _add_slices(
            found, f"tied, {_regime(epochs)}, decay {decay:g}", cells, grid.budgets, f"decay {decay:g}",
            group=DECAYS, short=f"weight decay {decay:g}",
        )  # fmt: skip
        if decay == grid.decay:
            at_fixed_decay = slices
    # The decay that is best at one pass, depth by depth, then held over all passes.
    chosen: dict[int, float] = {}
    for depth in grid.depths:
        losses = {
            d: c.loss for d, cells in by_decay.items() for c in cells if (c.depth, c.passes) == (depth, 1)
        }
        chosen[depth] = min(losses, key=lambda decay: losses[decay])
    tuned = [cell for decay, cells in by_decay.items() for cell in cells if chosen[cell.depth] == decay]
    _add_slices(
        found, f"tied, {_regime(epochs)}, decay chosen at K = 1", tuned, grid.budgets, "tuned decay",
        group=REGIMES, short=f"{_regime(epochs)}, decay of K = 1",
    )  # fmt: skip
    optima = _best_decays(by_decay, grid.depths, grid.passes)
    found.tables.insert(0, _decay_table(optima))
    fixed = by_decay[grid.decay]
    main = (
        slice_panel(f"at matched compute, decay {grid.decay:g}", at_fixed_decay),
        replace(_gains_panel("", fixed), title=f"marginal gain of passes, decay {grid.decay:g}"),
        _compute_use_panel(tuned, fixed, grid.decay),
        _decay_panel(optima),
    )
    found.panels += [replace(panel, group=MAIN, columns=2, lead=True) for panel in main]
    found.panels += _decay_sweeps(by_decay, optima, grid.depths)
    deep = _depth_panel(tuned, fixed, at_fixed_decay, grid.decay)
    if deep is not None:
        panel, ends = deep
        found.panels.append(panel)
        found.findings.append(ends)
    ratio = _cheapest_depth_by_passes(tuned, fixed)
    if ratio is not None:
        depth, factor = ratio
        found.findings.insert(
            0,
            f"Adding passes at d{depth} with decay {grid.decay:g} reaches the best loss of adding "
            f"parameters (one pass, decay retuned at every size) with {_cost(factor)}.",
        )
    else:
        found.findings.insert(
            0,
            "No depth reaches, by passes alone at fixed decay, the best loss of adding parameters with decay "
            "retuned.",
        )
    frontier = _frontier_factor(tuned, fixed)
    if frontier is not None:
        noise = context.preset.grids.chain.threshold
        ends = [_frontier_factor(tuned, fixed, change) for change in (-noise, noise)]
        known = " and ".join(_cost(end) for end in ends if end is not None)
        found.findings.insert(
            1,
            f"The lower convex envelope of all runs at decay {grid.decay:g} reaches that loss with "
            f"{_cost(frontier)}; were it {noise:g} nats lower or higher, with {known}.",
        )
    retuned = _cheapest_depth_by_passes(tuned, tuned)
    lowered = frontier_gap(fixed, tuned)
    if retuned is not None and lowered is not None:
        found.findings.insert(
            2,
            f"With decay retuned at every size for the passes too, d{retuned[0]} reaches it with "
            f"{_cost(retuned[1])}; retuning lowers the frontier of all passes by at most {lowered:.3f} nats.",
        )
    found.values["decay"] = {
        "chosen_at_one_pass": {str(d): w for d, w in chosen.items()},
        "optima": [
            {"depth": d, "passes": k, "decay": v.x, "interior": v.interior} for (d, k), v in optima.items()
        ],
        "loops_against_size": None if ratio is None else {"depth": ratio[0], "factor": ratio[1]},
        "frontier_factor": frontier,
        "retuned_loops_against_size": None
        if retuned is None
        else {"depth": retuned[0], "factor": retuned[1]},
        "retuning_lowers_frontier_by": lowered,
    }


def _gains(cells: Sequence[PassRun]) -> list[dict[str, float]]:
    """L(K) − L(1) at each depth: negative where passes help."""
    base = {cell.depth: cell.loss for cell in cells if cell.passes == 1}
    return [
        {"depth": c.depth, "passes": c.passes, "difference": c.loss - base[c.depth]}
        for c in cells
        if np.isfinite(c.loss) and np.isfinite(base.get(c.depth, np.inf))
    ]


def _gains_panel(name: str, cells: Sequence[PassRun]) -> Panel:
    gains = _gains(cells)
    series: list[Series] = []
    for depth in sorted({row["depth"] for row in gains}):
        own = sorted((row["passes"], row["difference"]) for row in gains if row["depth"] == depth)
        x, y = [row[0] for row in own], [row[1] for row in own]
        label, curve = family_curve("depth", depth)
        series += [points(label, x, y, **curve), line(label, x, y, **curve)]
    return Panel(
        f"{name}: marginal gain of passes", Axis("passes K", "log"), Axis("loss − loss at K = 1"),
        tuple(series), (("y", 0.0, "K = 1"),), "At fixed stored depth: more passes cost more compute here.",
    )  # fmt: skip


def _best_decays(
    by_decay: dict[float, list[PassRun]], depths: Sequence[int], passes: Sequence[int]
) -> dict[tuple[int, int], Vertex]:
    optima: dict[tuple[int, int], Vertex] = {}
    for depth in depths:
        for count in sorted(passes):
            rows = [
                (decay, cell.loss)
                for decay, cells in by_decay.items()
                for cell in cells
                if (cell.depth, cell.passes) == (depth, count) and np.isfinite(cell.loss)
            ]
            if len(rows) >= 3:
                x, y = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
                optima[depth, count] = find_vertex(x, y, nearest=min(5, len(rows)))
    return optima


def _decay_table(optima: dict[tuple[int, int], Vertex]) -> Table:
    rows = tuple((depth, count, v.x, v.interior, v.loss) for (depth, count), v in optima.items())
    return Table(
        "Best weight decay by depth and passes", ("depth", "passes", "weight decay", "inside", "loss"), rows,
        "Vertices of parabolas of log loss against log weight decay; not inside: the best measured.",
    )  # fmt: skip


def _decay_panel(optima: dict[tuple[int, int], Vertex]) -> Panel:
    series: list[Series] = []
    for depth in sorted({depth for depth, _ in optima}):
        own = [(count, v.x, v.interior) for (d, count), v in optima.items() if d == depth]
        label, curve = family_curve("depth", depth)
        inside = [row for row in own if row[2]]
        outside = [row for row in own if not row[2]]
        if inside:
            series.append(points(label, [r[0] for r in inside], [r[1] for r in inside], **curve))
        if outside:
            series.append(
                points(label, [r[0] for r in outside], [r[1] for r in outside], role="censored",
                       filled=False, note="best measured", **curve)
            )  # fmt: skip
        series.append(line(label, [r[0] for r in own], [r[1] for r in own], **curve))
    return Panel(
        "best weight decay by depth and passes",
        Axis("passes K", "log"),
        Axis("best weight decay", "log"),
        tuple(series),
        caption="Hollow: the best of the decays tried, an end of the sweep or near it; no optimum.",
    )


def _decay_sweeps(
    by_decay: dict[float, list[PassRun]], optima: dict[tuple[int, int], Vertex], depths: Sequence[int]
) -> list[Panel]:
    """Loss against weight decay, one panel for each stored depth, one curve for each number of passes."""
    panels: list[Panel] = []
    counts = sorted({count for _, count in optima})
    for depth in depths:
        series: list[Series] = []
        for count in counts:
            if (depth, count) not in optima:
                continue
            rows = sorted(
                (decay, cell.loss, cell.run)
                for decay, cells in by_decay.items()
                for cell in cells
                if (cell.depth, cell.passes) == (depth, count) and np.isfinite(cell.loss)
            )
            x, y, runs = (list(column) for column in zip(*rows, strict=True))
            label, curve = family_curve("passes", count)
            vertex = optima[depth, count]
            series += [points(label, x, y, runs, **curve), line(label, x, y, **curve)]
            series.append(optimum_star(label, vertex, **curve))
        if series:
            panels.append(
                Panel(
                    f"d{depth}", Axis("weight decay", "log"), Axis("validation loss", "log"), tuple(series),
                    caption="Stars: vertices of parabolas through the five lowest; hollow: best measured.",
                    group="Weight decay at each stored depth", columns=4,
                )
            )  # fmt: skip
    return panels


def depth_comparison(
    budgets: Sequence[float], by_size: Sequence[float], by_passes: Sequence[float], decay: float
) -> Panel:
    """KL effective depths of the best model at each budget: more parameters against more passes."""
    x = list(budgets)
    names = ("more parameters, decay retuned", f"more passes, decay {decay:g}")
    series: list[Series] = []
    for name, y in zip(names, (by_size, by_passes), strict=True):
        series += [points(name, x, y), line(name, x, y)]
    return Panel(
        "KL effective depth of the best model at each budget", Axis("compute (FLOPs)", "log"),
        Axis("KL effective depth (blocks)"), tuple(series), caption="Interpolated between neighbouring runs.",
    )  # fmt: skip


def _depth_panel(
    tuned: Sequence[PassRun], fixed: Sequence[PassRun], slices: Sequence[ComputeSlice], decay: float
) -> tuple[Panel, str] | None:
    """KL effective depth of the best model at each budget: more parameters, or more passes.

    Between runs, the depth is interpolated linearly in log compute, and in log K at the best K. None where
    the depths of the runs were not evaluated.
    """

    def ladder(cells: Sequence[PassRun], passes: int) -> tuple[list[float], list[float]]:
        own = sorted((c.flops, c.kl_depth) for c in cells if c.passes == passes and c.kl_depth is not None)
        return [float(np.log(row[0])) for row in own], [float(row[1] or 0) for row in own]

    sizes = ladder(tuned, 1)
    ladders = {count: ladder(fixed, count) for count in sorted({c.passes for c in fixed})}
    x: list[float] = []
    by_size: list[float] = []
    by_passes: list[float] = []
    for row in slices:
        at = float(np.log(row.budget))
        known = {
            count: float(np.interp(at, *own))
            for count, own in ladders.items()
            if len(own[0]) >= 2 and own[0][0] <= at <= own[0][-1]
        }
        if row.best is None or len(known) < 2 or len(sizes[0]) < 2:
            continue
        x.append(row.budget)
        by_size.append(float(np.interp(at, *sizes)))
        counts = [float(np.log(count)) for count in known]
        by_passes.append(float(np.interp(np.log(row.best.x), counts, list(known.values()))))
    if not x:
        return None
    panel = depth_comparison(x, by_size, by_passes, decay)
    sentence = (
        f"KL effective depth at the largest common budget: {by_passes[-1]:.1f} with more passes, "
        f"{by_size[-1]:.1f} with more parameters."
    )
    return panel, sentence


def _compute_use_panel(tuned: Sequence[PassRun], fixed: Sequence[PassRun], decay: float) -> Panel:
    """More parameters (one pass) against more passes (the frontier over all depths), by weight decay."""
    series: list[Series] = []
    kinds: tuple[tuple[str, Sequence[PassRun], LineStyle, LineStyle], ...] = (
        ("decay retuned", tuned, "solid", "dashed"),
        (f"decay {decay:g}", fixed, "dotted", "solid"),
    )
    for variant, cells, by_size, by_passes in kinds:
        own = sorted((c.flops, c.loss, c.run) for c in cells if c.passes == 1 and np.isfinite(c.loss))
        x, y = [row[0] for row in own], [row[1] for row in own]
        name = f"more parameters, {variant}"
        series += [
            points(name, x, y, [r[2] for r in own], filled=by_size == "solid"),
            line(name, x, y, style=by_size),
        ]
        runs = [c for c in cells if np.isfinite(c.loss)]
        if len(runs) >= 2:
            edge = convex_envelope(np.array([c.flops for c in runs]), np.array([c.loss for c in runs]))
            series.append(line(f"more passes, {variant}", *edge, style=by_passes))
    caption = "More passes: the lower convex envelope of all depths and numbers of passes."
    best = min(
        (c for c in tuned if c.passes == 1 and np.isfinite(c.loss)), key=lambda c: c.loss, default=None
    )
    factor = _frontier_factor(tuned, fixed)
    if best is not None and factor is not None:
        x = (best.flops / factor, best.flops)
        series.append(
            line(
                f"{_cost(factor)} for the best loss of more parameters",
                x,
                (best.loss, best.loss),
                role="control",
            )
        )
    return Panel(
        "compute spent on parameters or on passes",
        Axis("compute (FLOPs)", "log"),
        Axis("validation loss"),
        tuple(series),
        caption=caption,
    )


def _cost(factor: float) -> str:
    return f"{factor:.2f}× less compute" if factor >= 1 else f"{1 / factor:.2f}× the compute"


def _cheapest_depth_by_passes(tuned: Sequence[PassRun], fixed: Sequence[PassRun]) -> tuple[int, float] | None:
    """The depth whose passes reach the best tuned one-pass loss with least compute, and the compute ratio.

    A depth that has this loss at one pass is left out: it would be compared with itself.
    """
    sizes = [cell for cell in tuned if cell.passes == 1 and np.isfinite(cell.loss)]
    if not sizes:
        return None
    best = min(sizes, key=lambda cell: cell.loss)
    reached: list[tuple[float, int]] = []
    already_reached = {cell.depth for cell in fixed if cell.passes == 1 and cell.loss <= best.loss}
    for depth in {cell.depth for cell in fixed} - already_reached:
        own = sorted((c.flops, c.loss) for c in fixed if c.depth == depth and np.isfinite(c.loss))
        if len(own) >= 2:
            x, y = np.array([r[0] for r in own]), np.array([r[1] for r in own])
            needed = float(interpolate_compute(x, y, np.array([best.loss]))[0])
            if np.isfinite(needed):
                reached.append((needed, depth))
    if not reached:
        return None
    needed, depth = min(reached)
    return depth, best.flops / needed


def frontier_gap(fixed: Sequence[PassRun], tuned: Sequence[PassRun]) -> float | None:
    """The largest loss by which the frontier of `tuned` lies below that of `fixed`, where both have runs.

    A frontier is the lower convex envelope of loss against compute.
    """
    edges = []
    for cells in (fixed, tuned):
        runs = [cell for cell in cells if np.isfinite(cell.loss)]
        if len(runs) < 2:
            return None
        edges.append(convex_envelope(np.array([c.flops for c in runs]), np.array([c.loss for c in runs])))
    # Beyond its best run a frontier is flat.
    low, high = max(x[0] for x, _ in edges), max(x[-1] for x, _ in edges)
    if not low < high:
        return None
    x = np.linspace(low, high, 500)
    first, second = (np.interp(x, *edge) for edge in edges)
    return max(0.0, float((first - second).max()))


def _frontier_factor(tuned: Sequence[PassRun], fixed: Sequence[PassRun], change: float = 0.0) -> float | None:
    """Compute of the best tuned one-pass run over that of the frontier of all passes at the same loss.

    `change` is added to that loss.
    """
    sizes = [cell for cell in tuned if cell.passes == 1 and np.isfinite(cell.loss)]
    runs = [cell for cell in fixed if np.isfinite(cell.loss)]
    if not sizes or len(runs) < 2:
        return None
    best = min(sizes, key=lambda cell: cell.loss)
    needed = envelope_compute(
        np.array([c.flops for c in runs]), np.array([c.loss for c in runs]), best.loss + change
    )
    return best.flops / needed if np.isfinite(needed) else None
