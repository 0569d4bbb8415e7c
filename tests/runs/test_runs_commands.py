"""`steepen runs` and `steepen status` show every run with its status, and refuse what they do not know."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from steepen.cli.app import main
from steepen.cli.launch_options import launch_study
from steepen.errors import UsageError
from steepen.laws.table import read_table
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]


@pytest.fixture
def mixed(store: RunStore, spec: Spec, trainer: ModuleType) -> RunStore:
    """A store with a run of every status but running."""
    for seed, arm in ((1, "vanilla"), (2, "untied-grow")):
        record = trainer.record_of(spec(seed, arm=arm), loss=3.0 + seed)
        write_json(store.root / record.run / "record.json", record.to_dict())
    for seed in (3, 4, 5):
        write_json(store.run(spec(seed)).spec_file, spec(seed).to_dict())
    write_json(store.run(spec(3)).failure_file, {"kind": "Diverged", "message": "the loss is nan."})
    run = store.run(spec(4))
    run.metrics_file.write_text('{"step": 2, "loss": 5.5, "tokens_per_second": 100.0}\n{"step": 3, "lo')
    return store


def listed(capsys: pytest.CaptureFixture[str], store: RunStore, *words: str) -> list[dict[str, Any]]:
    assert main(["runs", "--runs", str(store.root), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_every_run_is_listed_with_its_status(
    mixed: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    with mixed.run(spec(5)).lock():
        rows = {row["seed"]: row for row in listed(capsys, mixed)}
    statuses = {seed: row["status"] for seed, row in rows.items()}
    assert statuses == {1: "finished", 2: "finished", 3: "failed", 4: "interrupted", 5: "running"}
    assert rows[3]["cause"] == "Diverged: the loss is nan." and rows[1]["loss"] == 4.0
    assert (rows[4]["loss"], rows[4]["step"]) == (5.5, 2)  # the line cut off by a kill is passed over
    assert {row["seed"]: row["status"] for row in listed(capsys, mixed)}[5] == "waiting"


def test_filters_and_sorting_choose_and_order_rows(
    mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["seed"] for row in listed(capsys, mixed, "--arm", "untied-grow")] == [2]
    assert [row["seed"] for row in listed(capsys, mixed, "--status", "failed")] == [3]
    assert listed(capsys, mixed, "--depth", "9") == []
    # What has no loss comes last, whichever way the others are sorted.
    assert [row["loss"] for row in listed(capsys, mixed, "--sort", "loss")] == [4.0, 5.0, 5.5, None, None]
    assert [row["loss"] for row in listed(capsys, mixed, "--sort=-loss")] == [5.5, 5.0, 4.0, None, None]


def test_finished_runs_are_written_as_a_table_that_fit_reads(
    mixed: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    assert main(["runs", "--runs", str(mixed.root), "--csv", str(path)]) == 0
    finished = [row for row in mixed.rows() if row.status == "finished"]
    assert finished and f"{len(finished)} finished runs" in capsys.readouterr().err
    columns = read_table(path).columns
    found = zip(columns["arm"], columns["seed"], columns["flops"], columns["loss"], strict=True)
    read = {(arm, int(seed), float(flops), float(loss)) for arm, seed, flops, loss in found}
    assert read == {(row.arm, row.seed, row.flops, row.loss) for row in finished}
    assert main(["runs", "--runs", str(mixed.root), "--status", "failed", "--csv", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_the_table_says_why_a_run_failed(mixed: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(mixed.root)]) == 0
    text = capsys.readouterr().out
    assert "failed: Diverged: the loss is nan." in text and "interrupted at step 2/6, resumable" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs", "--runs", "{root}", "--status", "done"], "finished, running"),
        (["runs", "--runs", "{root}", "--sort", "los"], "loss"),
        (["runs", "--runs", "{root}/nowhere"], "--runs"),
        (["status", "ladder", "--studies", "{root}"], "no study 'ladder'"),
        (["status", "--studies", "{root}/nowhere"], "--studies"),
    ],
)
def test_wrong_requests_exit_2_with_one_sentence(
    words: list[str], says: str, mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(root=mixed.root) for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def seeds(spec: Spec) -> Generator[list[RunSpec], Any, Any]:
    records = yield [spec(1), spec(2)]
    return {"losses": [record.validation_loss for record in records]}


def test_status_shows_progress_and_what_is_left(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.open(tmp_path / "studies", "pair", {}, store.root)
    drive(seeds(spec), store, instant, journal=journal)
    store.run(spec(2)).record_file.unlink()
    where = ["--studies", str(tmp_path / "studies")]
    assert main(["status", "pair", "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["finished"] == 1 and found["flops_left"] == pytest.approx(expected_flops(spec(2)))
    assert main(["status", *where]) == 0 and main(["status", str(tmp_path / "studies" / "pair")]) == 0
    assert capsys.readouterr().out.count("pair: finished, batch 1; 2 runs requested") == 2


def test_one_unreadable_journal_is_named_and_hides_no_other_study(
    instant: Any, store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = tmp_path / "studies"
    drive(seeds(spec), store, instant, journal=Journal.open(studies, "pair", {}, store.root))
    for name, text in (("aaa", "{"), ("bbb", '{"name": "bbb", "status": "thriving"}')):
        (studies / name).mkdir()
        (studies / name / "study.json").write_text(text)
    assert main(["status", "--studies", str(studies)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].startswith("pair: finished")
    for name, line in zip(("aaa", "bbb"), lines[1:], strict=True):
        assert line.startswith(f"{name}: the journal {studies / name / 'study.json'} can't be read: ")
    assert main(["status", "--studies", str(studies), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["studies"]] == ["pair"] and list(found["unreadable"]) == [
        "aaa",
        "bbb",
    ]
    # Asked for by name, it is an error.
    assert main(["status", "aaa", "--studies", str(studies)]) == 1
    assert "can't be read" in capsys.readouterr().err


def test_a_dry_run_prints_the_runs_with_flops_time_and_cost(
    store: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = {"data": tmp_path, "runs": store.root, "studies": tmp_path / "studies"}
    options: dict[str, Any] = {"name": "pair", "options": {}, "dry_run": True, **context}
    assert launch_study(lambda: seeds(spec), dollars_per_hour=2.0, jobs=2, **options) is None
    text = capsys.readouterr().out
    assert spec(1).hash in text and spec(2).hash in text and "2 runs" in text and "Cost: $" in text
    assert f"{2 * expected_flops(spec(1)):.3g} FLOPs" in text and "assuming" in text
    launch_study(lambda: seeds(spec), as_json=True, **options)
    assert json.loads(capsys.readouterr().out)["flops"] == pytest.approx(2 * expected_flops(spec(1)))
    assert not (tmp_path / "studies").exists() and not store.root.exists()


def test_a_wrong_budget_or_launcher_is_refused_before_anything_is_started(
    store: RunStore, spec: Spec, tmp_path: Path
) -> None:
    context: dict[str, Any] = {"name": "pair", "options": {}, "data": tmp_path, "runs": store.root}
    context["studies"] = tmp_path / "s"
    mistakes: list[dict[str, Any]] = [{"budget": "lots"}, {"on": "cloud"}, {"jobs": 0}, {"gpu": "abacus"}]
    for wrong in mistakes:
        with pytest.raises(UsageError):
            launch_study(lambda: seeds(spec), **context, **wrong)
    assert not (tmp_path / "s").exists()
