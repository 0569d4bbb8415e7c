"""Published tables are those of the committed runs; the studies of results/narrow find what is planted."""

from __future__ import annotations

import csv
import importlib.util
import math
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable
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


def load(path: Path) -> ModuleType:
    """A script as a module."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def publish() -> Callable[..., int]:
    """tools/publish_results.py, which judges the authors' runs once."""
    main = load(ROOT / "tools" / "publish_results.py").main
    return lambda folder, *words: main([str(folder), *words])


@pytest.mark.parametrize(
    "folder", [path.parent for path in sorted(RESULTS.glob("*/runs.csv"))], ids=lambda path: path.name
)
def test_published_tables_come_from_the_committed_runs(folder: Path, publish: Callable[..., int]) -> None:
    assert publish(folder, "--check") == 0
    assert (
        len([path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]) <= 20
    )


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    """The custom studies of results/narrow."""
    return load(RESULTS / "narrow" / "replication.py")


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
    done("ladder-top", studies.noise(fitted, cells="vanilla:10,operator-1:9", seeds=(0,)))
    done("transfer", studies.transferred(fitted, rungs=(5, 6)))
    done("adamw", studies.adamw(fitted, rungs=(5, 6)))
    done("passes", studies.tied_passes(fitted))
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


def runs_of(place: Path, name: str) -> list[RunSpec]:
    asked = Journal.read(place / "studies" / name).entry.runs
    records = {record.run: record for record in RunStore(place / "runs").records()}
    return [records[one.run].spec for one in asked]


def test_single_cells_are_trained_without_the_rest_of_the_ladder(place: Path) -> None:
    assert [(spec.arm.name, spec.shape.depth) for spec in runs_of(place, "ladder-top")] == [
        ("vanilla", 10),
        ("operator-1", 9),
    ]


def test_variants_differ_from_the_ladder_in_one_thing(place: Path) -> None:
    ladder = {(one.arm.name, one.shape.depth): one for one in runs_of(place, "ladder") if one.seed == 0}
    for spec in runs_of(place, "transfer"):
        own, source = ladder["operator-1", spec.shape.depth], ladder["vanilla", spec.shape.depth]
        assert spec.hyperparameters.head_lr_multiplier == source.hyperparameters.head_lr_multiplier
        assert (
            spec.hyperparameters.injection_weight == own.hyperparameters.injection_weight
        )  # Vanilla has none
        assert (spec.steps, spec.arm) == (own.steps, own.arm) and spec.hash != own.hash
    for spec in runs_of(place, "adamw"):
        own = ladder["vanilla", spec.shape.depth].hyperparameters
        changed = spec.hyperparameters
        assert spec.optimizer.kind == "adamw" and changed.learning_rate != own.learning_rate
        # Embedding and decay keep what they have per step at the recipe's rate, times the sweep's multiple.
        ratio = changed.embedding_lr / own.embedding_lr
        assert changed.learning_rate * changed.weight_decay == pytest.approx(
            ratio * own.learning_rate * own.weight_decay
        )
    passes = runs_of(place, "passes")
    assert {spec.arm.name for spec in passes} == {"operator-1", "loop-2", "loop-3"}
    assert len({(spec.tokens, spec.hyperparameters) for spec in passes}) == 1


def test_a_changed_loss_is_noticed(
    place: Path, tmp_path: Path, publish: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "README.md").write_text("# Toy\n\n<!-- results/toy -->\n<!-- end -->\n\nThe end.\n")
    assert publish(folder, "--add", str(place / "runs"), str(place / "studies")) == 0
    page = (folder / "README.md").read_text()
    assert (
        "### The ladder: 18 runs" in page
        and "| worse |" in page
        and "a decade (p = " in page
        and "| – | not measured |" in page
        and "The end." in page
    )
    assert re.search(r"\| vanilla \| 8 \| [0-9.]+ \(learning_rate 0\.0", page) and "(seed 1)" in page
    assert publish(folder, "--check") == 0
    capsys.readouterr()
    rows = list(csv.DictReader((folder / "runs.csv").open()))
    assert len(rows) == len({row["run"] for row in rows}) == len(list((place / "runs").iterdir()))
    text = (folder / "runs.csv").read_text()
    (folder / "runs.csv").write_text(text.replace(rows[0]["loss"], "3.21"))
    assert publish(folder, "--check") == 1
    assert "README.md: differs from runs.csv" in capsys.readouterr().out
    shutil.rmtree(folder)
