"""Published tables are those of the committed runs; the studies of results/narrow find what is planted."""

from __future__ import annotations

import csv
import importlib.util
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
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.studies.ladders.ladder import ladder
from steepen.studies.preset import load_preset
from steepen.studies.synthetic import fabricate_record
from steepen.utils.json_io import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
ARMS = ["vanilla", "operator-1"]
RATE, EXPONENT, BASE = 0.04, -0.4, 6  # the planted best learning rate, at d6


def publish(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "publish_results.py"), str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "folder", [path.parent for path in sorted(RESULTS.glob("*/runs.csv"))], ids=lambda path: path.name
)
def test_published_tables_come_from_the_committed_runs(folder: Path) -> None:
    done = publish(folder, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        len([path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]) <= 20
    )


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    """The custom studies of results/narrow."""
    found = importlib.util.spec_from_file_location("replication", RESULTS / "narrow" / "replication.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["replication"] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def context() -> StudyContext:
    return StudyContext(load_preset("mini"), DatasetInfo("d" * 64, 4096, 10**9, 2_200_000))


def best_rate(spec: RunSpec, context: StudyContext) -> float:
    base = context.stored_parameters(spec.arm, BASE)
    size = stored_parameters(spec.arm, spec.shape, spec.arm.passes.initial)
    return RATE * (size / base) ** EXPONENT


class Planted:
    """A launcher that writes records of a planted law, lowest at the planted rates; bf16 costs 0.01."""

    slots = 1

    def __init__(self, context: StudyContext, store: RunStore) -> None:
        self.context, self.store = context, store

    def launch(self, specs: Iterable[RunSpec]) -> Generator[Outcome]:
        for spec in specs:
            gamma = 0.06 if spec.arm.name == "vanilla" else 0.07
            loss = 1.5 + 1.4 * (expected_flops(spec) / 1e16) ** -gamma
            loss += 0.04 * math.log2(spec.hyperparameters.learning_rate / best_rate(spec, self.context)) ** 2
            loss += 0.01 * (spec.optimizer.embedding_precision == "bf16") + 1e-4 * spec.seed
            record = fabricate_record(spec, loss)
            write_json(self.store.run(spec).spec_file, spec.to_dict())
            write_json(self.store.run(spec).record_file, record.to_dict())
            yield Outcome(spec, record=record)


@pytest.fixture(scope="module")
def place(studies: ModuleType, context: StudyContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place where rates were tuned, their ladder trained, and settings checked again."""
    place = tmp_path_factory.mktemp("results")
    store = RunStore(place / "runs")
    launcher = Planted(context, store)

    def done(name: str, study: object) -> Answer:
        journal = Journal.open(place / "studies", name, {"study": name}, store.root)
        return drive(study, store, launcher, journal=journal)  # pyright: ignore[reportArgumentType]

    tuned = done("rates", studies.rates(context, arms=ARMS, rungs=(4, 6, 8)))
    fitted = replace(context, recipes={file.arm: file.recipe for file in tuned.recipes})
    done("ladder", ladder(fitted, arms=ARMS, rungs=(4, 5, 6, 7), seeds=(0, 1)))
    done("recheck", studies.recheck(fitted, arms=ARMS, rungs=(8,)))
    done("storage", studies.authors_storage(fitted, arms=ARMS, rungs=(4,)))
    done("noise", studies.noise(fitted, arms=ARMS, rungs=(4,), seeds=(0, 1)))
    return place


def answer(place: Path, name: str) -> dict[str, list[list[float]]]:
    return Journal.read(place / "studies" / name).entry.answer["values"]


def test_the_planted_rates_are_found_and_hold_at_the_top(place: Path) -> None:
    for row in answer(place, "rates")["rates"]:
        assert row[-2] == pytest.approx(EXPONENT) and row[-1] == pytest.approx(RATE, rel=0.05)
    assert [row[-1] for row in answer(place, "recheck")["recheck"]] == pytest.approx([1, 1], rel=0.1)


def test_paired_differences_and_noise_are_those_planted(place: Path) -> None:
    assert [row[-2] for row in answer(place, "storage")["differences"]] == pytest.approx([0.01, 0.01])
    assert [row[-1] for row in answer(place, "noise")["noise"]] == pytest.approx([1e-4 / math.sqrt(2)] * 2)


def test_a_changed_loss_is_noticed(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "README.md").write_text("# Toy\n\n<!-- results/toy -->\n<!-- end -->\n\nThe end.\n")
    done = publish(folder, "--add", str(place / "runs"), str(place / "studies"))
    assert done.returncode == 0, done.stderr
    page = (folder / "README.md").read_text()
    assert (
        "### The ladder: 16 runs" in page
        and "| worse |" in page
        and "a decade (p = " in page
        and "| – | not measured |" in page
        and "The end." in page
    )
    assert "| vanilla | 8 | learning_rate 0.0" in page and "| vanilla | 4 | seed 1 |" in page
    assert publish(folder, "--check").returncode == 0
    rows = list(csv.DictReader((folder / "runs.csv").open()))
    assert len(rows) == len({row["run"] for row in rows}) == len(list((place / "runs").iterdir()))
    text = (folder / "runs.csv").read_text()
    (folder / "runs.csv").write_text(text.replace(rows[0]["loss"], "3.21"))
    done = publish(folder, "--check")
    assert done.returncode == 1 and "README.md: differs from runs.csv" in done.stdout
    shutil.rmtree(folder)
