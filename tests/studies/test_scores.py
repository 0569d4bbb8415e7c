"""Downstream scores along ladders: known truths come back; the authors' tables give the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.evaluation.core.suite import CATEGORIES, CORE17
from steepen.evaluation.scored_runs import PassesAtTestTime, ScoredRun, group_series, read_scored_runs
from steepen.requests.app import main
from steepen.studies.answer import Answer
from steepen.studies.context import StudyContext
from steepen.studies.ladders.ladder import ladder
from steepen.studies.scores.downstream import analyse_downstream
from steepen.studies.scores.score_ladders import matched_metric
from steepen.studies.scores.score_residuals import fit_loss_line, mean_residual
from steepen.studies.synthetic import Formula

Find = Callable[[str], Path]
FLOPS = np.geomspace(1e18, 1e20, 6)
SCALE = {"vanilla": 1.0, "untied-grow": 2.0}  # an arm needs this many times less compute for any score


def checkpoint(arm: str, flops: float, corpus: str = "", gain: float = 0.0) -> ScoredRun:
    """Every task's NLL is 1 + (C/1e18)^−0.2, or lower by `gain`; accuracy is a sigmoid of it."""
    own = flops * SCALE[arm]
    loss = 2.0 + (own / 1e18) ** -0.1
    nll = float(1.0 + (own / 1e18) ** -0.2 - gain)
    centered = 1 / (1 + math.exp(4 * nll - 6))
    return ScoredRun(
        f"{arm}-{corpus}-{flops:.3g}", arm, round(8 + math.log(flops / 1e18)), flops, loss, corpus, nll=nll,
        core22=0.9 * centered, core17=centered,
        tasks={task: {"nll": nll, "centered": centered} for task in CORE17}, kl_depth=5 + math.log10(own),
        passes=PassesAtTestTime(4, (3, 4, 5), (0.1, 0.0, 0.05)),
    )  # fmt: skip


def runs(corpus: str = "", gain: float = 0.0) -> list[ScoredRun]:
    return [checkpoint(arm, c, corpus, gain) for arm in SCALE for c in FLOPS]


def panels(answer: Answer, group: str) -> list[str]:
    return [panel.title for panel in answer.panels if panel.group == group]


def test_equal_metrics_give_the_true_multiplier_whether_they_rise_or_fall() -> None:
    # Straight in log compute, so that interpolation is exact.
    base, other = 5 - 0.1 * np.log(FLOPS), 5 - 0.1 * np.log(2 * FLOPS)
    for sign, rises in ((1, False), (-1, True)):
        found = matched_metric((FLOPS, sign * base), (FLOPS, sign * other), rises=rises)
        assert found and all(one.value == pytest.approx(2.0) for one in found)
        assert all(FLOPS[0] <= one.flops <= FLOPS[-1] for one in found)
        assert len(found) == len(FLOPS) - 1  # the lowest score lies outside the other ladder


def test_lines_of_the_loss_leave_what_an_arm_gains_beyond_it() -> None:
    loss = np.linspace(2.5, 3.5, 7)
    line = fit_loss_line(loss, 0.5 + 1.5 * loss)
    assert (line.intercept, line.slope) == (pytest.approx(0.5), pytest.approx(1.5))
    low = loss[loss <= 3.0]
    left = mean_residual(line, low, 0.5 + 1.5 * low - 0.1)
    assert left is not None and left.mean == pytest.approx(-0.1) and left.count == 4


def test_downstream_recovers_the_truth_it_was_given() -> None:
    held = checkpoint("untied-grow", 1e21)
    answer = analyse_downstream([*runs(), held], held_out=[held.run], targets=[1e21]).answer()
    values = answer.values["scores"]
    for name in ("answer NLL", "CORE, 22 tasks"):
        for _, value in values["multipliers"][name]["untied-grow"]:
            assert value == pytest.approx(2.0, rel=0.05), name
    for kind in ("loss_forecast", "core_forecast"):
        (row,) = values[kind]["held_out"]
        assert row["forecast"] == pytest.approx(row["observed"], abs=2e-3)
    assert values["core_forecast"]["r"] == pytest.approx(0.9, rel=1e-3)
    crossed = values["core_forecast"]["crossings"]["GPT-3 2.7B"]
    assert crossed["vanilla"] / crossed["untied-grow"] == pytest.approx(2.0, rel=0.02)
    assert panels(answer, "Scores along the ladders") == [
        "validation loss", "answer NLL", "CORE, 22 tasks", "CORE, 17 tasks",
    ]  # fmt: skip
    assert panels(answer, "Forecasts beyond the ladders") == ["validation loss", "answer NLL", "CORE"]
    assert len(panels(answer, "From task NLL to accuracy, and from 17 tasks to CORE")) == 18
    assert panels(answer, "Loss at other numbers of passes than trained") == ["vanilla", "untied-grow"]


def test_task_bars_show_a_gain_that_the_loss_does_not_explain() -> None:
    better = [
        replace(run, tasks={**run.tasks, "squad": {"nll": run.score("squad", "nll") - 0.2}})
        if run.arm == "untied-grow"
        else run
        for run in runs()
    ]
    answer = analyse_downstream(better).answer()
    found = answer.values["scores"]["task_residuals"]["all runs"]["untied-grow"]
    assert found["squad"] - found["copa"] == pytest.approx(-0.2)
    bars = [panel for panel in answer.panels if panel.group == "Task NLL about the reference's line"]
    assert [panel.series[0].kind for panel in bars] == ["bars", "bars"]
    assert set(bars[0].x.names) == {task for tasks in CATEGORIES.values() for task in tasks} == set(CORE17)


def test_two_corpora_are_two_series_and_are_compared() -> None:
    found = analyse_downstream(
        [*runs("aaaa"), *runs("bbbb", gain=0.1)], corpora={"aaaa": "one", "bbbb": "two"}
    )
    answer = found.answer()
    assert {one.label for one in group_series([*runs("aaaa"), *runs("bbbb")])} == {
        f"{arm} (corpus {name})" for arm in SCALE for name in ("aaaa", "bbbb")
    }
    assert panels(answer, "Corpora compared: untied-grow") == [
        "validation loss, each on its own corpus", "answer NLL", "CORE",
    ]  # fmt: skip
    # A lower NLL at every compute: the second corpus reaches a score with less compute.
    crossed = answer.values["corpora of vanilla"]["crossings"]["GPT-3 2.7B"]
    assert crossed["vanilla (corpus one)"] > 1.5 * crossed["vanilla (corpus two)"]


def test_a_missing_reference_and_an_ambiguous_held_out_run_are_refused() -> None:
    with pytest.raises(UsageError, match="no scored run of 'loop-2'"):
        analyse_downstream(runs(), reference="loop-2")
    with pytest.raises(UsageError, match="names 6 of the scored runs"):
        analyse_downstream(runs(), held_out=["vanilla"])


def test_a_ladder_whose_runs_have_scores_shows_them(paper: StudyContext) -> None:
    class Scored(Formula):
        def _record(self, spec):
            record = super()._record(spec)
            assert record is not None
            nll = record.validation_loss - 1
            core = {"nll22": nll, "core22": 1 / nll, "core17": 1 / nll, "tasks": {}}
            evaluation = {"core": core, "kl_depth": {"depth": spec.shape.depth}}
            return replace(record, evaluation=evaluation)

    def loss(spec):
        return 1.7 + 1.4 * (spec.tokens * spec.shape.depth / 1e10) ** -0.2

    answer = Scored(loss).answer(ladder(paper, arms=["vanilla", "operator-1"]))
    titles = [panel.title for panel in answer.panels]
    assert "KL effective depth along the ladders" in titles and "at equal answer NLL" in titles
    assert any("KL effective depth" in text for text in answer.findings)
    assert any(table.title == "Recipes of the ladders" for table in answer.tables)


def test_the_authors_scores_give_the_papers_forecasts(
    reference_data: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        str(reference_data(f"refdata/authors/{name}.csv")) for name in ("core_scores", "core_task_scores")
    ]
    found = read_scored_runs([Path(file) for file in files])
    assert len(found) == 74 and not any(run.record for run in found)
    own = [run for run in found if run.corpus == "fineweb-edu"]
    values = analyse_downstream(own, held_out=["untied-grow-d26"]).answer().values["scores"]
    assert values["core_forecast"]["r"] == pytest.approx(0.86912, abs=1e-5)
    (row,) = values["core_forecast"]["held_out"]
    assert (row["forecast"], row["observed"]) == (
        pytest.approx(0.3837, abs=1e-4),
        pytest.approx(0.3865, abs=1e-4),
    )
    (row,) = values["nll_forecast"]
    assert abs(row["forecast"] - row["observed"]) == pytest.approx(0.002, abs=5e-4)
    ratios = [own["vanilla"] / own["untied-grow"] for own in values["core_forecast"]["crossings"].values()]
    assert ratios[0] == pytest.approx(2.5, abs=0.06) and ratios[-1] == pytest.approx(3.5, abs=0.06)
    arms = ["--arms", "vanilla,untied-grow", "--hold-out", "untied-grow-d26"]
    assert main(["downstream", *files, *arms]) == 0
    assert "CORE 0.3865 against 0.3837 forecast" in " ".join(capsys.readouterr().out.split())
