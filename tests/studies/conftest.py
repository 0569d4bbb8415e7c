"""Study contexts at the tiny and paper presets; synthetic losses replace training, so no data is read."""

from __future__ import annotations

import pytest

from run_fixtures import instant, spec, store, trainer
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset

__all__ = ["instant", "spec", "store", "trainer"]

PLENTY = 10**13


@pytest.fixture(scope="session")
def paper() -> StudyContext:
    return StudyContext(load_preset("paper"), DatasetInfo("f" * 64, 50_304, PLENTY, PLENTY))


@pytest.fixture(scope="session")
def tiny() -> StudyContext:
    return StudyContext(load_preset("tiny"), DatasetInfo("f" * 64, 512, PLENTY, PLENTY))


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bootstraps small enough for a test; verdicts do not rest on them."""
    monkeypatch.setattr("steepen.studies.ladders.ladder_runs.DRAWS", 200)
