"""The page scores registered forecasts against the runs of its studies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from steepen.errors import SteepenError
from steepen.laws.registered_forecasts import RegisteredForecast
from steepen.report.load_studies import LoadedStudy, with_registered_forecasts
from steepen.report.page import render_page


def test_page_scores_forecasts_against_the_studys_runs(
    tmp_path: Path, finished: Callable[[str], LoadedStudy]
) -> None:
    study, file = finished("ladder"), tmp_path / "forecasts.jsonl"
    arm = study.records[-1].spec.arm.name
    flops = study.records[-1].flops
    loss = study.records[-1].validation_loss
    forecast = RegisteredForecast(
        arm=arm, flops=flops, forecast=loss, interval=(loss - 0.1, loss + 0.1), standard_error=0.05,
        confidence=0.9, e=loss - 1, log_a=0.0, gamma=0.1, c0=flops, method="joint", reference="vanilla",
        runs=4, data_sha256="0" * 64, registered="2026-11-16T00:00:00+00:00",
    )  # fmt: skip
    forecasts = [forecast, replace(forecast, arm="no-arm"), replace(forecast, interval=(0.0, 0.1))]
    file.write_text("\n".join(json.dumps(asdict(one)) for one in forecasts) + "\n")
    scored = with_registered_forecasts(study, file)
    table = scored.answer.tables[0]
    assert table.title == "Registered forecasts"
    assert [row[-1] for row in table.rows] == ["inside", "not measured yet", "outside"]
    assert "Registered forecasts" in render_page([scored])
    with pytest.raises(SteepenError, match="no registered forecasts"):
        with_registered_forecasts(study, tmp_path / "absent")
