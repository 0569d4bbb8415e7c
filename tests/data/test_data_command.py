"""The `steepen data` commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steepen.data import Dataset
from steepen.requests.app import main


def test_prepare_show_and_verify(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["data", "prepare", str(corpus), "--out", out, "--val-tokens", "1000"]) == 0
    printed = capsys.readouterr().out
    assert Dataset.open(out).identity in printed
    assert main(["data", "show", out, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["splits"]["train"]["documents"] + shown["splits"]["val"]["documents"] == 400
    assert shown["padded_vocabulary"] == 50_304
    assert main(["data", "verify", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True


def test_verify_fails_on_an_altered_shard(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["data", "prepare", str(corpus), "--out", str(out), "--json"]) == 0
    shard = out / "train_00000.bin"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["data", "verify", str(out)]) == 1
    assert "train_00000.bin was altered" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["prepare"],
        ["prepare", "nowhere", "--out", "x"],
        ["prepare", "builtin:poems", "--out", "x"],
        ["prepare", "CORPUS"],
        ["prepare", "CORPUS", "--out", "x", "--tokenizer", "gpt9"],
        ["prepare", "CORPUS", "--out", "x", "--val-tokens", "many"],
        ["prepare", "CORPUS", "--out", "x", "--dtype", "uint8"],
        ["prepare", "CORPUS", "--out", "x", "--format", "xml"],
        ["prepare", "CORPUS", "--out", "x", "--threads", "0"],
        ["show", "nowhere"],
        ["verify", "nowhere"],
        ["frobnicate"],
    ],
)
def test_wrong_request_exits_2_and_creates_no_files(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *(str(corpus) if word == "CORPUS" else word for word in words)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_separator_option_understands_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("one two\n\nthree four\n\nfive six\n")
    out = tmp_path / "out"
    command = ["data", "prepare", str(tmp_path / "d.txt"), "--out", str(out), "--separator", "\\n\\n"]
    assert main([*command, "--val-tokens", "0"]) == 0
    assert Dataset.open(out).manifest.splits["train"].documents == 3


def test_ctrl_c_prints_how_to_resume_and_resuming_works(tmp_path: Path, environment: dict[str, str]) -> None:
    source = tmp_path / "long.jsonl"
    with source.open("w") as stream:
        for number in range(12_000):
            stream.write(
                json.dumps({"text": f"{number} is a number, and this is a sentence about it. " * 20}) + "\n"
            )
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "steepen",
        "data",
        "prepare",
        str(source),
        "--out",
        str(out),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out.partial/train_*.bin")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "same command again" in said
    assert "Traceback" not in said
    assert not out.exists()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert Dataset.open(out).manifest.splits["train"].documents > 10_000


def test_closed_pipe_is_not_an_error(tmp_path: Path, corpus: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "prepare", str(corpus), "--out", str(out), "--json"]) == 0
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "steepen", "data", "show", str(out)]
    run = subprocess.run(
        command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert "Traceback" not in run.stderr
