"""The authors' ladders are shipped with the package and give the paper's printed numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from steepen.requests.app import main
from steepen.tables.paper_ladders import ASSETS, KNOWN_ANSWERS


def fit(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["fit", *words, "--draws", "100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "e", "vanilla", "untied_grow"),
    [("fineweb", 1.706, 0.1113, 0.1168), ("fineweb-edu", 1.449, 0.1095, 0.1146)],
)
def test_papers_method_gives_the_exponents_of_figure_3(
    capsys: pytest.CaptureFixture[str], name: str, e: float, vanilla: float, untied_grow: float
) -> None:
    found = fit(capsys, f"paper:{name}", "--method", "paper", "--where", "arm=vanilla,untied-grow")
    arms = found["arms"]
    assert arms["vanilla"]["e"] == pytest.approx(e, abs=5e-4)
    assert arms["vanilla"]["gamma"] == pytest.approx(vanilla, abs=1e-4)
    assert arms["untied-grow"]["gamma"] == pytest.approx(untied_grow, abs=1e-4)
    assert arms["vanilla"]["slope_standard_error"] < 1e-3
    assert found["c0"] == pytest.approx(1.0558e18, rel=1e-4)


def test_interpolated_multipliers_are_the_printed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("paper:fineweb", "--method", "joint", "--where", "arm=vanilla,operator-1,untied-2,untied-grow")
    arms = fit(capsys, *words)["arms"]
    for arm, low, high in (("operator-1", 1.12, 1.25), ("untied-2", 1.19, 1.34), ("untied-grow", 1.30, 1.55)):
        found = {
            round(m["flops"] / 1e17): m["value"]
            for m in arms[arm]["multipliers"]
            if m["method"] == "interpolated"
        }
        assert found[11] == pytest.approx(low, abs=0.006)  # Vanilla d8
        assert found[max(found)] == pytest.approx(high, abs=0.006)  # Vanilla d20


def test_d26_is_held_out_of_fineweb_edu_and_can_be_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = fit(capsys, "paper:fineweb-edu", "--method", "paper")["hold_out"]
    assert run["arm"] == "untied-grow"
    assert run["observed"] == pytest.approx(2.1372, abs=5e-5)
    assert run["forecast"] == pytest.approx(2.1661, abs=5e-4)
    assert run["error"] == pytest.approx(-0.03, abs=0.005)  # the paper: 0.03 better than forecast
    assert fit(capsys, "paper:fineweb-edu", "--hold-out", "none")["hold_out"] == []


def test_unknown_data_set_is_rejected_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "paper:c4"]) == 2
    assert "paper:fineweb and paper:fineweb-edu" in capsys.readouterr().err


def test_shipped_tables_are_complete_and_carry_their_licence() -> None:
    counts = {"fineweb_ladders.csv": 58, "fineweb_edu_ladders.csv": 16, KNOWN_ANSWERS.name: 107}
    for name, rows in counts.items():
        with Path(ASSETS / name).open(newline="") as file:
            assert len(list(csv.DictReader(file))) == rows
    licence = (ASSETS / "paper_ladders.LICENSE").read_text()
    assert "Loop contributors" in licence
    assert "Permission is hereby granted" in licence
