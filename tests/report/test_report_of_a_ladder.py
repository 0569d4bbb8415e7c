"""The report of a ladder study: first screen, residuals, loss curves, samples and groups of panels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from steepen.report.colours import ARM_TITLES
from steepen.report.contents import StudyContent, summary_rows, summary_table
from steepen.report.load_studies import LoadedStudy, load_study
from steepen.report.page import render_page
from steepen.results.table import to_latex
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.answer import Axis, Panel, Series
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.journal import Journal
from steepen.studies.preset import load_preset
from steepen.studies.registry import STUDIES
from steepen.studies.synthetic import Formula, fabricate_record
from steepen.utils.json_io import write_json

ARMS = ["vanilla", "operator-1", "untied-2"]


def loss(spec: RunSpec) -> float:
    """Vanilla's law, a better constant for Operator-1 and a better exponent for Untied-2, with noise."""
    gamma, height = {"vanilla": (0.2, 2.0), "operator-1": (0.2, 1.9), "untied-2": (0.26, 1.95)}[spec.arm.name]
    noise = np.random.default_rng(int(spec.hash[:8], 16)).normal(0, 5e-4)
    return 1.5 + height * (expected_flops(spec) / 1e12) ** -gamma + float(noise)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> LoadedStudy:
    """A ladder of three arms, with metrics of every run and samples of one."""
    folder = tmp_path_factory.mktemp("ladder")
    context = StudyContext(load_preset("tiny"), DatasetInfo("f" * 64, 512, 10**13, 10**13))
    formula, store = Formula(loss), RunStore(folder / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steepen.studies.ladders.ladder_runs.DRAWS", 100)
        answer = formula.answer(STUDIES["ladder"].start(context, {"arms": ARMS}))
    for spec in formula.specs:
        run, final = store.run(spec), loss(spec)
        write_json(run.spec_file, spec.to_dict())
        write_json(run.record_file, fabricate_record(spec, final).to_dict())
        steps = range(1, spec.steps + 1)
        lines = [{"step": step, "loss": final + 3 * step**-0.5} for step in steps]
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    largest = max((s for s in formula.specs if s.arm.name == "vanilla"), key=expected_flops)
    samples = [{"step": step, "prompt": "Once", "text": f" <upon> {step}"} for step in (10, 20)]
    (store.run(largest).path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    journal = Journal.open(folder / "studies", "ladder", {}, folder / "runs")
    journal.set_answer(replace(answer, cautions=("Without a recipe of their own: untied-2 uses vanilla's.",)))
    return load_study("ladder", folder / "studies")


@pytest.fixture(scope="module")
def page(study: LoadedStudy) -> str:
    return render_page([study])


def test_first_screen_is_cautions_then_answers_then_multipliers_then_cards(page: str) -> None:
    order = [
        'class="caution"',
        ">Answers<",
        "multiplier over Vanilla",
        '<article class="verdict',
        ">Laws<",
        ">Runs<",
    ]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    assert page.index("Without a recipe of their own") < page.index(">Answers<")


def test_summary_has_a_row_per_arm_with_answer_multiplier_p_and_cost(study: LoadedStudy) -> None:
    table = summary_table(summary_rows(study.answer, study.records, ARM_TITLES), "FLOPs")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["Vanilla", "Operator-1", "Untied-2"]
    assert rows["Vanilla"]["better, and does the gain grow?"] == "reference"
    for judged in study.answer.verdicts:
        if judged.primary:
            row = rows[ARM_TITLES[judged.arm]]
            assert row["better, and does the gain grow?"] == judged.verdict.word
            assert row["p (growth)"] == judged.verdict.slope.p_value
            own = [r for r in study.records if r.spec.arm.name == judged.arm]
            assert row["training FLOPs"] == pytest.approx(sum(r.flops for r in own))
            # The true multiplier in the middle of the range, from the two laws.
            assert judged.verdict.flops_range is not None
            at, arm = np.sqrt(np.prod(judged.verdict.flops_range)) / 1e12, judged.arm
            gamma, height = (0.2, 1.9) if arm == "operator-1" else (0.26, 1.95)
            truth = at / (height / (2.0 * at**-0.2)) ** (1 / gamma)
            assert row["low"] < row["multiplier (mean)"] < row["high"]
            assert row["multiplier (mean)"] == pytest.approx(truth, rel=0.05)
    assert (
        r"\toprule" in to_latex(table) and "Untied-2 & " in to_latex(table) and "; grows" in to_latex(table)
    )


def test_laws_are_one_figure_and_runs_give_residuals_and_loss_curves(study: LoadedStudy) -> None:
    content = StudyContent.of(0, study, ARM_TITLES, {})
    figures = {figure.title: figure for figure in content.figures}
    assert [p.title.split(" against")[0] for p in figures["Laws"].panels] == [
        "Loss",
        "Reducible loss",
        "Exponent",
        "Exponent",
    ]
    (residuals,) = figures["Residuals of the laws"].panels
    for series in residuals.series:
        law = next(f.fit for f in study.answer.fits if f.arm == series.arm and f.method == "joint")
        by_run = {r.run: r for r in study.records}
        for run, x, y in zip(series.runs, series.x, series.y, strict=True):
            assert x == by_run[run].flops
            assert y == pytest.approx(by_run[run].validation_loss - float(law.predict(x)))  # type: ignore[union-attr]
    curves = figures["Loss curves of the runs"].panels
    assert [panel.title.split(" (")[0] for panel in curves] == ["Vanilla", "Operator-1", "Untied-2"]
    for panel in curves:
        for series in panel.series:
            assert 2 < len(series.x) <= 61
            losses = np.array(series.y)
            assert (np.diff(losses) < 0).all()
    scatter = next(table for table in content.tables if table.title == "Scatter about the laws")
    deviations = [float(row[2]) for row in scatter.rows]  # the noise is 5e-4
    assert min(deviations) > 1e-4 and max(deviations) < 1.2e-3, deviations


def test_samples_of_the_last_step_are_shown_and_escaped(page: str) -> None:
    section = page[page.index(">Samples<") : page.index(">Method<")]
    assert "<blockquote><b>Once</b> &lt;upon&gt; 20</blockquote>" in section
    assert "&gt; 10<" not in section
    assert page.count("&lt;upon&gt; 10") == 1  # with its run


def test_panels_of_a_group_are_one_figure_with_one_legend(study: LoadedStudy) -> None:
    def panel(depth: int) -> Panel:
        points = Series("one pass", "points", (0.1, 0.2), (3.0, 3.1), level=1.0)
        return Panel(
            f"d{depth}", Axis("weight decay"), Axis("loss"), (points,), group="Weight decay", share="y"
        )

    answer = replace(study.answer, verdicts=(), fits=(), panels=tuple(panel(d) for d in range(4, 22)))
    page = render_page([LoadedStudy("grid", answer, {}, ())])
    assert page.count("<figure ") == page.count('<div class="legend">') == 1
    assert page.count("<svg ") == 18 and len(set(re.findall(r'data-y="([^"]*)"', page))) == 1
    assert [unescape(t) for t in re.findall(r'<p class="title">([^<]*)</p>', page)][:2] == ["d4", "d5"]


def test_ids_of_a_page_are_unique(page: str) -> None:
    ids: Sequence[str] = re.findall(r'\sid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)
