"""Every file that steepen reads, damaged in every way: the answer is the right one, or one sentence.

`make test` tries a few of the faults, chosen by STEEPEN_CHAOS_SEED; with STEEPEN_CHAOS all are tried, and
STEEPEN_CHAOS_REPORT names a file to which each adds a line.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clean_place import Place, eval_words, no_hang
from steepen.requests.app import main
from steepen.utils.json_io import write_json

ALL = "STEEPEN_CHAOS" in os.environ
SEED = int(os.environ.get("STEEPEN_CHAOS_SEED", "0"))
REPORT = os.environ.get("STEEPEN_CHAOS_REPORT")
SECONDS = 10.0
FEW = 5  # faults in `make test`


def _flip(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] if content else b"x"


def _edit_number(content: bytes) -> bytes:
    """The last digit of the file, another one: valid JSON with a wrong value."""
    for place in range(len(content) - 1, -1, -1):
        if content[place : place + 1].isdigit():
            other = b"7" if content[place : place + 1] != b"7" else b"8"
            return content[:place] + other + content[place + 1 :]
    return content + b"1"


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "longer": lambda content: content + b"\x00junk",
    "a flipped bit": _flip,
    "another digit": _edit_number,
    "null": lambda content: b"null",
    "a list": lambda content: b"[[1]]",
    "a text": lambda content: b'"x"',
    "an object": lambda content: b'{"a": {"b": 1}}',
    "nested": lambda content: b"[" * 50_000,
    "not UTF-8": lambda content: b"\xff\xfe{}\x00",
    "zeros": lambda content: bytes(len(content)),
}


def damage(path: Path, how: str) -> None:
    """Damage a file: its content, or what lies in its place."""
    if how in CONTENTS:
        path.write_bytes(CONTENTS[how](path.read_bytes()))
        return
    path.unlink()
    if how == "a directory":
        path.mkdir()
    elif how == "a dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif how == "a loop of links":
        path.symlink_to(path)
    elif how == "a pipe":
        os.mkfifo(path)


DAMAGES = (*CONTENTS, "missing", "a directory", "a dangling link", "a loop of links", "a pipe")
RUN_FILES = ("spec.json", "record.json", "metrics.jsonl", "tokenizer.json", "lock", "failure.json")
NEWEST = ("checkpoints/00000006/checkpoint.json", "checkpoints/00000006/state.safetensors")
SCORES = ("evaluation/00000006/evaluation.json", "evaluation/00000006/core/*/choose.seed0.jsonl")
DATA_FILES = ("manifest.json", "tokenizer.json", "train_*.bin", "val_*.bin")
DATA_FILES += tuple(f"{what}_{split}.bin" for what in ("documents", "blocks") for split in ("train", "val"))
BUNDLE_FILES = ("core.yaml", "eval_meta_data.csv", "eval_data/one/choose.jsonl")
FAULTS = [
    (place, file, how)
    for place, files in (
        ("run", (*RUN_FILES, *NEWEST, *SCORES)),
        ("data", DATA_FILES),
        ("study", ("studies/s/study.json",)),
        ("bundle", BUNDLE_FILES),
        ("export", ("steepen.json", "model.safetensors", "tokenizer.json")),
        ("pack", ("s.tar.gz",)),
        ("named", ("preset.yaml", "recipe.yaml", "table.csv")),
    )
    for file in files
    for how in DAMAGES
]
CHOSEN = FAULTS if ALL else random.Random(SEED).sample(FAULTS, FEW)


def _commands(where: str, root: Path, run: str) -> list[list[str]]:
    spec = str(root / "spec.json")
    train_words = ["train", "--spec", spec, "--data", str(root / "data"), "--device", "cpu", "--json"]
    resume = [*train_words, "--runs", str(root / "unfinished")]
    evaluate = ["eval", str(root / "runs" / run), *eval_words(root)]
    runs = ["runs", "--runs", str(root / "runs")]
    if where == "run":
        show = ["runs", "show", run, "--runs", str(root / "runs")]
        return [runs, show, [*train_words, "--runs", str(root / "runs")], resume, evaluate]
    if where == "data":
        return [
            ["data", "show", str(root / "data")],
            ["data", "verify", str(root / "data")],
            resume,
            evaluate,
        ]
    if where == "study":
        studies = ["--studies", str(root / "studies")]
        return [
            ["status", *studies],
            ["status", "s", *studies],
            ["report", "s", *studies, "--out", str(root / "page")],
        ]
    if where == "export":
        return [["import", str(root / "export"), "--runs", str(root / "imported")]]
    if where == "pack":
        return [["unpack", str(root / "pack" / "s.tar.gz"), "--out", str(root / "unpacked")]]
    if where == "named":
        named = root / "named"
        return [
            ["study", "ladder", "--preset", str(named / "preset.yaml"), "--arms", "vanilla", "--dry-run"],
            ["plan", "--arm", "vanilla", "--depth", "8", "--recipe", str(named / "recipe.yaml")],
            ["fit", str(named / "table.csv"), "--reference", "a", "--draws", "100"],
        ]
    return [evaluate]


@pytest.mark.parametrize(("where", "file", "how"), CHOSEN, ids=lambda word: str(word).replace("/", "."))
def test_fault_is_reported_or_harmless(
    where: str, file: str, how: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(place.root, root, symlinks=True)
    write_json(root / "spec.json", json.loads((root / "runs" / place.run / "spec.json").read_text()))
    runs = [root / "runs" / place.run, root / "unfinished" / place.run]
    folders = runs if where == "run" else [root if where == "study" else root / where]
    damaged = [path for folder in folders for path in folder.glob(file)]
    assert damaged
    for path in damaged:
        damage(path, how)
    outcomes: list[str] = []
    for words in _commands(where, root, place.run):
        began = time.process_time()
        with no_hang():
            code = main(words)
        said = capsys.readouterr()
        assert code in (0, 1, 2), (words[0], said.err)
        assert "Traceback" not in said.err, words
        assert code == 0 or said.err.strip(), words
        assert time.process_time() - began < SECONDS * (5 if words[0] == "report" else 1), words
        if code == 0 and words[0] == "train":
            assert json.loads(said.out)["validation_loss"] == place.loss
        if code == 0 and words[0] == "eval":
            _same_scores(json.loads(said.out), place.scores)
        outcomes.append(f"{words[0]} {code}")
    if REPORT:
        with Path(REPORT).open("a", encoding="utf-8") as out:
            out.write(f"{where}/{file}, {how}: {', '.join(outcomes)}\n")


def _same_scores(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["validation"]["loss"] == expected["validation"]["loss"]
    assert found["core"]["tasks"] == expected["core"]["tasks"]
