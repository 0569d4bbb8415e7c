"""Ladders of arms, judged: does each one's law have a better exponent, a better constant, or neither?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, Panel, Study, Table
from steepen.studies.context import Arms, StudyContext, find_arms
from steepen.studies.ladders.ladder_runs import (
    LadderSpec,
    MeasuredLadder,
    check_ladders,
    judge_ladders,
    ladder_spec,
    repeated_data_warnings,
    run_ladders,
)
from steepen.studies.ladders.verdict_report import (
    hypotheses_table,
    ladder_panels,
    runs_table,
    verdict_sentences,
    verdict_table,
    what_would_change,
)
from steepen.utils.json_io import json_safe

SECTION = "Section 4.2, Improving the Exponent of the Scaling Laws"


def ladder(
    context: StudyContext,
    *,
    arms: Arms = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (),
    reference: str | None = None,
    noise: float | None = None,
) -> Study:
    """Section "Improving the Exponent of the Scaling Laws" (4.2), with the runtime figure of the appendix.

    Trains every arm's compute-optimal recipe at every rung and seed, fits one law to each ladder, and judges
    each against the reference: per FLOPs, and per second of training.
    """
    chosen = find_arms(arms or context.preset.arms)
    base = _reference(context, reference, [arm.name for arm in chosen])
    if base not in [arm.name for arm in chosen]:
        chosen.insert(0, find_arm(base))
    entries = [ladder_spec(context, arm, rungs) for arm in chosen]
    others = [arm.name for arm in chosen if arm.name != base]
    answer = yield from judged_ladders(
        context,
        entries,
        base,
        study="ladder",
        section=SECTION,
        question=f"{'Does' if len(others) == 1 else 'Do'} {', '.join(others)} scale better than {base}, "
        "and is it the exponent or only the constant?",
        seeds=seeds,
        noise=noise,
    )
    return answer


def _reference(context: StudyContext, asked: str | None, names: list[str]) -> str:
    if asked is not None:
        return find_arm(asked).name
    wanted = find_arm(context.preset.reference).name
    return wanted if wanted in names or len(names) < 2 else names[0]


def judged_ladders(
    context: StudyContext,
    entries: Sequence[LadderSpec],
    reference: str,
    *,
    study: str,
    section: str,
    question: str,
    seeds: Sequence[int] = (),
    noise: float | None = None,
    by_time: bool = True,
) -> Study:
    """Ladders run and judged against one of them; the whole of several studies."""
    exist, warnings = check_ladders(context, entries, reference)
    unused = sorted(set(context.recipes) - {entry.arm.name for entry in exist})
    if unused:
        warnings.append(f"a recipe was given for {', '.join(unused)}, which this study does not measure")
    measured: list[MeasuredLadder] = yield from run_ladders(context, exist, seeds)
    judged = judge_ladders(measured, reference, noise=noise)
    report, ladders = judged.analysis, judged.ladders
    values: dict[str, Any] = {"flops": json_safe(report.to_dict())}
    panels: list[Panel] = ladder_panels(report, ladders, measured)
    tables: list[Table] = [verdict_table(report), hypotheses_table(report)]
    warnings += [*report.warnings, *judged.notes]
    if by_time:
        found, table, extra, notes = _per_time(measured, reference, noise)
        values["seconds"] = found
        panels += extra
        tables.append(table)
        warnings += [f"per second: {note}" for note in notes]
    hardware = sorted({_hardware(record.hardware) for one in measured for record in one.records})
    if len(hardware) > 1 and by_time:
        warnings.append(f"runs are of different hardware ({', '.join(hardware)}): times do not compare")
    if by_time and ran_on_shared_machine([record for one in measured for record in one.records]):
        warnings.append(
            "runs shared their machine (a CPU, or several at a time on one host): seconds include what "
            "neighbours took, so verdicts per time are weaker than those per FLOPs"
        )
    warnings += repeated_data_warnings(measured)
    count = sum(len(one.records) for one in measured)
    low, high = report.primary_fit.arms[reference].flops_range
    used = len({record.spec.seed for one in measured for record in one.records})
    return Answer(
        study=study,
        question=question,
        section=section,
        findings=tuple(verdict_sentences(report)),
        values={**values, "what_would_change": what_would_change(report)},
        panels=tuple(panels),
        tables=(*tables, runs_table(measured)),
        warnings=tuple(warnings),
        method=(
            f"{count} runs: {len(measured)} ladders at their own recipes, {used} seed{'s'[: used > 1]} a "
            f"rung; {reference} spans {low:.3g} to {high:.3g} FLOPs.",
            "FLOPs are realised ones, pass by pass, with causal attention and without the input embedding.",
            "One floor E and every ladder's A and γ are fitted jointly by least squares; the paper's way "
            "(E from the reference by Huber loss, then straight lines) is kept beside it in the values.",
        ),
        runs=tuple(record.run for one in measured for record in one.records),
    )


def _per_time(
    measured: Sequence[MeasuredLadder], reference: str, noise: float | None
) -> tuple[dict[str, Any], Table, list[Panel], tuple[str, ...]]:
    """The verdicts' values, their table, the panels of loss and multiplier, and what to know about them."""
    judged = judge_ladders(measured, reference, by="seconds", noise=noise)
    report = judged.analysis
    panels = ladder_panels(report, judged.ladders, measured, by="seconds")
    notes = (*report.warnings, *judged.notes)
    return json_safe(report.to_dict()), verdict_table(report, "seconds"), [panels[0], panels[2]], notes


def ran_on_shared_machine(records: Sequence[RunRecord]) -> bool:
    """Whether some run was on a CPU, or overlapped in time with another on its host."""
    if any(record.hardware.get("device") == "cpu" for record in records):
        return True
    spans: dict[str, list[tuple[float, float]]] = {}
    for record in {record.run: record for record in records if record.finished}.values():
        end = datetime.fromisoformat(record.finished).timestamp()
        spans.setdefault(str(record.hardware.get("host")), []).append((end - record.seconds_total, end))
    # Ends are in whole seconds: a run that starts as another ends is no neighbour.
    return any(
        later[0] < earlier[1] - 2 for own in spans.values() for earlier, later in pairwise(sorted(own))
    )


def _hardware(facts: dict[str, Any]) -> str:
    return str(facts.get("name") or facts.get("host") or facts.get("device") or "unknown")
