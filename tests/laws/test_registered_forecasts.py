"""Forecasts registered before the runs exist are scored afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.laws.registered_forecasts import RANGES, read_registered, score_registered
from steepen.requests.app import main

FLOPS = np.geomspace(3e17, 1e20, 7)
LATER = 1.2e21


def write(path: Path, rungs: np.ndarray, last: float = 0.0) -> str:
    rng = np.random.default_rng(0)
    rows = ["arm,flops,loss"]
    for arm, gamma in (("vanilla", 0.111), ("grow", 0.118)):
        for flops in rungs:
            loss = 1.8 + 1.5 * (flops / 1e18) ** -gamma + 1e-3 * rng.standard_normal()
            rows.append(f"{arm},{flops:.8g},{loss + (last if flops > 1e21 else 0):.6f}")
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def fit(*words: str) -> int:
    return main(["fit", *words, "--reference", "vanilla", "--draws", "100", "--method", "joint"])


def test_forecast_is_registered_and_scored_once_the_run_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = tmp_path / "forecasts.jsonl", write(tmp_path / "before.csv", FLOPS)
    assert fit(before, "--register", str(file), "--budget", str(LATER)) == 0
    assert "not measured yet" in capsys.readouterr().out
    vanilla, grow = read_registered(file)
    assert (vanilla.arm, grow.arm, grow.flops, grow.runs) == ("vanilla", "grow", LATER, 14)
    assert grow.interval[0] < grow.forecast < grow.interval[1]
    assert grow.forecast == pytest.approx(grow.law(LATER))
    assert grow.registered.startswith("20") and len(grow.data_sha256) == 64

    as_forecast = write(tmp_path / "after.csv", np.append(FLOPS, LATER * 1.01))
    assert fit(as_forecast, "--score", str(file), "--json") == 0
    scored = json.loads(capsys.readouterr().out)["scored"]
    assert [one["inside"] for one in scored] == [True, True]
    assert scored[1]["forecast"] == pytest.approx(grow.law(LATER * 1.01))
    assert fit(write(tmp_path / "off.csv", np.append(FLOPS, LATER), 0.1), "--score", str(file)) == 0
    assert "outside the 90% interval" in " ".join(capsys.readouterr().out.split())


def test_lines_are_only_added_and_measured_runs_are_not_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "forecasts.jsonl", write(tmp_path / "runs.csv", FLOPS)
    words = (table, "--register", str(file), "--budget")
    assert fit(*words, "1e21") == 0
    first = file.read_text()
    assert fit(*words, "1e22") == 0
    assert file.read_text().startswith(first)
    assert len({one.data_sha256 for one in read_registered(file)}) == 1
    assert fit(*words, str(FLOPS[-1])) == 2
    assert "every arm already has a run" in capsys.readouterr().err
    assert fit(*words, str(FLOPS[-1]), "--hold-out", "9e19") == 2, "held out, but measured"
    assert fit(table, "--register", str(file)) == 2
    assert "--budget" in capsys.readouterr().err
    file.write_text("nonsense\n")
    assert fit(*words, "1e21") == 2
    assert "line 1: not a registered forecast" in capsys.readouterr().err
    assert fit(table, "--score", str(tmp_path / "none")) == 2


@pytest.mark.parametrize("change", [{"gamma": 1e308}, {"log_a": 1e9}, {"forecast": math.nan}, {"flops": 0}])
def test_absurd_forecast_is_rejected(change: dict[str, float], tmp_path: Path) -> None:
    file = tmp_path / "forecasts.jsonl"
    good: dict[str, Any] = dict.fromkeys(RANGES, 1.0) | {"interval": [0.9, 1.1], "runs": 5}
    good |= dict.fromkeys(("arm", "method", "reference", "data_sha256", "registered"), "x")
    file.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(UsageError, match=f"line 2: not a registered forecast .*{next(iter(change))}"):
        read_registered(file)


def test_forecast_without_its_run_is_not_scored() -> None:
    assert score_registered([], {}) == []
    with pytest.raises(UsageError, match="cannot be read"):
        read_registered(Path("/"))


def test_ledger_collects_projects_and_says_how_forecasts_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    words = ("--register", str(ledger), "--budget", str(LATER))
    first = write(tmp_path / "first.csv", FLOPS)
    assert fit(first, *words) == 0
    other = tmp_path / "other.csv"  # arms of the same names, with another irreducible loss
    lines = Path(first).read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in lines[1:]]
    other.write_text("\n".join([lines[0], *(f"{head},{float(loss) + 0.5:.6f}" for head, loss in rows)]))
    assert fit(str(other), *words) == 0
    later = write(tmp_path / "later.csv", np.append(FLOPS, LATER))
    capsys.readouterr()
    assert fit(later, "--score", str(ledger), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["inside"] for one in found["scored"]] == [True, True, None, None]
    assert (found["calibration"]["scored"], found["calibration"]["inside"]) == (2, 2)
    before = ledger.read_text()
    assert fit(later, "--score", str(ledger)) == 0
    assert ledger.read_text() == before, "an observation is added once"
    assert fit(write(tmp_path / "off.csv", np.append(FLOPS, LATER), 0.1), "--score", str(ledger)) == 0
    capsys.readouterr()
    shown = steepen.ledger(ledger)
    assert [row.inside for row in shown.rows] == [False, False, None, None], "the latest observation counts"
    assert shown.calibration.expected == pytest.approx(1.8) and shown.calibration.rms_error > 3
    assert main(["ledger", str(ledger)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 of 4 forecasts are scored: 0 are inside their intervals (1.8 expected)" in printed
    assert main(["ledger", str(tmp_path / "none")]) == 2
