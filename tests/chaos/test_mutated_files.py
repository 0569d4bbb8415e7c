"""Well-formed files with a wrong value somewhere, as another program or person may have written them.

Without a new checksum a file is always rejected. With one, every command that reads it ends with a result or
one sentence. Without a wrong value it is read. STEEPEN_CHAOS is the number of files of all kinds,
STEEPEN_CHAOS_SEED the seed, STEEPEN_CHAOS_REPORT a file to which the test adds a line for each kind.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clean_place import Place, no_hang
from mutations import mutate
from steepen.data.dataset import Manifest
from steepen.errors import SteepenError
from steepen.requests.app import main
from steepen.runs.store import RunDirectory
from steepen.studies.driver.journal import Journal
from steepen.training.checkpoint import Checkpoint
from steepen.utils.codec import from_builtins
from steepen.utils.json_io import parse_json, with_checksum

COUNT = int(os.environ.get("STEEPEN_CHAOS", "0"))
SEED = int(os.environ.get("STEEPEN_CHAOS_SEED", "0"))
REPORT = os.environ.get("STEEPEN_CHAOS_REPORT")
SECONDS = 10.0  # of processor time
Content = Callable[[Any], bytes]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def with_new_checksum(value: Any) -> bytes:
    return as_json(with_checksum(value) if isinstance(value, dict) else value)


def with_new_identity(value: Any) -> bytes:
    """A manifest that states its own content hash again, where it can be decoded at all."""
    try:
        fields = {
            name: item for name, item in value.items() if name not in ("format", "identity", "checksum")
        }
        value["identity"] = from_builtins(Manifest, fields).identity
    except (SteepenError, AttributeError):
        pass
    return with_new_checksum(value)


def packed(value: Any, clean: Path) -> bytes:
    """A pack with another manifest."""
    with tarfile.open(clean) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
        for name, data in {**contents, "MANIFEST.json": as_json(value)}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return target.getvalue()


@dataclass(frozen=True)
class Kind:
    """A file, how its value is written, and the commands that read it ({root}: the place, {run}: its run)."""

    file: str
    commands: tuple[str, ...]
    write: Content = as_json
    read: Callable[[Path], object] | None = None  # rejects a file whose checksum was not renewed


RUNS = "--runs {root}/runs"
EVALUATE = "eval {root}/runs/{run} --data {root}/data --core {root}/bundle --device cpu --tasks choose"
FIT = "fit {root}/ladder.json --reference a --draws 100 --method joint"
KINDS = {
    "records": Kind(
        "runs/{run}/record.json",
        (f"runs {RUNS}", f"runs show {{run}} {RUNS}", "downstream {root}/runs", "forecast {root}/runs"),
        with_new_checksum,
        lambda file: RunDirectory(file.parent).record(),
    ),
    "specs": Kind("unfinished/{run}/spec.json", ("runs --runs {root}/unfinished",)),
    "metrics": Kind("runs/{run}/metrics.jsonl", (f"runs show {{run}} {RUNS}",)),
    "checkpoints": Kind(
        "runs/{run}/checkpoints/00000006/checkpoint.json",
        ("generate {root}/runs/{run} --prompt a --max-tokens 1 --device cpu",),
        with_new_checksum,
        lambda file: Checkpoint(file.parent).training_progress(),
    ),
    "tokenizers of runs": Kind(
        "runs/{run}/tokenizer.json", ("generate {root}/runs/{run} --prompt a --max-tokens 1 --device cpu",)
    ),
    "scores": Kind("runs/{run}/evaluation/00000006/evaluation.json", (EVALUATE,), with_new_checksum),
    "manifests": Kind(
        "data/manifest.json",
        ("data show {root}/data", "data verify {root}/data"),
        with_new_identity,
        lambda file: Manifest.read(file.parent),
    ),
    "journals": Kind(
        "studies/s/study.json",
        ("status --studies {root}/studies", "status s --studies {root}/studies"),
        with_new_checksum,
        lambda file: Journal.read(file.parent),
    ),
    "answers": Kind(
        "studies/s/study.json",
        ("report s --studies {root}/studies --out {root}/page --format svg",),
        with_new_checksum,
    ),
    "tasks of bundles": Kind("bundle/core.yaml", (EVALUATE,)),
    "examples of bundles": Kind("bundle/eval_data/one/choose.jsonl", (EVALUATE,)),
    "exports": Kind("export/steepen.json", ("import {root}/export --runs {root}/imported",)),
    "packs": Kind("pack/s.tar.gz", ("unpack {root}/pack/s.tar.gz --out {root}/unpacked",)),
    "tables of parabolas": Kind("table.json", ("fit {root}/table.json --law isoflop",)),
    "tables of ladders": Kind("ladder.json", (FIT,)),
    "forecasts": Kind("forecasts.jsonl", (f"{FIT} --score {{root}}/forecasts.jsonl",)),
}
ISOFLOP = [
    {"arm": arm, "budget": 10.0**n, "x": 1e7 * 2.0**x, "loss": 4 - n / 10 + x * x / 9}
    for arm in ("a", "b")
    for n in range(17, 20)
    for x in (-1, 0, 1)
]
LADDER = [
    {"arm": arm, "flops": 10.0**n, "loss": 1.8 + 3 * 10.0 ** (-n / 20)}
    for arm in ("a", "b")
    for n in range(15, 22)
]
FORECAST = {"arm": "a", "flops": 1e20, "forecast": 2.0, "interval": [1.9, 2.1], "standard_error": 0.05}
FORECAST |= {"confidence": 0.9, "e": 1.0, "log_a": 0.5, "gamma": 0.1, "c0": 1e18, "runs": 9}
FORECAST |= dict.fromkeys(("method", "reference", "data_sha256", "registered"), "x")


def changed(kind: str, clean: Path, choose: random.Random, *, renew: bool) -> bytes:
    """The content of a file with one wrong value, with a new checksum or the old one."""
    if kind == "packs":
        with tarfile.open(clean) as tar:
            manifest = tar.extractfile("MANIFEST.json")
            assert manifest is not None
            return packed(mutate(json.load(manifest), choose), clean)
    if clean.suffix == ".jsonl":
        lines = clean.read_text().splitlines()
        number = choose.randrange(len(lines))
        lines[number] = json.dumps(mutate(json.loads(lines[number]), choose))
        return "\n".join(lines).encode()
    value = yaml.safe_load(clean.read_text()) if clean.suffix == ".yaml" else json.loads(clean.read_text())
    return (KINDS[kind].write if renew else as_json)(mutate(value, choose))


@pytest.fixture(scope="module")
def root(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutated") / "copy"
    shutil.copytree(place.root, root)
    (root / "table.json").write_text(json.dumps(ISOFLOP))
    (root / "ladder.json").write_text(json.dumps(LADDER))
    (root / "forecasts.jsonl").write_text(json.dumps(FORECAST) + "\n")
    (root / "unfinished" / place.run / "failure.json").unlink()
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_value_in_a_file_is_rejected_or_harmless(
    kind: str, place: Place, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choose, known = random.Random(f"{SEED} {kind}"), KINDS[kind]
    file = root / known.file.format(run=place.run)
    clean = file.read_bytes()
    kept = file.with_name(f"clean-{file.name}")
    kept.write_bytes(clean)
    commands = [[word.format(root=root, run=place.run) for word in text.split()] for text in known.commands]
    count = max(1, round(COUNT / len(KINDS)))
    codes: dict[int, int] = {}
    wrong: list[str] = []

    def execute(words: list[str]) -> int:
        began = time.process_time()
        with no_hang():
            code = main(words)
        said = capsys.readouterr()
        seconds = time.process_time() - began
        good = code in (0, 1, 2) and (code == 0 or said.err.strip()) and seconds < SECONDS
        if not good or "Traceback" in said.err or "\x1b" in said.out + said.err:
            wrong.append(f"{words}: {code} {seconds:.0f} s {said.err[-300:]} {file.read_bytes()!r:.3000}")
        for made in ("imported", "unpacked", "page"):
            shutil.rmtree(root / made, ignore_errors=True)
        return code

    try:
        assert execute(commands[0]) == 0
        for _ in range(count):
            if known.read is not None:
                file.write_bytes(changed(kind, kept, choose, renew=False))
                # Of files without a checksum, as earlier versions wrote them, the content is what counts.
                found, right = parse_json(file.read_bytes()), parse_json(clean)
                same = found == right or (
                    "checksum" not in found and {**found, "checksum": right["checksum"]} == right
                )
                assert same or rejects(known.read, file), file.read_text()
            file.write_bytes(changed(kind, kept, choose, renew=True))
            for words in commands:
                code = execute(words)
                codes[code] = codes.get(code, 0) + 1
    finally:
        kept.unlink()
        file.write_bytes(clean)
    assert not wrong, "\n".join(wrong)
    if REPORT:
        with Path(REPORT).open("a", encoding="utf-8") as out:
            out.write(f"{count} mutated {kind}: exit codes {dict(sorted(codes.items()))}, seed {SEED}\n")


def rejects(read: Callable[[Path], object], file: Path) -> bool:
    try:
        read(file)
    except SteepenError:
        return True
    return False
