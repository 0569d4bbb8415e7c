"""The table that opens a study's report: a line per arm with its answer, multiplier, p-value and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from steepen.laws.fits.compute_law import ArmLaw
from steepen.report.colours import arm_key
from steepen.report.curves import ladder_title
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, StudyFit, StudyVerdict
from steepen.utils.formatting import cost_axis
from steepen.utils.json_io import json_safe


@dataclass(frozen=True)
class SummaryRow:
    """One ladder: what was judged of it (nothing, of the reference), and what its runs cost."""

    arm: str
    answer: Annotated[str, Column("better, and does the gain grow?")]
    multiplier: Annotated[float | None, Column("multiplier (mean)")] = None
    low: float | None = None
    high: float | None = None
    p_better: Annotated[float | None, Column("p (better)")] = None
    p_growth: Annotated[float | None, Column("p (growth)")] = None
    training_flops: Annotated[float | None, Column("training FLOPs")] = None
    training_hours: float | None = None
    judged: Annotated[StudyVerdict | None, Column(shown=False)] = None
    name: Annotated[str, Column(shown=False)] = ""  # the arm's, which decides the colour


def summary_rows(answer: Answer, records: Sequence[RunRecord], titles: dict[str, str]) -> list[SummaryRow]:
    """The references, then every judged ladder; [] for a study without verdicts."""
    laws = {(one.arm, one.variant, one.part): one for one in ladder_laws(answer)}
    rows: list[SummaryRow] = []
    for name, part in dict.fromkeys((one.verdict.reference, one.part) for one in answer.primary_verdicts):
        title = ladder_title(name, "", titles) + (f", {part}" if part else "")
        rows.append(
            _with_cost(SummaryRow(title, "reference", name=name), name, laws.get((name, "", part)), records)
        )
    for one in answer.primary_verdicts:
        row = one.row
        numbers = map(
            json_safe, (row.multiplier, row.multiplier_low, row.multiplier_high, row.p_better, row.p_growth)
        )
        title = ladder_title(one.arm, one.variant, titles) + (f", {one.part}" if one.part else "")
        made = SummaryRow(title, row.verdict, *numbers, judged=one, name=one.arm)
        rows.append(_with_cost(made, one.arm, laws.get((one.arm, one.variant, one.part)), records))
    return rows


def summary_table(rows: Sequence[SummaryRow], unit: str) -> Table:
    """The rows as a table; `unit` is that of the cost that multipliers compare."""
    costs = any(row.training_flops is not None for row in rows)  # a table of runs has no records
    columns = [
        column
        for name, column in columns_of(SummaryRow).items()
        if column.shown and (costs or not name.startswith("training"))
    ]
    noun = cost_axis(unit).noun
    caption = (
        f"The multiplier is the reference's {noun} over the arm's for the same loss, averaged over the range "
        "that both cover, with its interval; the p are those of no difference, and of a gain that does not "
        f"change with {noun}. By either: the data allow a larger exponent as well as a lower irreducible "
        "loss."
    )
    caption += " FLOPs and hours are the sums over the arm's runs in this study." * costs
    return replace(table_of(rows, columns, "Answers", caption), arm_column=0)


def ladder_laws(answer: Answer) -> list[StudyFit]:
    """The law of loss against FLOPs of every ladder, the joint fit's where there are two."""
    found: dict[tuple[str, str, str], StudyFit] = {}
    for one in answer.fits:
        key = (arm_key(one.arm), one.variant, one.part)
        of_compute = isinstance(one.fit, ArmLaw) and one.quantity == "loss" and one.against.lower() == "flops"
        if of_compute and (key not in found or one.method == "joint"):
            found[key] = one
    return list(found.values())


def _with_cost(row: SummaryRow, arm: str, law: StudyFit | None, records: Iterable[RunRecord]) -> SummaryRow:
    """The row with FLOPs and hours of training of a ladder's runs; without its law, of the arm's."""
    own = [r for r in records if (r.spec.arm.name == arm if law is None else r.run in law.runs)]
    if not own:
        return row
    hours = sum(record.seconds_training for record in own) / 3600
    return replace(row, training_flops=sum(record.flops for record in own), training_hours=hours)
