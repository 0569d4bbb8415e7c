"""The paper's printed numbers come out of its authors' measurements by this package's fits.

One test for every row of docs/paper-map.md; the authors' tables are reference data and are not shipped.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.fits.downstream import fit_downstream
from steepen.laws.fits.drift import HyperparameterSweep, fit_drift
from steepen.laws.fits.matched_compute import slice_families
from steepen.laws.ladder import make_ladder
from steepen.laws.verdict.multipliers import interpolated_multipliers

REPOSITORY = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    """tools/paper_map.py, which is no package."""
    spec = importlib.util.spec_from_file_location("paper_map", REPOSITORY / "tools" / "paper_map.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def documented() -> dict[tuple[str, str], list[str]]:
    """The cells of the docs' table by name and arm."""
    text = (REPOSITORY / "docs" / "paper-map.md").read_text(encoding="utf-8")
    lines = text.split(TOOL.BEGIN)[1].split(TOOL.END)[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0].strip("`"), "" if row[1] == "–" else row[1]): row for row in rows}


DOCUMENTED = documented()


@pytest.fixture(scope="module")
def authors(reference_data: Callable[[str], Path]) -> Any:
    """The authors' tables, read once."""
    return TOOL.Authors(reference_data("refdata/authors"))


def test_the_docs_list_every_known_answer(authors: Any) -> None:
    answers = TOOL.read_answers(authors.directory)
    assert len(answers) == 107
    assert [(answer.name, answer.arm) for answer in answers] == list(DOCUMENTED)


def test_every_documented_answer_has_its_computation() -> None:
    assert len(DOCUMENTED) == 107
    assert {name for name, _ in DOCUMENTED} == set(TOOL.ANSWERS)


@pytest.mark.parametrize(("name", "arm"), DOCUMENTED, ids=[":".join(key) for key in DOCUMENTED])
def test_a_known_answer_is_reproduced(authors: Any, name: str, arm: str) -> None:
    (answer,) = (a for a in TOOL.read_answers(authors.directory) if (a.name, a.arm) == (name, arm))
    ours = TOOL.compute(authors, answer)
    assert abs(ours - answer.printed) <= answer.tolerance
    # Far closer than the tolerance to what the authors' own scripts give.
    assert ours == pytest.approx(answer.recomputed, rel=2e-5, abs=1e-6)
    printed, theirs, documented_value = (float(cell) for cell in DOCUMENTED[name, arm][3:6])
    assert (printed, theirs) == pytest.approx((answer.printed, answer.recomputed), rel=1e-5)
    assert documented_value == pytest.approx(ours, rel=1e-4, abs=1e-8)


def test_the_irreducible_losses_are_the_authors(authors: Any) -> None:
    for table, e in (("fineweb_ladders", 1.7064), ("fineweb_edu_ladders", 1.4492)):
        assert authors.law(table).arms["vanilla"].e.value == pytest.approx(e, abs=5e-5)
    errors = [law.slope_standard_error for law in authors.law("fineweb_ladders").arms.values()]
    assert max(errors) == pytest.approx(8.3e-4, abs=1e-5)


def test_the_papers_words_remain_options_and_give_other_numbers(authors: Any) -> None:
    """Huber of log losses, log-loss interpolation, log–log cuts and a predicted ratio."""
    ladders = authors.ladders("fineweb_ladders")
    settings = FitSettings("vanilla", method="paper", loss="huber", reference_law="free-fit")
    law = fit_compute(ladders, settings).arms
    assert law["vanilla"].e.value == pytest.approx(1.6932, abs=1e-4)
    assert law["vanilla"].gamma.value == pytest.approx(0.1101, abs=1e-4)
    assert law["untied-grow"].gamma.value == pytest.approx(0.1155, abs=1e-4)

    in_logs = interpolated_multipliers(ladders["vanilla"], ladders["untied-2"], interpolate="log-loss")
    assert in_logs[-1].value == pytest.approx(1.346, abs=5e-4)

    families = {
        float(loops): make_ladder(loops, TOOL.column(rows, "matrix_flops"), TOOL.column(rows, "val_loss"))
        for (loops,), rows in TOOL.group(authors.fixed_decay(), "loops").items()
    }
    low, high = slice_families(families, np.array([8.46e17, 6.7e18]), interpolation="log-log")
    assert low.best is not None and high.best is not None
    assert (low.best.x, high.best.x) == pytest.approx((1.72, 6.77), abs=0.01)

    tasks = authors.downstream().tasks
    series = {arm: authors.checkpoints("fineweb-edu", arm) for arm in ("vanilla", "untied-grow")}
    other = fit_downstream(series, tasks, residuals="log-nll", ratio="predicted")
    assert other.r == pytest.approx(0.8634, abs=1e-4)
    d26 = authors.largest("compute_flops")
    assert float(other.predict("untied-grow", d26)[0]) == pytest.approx(0.3822, abs=1e-4)


def test_learning_rates_drift_by_the_adopted_exponents(authors: Any) -> None:
    adopted = {
        row["arm"]: float(row["adopted_beta"]) for row in authors.rows("hyperparameter_slice_exponents")
    }
    for arm in ("vanilla", "operator-1", "loop-2", "untied-2"):
        rows = [
            row
            for row in authors.arm_rows("hyperparameter_slices", arm)
            if row["recipe"] == "constant" and row["knob"] == "learning_rate"
        ]
        sweeps = [
            HyperparameterSweep(
                float(size), 2.0 ** TOOL.column(own, "log2_multiplier"), TOOL.column(own, "val_loss")
            )
            for (size,), own in TOOL.group(rows, "params_stored").items()
        ]
        law = fit_drift(sweeps).law
        assert law is not None
        assert round(-law.exponent, 1) == adopted[arm]


def test_the_docs_show_every_published_ladder_run_as_equal(authors: Any) -> None:
    made = TOOL.ladder_table(authors.directory)
    text = (REPOSITORY / "docs" / "paper-map.md").read_text(encoding="utf-8")
    assert text.split(TOOL.LADDERS_BEGIN)[1].split(TOOL.LADDERS_END)[0].strip() == made
    assert "DIFFER" not in made
    assert made.count("| command line, FLOPs |") == 52
    assert len(made.splitlines()) == 2 + 59  # with the seven runs of Deep Vanilla Grow
