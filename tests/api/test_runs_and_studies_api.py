"""`steepen.train`, `evaluate`, `ladder`, `open_study` and `report` from Python."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import steepen
from fork_server import fork_workers
from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.studies.context import open_data, tokenizer_note
from steepen.studies.preset import load_preset


def test_train_and_evaluate(tiny_data: Dataset, make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    run = steepen.train(make_spec("untied-2", steps=3), tiny_data, runs=tmp_path / "runs", device="cpu")
    assert run.status == "finished" and run["loss"] == run.record.validation_loss  # type: ignore[union-attr]
    assert list(run.metrics()["loss"].dropna().index) == [0, 1, 2]
    scores = steepen.evaluate(run, tiny_data, kl_depth=True, passes=(1, 2), device="cpu")
    frame = scores.to_frame().set_index("score")["value"]
    assert frame["loss"] == pytest.approx(run["loss"], rel=1e-4)
    assert frame["loss_at_2_passes"] == pytest.approx(frame["loss"], rel=1e-5)
    assert (
        steepen.open_runs(tmp_path / "runs").best()["kl_depth"] == frame["kl_depth"]
    )  # joined to the record
    assert scores.plot().get_xlabel() == "executed blocks"


def test_spec_is_that_of_the_command(tiny_data: Dataset) -> None:
    size: dict[str, Any] = {
        "aspect": 16,
        "head_dim": 16,
        "mlp_multiple": 16,
        "context": 32,
        "batch_tokens": 256,
    }
    spec = steepen.spec("vanilla", 2, tiny_data, tokens=1024, changes={"glr": 0.5}, precision="fp32", **size)
    assert (spec.steps, spec.hyperparameters.learning_rate, spec.precision) == (4, 0.5, "fp32")
    other = steepen.spec("vanilla", 2, tiny_data, tokens=1024, seed=1, precision="fp32", **size)
    assert other.hash != spec.hash and other.seed == 1


def test_a_ladder_with_a_launcher_class_and_its_report(
    launcher: type, tiny_data: Dataset, tmp_path: Path
) -> None:
    folder = tiny_data.directory
    study: Any = steepen.ladder(
        ["vanilla", "operator-1"], "tiny", rungs=[2, 3, 4, 5], data=folder, epochs=10_000, launcher=launcher,
        device="cpu",
    )  # fmt: skip
    assert study.name == "ladder-tiny-vanilla-operator-1" and study.journal.live_status == "finished"
    assert set(study.verdicts) == {"operator-1"} and len(study.runs) == 8
    assert set(study.to_frame()["measure"]) == {"per FLOP", "per second"}
    assert study.plot(panel="Loss").get_ylabel() and "operator-1" in repr(study)
    assert study.answer.question in " ".join(study.summary().split())
    page = steepen.report(study, tmp_path / "page", formats="png").page
    assert page.name == "report.html" and "operator-1" in page.read_text()
    with pytest.raises(UsageError, match="no panel 'nothing'"):
        study.plot(panel="nothing")
    planned = steepen.dry_run_study("ladder", arms=["vanilla", "untied-2"], data=folder, epochs=10_000,
                                     rungs=[2, 3, 4, 5])  # fmt: skip
    assert planned.finished == 4 and {run.arm for run in planned.runs} == {"untied-2"}


def test_a_pack_holds_the_study_and_is_checked(
    launcher: type,
    tiny_data: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steepen.ladder(["vanilla", "operator-1"], rungs=[2, 3, 4, 5], data=tiny_data.directory, epochs=10_000,
                   launcher=launcher, device="cpu", name="pair")  # fmt: skip
    monkeypatch.setattr("steepen.utils.progress.STEP_SECONDS", 0)
    assert main(["pack", "pair", "--out", "pair.tar.gz"]) == 0
    shown = capsys.readouterr()
    assert "8 runs" in shown.out and re.search(r"^drawing: 2 of \d+, about", shown.err, re.MULTILINE)
    assert main(["unpack", "pair.tar.gz", "--out", "moved"]) == 0
    (tmp_path / "runs").rename(tmp_path / "gone")
    capsys.readouterr()
    assert main(["status", "pair", "--studies", "moved/studies"]) == 0
    assert "finished" in (text := capsys.readouterr().out) and "8 finished" in text and ", 0 left" in text
    assert steepen.open_study("pair", "moved/studies").report("page", formats=["png"]).is_file()
    assert (tmp_path / "moved" / "report" / "pair" / "report.html").is_file()
    assert main(["unpack", "pair.tar.gz", "--out", "moved"]) == 0  # the same content
    record = next((tmp_path / "moved" / "runs").glob("*/record.json"))
    record.write_text("{}")
    assert main(["unpack", "pair.tar.gz", "--out", "moved"]) == 2
    assert "another content" in capsys.readouterr().err
    data = gzip.decompress((tmp_path / "pair.tar.gz").read_bytes())
    (tmp_path / "bad.tar.gz").write_bytes(
        gzip.compress(data.replace(b'"validation_loss": ', b'"validation_loss":9', 1))
    )
    assert main(["unpack", "bad.tar.gz", "--out", "elsewhere"]) == 1
    assert "does not have the checksum" in capsys.readouterr().err and not (tmp_path / "elsewhere").exists()


def test_another_tokenizer_than_the_presets_is_said_with_its_cost(tiny_data: Dataset) -> None:
    preset = load_preset("mini")
    folder, facts = open_data(preset, tiny_data.directory, Path("runs"), True, (Path("studies"), "s"))
    note = tokenizer_note(preset, folder, facts)
    assert note is not None and "bpe:4096" in note and "times the preset's FLOPs" in note
    assert tokenizer_note(preset, folder, replace(facts, vocabulary=4096)) is None


def test_a_study_is_right_after_it_moved(launcher: type, tiny_data: Dataset, tmp_path: Path) -> None:
    steepen.ladder(["vanilla", "operator-1"], rungs=[2, 3, 4, 5], data=tiny_data.directory, epochs=10_000,
                   launcher=launcher, device="cpu", runs=tmp_path / "a" / "runs",
                   studies=tmp_path / "a" / "studies")  # fmt: skip
    (tmp_path / "a").rename(tmp_path / "b")
    moved = steepen.open_study("ladder", tmp_path / "b" / "studies")
    assert moved.status().counts["finished"] == 8 and moved.status().flops_left == 0
    assert moved.report(tmp_path / "page", formats=["png"]).is_file()


def test_a_study_with_another_optimizer_is_the_commands(
    launcher: type, tiny_data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared: dict[str, Any] = {"arms": ["vanilla", "operator-1"], "optimizer": "adamw", "tpp": 1.0}
    study = steepen.study(
        "ladder", "tiny", rungs=[2, 3, 4, 5], data=tiny_data.directory, epochs=10_000,
        launcher=launcher, **shared,
    )  # fmt: skip
    assert study.name == "ladder-tiny-vanilla-operator-1-adamw"
    assert {run.spec.optimizer.kind for run in study.runs} == {"adamw"}
    # The command finds the same study, with the same options and finished runs.
    assert main(["study", "ladder", "--arms", "vanilla,operator-1", "--optimizer", "adamw", "--rungs", "2-5",
                 "--tpp", "1", "--data", str(tiny_data.directory), "--epochs", "10000",
                 "--dry-run"]) == 0  # fmt: skip
    assert "8 finished" in capsys.readouterr().out
    planned = steepen.dry_run_study("ladder", rungs=[2, 3, 4, 5], epochs=10_000,
                                     data=tiny_data.directory, **shared)  # fmt: skip
    assert planned.complete and planned.finished == 8


def test_a_study_scores_its_runs(tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="one of 'core', 'nll', 'kl-depth'"):
        steepen.ladder(["vanilla"], score="kldepth", data=tiny_data.directory)
    with pytest.raises(UsageError, match="need the CORE tasks"):
        steepen.ladder(["vanilla"], score=["core"], data=tiny_data.directory)
    study = steepen.ladder(
        ["vanilla", "loop-2"], rungs=[2, 3, 4, 5], data=tiny_data.directory, epochs=10_000, tpp=0.05,
        device="cpu", jobs=1, score="kl-depth",
    )  # fmt: skip
    assert all(run["kl_depth"] is not None for run in study.runs)


BLOCK = """
from steepen.model.block import TransformerBlock

class Plain(TransformerBlock):
    pass
"""


def test_runs_of_a_custom_block_are_listed_without_running_its_code(
    launcher: type, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "plain_block.py").write_text(BLOCK)
    study = steepen.ladder(
        ["vanilla", __import__("plain_block").Plain], rungs=[2, 3, 4, 5], data=tiny_data.directory,
        epochs=10_000, launcher=launcher, device="cpu", name="custom",
    )  # fmt: skip
    text = study.summary() + str(study.answer)
    assert "plain uses vanilla's" in text
    assert "fit-recipe --arms plain_block:Plain --preset tiny` fits one with about" in text
    run = study.runs.filter("arm == 'plain' and depth == 5")[0]
    (run.path / "record.json").unlink()
    (tmp_path / "plain_block.py").write_text("raise SystemExit('this code must not run')")
    monkeypatch.delitem(__import__("sys").modules, "plain_block")
    capsys.readouterr()
    assert main(["runs"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if run.name in line)
    assert line.startswith("waiting") and "–" in line
    for words in (["status", "custom"], ["runs", "show", run.name[:6]], ["runs", "--where", "depth > 3"]):
        assert main(words) == 0, words
    capsys.readouterr()
    assert main(["status", "custom", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops_left"] == pytest.approx(run["flops"])  # the journal's
