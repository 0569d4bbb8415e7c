"""Files of weights that were made to harm: every command that reads them gives one sentence or the truth."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from clean_place import Place, make_place, no_hang
from steepen.data import Dataset
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.utils.json_io import read_json, with_checksum, write_json
from training_fixtures import make_spec, tiny_data

from .test_import_published import TOOL, result, write_checkpoint

__all__ = ["make_spec", "tiny_data"]
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def place(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    spec = make_spec("untied-grow", depth=2, steps=6)
    return make_place(tmp_path_factory.mktemp("hostile"), spec, tiny_data.directory)


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the code of a file was executed')",)


def run(
    words: list[str], capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int] = main
) -> tuple[int, str]:
    capsys.readouterr()
    with no_hang():
        code = command(words)
    said = " ".join(capsys.readouterr().err.split())
    assert code in (0, 1, 2) and "Warning" not in said and "executed" not in said, said
    return code, said


def header(content: dict[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def changed_header(whole: bytes, **changes: Any) -> bytes:
    """A safetensors file with another description of its first tensor."""
    (length,) = struct.unpack("<Q", whole[:8])
    described = json.loads(whole[8 : 8 + length])
    names = [name for name in described if name != "__metadata__"]
    described[names[0]].update(changes)
    return header(described, whole[8 + length :])


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "a header of 2^64 bytes": lambda whole: header(b"{}", length=2**64 - 1),
    "a nested header": lambda whole: header(b"[" * 100_000),
    "a negative offset": lambda whole: changed_header(whole, data_offsets=[-4, 4]),
    "an offset beyond the end": lambda whole: changed_header(whole, data_offsets=[0, 1 << 50]),
    "offsets of all": lambda whole: changed_header(whole, data_offsets=[0, len(whole)]),
    "a shape of 2^80": lambda whole: changed_header(whole, shape=[1 << 40, 1 << 40]),
    "a shape of nothing": lambda whole: changed_header(whole, shape=[0, 1 << 60], data_offsets=[0, 0]),
    "fp32 as integers": lambda whole: changed_header(whole, dtype="I32"),
    "a pickle": lambda whole: pickle.dumps(Code()),
    "one byte more": lambda whole: whole + b"x",
}


def replaced(make: Callable[[Tensor], Tensor]) -> Change:
    """Replace the first weight."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in sorted(tensors) if not name.startswith(("optimizer", "random")))
        tensors[name] = make(tensors[name])

    return change


WEIGHTS: dict[str, Change] = {
    "not a number": replaced(lambda value: torch.full_like(value, torch.nan)),
    "integers": replaced(lambda value: value.int()),
    "booleans": replaced(lambda value: value > 0),
    "complex": replaced(lambda value: value.to(torch.complex64)),
    "fp4": replaced(lambda value: value[..., ::2].to(torch.uint8).view(torch.float4_e2m1fn_x2)),
    "a scalar": replaced(lambda value: torch.tensor(1.0)),
    "another name": lambda tensors: tensors.update({"\x1b[2J\u202e": torch.ones(1)}),
}


@pytest.mark.parametrize("how", [*HEADERS, *WEIGHTS])
def test_hostile_safetensors_are_not_imported(
    how: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(place.root / "export", tmp_path / "export")
    file = folder / "model.safetensors"
    if how in HEADERS:
        file.write_bytes(HEADERS[how](file.read_bytes()))
    else:
        tensors = load(file.read_bytes())
        WEIGHTS[how](tensors)
        file.write_bytes(save(tensors))
    code, said = run(["import", str(folder), "--runs", str(tmp_path / "runs")], capsys)
    assert code and said and not (tmp_path / "runs").exists()


def _saved(value: object, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def _pairs_of_pairs(depth: int) -> bytes:
    """A key that is a tuple twice in a tuple twice in a tuple …: hashing it takes 2^depth steps."""
    content = b"\x80\x02})q\x00"
    for number in range(depth):
        content += b"h" + bytes([number]) + b"\x86q" + bytes([number + 1])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", content + b"K\x01s.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return out.getvalue()


EMBEDDING = "transformer.wte.weight"


def _with(make: Callable[[Tensor], object]) -> Callable[[dict[str, Tensor]], bytes]:
    return lambda state: _saved({"model": {**state, EMBEDDING: make(state[EMBEDDING])}})


def _compressed(state: dict[str, Tensor]) -> bytes:
    """A file whose records are deflated: a thousandth of what torch would read from it."""
    out = io.BytesIO()
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    with (
        zipfile.ZipFile(io.BytesIO(_saved({"model": zeros}))) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out.getvalue()


CODE, NOT_DENSE = "contains code or objects other than tensors", "is not a dense tensor of bf16, fp16"
CHECKPOINTS: dict[str, tuple[Callable[[dict[str, Tensor]], bytes], str]] = {
    "a pickle": (lambda state: pickle.dumps(Code()), "not a zip file"),
    "code beside the weights": (lambda state: _saved({"model": state, "more": Code()}), CODE),
    "the old format": (lambda state: _saved(Code(), _use_new_zipfile_serialization=False), "not a zip file"),
    "compressed zeros": (_compressed, "it is compressed"),
    "one number as 1 GB": (_with(lambda value: torch.zeros(1).expand(1 << 24, 16)), "more than the file"),
    "one number as 0.5 GB": (
        _with(lambda _: torch.zeros(1).half().expand(1 << 24, 16)),
        "more than the file",
    ),
    "pairs of pairs": (lambda state: _pairs_of_pairs(60), "a tuple is used twice"),
    "not a number": (_with(lambda value: torch.full_like(value, torch.nan)), "not finite numbers"),
    "beyond fp32": (_with(lambda value: value.double() * 1e300), "not finite numbers"),
    "integers": (_with(lambda value: value.int()), NOT_DENSE),
    "complex": (_with(lambda value: value.to(torch.complex64)), NOT_DENSE),
    "sparse": (_with(lambda value: value[:100].to_sparse()), NOT_DENSE),
    "without values": (_with(lambda value: value[:100].to("meta")), NOT_DENSE),
    "a text": (_with(lambda value: "text"), "is not a tensor"),
    "a list": (lambda state: _saved([1]), "is not a checkpoint of the paper's authors"),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_hostile_checkpoints_of_others_are_not_imported(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, state = write_checkpoint(tmp_path, result())
    make, says = CHECKPOINTS[how]
    file.write_bytes(make(state))
    code, said = run([str(tmp_path), "--runs", str(tmp_path / "runs")], capsys, TOOL.main)
    assert code and says in said and not (tmp_path / "runs").exists(), said


def _of(section: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Replace the first tensor of a section that is not a scalar."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.startswith(section) and tensors[name].ndim)
        tensors[name] = make(tensors[name])

    return change


def _renamed(rows: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.startswith("model"))
        tensors[name + rows] = tensors.pop(name)

    return change


STATES: dict[str, Change] = {
    "rows of 5,000 digits": _renamed(f"@0-{'9' * 5000}/1"),
    "rows from 5 to 3": _renamed("@5-3/7"),
    "rows in other digits": _renamed("@٠-٣/٧"),
    "integer weights": _of("model", lambda value: value.int()),
    "complex weights": _of("model", lambda value: value.to(torch.complex64)),
    "another optimizer": _of("optimizer", lambda value: torch.zeros(3)),
    "an optimizer of integers": _of("optimizer", lambda value: value.int()),
    "a short random state": _of("random", lambda value: value[:3]),
    "a random state of zeros": _of("random", torch.zeros_like),
    "a random state of floats": _of("random", lambda value: value.float()),
}


def _forge(checkpoint: Path, change: Change) -> None:
    """Change the tensors of a checkpoint, and give it the right checksums again."""
    file = checkpoint / "state.safetensors"
    tensors = load(file.read_bytes())
    change(tensors)
    content = save(tensors)
    file.write_bytes(content)
    told = read_json(checkpoint / "checkpoint.json")
    told = {**told, "files": {file.name: hashlib.sha256(content).hexdigest()}}
    told.pop("checksum")
    write_json(checkpoint / "checkpoint.json", with_checksum(told))


@pytest.mark.parametrize("how", STATES)
def test_forged_checkpoint_is_one_sentence_or_the_run_starts_over(
    how: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(place.root / "unfinished" / place.run, tmp_path / "runs" / place.run)
    shutil.rmtree(path / "checkpoints/00000006")
    _forge(path / "checkpoints/00000003", STATES[how])
    data = ["--data", str(place.root / "data"), "--device", "cpu"]
    evaluated, _ = run(["eval", str(path), *data], capsys)
    assert bool(evaluated) == ("optimizer" not in how and "random" not in how)
    train = ["train", "--spec", str(path / "spec.json"), "--runs", str(path.parent), *data]
    code, said = run(train, capsys)
    assert code == 0 and "the run starts over" in said, said
    assert read_json(path / "record.json")["validation_loss"] == place.loss


def test_imported_run_is_not_resumed_without_its_optimizer_state(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would give another loss under the same run's name."""
    half = place.root / "unfinished" / place.run / "checkpoints/00000003"
    assert run(["export", str(half), str(tmp_path / "export")], capsys)[0] == 0
    assert run(["import", str(tmp_path / "export"), "--runs", str(tmp_path / "runs")], capsys)[0] == 0
    path = tmp_path / "runs" / place.run
    words = ["train", "--spec", str(path / "spec.json"), "--data", str(place.root / "data")]
    code, said = run([*words, "--runs", str(path.parent), "--device", "cpu"], capsys)
    assert code == 1 and "was imported and cannot be resumed" in said
    assert not (path / "record.json").exists() and (path / "checkpoints/00000003").is_dir()
