"""Files that change while a run trains or is evaluated, and permissions of what it writes."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepen.data import Dataset
from steepen.errors import SteepenError
from steepen.evaluation.load import load
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training import checkpoint as checkpoints
from steepen.training import train_step
from steepen.training.run import train
from steepen.training.train_options import TrainOptions

OPTIONS = TrainOptions(device="cpu", quiet=True, checkpoint_every=5)


@pytest.fixture
def data(tiny_data: Dataset, tmp_path: Path) -> Dataset:
    return Dataset.open(shutil.copytree(tiny_data.directory, tmp_path / "data"))


def overwrite(file: Path) -> None:
    """Write other ids of the vocabulary to a shard, in place."""
    content = np.fromfile(file, "<u2")
    content[32:] = content[32:][::-1]
    with file.open("r+b") as out:
        out.write(content.tobytes())


def test_shard_overwritten_in_mid_run_gives_no_record(
    make_spec: Callable[..., RunSpec], data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("vanilla", steps=30)
    spec = replace(spec, data=replace(spec.data, epochs=100))
    store, shard = RunStore(tmp_path / "runs"), data.directory / "train_00000.bin"
    expected = train(spec, data, RunStore(tmp_path / "clean"), OPTIONS).validation_loss
    clean = shard.read_bytes()
    original = train_step.TrainStep.__call__

    def step(self: Any, *arguments: Any) -> Any:
        if arguments[-1] == 7:
            overwrite(shard)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patched: Any = step
        patch.setattr(train_step.TrainStep, "__call__", patched)
        with pytest.raises(SteepenError, match=r"train_00000\.bin was altered"):
            train(spec, Dataset.open(data.directory), store, OPTIONS)
    assert store.record(spec) is None
    failure = store.run(spec).failure()
    assert failure is not None and "train_00000.bin" in failure[1]
    shard.write_bytes(clean)
    record = train(spec, Dataset.open(data.directory), store, OPTIONS)
    assert record.resumed == 1 and record.validation_loss == expected


def test_weights_that_change_while_they_are_read_are_rejected(
    make_spec: Callable[..., RunSpec], data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("vanilla", steps=5)
    train(spec, data, RunStore(tmp_path / "runs"), OPTIONS)
    run = tmp_path / "runs" / spec.hash
    original = checkpoints.StateReader.names

    def names(self: Any, section: str) -> list[str]:
        (file,) = run.glob("checkpoints/*/state.safetensors")
        file.chmod(0o644)
        with file.open("r+b") as out:
            out.seek(-8, os.SEEK_END)
            out.write(b"changed!")
        return original(self, section)

    load(run, device="cpu")
    monkeypatch.setattr(checkpoints.StateReader, "names", names)
    with pytest.raises(SteepenError, match=r"checksum mismatch of state\.safetensors"):
        load(run, device="cpu")


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_all_files_of_a_run_and_an_export_follow_the_umask(
    umask: int, make_spec: Callable[..., RunSpec], data: Dataset, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        spec = make_spec("vanilla", steps=5)
        train(spec, data, RunStore(tmp_path / "runs"), OPTIONS)
        for to in ("hf", "safetensors"):
            assert main(["export", str(tmp_path / "runs" / spec.hash), "--to", to, str(tmp_path / to)]) == 0
    finally:
        os.umask(before)
    files = [path for name in ("runs", "hf", "safetensors") for path in (tmp_path / name).rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files if path.is_file()}
    assert {"state.safetensors", "model.safetensors", "record.json"} <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~umask} == {}
