"""The `steepen study` command: help, invalid requests, dry runs, and a trained study end to end."""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import steepen
from fork_server import fork_workers
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.tokenize_source import TokenizationJob
from steepen.report.serve import StudyPages
from steepen.requests.app import main
from steepen.studies.driver.journal import Journal, list_preparing, preparing_data
from steepen.studies.preset import PRESETS_DIRECTORY, load_preset
from steepen.studies.registry import STUDIES

WORDS = ["north", "south", "river", "hill", "stone", "wood", "light", "rain", "wind", "house", "road", "sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, and a preset whose runs take no time."""
    folder = tmp_path_factory.mktemp("study")
    choose = random.Random(2)
    documents = [" ".join(choose.choices(WORDS, k=60)) for _ in range(600)]
    (folder / "text.txt").write_text("<|endoftext|>".join(documents))
    prepare(
        PrepareRequest((str(folder / "text.txt"),), tokenizer="bpe:300", val_tokens=1_000), folder / "data"
    )
    text = (PRESETS_DIRECTORY / "tiny.yaml").read_text()
    for before, after in (
        ("context: 32", "context: 16"),
        ("batch_tokens: 2048", "batch_tokens: 64"),
        ("validation_tokens: 65536", "validation_tokens: 512"),
        ("base_tokens: 262144", "base_tokens: 640"),
    ):
        assert before in text
        text = text.replace(before, after)
    (folder / "minute.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that train are forked: torch is imported already (started: training/test_worker_process.py)."""
    fork_workers(monkeypatch)


def test_help_lists_every_study_and_each_shows_its_own_options_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["study", "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, entry in STUDIES.items():
        assert any(line[1:2] == [name] for line in lines), name
        # The registry says what a study takes without importing it; its function must agree.
        taken = set(list(inspect.signature(entry.function).parameters)[1:])
        own = (
            taken - {"budget"} if "until" in taken else taken
        )  # every study has --budget; this one spends it
        assert set(entry.takes.split()) == own
        assert main(["study", name, "--help"]) == 0
        words = {word.strip(",.:") for word in capsys.readouterr().out.split()}
        assert set(entry.parts) <= words, name
        assert {"--hold-out", "--part", "--rungs"} & words == {
            flag for flag, option in (("--hold-out", "hold_out"), ("--part", "parts"), ("--rungs", "rungs"))
            if option in entry.takes.split()
        }  # fmt: skip


@pytest.mark.parametrize("words", [["ladder", "--arms", "vanilla"], ["tpp", "--rungs", "2,3"]])
def test_wrong_options_are_rejected_before_data_is_prepared(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert ("at least one more arm" if words[0] == "ladder" else "does not take --rungs") in told
    assert "Preparing" not in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["laddr"], "no study 'laddr'"),
        (["ladder", "--preset", "huge"], "no preset 'huge'"),
        (["ladder", "--rungs", "6-2"], "--rungs '6-2' is not valid"),
        (["ladder", "--seeds", "one"], "--seeds 'one' is not valid"),
        (["ladder", "--arms", "vanila"], "no arm 'vanila'"),
        (["ladder", "--arms", "vanilla,vanilla"], "twice"),
        (["tpp", "--hold-out", "9"], "tpp does not take --hold-out; these do: extrapolate"),
        (["passes", "--part", "both"], "--part names 'both'"),
        (["ladder", "--recipe", "none.yaml"], "none.yaml could not be read"),
        (["ladder", "--preset", "paper"], "needs --data"),
        (["ladder", "--data", "nowhere"], "no prepared data"),
    ],
)
def test_invalid_requests_are_rejected_before_anything_is_written(
    words: list[str], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = [] if {"--data", "paper"} & set(words) else ["--data", str(folder / "data")]
    assert main(["study", *words, *data]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.startswith("steepen: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_needs_no_data_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", "ladder", "--preset", "paper", "--dry-run", "--gpu", "h100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["runs"]) == 58
    assert plan["flops"] == pytest.approx(1.83e21, rel=0.01)
    assert not list(tmp_path.iterdir())


def test_dry_run_without_data_shows_no_hashes_as_they_depend_on_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["ladder", "--preset", str(folder / "minute.yaml"), "--rungs", "2-5"]
    text = dry(words, capsys)
    assert not re.search("[0-9a-f]{16}", text) and "Runs have no names (hashes) yet" in text
    assert not json.loads(dry([*words, "--json"], capsys))["data_known"]
    text = dry([*words, "--data", str(folder / "data"), "--epochs", "99"], capsys)
    assert re.match(r" [0-9a-f]{16} ", text.splitlines()[3]) and "no names" not in text


def test_a_study_can_be_watched_while_its_data_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from steepen.studies import context

    seen: list[str] = []

    class Enough(Exception):
        """Ends the study before data is prepared."""

    def look(*_: object) -> None:
        for words in (["status", "mine"], ["status", "mi"], ["status"]):
            assert main(words) == 0
            seen.append(capsys.readouterr().out)
        pages = StudyPages(Path("studies"), only="mine")
        seen.extend([pages.reply("/").body, StudyPages(Path("studies")).reply("/").body])
        assert pages.reply("/").reload and StudyPages(Path("studies")).reply("/other").status == 404
        assert main(["status", "mine", "--json"]) == 0 and main(["status", "other"]) == 2
        assert json.loads(capsys.readouterr().out) == {"name": "mine", "state": "preparing"}
        raise Enough

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(context, "_prepare", look)
    for start in (
        lambda: main(["study", "ladder", "--name", "mine", "--device", "cpu"]),
        lambda: steepen.ladder(name="mine", device="cpu"),
    ):
        seen.clear()
        with contextlib.suppress(Enough):
            start()
        assert len(seen) == 5 and all("mine" in text and "data is being prepared" in text for text in seen)
        capsys.readouterr()
        assert main(["status", "mine"]) == 2 and "studies has no studies" in capsys.readouterr().err


def test_a_second_study_waits_for_data_that_another_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steepen.studies import context

    begun = threading.Event()
    prepared: list[Path] = []
    run = TokenizationJob.run

    def run_slowly(job: TokenizationJob) -> None:
        prepared.append(job.directory)
        begun.wait(20)  # until the other study has come to the same place
        run(job)

    monkeypatch.setattr(TokenizationJob, "run", run_slowly)
    preset, found = load_preset("tiny"), list[Any]()

    def open_it(name: str) -> None:
        found.append(context.open_data(preset, None, tmp_path / "runs", False, (tmp_path / "studies", name)))

    studies = [threading.Thread(target=open_it, args=(name,)) for name in ("first", "second")]
    for one in studies:
        one.start()
    while len(context_names := list_preparing(tmp_path / "studies")) < 2:
        assert all(one.is_alive() for one in studies)
    begun.set()
    for one in studies:
        one.join(60)
    assert context_names == ["first", "second"] and len(prepared) == 1
    assert found[0] == found[1] and prepared == [found[0][0].with_suffix(".partial")]


def test_watch_goes_on_from_the_preparation_to_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preparing = preparing_data(Path("studies"), "mine")
    preparing.__enter__()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            preparing.__exit__(None, None, None)  # then for a moment there is neither lock nor journal
        if len(waits) == 2:
            Journal.open(Path("studies"), "mine", {}, Path("runs"))._write(status="finished")

    monkeypatch.setattr("steepen.requests.status.time.sleep", wait)
    assert main(["status", "mine", "--watch"]) == 0 and len(waits) == 2
    text = capsys.readouterr().out
    assert "data is being prepared" in text and "mine: finished" in text
    assert main(["status", "absent", "--watch"]) == 2 and len(waits) == 2


def dry(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["study", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_dry_run_estimates_later_runs_of_adaptive_studies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = dry(["chain-tuning"], capsys)
    plan = json.loads(dry(["chain-tuning", "--json"], capsys))
    assert f"then about {plan['later_runs']} more runs" in text
    assert len(plan["runs"]) == 5  # the first sweep; all others start from what it adopts
    assert plan["later_runs"] > 50
    assert plan["later_flops"] > 10 * plan["flops"]


def test_dry_run_lists_the_held_out_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = json.loads(dry(["extrapolate", "--json"], capsys))
    assert [run["depth"] for run in plan["runs"] if run["arm"] == "untied-grow"][-1] == 7
    assert plan["later_runs"] == 0


def test_dry_run_too_long_for_a_cpu_suggests_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["ladder", "--preset", "paper", "--device", "cpu"]
    assert "`--gpu h100` estimates" in dry(words, capsys)
    assert "`--gpu h100` estimates" not in dry([*words, "--gpu", "h100"], capsys)
    assert "`--gpu h100` estimates" not in dry(["ladder", "--device", "cpu"], capsys)


@pytest.mark.parametrize("asked", [512, 8192])
def test_fewer_validation_tokens_than_the_presets_give_a_note(
    asked: int,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (folder / "minute.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("validation_tokens: 512", f"validation_tokens: {asked}"))
    words = ["--preset", "own.yaml", "--rungs", "2-5", "--data", str(folder / "data"), "--epochs", "99"]
    assert main(["study", "ladder", *words, "--dry-run"]) == 0
    assert ("the preset asks for 8,192" in capsys.readouterr().err) == (asked == 8192)


def test_finished_study_is_answered_without_new_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "study", "transfer", "--part", "probe", "--preset", str(folder / "minute.yaml"),
        "--data", str(folder / "data"), "--runs", str(tmp_path / "runs"),
        "--studies", str(tmp_path / "studies"),
        "--device", "cpu", "--jobs", "2",
    ]  # fmt: skip
    assert main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["study"] == "transfer"
    entry = json.loads((tmp_path / "studies" / "transfer-minute-probe" / "study.json").read_text())
    assert entry["answer"] == first
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/record.json")}
    assert {path.parent.name for path in before} == set(first["runs"])
    assert len(before) == 3  # vanilla's own recipe is the one that is transferred
    assert main(words) == 0
    text = capsys.readouterr().out
    assert first["findings"][0] in text
    assert "study.json" in text
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_reusing_a_study_name_with_other_options_is_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = tmp_path / "studies"
    (studies / "growth-target-minute").mkdir(parents=True)
    entry = {"name": "growth-target-minute", "options": {"preset": "other"}, "runs_directory": "runs"}
    (studies / "growth-target-minute" / "study.json").write_text(json.dumps(entry))
    words = [
        "--preset",
        str(folder / "minute.yaml"),
        "--data",
        str(folder / "data"),
        "--studies",
        str(studies),
    ]
    assert main(["study", "growth-target", *words, "--runs", str(tmp_path / "runs")]) == 2
    assert "another name" in capsys.readouterr().err


def test_study_is_found_by_an_unambiguous_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ladder-tiny", "tpp-tiny", "tpp-mini"):
        (tmp_path / name).mkdir()
        entry = {"name": name, "options": {}, "runs_directory": str(tmp_path / "runs"), "status": "stopped"}
        (tmp_path / name / "study.json").write_text(json.dumps(entry))
    where = ["--studies", str(tmp_path)]
    assert main(["status", "ladder", *where]) == 0
    assert capsys.readouterr().out.startswith("ladder-tiny:")
    assert main(["report", "ladder", *where, "--out", str(tmp_path / "report")]) == 1
    assert "the study ladder-tiny has no answer yet" in capsys.readouterr().err
    for command in (["status", "tpp"], ["report", "tpp", "--out", str(tmp_path / "report")]):
        assert main([*command, *where]) == 2
        assert "tpp-mini, tpp-tiny" in capsys.readouterr().err


def test_documented_custom_study_runs_as_module_function(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "studies.md").read_text()
    source = re.search(r"```python\n(# warmup_study.py\n.*?)```", page, re.DOTALL)
    assert source is not None
    (tmp_path / "warmup_study.py").write_text(source.group(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["study", "warmup_study:warmup_study", "--preset", str(folder / "minute.yaml")]
    words += ["--data", str(folder / "data"), "--device", "cpu", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0].startswith("The best warm-up is ")
    assert len(answer["runs"]) == 3
    assert (tmp_path / "studies" / "warmup-study-minute" / "study.json").is_file()
    assert main([*words[:2], "--rungs", "2-4", "--dry-run"]) == 2
    assert "warmup-study does not take --rungs" in capsys.readouterr().err
    assert main(["study", "warmup_study:missing", "--dry-run"]) == 2
    assert "the study 'warmup_study:missing' could not be loaded" in capsys.readouterr().err


def test_options_of_a_custom_study_have_the_types_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "typed_study.py").write_text(
        "from __future__ import annotations\n"
        "from collections.abc import Sequence\n"
        "def typed_study(context, *, count: int = 3, sizes: Sequence[int], quick: bool = False, other=1):\n"
        "    raise ValueError(repr((count, sizes, quick, other)))\n"
        "    yield\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--count", "2k", "--sizes", "4-6", "--quick", "--other", "x", "--dry-run"]
    assert main(["study", "typed_study:typed_study", *words]) == 70
    assert "ValueError: (2000, (4, 5, 6), True, 'x')" in capsys.readouterr().err
    assert main(["study", "typed_study:typed_study", "--count", "few", "--dry-run"]) == 2
