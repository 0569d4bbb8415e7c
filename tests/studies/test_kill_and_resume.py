"""A trained ladder killed at ten random moments gives the answer of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from steepen.data import Dataset
from steepen.launch.base import Outcome
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders.ladder import ladder
from steepen.studies.preset import RecipeOverride, load_preset
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from training_fixtures import prepare_words


@dataclass(frozen=True)
class InProcess:
    """Trains in the driver's own process, so that one SIGKILL ends driver and run at once."""

    data: Dataset
    store: RunStore
    slots: int = 1

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        for spec in specs:
            options = TrainOptions(device="cpu", quiet=True, checkpoint_every=4)
            yield Outcome(spec, record=train(spec, self.data, self.store, options))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare_words(tmp_path_factory.mktemp("words"), documents=600, val_tokens=1_000, seed=1)


def small_context(data: Dataset) -> StudyContext:
    preset = replace(
        load_preset("tiny"),
        context=16,
        batch_tokens=64,
        validation_tokens=512,
        rungs=(1, 2, 3, 4),
        recipes=(
            RecipeOverride("all", {"learning_rate": 0.1, "warmup_steps": 2, "tpp": 0.06}),
            RecipeOverride("untied-grow", {"rho": 0.4}),
        ),
    )
    facts = DatasetInfo(
        data.identity, data.padded_vocabulary, len(data.tokens("train")), len(data.tokens("val"))
    )
    return StudyContext(preset, facts)


def run_ladder(data: Dataset, folder: Path) -> Answer:
    store = RunStore(folder / "runs")
    journal = Journal.open(folder / "studies", "ladder", {}, store.root)
    study = ladder(small_context(data), arms=["vanilla", "untied-grow"])
    return drive(study, store, InProcess(data, store), journal=journal)


def in_a_child(data: Dataset, folder: Path) -> int:
    """Fork a driver; torch is imported already, so that it starts at once."""
    child = os.fork()
    if child:
        return child
    try:
        run_ladder(data, folder)
    finally:
        os._exit(0)


def without_times(answer: dict[str, Any]) -> str:
    """What must not depend on how often a study was killed: everything but seconds."""
    values = {name: value for name, value in answer["values"].items() if name != "seconds"}
    tables = [
        table for table in answer["tables"] if "time" not in table["title"] and table["title"] != "Runs"
    ]
    panels = [panel for panel in answer["panels"] if "time" not in panel["title"].lower()]
    warnings = [warning for warning in answer["warnings"] if not warning.startswith("per second: ")]
    kept = ("findings", "method", "runs", "question")
    return json.dumps([{name: answer[name] for name in kept}, warnings, values, tables, panels])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_study_killed_at_ten_random_moments_gives_the_same_answer(data: Dataset, tmp_path: Path) -> None:
    began = time.monotonic()
    undisturbed = run_ladder(data, tmp_path / "undisturbed")
    whole = time.monotonic() - began
    choose = random.Random(20260101)
    disturbed = tmp_path / "disturbed"
    kills = 0
    for _ in range(10):
        child = in_a_child(data, disturbed)
        time.sleep(choose.uniform(0.01, 0.12) * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
    assert kills >= 6  # on a machine that grew faster meanwhile, the last may come after the answer
    answer = run_ladder(data, disturbed)
    assert without_times(answer.to_dict()) == without_times(undisturbed.to_dict())
    entry = Journal.read(disturbed / "studies" / "ladder").entry
    assert entry.status == "finished"
    assert Answer.from_dict(entry.answer).findings == answer.findings
    records = sorted((disturbed / "runs").glob("*/record.json"))
    assert len(records) == len(set(answer.runs)) == 9
