"""The commands of docs/export.md run, in the order of the page, with a shorter training."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from steepen.requests.app import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
RUN = re.compile(r"runs/[0-9a-f]{16}")
SHORTER = {"3e5": "8192", "bpe:1024": "bpe:512", "40": "6", "20000": "1024"}  # tokens, vocabulary


def page_commands() -> list[list[str]]:
    """The words of every command in a block of the page."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ steepen ")]


def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    found = page_commands()
    assert {words[0] for words in found} >= {"data", "train", "generate", "export", "import", "eval"}
    done: set[str] = set()
    for words in found:
        if "--hf" in words and importlib.util.find_spec("transformers") is None:
            continue
        runs = list(Path("runs").glob("*"))
        given = [SHORTER.get(word, RUN.sub(str(runs[0]), word) if runs else word) for word in words]
        assert main(given) == 0, (given, capsys.readouterr().err)
        done.add(words[0])
    assert (
        "import" in done
        and list(Path("imported").glob("*"))
        and Path("exported/loop-2/config.json").is_file()
    )
