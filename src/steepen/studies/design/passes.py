"""The passes study: how many core passes, in ladders of fixed tokens and at fixed depth and compute."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.isoflop import PowerLawFit, fit_power_law
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.model.arm import Arm
from steepen.model.arms import find_arm, loop, untied
from steepen.recipe.flops import compute_active_parameters
from steepen.recipe.recipe import Recipe
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, StudyFit, Table
from steepen.studies.context import StudyContext, loss_or_inf
from steepen.studies.design.pass_families import (
    PassRun,
    loss_panel,
    matched_compute_slices,
    range_sentence,
    slice_panel,
    slice_table,
    slice_values,
)
from steepen.studies.design.passes_transfer import transfer_across_passes
from steepen.studies.driver.run_concurrently import run_concurrently
from steepen.studies.plotting import family_curve, line, points, sweep_series
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.2.2, Choosing the Number of Core Passes"
PARTS = ("tokens", "anchor", "hyperparameters")
DEFAULT_PARTS = PARTS[:2]
TOKENS_GROUP = "Passes in ladders of fixed tokens"
FAMILIES = {"tied": loop, "untied": untied}


@dataclass(frozen=True)
class PassSweep:
    """A sweep of passes at one depth and budget."""

    depth: int
    tpp: float  # at K = 1
    passes: tuple[int, ...]
    losses: tuple[float, ...]
    runs: tuple[str, ...]
    vertex: Vertex
    expansion: float  # compute-active parameters at K* over those at K = 1
    tpp_at_optimum: float  # tokens per stored parameter at K*

    @property
    def bracketed(self) -> bool:
        """Whether the optimum lies between measured passes with higher losses on both sides."""
        return self.vertex.interior and self.vertex.bracketed


@dataclass
class PartResult:
    """Results of one part of the study."""

    found: list[str]
    panels: list[Panel]
    tables: list[Table]
    runs: list[str]
    values: dict[str, Any]
    fits: list[StudyFit] = field(default_factory=list[StudyFit])


PartRun = Generator[Sequence[RunSpec], Sequence[RunRecord | None], PartResult]


def passes(context: StudyContext, *, parts: Sequence[str] = ()) -> Study:
    """Appendix "Choosing the Number of Core Passes": fixed-token ladders, and fixed anchors.

    `tokens`: for every K a ladder of depths on the base tokens, tied and untied, compared at matched compute.
    `anchor`: at fixed depth and compute more passes mean fewer tokens; the optimum's expansion and tokens per
    parameter are fitted against the tokens per parameter of one pass. Both use Operator-1's base recipe.
    `hyperparameters` (only where asked for): with the tokens fixed, does K move the best values?
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part!r} is not known here: use {', '.join(PARTS)}.")
    works = {
        name: work(context, _recipe(context))
        for name, work in (
            ("tokens", _fixed_tokens),
            ("anchor", _fixed_anchor),
            ("hyperparameters", _transfer),
        )
        if name in (parts or DEFAULT_PARTS)
    }
    done: list[PartResult] = yield from run_concurrently(list(works.values()))
    values = {name: part.values for name, part in zip(works, done, strict=True)}
    return Answer(
        study="passes",
        question="How many times should the core be applied?",
        section=SECTION,
        findings=tuple(sentence for part in done for sentence in part.found),
        values=json_safe(values),
        fits=tuple(fit for part in done for fit in part.fits),
        panels=tuple(panel for part in done for panel in part.panels),
        tables=tuple(table for part in done for table in part.tables),
        method=(
            f"Operator-1's base recipe, constant over sizes; fixed-token ladders have "
            f"{context.preset.fixed_tokens:,} tokens.",
            "Optima are vertices of parabolas of log loss against log K; those that measured K do not "
            "bracket take no part in the laws.",
            context.sweep_flops_method,
        ),
        runs=tuple(dict.fromkeys(run for part in done for run in part.runs)),
    )


def _transfer(context: StudyContext, recipe: Recipe) -> PartRun:
    """The recipe is that of each family's two passes, not Operator-1's."""
    found = yield from transfer_across_passes(context, FAMILIES)
    return PartResult(
        list(found.findings), list(found.panels), list(found.tables), list(found.runs), found.values,
        list(found.fits),
    )  # fmt: skip


def family_arm(family: str, count: int) -> Arm:
    """K passes of a family; one pass is Operator-1 in both."""
    return find_arm("operator-1") if count == 1 else FAMILIES[family](count)


def _recipe(context: StudyContext) -> Recipe:
    return replace(context.recipe(find_arm("operator-1")), learning_rate_exponent=0.0)


def _fixed_tokens(context: StudyContext, recipe: Recipe) -> PartRun:
    grid = context.preset.grids.passes
    part = PartResult([], [], [], [], {})
    keys = [(f, k, d) for f in FAMILIES for k in sorted(grid.passes) for d in grid.depths]
    planned_runs = [
        recipe.at_budget(family_arm(f, k), d, context.size_rule, tokens=context.preset.fixed_tokens)
        for f, k, d in keys
    ]
    specs = [context.spec(planned) for planned in planned_runs]
    losses = [loss_or_inf(record) for record in (yield specs)]
    part.runs = [spec.hash for spec in specs]
    for family in FAMILIES:
        cells = [
            PassRun(depth, count, context.sweep_flops(planned), loss, spec.hash)
            for (name, count, depth), planned, loss, spec in zip(
                keys, planned_runs, losses, specs, strict=True
            )
            if name == family
        ]
        slices = matched_compute_slices(cells, grid.budgets)
        part.found.append(range_sentence(f"{family}, fixed tokens", slices))
        part.panels += [
            replace(loss_panel(f"{family}: fixed-token ladders", cells), group=TOKENS_GROUP, columns=2),
            replace(
                slice_panel(f"{family}: passes at matched compute", slices), group=TOKENS_GROUP, columns=2
            ),
        ]
        part.tables.append(slice_table(f"{family}: best passes at matched compute", slices))
        part.values[family] = slice_values(slices)
    return part


def _fixed_anchor(context: StudyContext, recipe: Recipe) -> PartRun:
    grid = context.preset.grids.passes
    part = PartResult([], [], [], [], {})
    one = find_arm("operator-1")
    keys = [
        (f, d, tpp, k) for f in FAMILIES for d in grid.anchors for tpp in sorted(grid.anchor_tpp)
        for k in sorted(grid.passes)
    ]  # fmt: skip
    specs = [
        context.spec(context.run_at_flops(recipe, family_arm(f, k), d, context.flops_at_tpp(one, d, tpp)))
        for f, d, tpp, k in keys
    ]
    losses = [loss_or_inf(record) for record in (yield specs)]
    part.runs = [spec.hash for spec in specs]
    for family in FAMILIES:
        anchors: list[PassSweep] = []
        for depth in grid.anchors:
            for tpp in sorted(grid.anchor_tpp):
                own = [
                    (k, losses[i], specs[i].hash)
                    for i, (f, d, t, k) in enumerate(keys)
                    if (f, d, t) == (family, depth, tpp) and np.isfinite(losses[i])
                ]
                if len(own) >= 3:
                    anchors.append(_anchor(context, family, depth, tpp, own))
        part.values[family] = _report(part, family, anchors)
    return part


def _anchor(
    context: StudyContext, family: str, depth: int, tpp: float, own: Sequence[tuple[int, float, str]]
) -> PassSweep:
    counts, losses, runs = zip(*own, strict=True)
    vertex = find_vertex(np.array(counts, float), np.array(losses))
    arm = family_arm(family, 2)
    shape = arm.shape(depth, context.size_rule)
    # Both counts are straight lines in K, so they can be evaluated at a fractional K*.
    active = [compute_active_parameters(arm, shape, k) for k in (1, 2)]
    stored = [context.stored_parameters(arm, depth, k) for k in (1, 2)]
    expansion = 1 + (vertex.x - 1) * (active[1] / active[0] - 1)
    size = 1 + (vertex.x - 1) * (stored[1] / stored[0] - 1)
    return PassSweep(depth, tpp, counts, losses, runs, vertex, expansion, tpp / (expansion * size))


def _report(part: PartResult, family: str, anchors: Sequence[PassSweep]) -> dict[str, Any]:
    inside = [anchor for anchor in anchors if anchor.bracketed]
    laws: dict[str, PowerLawFit] = {}
    if len({anchor.tpp for anchor in inside}) >= 2:
        x = np.array([anchor.tpp for anchor in inside])
        laws["expansion"] = fit_power_law(x, np.array([anchor.expansion for anchor in inside]))
        laws["tpp"] = fit_power_law(x, np.array([anchor.tpp_at_optimum for anchor in inside]))
        laws["passes"] = fit_power_law(x, np.array([anchor.vertex.x for anchor in inside]))
        part.fits += [
            StudyFit(law, quantity, "tokens per parameter at one pass", family, part="anchor")
            for quantity, law in laws.items()
        ]
        e, t = laws["expansion"], laws["tpp"]
        part.found.append(
            f"{family}, fixed anchor: expansion at K* = {e.coefficient:.2f}·TPP^{_with_error(e)} and "
            f"TPP at K* = {t.coefficient:.2f}·TPP^{_with_error(t)} over "
            f"{len(inside)} of {len(anchors)} optima; K* runs from {min(a.vertex.x for a in inside):.2f} to "
            f"{max(a.vertex.x for a in inside):.2f}."
        )
    else:
        part.found.append(
            f"{family}, fixed anchor: {len(inside)} of {len(anchors)} optima are bracketed by measured "
            "passes, too few for a law."
        )
    part.panels += _panels(family, anchors, laws)
    part.tables.append(
        Table(
            f"{family}: best passes at fixed anchor and compute",
            ("depth", "TPP at K = 1", "K*", "bracketed", "expansion at K*", "TPP at K*"),
            tuple((a.depth, a.tpp, a.vertex.x, a.bracketed, a.expansion, a.tpp_at_optimum) for a in anchors),
            "Bracketed: the lowest measured loss is at neither end of the sweep; others are in no law.",
        )
    )
    return {
        "laws": {
            name: {"coefficient": law.coefficient, "exponent": law.exponent, "interval": law.interval}
            for name, law in laws.items()
        },
        "anchors": [
            {"depth": a.depth, "tpp": a.tpp, "passes": a.vertex.x, "interior": a.vertex.interior}
            for a in anchors
        ],
    }


def _with_error(law: PowerLawFit) -> str:
    """An exponent with its standard error, where there are points for one."""
    error = f" ± {law.standard_error:.2f}" if law.degrees_of_freedom > 0 else ""
    return f"({law.exponent:.2f}{error})"


def _relative_to_one_pass(series: Sequence[Series], base: float | None) -> list[Series]:
    """The curves with the loss at one pass taken off; as they are where that was not measured."""
    if base is None:
        return list(series)
    return [replace(one, y=tuple(value - base for value in one.y)) for one in series]


def _panels(family: str, anchors: Sequence[PassSweep], laws: dict[str, PowerLawFit]) -> list[Panel]:
    panels: list[Panel] = []
    for depth in sorted({anchor.depth for anchor in anchors}):
        series: list[Series] = []
        for anchor in (a for a in anchors if a.depth == depth):
            label, curve = family_curve("TPP", anchor.tpp)
            series += _relative_to_one_pass(
                sweep_series(
                    label, anchor.passes, anchor.losses, anchor.runs, anchor.vertex, log=True, **curve
                ),
                dict(zip(anchor.passes, anchor.losses, strict=True)).get(1),
            )
        panels.append(
            Panel(f"{family}, d{depth}", Axis("passes K", "log"), Axis("loss − loss at K = 1"), tuple(series),
                  (("y", 0.0, ""),), "At fixed compute: more passes mean fewer tokens.",
                  group=f"{family}: passes at fixed anchor and compute")
        )  # fmt: skip
    words = {
        "expansion": "expansion at K*",
        "tpp": "tokens per parameter at K*",
        "passes": "best passes K*",
    }
    for name, label in words.items():
        ys = {True: [], False: []}
        for anchor in anchors:
            values = {"expansion": anchor.expansion, "tpp": anchor.tpp_at_optimum, "passes": anchor.vertex.x}
            ys[anchor.bracketed].append((anchor.tpp, values[name]))
        series = [
            points("optima", *zip(*rows, strict=True), role="optimum")
            if inside
            else points("censored", *zip(*rows, strict=True), role="censored", filled=False)
            for inside, rows in ys.items()
            if rows
        ]
        if name in laws and ys[True]:
            ends = [min(x for x, _ in ys[True]), max(x for x, _ in ys[True])]
            series.append(line("fitted", ends, [laws[name].predict(x) for x in ends], role="fit"))
        panels.append(
            Panel(f"{family}: {label}", Axis("tokens per parameter at K = 1", "log"), Axis(label, "log"),
                  tuple(series), group=f"{family}: the best passes against tokens per parameter")
        )  # fmt: skip
    return panels
