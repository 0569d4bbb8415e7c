"""The `steepen report` command: the files it writes, and its errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from steepen.report.load_studies import load_study
from steepen.report.page import render_page
from steepen.requests.app import main
from steepen.runs.store import RunStore
from steepen.utils.json_io import with_checksum, write_json

SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_report_writes_page_figures_and_tables(
    simulated_studies: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(simulated_studies)
    out = tmp_path / "r"
    words = ["report", "tpp", "studies/extrapolate", "--out", str(out), "--format", "svg,pdf", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert "did not write" not in captured.err
    there = {str(file) for file in out.rglob("*") if file.is_file()}
    assert set(said["files"]) == there and said["page"] in there
    figures = (
        "tpp-vanilla-loss-against-tokens-per-parameter",
        "tpp-untied-2-loss-against-tokens-per-parameter",
        "tpp-optimal-tokens-per-parameter-against-compute",
        "tpp-loss-at-the-optimum",
        "tpp-all",
        "extrapolate-laws",
        "extrapolate-compute-multiplier-over-vanilla-projected",
        "extrapolate-all",
    )
    found = ("answers", "the-held-out-run", "verdicts-against-vanilla", "runs")
    tables = ("tpp-compute-optimal-tpp", *(f"extrapolate-{name}" for name in found))
    assert {Path(file).relative_to(out).as_posix() for file in there} == {
        "report.html",
        *(f"figures/{name}.{kind}" for name in figures for kind in ("pdf", "svg", "csv")),
        *(f"tables/{name}.{kind}" for name in tables for kind in ("csv", "md", "tex")),
    }
    page = (out / "report.html").read_text()
    links = re.findall(r'<a href="((?:figures|tables)/[^"]+)">', page)
    assert {str(out / link) for link in links} == there - {said["page"]} - {
        str(out / f"figures/{name}-all.{kind}")
        for name in ("tpp", "extrapolate")
        for kind in ("pdf", "svg", "csv")
    }


def test_report_is_written_to_the_folder_report_by_default(
    simulated_studies: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "report" / "figures" / "another-study-laws.svg"  # left by an earlier report
    other.parent.mkdir(parents=True)
    other.touch()
    assert main(["report", str(simulated_studies / "studies" / "extrapolate"), "--format", "svg"]) == 0
    said = capsys.readouterr()
    assert "report/report.html: open it in any browser." in said.out
    assert (tmp_path / "report" / "report.html").is_file()
    assert "report also has 1 file that this report did not write" in said.err and other.exists()


def test_report_bytes_are_equal_across_processes(
    simulated_studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["report", "extrapolate", "--format", "pdf,svg", "--out"]
    monkeypatch.chdir(simulated_studies)
    assert main([*words, str(tmp_path / "1")]) == 0
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"  # sets have another order there
    command = [sys.executable, "-m", "steepen", *words, str(tmp_path / "2")]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCE)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    first, second = (
        {
            file.relative_to(tmp_path / name): file.read_bytes()
            for file in (tmp_path / name).rglob("*")
            if file.is_file()
        }
        for name in ("1", "2")
    )
    assert first.keys() == second.keys() and len(first) == 1 + 3 * 3 + 4 * 3
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["laddr", "--out", "r"], 2, ["no study 'laddr'", "ladder"]),
        (["studies", "--out", "r"], 2, ["holds no study"]),
        (["ladder", "--out", "r", "--format", "gif"], 2, ["'gif'", "'pdf', 'svg', 'png'"]),
        (["ladder", "--out", "r", "--format", ","], 2, ["--format is empty"]),
        (["ladder", "--out", "studies/ladder/study.json"], 2, ["is a file"]),
        (["unfinished", "--out", "r"], 1, ["no answer yet", "it stopped", "the budget was spent"]),
        (["running", "--out", "r"], 1, ["no answer yet", "it was killed"]),
        (["garbled", "--out", "r"], 1, ["garbled/study.json can't be read"]),
        (["crooked", "--out", "r"], 1, ["crooked/study.json can't be read", "no field 'colour'"]),
        (["moved", "--out", "r"], 1, ["does not exist", "--runs"]),
        (["ladder", "--out", "r", "--runs", "studies"], 1, ["has no record in studies", "--runs"]),
    ],
)
def test_invalid_input_gives_a_one_sentence_error(
    arguments: list[str],
    code: int,
    words: list[str],
    simulated_studies: Path,
    tmp_path: Path,
    simulated: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(simulated_studies / "studies" / "ladder", tmp_path / "studies" / "ladder")
    answer = simulated.simulate("tpp")

    def write(name: str, **journal: object) -> None:
        file = simulated.write_study(tmp_path, name, answer) / "study.json"
        file.write_text(json.dumps(with_checksum({**json.loads(file.read_text()), **journal})))

    write("unfinished", answer=None, status="stopped", message="the budget was spent.")
    write("running", answer=None, status="running")
    write("crooked", answer={**answer.to_dict(), "colour": "red"})
    write("moved", answer={**answer.to_dict(), "runs": ["0" * 16]}, runs_directory="/nowhere/runs")
    (tmp_path / "studies" / "garbled").mkdir(exist_ok=True)
    (tmp_path / "studies" / "garbled" / "study.json").write_text("{")
    assert main(["report", *arguments]) == code
    message = capsys.readouterr().err.strip()
    assert all(word in message for word in words), message
    assert "\n" not in message and message.startswith("steepen: ")
    assert not (tmp_path / "r").exists()


def test_runs_option_finds_moved_runs(
    simulated_studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = json.loads((simulated_studies / "studies" / "ladder" / "study.json").read_text())
    (tmp_path / "here").mkdir()
    text = json.dumps(with_checksum({**journal, "runs_directory": "/nowhere/runs"}))
    (tmp_path / "here" / "study.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "here", "--out", "a", "--format", "png"]) == 1
    assert (
        main(["report", "here", "--out", "a", "--format", "png", "--runs", str(simulated_studies / "runs")])
        == 0
    )


def test_failed_run_is_listed_with_its_reason(
    simulated_studies: Path, simulated: ModuleType, tmp_path: Path
) -> None:
    store = RunStore(tmp_path / "runs")
    answer = simulated.simulate("ladder", store, arms=("vanilla", "untied-grow"))
    run = store.root / answer.runs[0]
    (run / "record.json").unlink()
    write_json(run / "failure.json", {"kind": "diverged", "message": "the loss became NaN at step 7."})
    study = load_study(str(simulated.write_study(tmp_path, "ladder", answer)), tmp_path)
    assert study.failures == ((run.name, "the loss became NaN at step 7."),)
    assert "the loss became NaN at step 7." in render_page([study])
