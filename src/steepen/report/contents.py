"""What the report of a study consists of: its figures and tables, with the ids and names they have."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from steepen.report.colours import ArmStyles
from steepen.report.curves import curves_of, panel_with_titles, role_text, styled_panel
from steepen.report.load_studies import LoadedStudy
from steepen.report.run_panels import curve_panels, residual_panels, scatter_tables, source_panels
from steepen.report.summary import SummaryRow, summary_rows, summary_table
from steepen.results.table import no_formula
from steepen.studies.answer import Panel, Table
from steepen.studies.mistuning import mistuned_runs
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
        added = [
            *residual_panels(answer, records, titles),
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
            *summary, *_mistuned_table(study), *answer.tables, *scatter_tables(answer, records, titles)
        )  # fmt: skip
        return StudyContent(name, study, tuple(figures), tables, rows)

    def table_id(self, index: int) -> str:
        """The id of a table on the page."""
        return f"{self.id}-t{index + 1}"


def _mistuned_table(study: LoadedStudy) -> list[Table]:
    """The runs that look mistuned, if there are any."""
    found = () if study.runs_directory is None else mistuned_runs(study.runs_directory, study.records)
    rows = tuple((one.ladder, one.depth, one.reason, one.check, one.run) for one in found)
    caption = "By their loss curves and gradient norms, beside the other rungs and ladders of the study."
    columns = ("arm", "depth", "what was seen", "what would tell", "run")
    return [Table("Is a rung mistuned?", columns, rows, caption, arm_column=0)] if rows else []


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
