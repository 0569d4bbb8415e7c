"""Panels that a report adds from the runs themselves: loss curves, and residuals of laws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from steepen.laws.fits.compute_law import ArmLaw
from steepen.report.colours import arm_key
from steepen.report.curves import evenly, ladder_title
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory, read_metrics
from steepen.studies.answer import Answer, Axis, Panel, Series, StudyFit, Table
from steepen.studies.cells import table
from steepen.studies.plotting import family_curve
from steepen.utils.rows import grouped

CURVE_POINTS = 61  # means over equal ratios of steps
MAX_CURVES = 8  # of an arm
MAX_ARMS = 9


def curve_panels(records: Sequence[RunRecord], directory: Path | None, titles: dict[str, str]) -> list[Panel]:
    """Loss during training, a panel per arm: of metrics.jsonl, or of the validations in the records."""
    panels: list[Panel] = []
    for name, own in list(grouped(records, lambda record: record.arm).items())[:MAX_ARMS]:
        series: list[Series] = []
        for record in _spread(sorted(own, key=lambda r: (r.spec.seed, -r.flops))[:200]):
            x, y = _curve(record, directory)
            if len(x) > 1:
                label, curve = family_curve("depth", record.spec.shape.depth)
                series.append(Series(label, "line", x, y, detail=f"run {record.run}", **curve))
        if series:
            more = "" if len(series) == len(own) else f" ({len(series)} of {len(own)} runs)"
            title, group = f"{ladder_title(name, '', titles)}{more}", "Loss curves of the runs"
            axes = Axis("tokens", "log"), Axis("loss (nats per token)")
            panels.append(Panel(title, *axes, tuple(series), group=group, share="y"))
    return panels


def source_panels(records: Sequence[RunRecord]) -> list[Panel]:
    """Validation loss on each source of a mixture against compute, a panel per source; [] without one."""
    # The paper's and imported runs have a loss but no history of scores.
    measured = [(one, one.validation_scores[-1].by_source) for one in records if one.validation_scores]
    panels: list[Panel] = []
    for source in dict.fromkeys(name for _, losses in measured for name in losses):
        known = [(record, losses[source]) for record, losses in measured if source in losses]
        series: list[Series] = []
        for arm, own in grouped(known, lambda one: one[0].arm).items():
            x, runs = tuple(r.flops for r, _ in own), tuple(r.run for r, _ in own)
            series.append(Series(arm, "points", x, tuple(loss for _, loss in own), arm=arm, runs=runs))
        axes = Axis("training compute (FLOPs)", "log"), Axis("validation loss (nats per token)")
        panels.append(Panel(source, *axes, tuple(series), group="Validation loss by source"))
    return panels


def _spread(records: list[RunRecord]) -> list[RunRecord]:
    """At most `MAX_CURVES` runs, evenly spaced in compute, one for each depth first."""
    by_depth = {record.spec.shape.depth: record for record in reversed(records)}
    return evenly(sorted(by_depth.values(), key=lambda record: record.flops), MAX_CURVES)


def _curve(record: RunRecord, directory: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Tokens and loss: training loss in means over steps that grow geometrically, or validation losses."""
    rows: list[tuple[float, float]] = []
    if directory is not None:
        lines = read_metrics(RunDirectory(directory / record.run).metrics_file)
        rows = [(row["step"], row["loss"]) for row in lines if row.get("loss") is not None]
    rows = rows or [(score.step, score.loss) for score in record.validation_scores]
    steps, losses = thin_curve(rows, CURVE_POINTS)
    return tuple(record.spec.batch_tokens * step for step in steps), losses


def thin_curve(
    rows: Iterable[tuple[float, float]], count: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most `count` means of (x, y), over equal ratios of x and the last alone; only of finite values."""
    rows = [(x, y) for x, y in rows if x > 0 and math.isfinite(y)]
    if not rows:
        return (), ()
    span = math.log(max(rows[-1][0] / rows[0][0], 1.0)) or 1.0
    bins = grouped(rows, lambda row: int((count - 1) * math.log(row[0] / rows[0][0]) / span + 1e-9)).values()
    return tuple(fmean(x for x, _ in own) for own in bins), tuple(fmean(y for _, y in own) for own in bins)


def residuals_of_laws(
    answer: Answer, records: Sequence[RunRecord], titles: dict[str, str]
) -> tuple[list[Panel], list[Table]]:
    """Loss minus law of every run of every ladder, and their scatter; [] without laws of compute."""
    series: list[Series] = []
    rows: list[dict[str, Any]] = []
    for one in ladder_laws(answer):
        assert isinstance(one.fit, ArmLaw)
        own = [record for record in records if record.run in one.runs]
        if not own:
            continue
        x, runs = tuple(r.flops for r in own), tuple(r.run for r in own)
        left = tuple(r.validation_loss - float(one.fit.predict(r.flops)) for r in own)
        series.append(Series(one.arm, "points", x, left, arm=one.arm, variant=one.variant, runs=runs))
        worst = max(range(len(own)), key=lambda i: abs(left[i]))
        rows.append({
            "arm": ladder_title(one.arm, one.variant, titles), "runs": len(own),
            # About a law of two parameters of its own.
            "residual sd": math.sqrt(sum(miss**2 for miss in left) / max(1, len(left) - 2)),
            "sd between seeds": _sd_between_seeds(own), "largest residual": left[worst],
            "run": own[worst].run,
        })  # fmt: skip
    if not series:
        return [], []
    axes = Axis("training compute (FLOPs)", "log"), Axis("loss − law (nats per token)")
    scatter = ", ".join(f"{row['arm']} {row['residual sd']:.2g}" for row in rows)
    caption = f"Standard deviations: {scatter}."
    panel = Panel("Residuals of the laws", *axes, tuple(series), (("y", 0.0, ""),), caption)
    caption = "In nats per token. A residual sd far above that between seeds means that the law does not fit."
    return [panel], [table("Scatter about the laws", rows, caption)]


def _sd_between_seeds(records: Sequence[RunRecord]) -> float | None:
    """Standard deviation of the losses of one rung, pooled; None where every rung has one run."""
    rungs = grouped(records, lambda record: record.spec.shape.depth).values()
    losses = [[record.validation_loss for record in rung] for rung in rungs]
    squares = sum(sum((loss - fmean(rung)) ** 2 for loss in rung) for rung in losses)
    degrees = sum(len(rung) - 1 for rung in losses)
    return math.sqrt(squares / degrees) if degrees else None


def ladder_laws(answer: Answer) -> list[StudyFit]:
    """The law of loss against FLOPs of every ladder, the joint fit's where there are two."""
    found: dict[tuple[str, str, str], StudyFit] = {}
    for one in answer.fits:
        key = (arm_key(one.arm), one.variant, one.part)
        of_compute = isinstance(one.fit, ArmLaw) and one.quantity == "loss" and one.against.lower() == "flops"
        if of_compute and (key not in found or one.method == "joint"):
            found[key] = one
    return list(found.values())
