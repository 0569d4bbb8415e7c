"""Saved scores: never another tokenizer's, never a smaller CORE evaluation in place of a larger one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.evaluation.core.results import may_replace
from steepen.requests.app import main
from steepen.runs.store import RunDirectory

from .conftest import words

Eval = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / trained.name))


@pytest.fixture
def evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> Eval:
    """`steepen eval RUN --data DATA …`: exit code, output and errors."""

    def call(data: Dataset, *more: object) -> tuple[int, str, str]:
        code = main(["eval", str(run), "--data", str(data.directory), *map(str, more)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture(scope="session")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Dataset]:
    """Data like the run's; text seed 5 is the run's text and gives the run's tokenizer."""

    def make(seed: int, val_tokens: int) -> Dataset:
        rng, folder = random.Random(seed), tmp_path_factory.mktemp("other")
        lines = [json.dumps({"text": words(rng, 30, 80)}) + "\n" for _ in range(400)]
        (folder / "text.jsonl").write_text("".join(lines))
        request = PrepareRequest(
            source=(str(folder / "text.jsonl"),), tokenizer="bpe:300", val_tokens=val_tokens
        )
        return prepare(request, folder / "data")

    return make


@pytest.fixture(scope="session")
def same_tokenizer(make_data: Callable[[int, int], Dataset], dataset: Dataset) -> Dataset:
    found = make_data(5, 3000)
    assert found.identity != dataset.identity
    assert found.manifest.tokenizer == dataset.manifest.tokenizer
    return found


@pytest.fixture(scope="session")
def other_tokenizer(make_data: Callable[[int, int], Dataset], dataset: Dataset) -> Dataset:
    found = make_data(6, 4000)
    assert found.manifest.tokenizer.sha256 != dataset.manifest.tokenizer.sha256
    assert found.padded_vocabulary == dataset.padded_vocabulary  # the network could run it
    return found


def scores(run: Path) -> dict[str, Any]:
    record = RunDirectory(run).record()
    assert record is not None
    return record.evaluation


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_another_tokenizer_is_rejected_before_anything_is_measured(
    run: Path, other_tokenizer: Dataset, bundle_folder: Path, evaluate: Eval
) -> None:
    core = ("--core", bundle_folder, "--core-examples", 2)
    record, before = (run / "record.json").read_bytes(), files(run)
    for more in ((), ("--update-record",), ("--no-update-record",), ("--json",)):
        code, out, err = evaluate(other_tokenizer, *core, *more)
        assert code == 2 and not out and "has another tokenizer" in err
    assert (run / "record.json").read_bytes() == record and files(run) == before


def test_other_data_with_the_runs_tokenizer_updates_the_record(
    run: Path, dataset: Dataset, same_tokenizer: Dataset, evaluate: Eval
) -> None:
    assert evaluate(same_tokenizer)[0] == 0
    assert scores(run)["data"] == same_tokenizer.identity
    assert scores(run)["tokenizer"] == dataset.manifest.tokenizer.sha256


def test_smaller_core_evaluation_never_replaces_a_larger_one(
    run: Path, dataset: Dataset, bundle_folder: Path, tmp_path: Path, evaluate: Eval
) -> None:
    small = Path(shutil.copytree(bundle_folder, tmp_path / "small"))
    config = (small / "core.yaml").read_text()
    (small / "core.yaml").write_text(config[: config.index("-\n  label: ending")])
    # A larger evaluation replaces a smaller one, never the reverse.
    assert evaluate(dataset, "--core", small)[0] == 0
    assert len(scores(run)["core"]["tasks"]) == 2
    assert evaluate(dataset, "--core", bundle_folder)[0] == 0
    large = scores(run)["core"]
    assert len(large["tasks"]) == 4
    code, out, err = evaluate(dataset, "--core", small, "--kl-depth")
    assert code == 0 and "mean of 2 tasks" in out
    assert "keeps its larger CORE result (4 tasks" in err and "this one (2 tasks" in err
    assert scores(run)["core"] == large and "kl_depth" in scores(run)
    (file,) = run.glob("evaluation/*/evaluation.json")
    assert json.loads(file.read_text())["core"] == large
    # Nor does a look in another precision, which could not stand beside it, with CORE or without.
    for more in (("--core", small), ()):
        _, out, err = evaluate(dataset, *more, "--precision", "bf16")
        assert "bf16: validation loss" in out and "in fp32); what was measured in bf16 was not saved" in err
        assert scores(run)["core"] == large and scores(run)["precision"] == "fp32"
    assert evaluate(dataset, "--core", small, "--precision", "bf16", "--update-record")[0] == 1


def test_scores_of_another_convention_are_never_mixed(
    run: Path, dataset: Dataset, bundle_folder: Path, evaluate: Eval
) -> None:
    ask = ("--core", bundle_folder, "--tasks", "choose,ending", "--seeds", "0")
    assert evaluate(dataset, *ask, "--convention", "nanochat")[0] == 0
    first = scores(run)["core"]
    assert first["convention"] == "nanochat"
    _, out, _ = evaluate(dataset, *ask)
    second = scores(run)["core"]
    assert second["convention"] == "authors" and "convention: authors" in out
    # Each has outcomes of its own, and the accuracies agree: only seeds and answer NLL differ.
    assert first["outcomes"] != second["outcomes"]
    for label in ("choose", "ending"):
        assert first["tasks"][label]["accuracy"] == second["tasks"][label]["accuracy"]
        assert first["tasks"][label]["nll"] != second["tasks"][label]["nll"]
    # A smaller one of the other convention does not displace it.
    _, _, err = evaluate(dataset, *ask, "--core-examples", 1, "--convention", "nanochat")
    assert "keeps its larger CORE result" in err and "convention: authors" in err
    assert scores(run)["core"] == second
    code, _, err = evaluate(dataset, "--core", bundle_folder, "--convention", "lm-eval")
    assert code == 2 and "--convention 'lm-eval' is not valid: it must be one of 'authors', 'nanochat'" in err


def core(bundle: str, tasks: int, seeds: int = 3, each: int = 10, limit: int | None = None) -> dict[str, Any]:
    scored = {f"task{number}": {"examples": each} for number in range(tasks)}
    return {"bundle": bundle, "tasks": scored, "seeds": list(range(seeds)), "examples": limit}


@pytest.mark.parametrize(
    ("new", "yes"),
    [
        (core("a", 22), True),
        (core("a", 21), False),
        (core("a", 22, seeds=1), False),
        (core("a", 22, limit=10), False),
        (core("b", 2), False),
        (core("b", 2, each=1000), False),
        (core("b", 22, seeds=1), False),
        (core("b", 22, each=9), False),
        (core("b", 23, limit=10), True),
        ({**core("a", 22), "convention": "authors"}, True),
        ({**core("a", 22, seeds=1), "convention": "nanochat"}, False),
    ],
)
def test_core_result_is_covered_only_by_an_equal_or_larger_one(new: dict[str, Any], yes: bool) -> None:
    assert may_replace(new, core("a", 22)) is yes


@pytest.fixture
def sealed(run: Path) -> Path:
    """A run that not even root can write to: files have the names of its directories."""
    (run / "evaluation").write_text("")
    (run / "lock").unlink()
    (run / "lock").mkdir()
    return run


def test_score_is_printed_where_it_cannot_be_saved(
    sealed: Path, dataset: Dataset, bundle_folder: Path, evaluate: Eval
) -> None:
    core, before = ("--core", bundle_folder, "--core-examples", 2), files(sealed)
    for more, expected in (("--no-update-record",), 0), ((), 0), (("--update-record",), 1):
        code, out, err = evaluate(dataset, *core, *more)
        assert code == expected
        assert "validation loss" in out and "mean of 4 tasks" in out and "saved in" not in out
        assert "the scores could not be saved in" in err
    assert "were not added" in err
    code, out, _ = evaluate(dataset, *core, "--json")
    found = json.loads(out)
    assert code == 0 and not found["in_record"] and found["saved"] is None
    assert found["core"]["outcomes"] is None and len(found["core"]["tasks"]) == 4
    assert files(sealed) == before and not scores(sealed)


def test_run_with_only_a_writable_record_is_joined(run: Path, dataset: Dataset, evaluate: Eval) -> None:
    (run / "evaluation").write_text("")
    code, out, err = evaluate(dataset, "--update-record")
    assert code == 0 and "record.json" in out and "outcome could not be saved" in err
    assert scores(run)["validation"]["tokens"] > 0
