"""What the report of a study consists of: its figures and tables, with the ids and names they have.

The first table is the summary: a line per arm with its answer, multiplier, p-value and cost.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from steepen.report.colours import ArmStyles
from steepen.report.curves import curves_of, ladder_title, panel_with_titles, role_text, styled_panel
from steepen.report.load_studies import LoadedStudy
from steepen.report.run_panels import curve_panels, ladder_laws, residuals_of_laws, source_panels
from steepen.results.table import Column, Table, columns_of, no_formula, table_of
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, Panel, StudyFit, StudyVerdict
from steepen.studies.mistuning import mistuned_runs
from steepen.utils.formatting import cost_axis
from steepen.utils.json_io import json_safe
from steepen.utils.rows import grouped


@dataclass(frozen=True)
class FigureContent:
    """One figure: a panel, or the panels of a group."""

    id: str
    title: str
    panels: tuple[Panel, ...]

    @property
    def lead(self) -> bool:
        """Whether it is shown first."""
        return any(panel.lead for panel in self.panels)


@dataclass(frozen=True)
class StudyContent:
    """The figures and tables of a study's report; the first table is that of `summary`, if it has rows."""

    id: str
    study: LoadedStudy
    figures: tuple[FigureContent, ...]
    tables: tuple[Table, ...]
    summary: tuple[SummaryRow, ...]

    @staticmethod
    def of(index: int, study: LoadedStudy, titles: dict[str, str], styles: ArmStyles) -> StudyContent:
        """The study's own panels and tables, and those that its runs give."""
        answer, records = study.answer, study.records
        residuals, scatter = residuals_of_laws(answer, records, titles)
        added = [
            *residuals,
            *source_panels(records),
            *curve_panels(records, study.runs_directory, titles),
        ]
        panels = [styled_panel(panel_with_titles(one, titles), styles) for one in (*answer.panels, *added)]
        groups = grouped(panels, lambda panel: panel.group or id(panel)).values()
        name = f"s{index + 1}"
        figures = [
            FigureContent(f"{name}-f{i}", members[0].group or members[0].title, tuple(members))
            for i, members in enumerate(groups, start=1)
        ]
        rows, judged = tuple(summary_rows(answer, records, titles)), answer.primary_verdicts
        summary = [summary_table(rows, judged[0].verdict.unit)] if rows else []
        tables = (
            *summary, *_mistuned_table(study), *answer.tables, *scatter
        )  # fmt: skip
        return StudyContent(name, study, tuple(figures), tables, rows)

    def table_id(self, index: int) -> str:
        """The id of a table on the page."""
        return f"{self.id}-t{index + 1}"


def _mistuned_table(study: LoadedStudy) -> list[Table]:
    """The runs that look mistuned, if there are any."""
    found = () if study.runs_directory is None else mistuned_runs(study.runs_directory, study.records)
    rows = tuple((one.ladder, one.depth, one.reason, one.check, one.run) for one in found)
    caption = (
        "By their loss curves, gradient norms and residual streams, beside the other rungs and ladders of"
        " the study."
    )
    columns = ("arm", "depth", "what was seen", "what would tell", "run")
    return [Table("Is a rung mistuned?", columns, rows, caption, arm_column=0)] if rows else []


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


def _with_cost(row: SummaryRow, arm: str, law: StudyFit | None, records: Iterable[RunRecord]) -> SummaryRow:
    """The row with FLOPs and hours of training of a ladder's runs; without its law, of the arm's."""
    own = [r for r in records if (r.spec.arm.name == arm if law is None else r.run in law.runs)]
    if not own:
        return row
    hours = sum(record.seconds_training for record in own) / 3600
    return replace(row, training_flops=sum(record.flops for record in own), training_hours=hours)


def figure_csv(panels: Sequence[Panel], titles: dict[str, str]) -> str:
    """Everything that a figure shows, one row per point, numbers to their last digit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("panel", "curve", "kind", "what", "x_label", "y_label", "x", "y", "low", "high", "run", "text")
    writer.writerow(head)
    for panel in panels:
        for curve in curves_of(panel, titles):
            for series in curve.series:
                what = role_text(series) or series.role
                head = (panel.title, curve.label, series.kind, what, panel.x.label, panel.y.label)
                for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                    low = y if series.kind == "band" else _item(series.low, i)
                    high = _item(series.y_high if series.kind == "band" else series.high, i)
                    middle = "" if series.kind == "band" else repr(y)
                    numbers = (repr(x), middle, low, high)
                    texts = (_item(series.runs, i), _item(series.texts, i))
                    writer.writerow((*map(no_formula, head), *numbers, *map(no_formula, texts)))
    return text.getvalue()


def _item(values: Sequence[object], index: int) -> object:
    return values[index] if index < len(values) else ""
