"""The self-contained page of a result: the page that studies get, from any table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steepen.laws.verdict.evidence import Verdict
from steepen.report.load_studies import LoadedStudy
from steepen.report.page import render_page
from steepen.results.panel import Panel
from steepen.results.table import Table
from steepen.studies.answer import Answer, StudyVerdict


def result_page(
    question: str,
    *,
    panels: Sequence[Panel] = (),
    tables: Sequence[Table] = (),
    verdicts: Mapping[str, Verdict] | None = None,
    findings: Sequence[str] = (),
    cautions: Sequence[str] = (),
    warnings: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a page with a result's answers, figures and tables; `titles` are other names of arms."""
    answer = Answer(
        "fit", question, "", tuple(findings), {},
        verdicts=tuple(StudyVerdict(verdict, arm) for arm, verdict in (verdicts or {}).items()),
        panels=tuple(panels), tables=tuple(tables), warnings=tuple(warnings), cautions=tuple(cautions),
    )  # fmt: skip
    return render_page([LoadedStudy("fit", answer, {}, ())], titles=dict(titles or {}))
