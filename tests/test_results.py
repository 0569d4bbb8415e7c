"""Published numbers are those of committed records; studies of results/h200-mini find what is planted."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from steepen.launch.base import Outcome
from steepen.recipe.flops import stored_parameters
from steepen.recipe.recipe_file import read_recipe, write_recipe
from steepen.requests.app import main
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders.ladder import ladder
from steepen.studies.preset import load_preset
from steepen.studies.synthetic import fabricate_record
from steepen.utils.json_io import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PUBLISH = ROOT / "tools" / "publish_results.py"
ARMS = ["vanilla", "operator-1", "untied-grow"]
RATE, EXPONENT, BASE = 0.05, -0.2, 3  # the planted best learning rate, at d3


def published(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PUBLISH), str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "folder", [path.parent for path in sorted(RESULTS.glob("*/runs"))], ids=lambda path: path.name
)
def test_published_numbers_come_from_the_committed_records(folder: Path) -> None:
    done = published(folder, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    """The custom studies of results/h200-mini."""
    found = importlib.util.spec_from_file_location("h200_mini", RESULTS / "h200-mini" / "h200_mini.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["h200_mini"] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def context() -> StudyContext:
    preset = load_preset(str(RESULTS / "h200-mini" / "preset.yaml"))
    return StudyContext(preset, DatasetInfo("d" * 64, 8192, 118_000_000, 2_200_000), epochs=4)


def best_rate(spec: RunSpec, context: StudyContext) -> float:
    base = context.stored_parameters(spec.arm, BASE)
    size = stored_parameters(spec.arm, spec.shape, spec.arm.passes.initial)
    return RATE * (size / base) ** EXPONENT


class Planted:
    """A launcher that writes records of a planted law: half the loss of a rate off its optimum is known."""

    slots = 1

    def __init__(self, context: StudyContext, store: RunStore) -> None:
        self.context, self.store = context, store

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        for spec in specs:
            gamma = 0.06 if spec.arm.name == "vanilla" else 0.07
            loss = 1.5 + 1.4 * (expected_flops(spec) / 1e16) ** -gamma
            loss += 0.04 * math.log2(spec.hyperparameters.learning_rate / best_rate(spec, self.context)) ** 2
            loss += 1e-4 * math.sin(int(spec.hash[:6], 16))
            record = fabricate_record(spec, loss)
            write_json(self.store.run(spec).spec_file, spec.to_dict())
            write_json(self.store.run(spec).record_file, record.to_dict())
            yield Outcome(spec, record=record)


@pytest.fixture
def folder(made_once: Path, tmp_path: Path) -> Path:
    """A results directory of the test's own."""
    return shutil.copytree(made_once, tmp_path / "toy")


@pytest.fixture(scope="module")
def made_once(studies: ModuleType, context: StudyContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory as run.sh leaves it: tuned recipes, their ladder, and a second seed."""
    folder = tmp_path_factory.mktemp("results") / "toy"
    store = RunStore(folder / "runs")
    launcher = Planted(context, store)

    def journal(name: str) -> Journal:
        return Journal.open(folder / "studies", name, {"study": name}, store.root)

    tuned = drive(
        studies.learning_rates(context, arms=ARMS, rungs=(2, 4)), store, launcher, journal=journal("tuning")
    )
    fitted = replace(context, recipes={file.arm: file.recipe for file in tuned.recipes})
    for path, file in tuned.recipe_files(folder / "studies" / "tuning").items():
        write_recipe(path, file)
    drive(ladder(fitted, arms=ARMS, rungs=(2, 3, 4, 5)), store, launcher, journal=journal("tuned"))
    drive(studies.seeds(fitted, arms=ARMS, rungs=(2, 3)), store, launcher, journal=journal("seeds"))
    (folder / "README.md").write_text("# Toy\n\n<!-- results/toy -->\n<!-- end -->\n\nThe end.\n")
    return folder


def test_tuning_finds_the_planted_rates(folder: Path, context: StudyContext) -> None:
    for arm in ARMS:
        recipe = read_recipe(folder / "studies" / "tuning" / f"recipe-{arm}.yaml").recipe
        assert recipe.learning_rate_exponent == EXPONENT
        assert recipe.base.learning_rate == pytest.approx(RATE, rel=0.05)
    answer = Journal.read(folder / "studies" / "tuned").entry.answer
    assert len(answer["runs"]) == 12
    for run in answer["runs"]:
        spec = RunSpec.from_dict(json.loads((folder / "runs" / run / "spec.json").read_text()))
        assert spec.hyperparameters.learning_rate == pytest.approx(best_rate(spec, context), rel=0.06)


def test_a_changed_record_is_noticed(folder: Path) -> None:
    assert published(folder, "--check").returncode == 1
    done = published(folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "README.md").read_text()
    assert "### `tuned`: 12 runs" in page and "Untied-Grow" in page and "The end." in page
    assert "between seeds" in page and "exponent -0.2" in page
    assert published(folder, "--check").returncode == 0
    run = Journal.read(folder / "studies" / "tuned").entry.answer["runs"][0]
    directory = RunDirectory(folder / "runs" / run)
    record = directory.record()
    assert record is not None
    write_json(
        directory.record_file, replace(record, validation_loss=record.validation_loss + 0.01).to_dict()
    )
    done = published(folder, "--check")
    assert (
        done.returncode == 1 and "README.md: differs" in done.stdout and "tuned.csv: differs" in done.stdout
    )
    directory.record_file.unlink()
    assert "is missing" in published(folder, "--check").stderr


def test_the_report_and_fit_read_the_directory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(folder)
    assert main(["report", str(folder), "--out", str(tmp_path / "page"), "--format", "svg"]) == 0
    text = (tmp_path / "page" / "report.html").read_text()
    assert "tuning" in text and "tuned" in text and "seeds" in text
    assert main(["fit", str(folder / "tuned.csv"), "--reference", "vanilla"]) == 0
    assert "operator-1" in capsys.readouterr().out.lower()
