"""Commands on a full disk: one sentence, nothing damaged or left behind, and success once there is space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from clean_place import Place, eval_words, make_place
from steepen.data import Dataset
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "tiny_data"]
MEGABYTES = 4


@pytest.fixture(scope="module")
def place(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    spec = make_spec("untied-grow", depth=2, steps=6)
    return make_place(tmp_path_factory.mktemp("full"), spec, tiny_data.directory)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A file system of a few MB of its own, the current directory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    monkeypatch.chdir(folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


COMMANDS = {  # with the kB that are free in each attempt
    "train --spec {root}/runs/{run}/spec.json --data {root}/data --runs runs --device cpu": (0, 20, 700),
    "data prepare {root}/../text.txt --out data --tokenizer bpe:300 --val-tokens 2000": (0, 8, 40),
    "eval runs/{run} {eval}": (0, 4),
    "export {root}/runs/{run} out": (0, 300),
    "export {root}/runs/{run} out --to safetensors": (0, 300),
    "import {root}/export --runs imported": (0, 300),
    "pack s --studies {root}/studies --out s.tar.gz": (0, 8),
    "unpack {root}/pack/s.tar.gz --out unpacked": (0, 8),
    "report s --studies {root}/studies --out page --format svg": (0, 8),
    "fit paper:fineweb --draws 100 --write-result table.csv": (0,),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command.split()[:2]))
def test_full_disk_is_one_sentence_and_the_command_succeeds_later(
    command: str, place: Place, disk: Path, capsys: pytest.CaptureFixture[str], tiny_data: Dataset
) -> None:
    if command.startswith("eval"):
        shutil.copytree(place.root / "runs", disk / "runs")
        shutil.rmtree(disk / "runs" / place.run / "evaluation")
    text = command.replace("{root}/../text.txt", str(tiny_data.directory.parent / "text.txt"))
    words = text.format(root=place.root, run=place.run, eval=" ".join(eval_words(place.root))).split()
    given = {path for path in disk.rglob("*") if path.is_file()}
    for free in COMMANDS[command]:
        space = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(max(0, space.f_bavail * space.f_bsize - (free << 10))))
        capsys.readouterr()
        code = main(words)
        said = " ".join(capsys.readouterr().err.split())
        assert code == 1 and ("disk is full" in said or "free some disk space" in said), (free, said)
        found = {path for path in disk.rglob("*") if path.is_file()} - given
        unfinished = [path for path in found if path.suffix == ".tmp" or ".writing-" in str(path)]
        assert not unfinished and all(path.exists() for path in given)
        (disk / "filler").unlink()
    assert main(words) == 0, capsys.readouterr().err
