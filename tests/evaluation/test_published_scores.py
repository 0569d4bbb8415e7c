"""tools/published_scores.py finds scores where arm, depth, corpus and network match, and prints them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.shape import Shape, SizeRule
from steepen.requests.app import main
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory

from ..inference.test_import_published import load_tool

TOOL = load_tool("published_scores")
find_corpus, find_published = TOOL.find_corpus, TOOL.find_published
FINEWEB, EDU = "fineweb", "fineweb-edu"
TABLES = {
    "core_scores.csv": "corpus,arm,depth,compute_flops,val_loss,answer_nll,core_accuracy,core_accuracy_std,"
    "core17_accuracy,core17_accuracy_std\n"
    "fineweb,untied-grow,3,1e15,4.25,3.5,0.0625,,0.05,0.001\n"
    "fineweb-edu,untied-grow,3,1e15,4.125,3.25,0.07,0.002,,\n",
    "core_task_scores.csv": "corpus,arm,depth,task,answer_nll,centered_accuracy\n"
    "fineweb,untied-grow,3,choose,2.75,0.03125\nfineweb,untied-grow,3,ending,2.5,\n",
    "effective_depth.csv": "arm,depth,compute_flops,effective_depth\nuntied-grow,3,1e15,5\n",
    "passes_at_test_time.csv": "arm,depth,trained_passes,eval_passes,val_loss\n"
    "untied-grow,3,4,1,4.5\nuntied-grow,3,4,4,4.25\n",
}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, text in TABLES.items():
        (folder / name).write_text(text)
    return folder


def record_of(trained: Path) -> RunRecord:
    record = RunDirectory(trained).record()
    assert record is not None
    return record


def full_size(arm: str, depth: int) -> tuple[Arm, Shape]:
    found = find_arm(arm)
    return found, found.shape(depth, SizeRule())


def test_only_the_published_network_on_its_corpus_matches(trained: Path, tables: Path) -> None:
    small = record_of(trained).spec
    arm, shape = full_size("untied-grow", 3)
    found, reason = find_published(tables, arm, shape, FINEWEB)
    assert found is not None and not reason
    assert (found["validation_loss"], found["nll22"], found["core22"]) == (4.25, 3.5, 0.0625)
    assert found["core22_seed_sd"] is None and found["core17_seed_sd"] == 0.001
    assert found["tasks"] == {
        "choose": {"nll": 2.75, "centered": 0.03125},
        "ending": {"nll": 2.5, "centered": None},
    }
    assert found["kl_depth"] == 5 and found["test_time_passes"]["differences"] == {1: 0.25, 4: 0.0}
    # The depth and the passes were published for FineWeb only.
    found, _ = find_published(tables, arm, shape, EDU)
    assert found is not None and found["core22_seed_sd"] == 0.002
    assert found["kl_depth"] is None and found["test_time_passes"] is None and not found["tasks"]
    for other, corpus, says in (
        ((arm, shape), None, "not prepared from fineweb"),
        (full_size("vanilla", 3), FINEWEB, "no published vanilla d3"),
        (full_size("untied-grow", 4), FINEWEB, "no published untied-grow d4"),
        ((small.arm, small.shape), FINEWEB, "the run's network is not the published untied-grow d3"),
        ((replace(arm, title="Other"), shape), FINEWEB, "network is not the published"),
    ):
        scores, reason = find_published(tables, *other, corpus)
        assert scores is None and says in reason
    with pytest.raises(UsageError, match=r"has no core_scores\.csv"):
        find_published(tables.parent, arm, shape, FINEWEB)


def test_the_corpus_is_that_of_the_data_or_of_an_imported_checkpoint() -> None:
    edu = {"repository": "HuggingFaceFW/fineweb-edu"}
    assert find_corpus("0123", {"repository": "HuggingFaceFW/fineweb"}) == FINEWEB
    assert find_corpus("0123", edu) == EDU
    assert find_corpus("0123", {"kind": "files"}) is None
    assert find_corpus("published:fineweb", edu) == FINEWEB  # what it is evaluated on does not matter
    assert find_corpus("published:fineweb_edu_40b", {}) == EDU
    assert find_corpus("published:other", edu) is None


def test_published_scores_are_printed_beside_a_runs_own_and_not_saved(
    trained: Path,
    dataset: Dataset,
    bundle_folder: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / trained.name))
    words = ["eval", str(run), "--data", str(dataset.directory), "--core", str(bundle_folder)]
    words += ["--core-examples", "2", "--kl-depth", "--passes", "1-4"]
    assert main(words) == 0
    capsys.readouterr()
    asked = [str(run), "--tables", str(tables), "--data", str(dataset.directory)]
    assert TOOL.main(asked) == 1
    out, err = capsys.readouterr()
    assert "no published scores to compare with" in err and not out
    # A run of the published size takes long: this small one is declared to be of that size.
    shape = record_of(trained).spec.shape
    monkeypatch.setattr(TOOL, "CORPORA", {"None": "fineweb"})
    monkeypatch.setattr(TOOL, "WIDTH_PER_DEPTH", shape.width // shape.depth)
    monkeypatch.setattr(TOOL, "VOCABULARY", shape.vocabulary)
    monkeypatch.setattr(TOOL, "CONTEXT", shape.context)
    assert TOOL.main(asked) == 0
    out, err = capsys.readouterr()
    own = record_of(run).evaluation
    loss = f"validation loss 4.2500 (own {own['validation']['loss']:.4f})"
    assert f"published untied-grow d3 on fineweb (1.000e+15 FLOPs): {loss}" in out
    assert f"published: KL effective depth 5 (own {own['kl_depth']['depth']})" in out
    assert "published, minus loss at 4: 1: +0.2500, 4: +0.0000" in out
    assert "choose: centred accuracy 0.0312 (own " in out and "answer NLL 2.7500 (own " in out
    for score in ("CORE22 0.0625", "CORE17 0.0500", "answer NLL 3.5000"):
        assert f"published: {score} (convention: authors)" in out
    assert TOOL.main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core22"] == 0.0625
    assert "published" not in own
    assert TOOL.main([str(run), "--tables", str(tmp_path)]) == 2
    assert "has no core_scores.csv" in capsys.readouterr().err


def test_every_published_checkpoint_is_found(reference_data: Callable[[str], Path]) -> None:
    folder = reference_data("refdata/authors/core_scores.csv").parent
    rows = (folder / "core_scores.csv").read_text().splitlines()[1:]
    found = 0
    for corpus, arm, depth, _, loss, *_ in (row.split(",") for row in rows):
        scores, reason = find_published(folder, *full_size(arm, int(depth)), corpus)
        assert scores is not None, reason
        assert scores["validation_loss"] == float(loss)
        found += 1
    assert found == 74
    for table in ("effective_depth.csv", "passes_at_test_time.csv"):
        for arm, depth in {
            tuple(row.split(",")[:2]) for row in (folder / table).read_text().splitlines()[1:]
        }:
            scores, reason = find_published(folder, *full_size(arm, int(depth)), FINEWEB)
            assert scores is not None, reason
            value = scores["kl_depth" if "depth" in table else "test_time_passes"]
            assert value is not None, (arm, depth)
