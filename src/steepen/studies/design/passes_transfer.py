"""Part `hyperparameters` of the passes study: do the best values hold when the number of passes changes?"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steepen.laws.fits.drift import Drift, HyperparameterSweep, fit_drift
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import paper_code
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Axis, Panel, Series, StudyFit, Table
from steepen.studies.context import StudyContext, loss_or_inf
from steepen.studies.plotting import family_curve, sweep_series

Work = Generator[Sequence[RunSpec], Sequence[RunRecord | None], "TransferResult"]


@dataclass(frozen=True)
class TransferResult:
    """What the sweeps show, family by family."""

    findings: tuple[str, ...]
    panels: tuple[Panel, ...]
    tables: tuple[Table, ...]
    runs: tuple[str, ...]
    values: dict[str, Any]
    fits: tuple[StudyFit, ...]


@dataclass(frozen=True)
class HyperparameterByPasses:
    """One hyperparameter of one family: (multiple, loss, run) by passes, and the drift of the optimum."""

    family: str
    name: str
    rows: dict[int, list[tuple[float, float, str]]]
    drift: Drift | None


def transfer_across_passes(context: StudyContext, families: dict[str, Callable[[int], Arm]]) -> Work:
    """Figure "Hyperparameter sensitivity to stored depth and recurrence" (b).

    At the base depth each family trains the tokens of its two-pass recipe, whatever K, with one
    hyperparameter at multiples of the two-pass base values. The optimum's drift with K is a power law.
    """
    grid, multiples = context.preset.grids.passes, context.preset.grids.lr_rule.multiples
    keys: list[tuple[str, str, int, float]] = []
    specs: list[RunSpec] = []
    tokens: dict[str, int] = {}
    for family, make in families.items():
        two = make(2)
        recipe = replace(context.recipe(two), learning_rate_exponent=0.0)
        count = recipe.tpp * context.stored_parameters(two, context.preset.base_depth)
        for passes in sorted(grid.transfer_passes):
            planned = recipe.at_budget(
                make(passes), context.preset.base_depth, context.size_rule, tokens=count
            )
            tokens[family] = planned.tokens
            for name in grid.transferred:
                for multiple in sorted(multiples):
                    value = getattr(planned.hyperparameters, name) * multiple
                    changed = replace(planned.hyperparameters, **{name: value})
                    keys.append((family, name, passes, multiple))
                    specs.append(context.spec(replace(planned, hyperparameters=changed)))
    losses = [loss_or_inf(record) for record in (yield specs)]
    found: dict[tuple[str, str], dict[int, list[tuple[float, float, str]]]] = {}
    for (family, name, passes, multiple), loss, spec in zip(keys, losses, specs, strict=True):
        if math.isfinite(loss):
            own = found.setdefault((family, name), {}).setdefault(passes, [])
            own.append((multiple, loss, spec.hash))
    sweeps = [
        HyperparameterByPasses(family, name, rows, _drift(rows)) for (family, name), rows in found.items()
    ]
    return TransferResult(
        findings=tuple(_sentence(family, sweeps, tokens[family]) for family in families),
        panels=tuple(_panel(one) for one in sweeps),
        tables=(_table(sweeps),),
        runs=tuple(spec.hash for spec in specs),
        values={
            family: {
                one.name: {
                    "optima": [[v.budget, v.x, v.interior] for v in one.drift.vertices],
                    "exponent": one.drift.law.exponent if one.drift.law else None,
                }
                for one in sweeps
                if one.family == family and one.drift is not None
            }
            for family in families
        },
        fits=tuple(
            StudyFit(one.drift, one.name, "passes", one.family, part="hyperparameters")
            for one in sweeps
            if one.drift is not None
        ),
    )


def _drift(rows: dict[int, list[tuple[float, float, str]]]) -> Drift | None:
    slices = [
        HyperparameterSweep(float(passes), np.array([r[0] for r in own]), np.array([r[1] for r in own]))
        for passes, own in rows.items()
        if len(own) >= 3
    ]
    return fit_drift(slices) if slices else None


def _sentence(family: str, sweeps: Sequence[HyperparameterByPasses], tokens: int) -> str:
    words: list[str] = []
    for one in sweeps:
        if one.family != family or one.drift is None:
            continue
        inside = [v for v in one.drift.vertices if v.interior]
        name = paper_code(one.name) or one.name
        if len(inside) >= 2:
            first, last = inside[0], inside[-1]
            law = one.drift.law
            error = f", p = {law.p_value:.2g}" if law is not None and law.degrees_of_freedom > 0 else ""
            ends = f"×{first.x:.2f} at K = {first.budget:g} to ×{last.x:.2f} at K = {last.budget:g}"
            words.append(f"{name} {ends}{error}")
        else:
            words.append(f"{name}: fewer than two optima inside")
    return f"{family}, {tokens:,} tokens at every K: the best values go from {'; '.join(words)}."


def _panel(one: HyperparameterByPasses) -> Panel:
    vertices = {v.budget: v for v in one.drift.vertices} if one.drift else {}
    series: list[Series] = []
    for passes, own in sorted(one.rows.items()):
        x, y, runs = (list(column) for column in zip(*own, strict=True))
        if float(passes) in vertices:
            label, curve = family_curve("passes", passes)
            series += sweep_series(label, x, y, runs, vertices[float(passes)], log=True, **curve)
    return Panel(
        f"{one.family}: {paper_code(one.name) or one.name}",
        Axis(f"{one.name.replace('_', ' ')} (× base)", "log"),
        Axis("validation loss", "log"),
        tuple(series),
        (("x", 1.0, ""),),
        group="Hyperparameters at other numbers of passes, tokens fixed",
        columns=5,
    )


def _table(sweeps: Sequence[HyperparameterByPasses]) -> Table:
    rows = tuple(
        (
            one.family, one.name, vertex.budget, vertex.x, vertex.interior,
            one.drift.law.exponent if one.drift.law else None,
            one.drift.law.p_value if one.drift.law and one.drift.law.degrees_of_freedom > 0 else None,
        )
        for one in sweeps
        if one.drift is not None
        for vertex in one.drift.vertices
    )  # fmt: skip
    return Table(
        "Best values by number of passes",
        ("family", "hyperparameter", "K", "best multiple", "inside", "exponent in K", "p"),
        rows,
        "Multiples of the two-pass base value; the exponent is of best ∝ K^exponent.",
    )
