"""`steepen eval` of many runs: stores, studies, resuming, shards and failures."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fork_server import fork_workers
from run_fixtures import make_spec
from steepen.data import Dataset
from steepen.errors import Failure, UsageError
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.evaluate_many import choose_part
from steepen.evaluation.score_options import ScoreOptions
from steepen.launch.base import Job, attempt_result
from steepen.launch.worker import Attempt
from steepen.requests.app import main
from steepen.requests.evaluate import Evaluate
from steepen.requests.request import decode
from steepen.runs.store import RunDirectory, RunStore
from steepen.studies.driver.journal import Journal
from steepen.utils.codec import to_builtins


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that train are forked: torch is imported already (started: training/test_worker_process.py)."""
    fork_workers(monkeypatch)


@pytest.fixture
def many(trained: Path, tmp_path: Path) -> Path:
    """A store with three copies of a run, one of which has lost its checkpoints."""
    store = tmp_path / "runs"
    for name in ("a", "b", "c"):
        shutil.copytree(trained, store / name)
    shutil.rmtree(store / "c" / "checkpoints")
    return store


def evaluated(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> tuple[dict[str, Any], str]:
    assert main(["eval", *map(str, words), "--device", "cpu", "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_store_is_evaluated_once_and_failures_do_not_stop_it(
    many: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (many, "--data", dataset.directory)
    first, said = evaluated(capsys, 1, *asked)
    assert (first["evaluated"], first["skipped"], first["failed"]) == (2, 0, 1)
    assert "1/2 untied-grow d3 (a): validation loss" in said and "left" in said
    assert "1 run was not evaluated, c because" in said
    assert [Path(run).name for run in first["reasons"]] == ["c"]
    again, said = evaluated(capsys, 1, *asked)
    assert (again["evaluated"], again["skipped"], again["failed"]) == (0, 2, 1)
    assert "2 runs have these scores already" in said
    # Another request is another evaluation, and both are in the record.
    deeper, _ = evaluated(capsys, 0, many / "a", many / "b", "--data", dataset.directory, "--kl-depth")
    assert deeper["evaluated"] == 2
    record = RunDirectory(many / "a").record()
    assert record is not None and {"validation", "kl_depth"} <= set(record.evaluation)


def test_run_that_cannot_be_written_does_not_stop_the_others(
    many: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(many / "a" / "evaluation", ignore_errors=True)
    (many / "a" / "evaluation").write_text("")  # which not even root can write into
    found, said = evaluated(capsys, 0, many / "a", many / "b", "--data", dataset.directory)
    assert (found["evaluated"], found["failed"]) == (2, 0)
    assert (
        f"nothing could be saved in {many / 'a' / 'evaluation'} (" in said
        and "2/2 untied-grow d3 (b)" in said
    )


def test_figures_of_many_runs_and_unknown_launchers_are_rejected(
    many: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval", str(many / "a"), str(many / "b"), "--data", str(dataset.directory), "--device", "cpu"]
    assert main([*asked, "--figure", "nowhere.png"]) == 2
    assert "nothing to draw" in capsys.readouterr().err
    # A launcher is rejected though every run has its scores and none would be launched.
    assert main([*asked, "--launcher", "nope"]) == 2
    assert "--launcher 'nope' is not known" in capsys.readouterr().err


def test_runs_of_a_study_are_evaluated(
    many: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.open(tmp_path / "studies", "mine", {}, many)
    record = RunDirectory(many / "a").record()
    assert record is not None
    shutil.move(many / "a", many / record.run)
    journal.add_batch([record.spec])
    found, _ = evaluated(
        capsys, 0, "--study", "mine", "--studies", tmp_path / "studies", "--data", dataset.directory
    )
    assert found["evaluated"] == 1


def test_launcher_evaluates_runs_as_jobs(
    many: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunDirectory(many / "a").record()
    assert record is not None
    run = Path(shutil.move(many / "a", many / record.run))
    options = ("--data", dataset.directory, "--kl-depth", "--kl-threshold", "0.125", "--jobs", "2")
    first, said = evaluated(capsys, 0, run, *options)
    assert first["evaluated"] == 1 and f"1/1 untied-grow d3 ({record.run}): validation loss" in said
    record = RunDirectory(run).record()
    assert record is not None and record.evaluation["kl_depth"]["threshold"] == 0.125
    again, said = evaluated(capsys, 0, run, *options)
    assert (again["evaluated"], again["skipped"]) == (0, 1) and "1 run has these scores already." in said
    # A job that fails has no scores, though the run has a record, which stays as it is.
    job = Job(record.spec, RunDirectory(run), finished=True)
    damaged = Failure("CheckpointDamaged", "the checkpoint is damaged.")
    assert attempt_result(job, Attempt(damaged)) == damaged
    assert attempt_result(job, Attempt()) == record
    # A launcher finds a run by its hash.
    assert main(["eval", str(many / "b"), "--data", str(dataset.directory), "--launcher", "local"]) == 2
    assert "not a run directory named by its hash" in capsys.readouterr().err


def test_request_travels_to_a_job_as_json(bundle: Bundle, tmp_path: Path) -> None:
    execution = {"device": "cpu", "precision": "fp32", "update_record": False}
    scores = Evaluate(
        (tmp_path / "runs",), "data", core=bundle.directory, seeds=(3, 5), core_examples=7,
        tasks=("choose", "ending"), token_budget=99,
        convention="nanochat", kl_depth=True, kl_threshold=0.1, kl_depth_tokens=64, passes=(1, 3),
        validation_tokens=512, **execution,
    )  # fmt: skip
    context = scores.launch_context(RunStore(tmp_path), tmp_path)
    request = {**context.request(make_spec(), RunDirectory(tmp_path / "a")), **to_builtins(context.options)}
    got = decode(json.loads(json.dumps({**request, "data": "d"})))
    assert isinstance(got, Evaluate) and got.runs == (tmp_path / "a",)
    for one in fields(ScoreOptions):
        assert getattr(got, one.name) == getattr(scores, one.name), one.name
    assert {name: getattr(got, name) for name in execution} == execution


def test_split_runs_covers_all_runs() -> None:
    runs = [Path(str(i)) for i in range(7)]
    parts = [choose_part(runs, f"{i}/3") for i in range(3)]
    assert sorted(run for part in parts for run in part) == runs and choose_part(runs, None) == runs
    for wrong in ("3/3", "1", "a/2", "1/0"):
        with pytest.raises(UsageError, match="split_runs"):
            choose_part(runs, wrong)


def test_study_asks_for_scores_and_answers_with_them(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one_run.py").write_text(
        "from steepen.model.arms import find_arm\n"
        "from steepen.studies.answer import Answer\n"
        "def depth_study(context):\n"
        "    arm = find_arm('vanilla')\n"
        "    spec = context.spec(context.recipe(arm).at_budget(arm, 2, context.size_rule, tokens=4096))\n"
        "    (record,) = yield [spec]\n"
        "    found = record.evaluation.get('kl_depth', {}).get('executed')\n"
        "    return Answer(study='depth-study', question='How deep?', section='', findings=(f'{found}',),\n"
        "                  values={'executed': found}, runs=(spec.hash,))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "study",
        "one_run:depth_study",
        "--preset",
        "tiny",
        "--data",
        str(dataset.directory),
        "--device",
        "cpu",
    ]
    assert main([*words, "--score", "kl-depth", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["executed"] == 2
    assert main([*words, "--score", "kl-depth,beauty"]) == 2
    assert "'beauty' is not valid" in capsys.readouterr().err
    assert main([*words, "--score", "core"]) == 2
    assert "--core" in capsys.readouterr().err
