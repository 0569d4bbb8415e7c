"""Truncated or altered shards are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from steepen.data import Dataset
from steepen.data.shards import HEADER, choose_dtype
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import sha256_of_file


@pytest.fixture
def copy(tmp_path: Path, dataset: Dataset) -> Path:
    return Path(shutil.copytree(dataset.directory, tmp_path / "copy"))


def test_truncated_shard_is_named_at_opening(copy: Path) -> None:
    shard = copy / "train_00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(SteepenError, match=r"train_00001\.bin is truncated"):
        Dataset.open(copy)


def test_altered_header_is_named_at_opening(copy: Path) -> None:
    shard = copy / "train_00001.bin"
    content = bytearray(shard.read_bytes())
    content[16] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SteepenError, match=r"train_00001\.bin was altered"):
        Dataset.open(copy)


def test_missing_shard_is_named_at_opening(copy: Path) -> None:
    (copy / "val_00000.bin").unlink()
    with pytest.raises(SteepenError, match=r"val_00000\.bin cannot be read"):
        Dataset.open(copy)


def test_verify_detects_one_altered_bit(copy: Path) -> None:
    shard = copy / "train_00002.bin"
    content = bytearray(shard.read_bytes())
    content[HEADER.size + 1234] ^= 4
    shard.write_bytes(content)
    opened = Dataset.open(copy)
    with pytest.raises(SteepenError, match=r"train_00002\.bin was altered"):
        opened.verify()


def test_altered_tokenizer_is_refused(copy: Path) -> None:
    path = copy / "tokenizer.json"
    stored = json.loads(path.read_bytes())
    stored["tokens"][300], stored["tokens"][301] = stored["tokens"][301], stored["tokens"][300]
    path.write_text(json.dumps(stored))
    with pytest.raises(SteepenError, match=r"tokenizer\.json is not the tokenizer"):
        Dataset.open(copy).tokenizer()


@pytest.mark.parametrize("damage", ["", "{}", '{"format": "else"}', "[1]", "\x00"])
def test_damaged_manifest_is_refused(copy: Path, damage: str) -> None:
    (copy / "manifest.json").write_text(damage)
    with pytest.raises(SteepenError, match=r"manifest\.json"):
        Dataset.open(copy)


def test_edited_manifest_is_refused(copy: Path) -> None:
    path = copy / "manifest.json"
    stored = json.loads(path.read_bytes())
    stored["shards"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(stored))
    with pytest.raises(SteepenError, match="was altered"):
        Dataset.open(copy)


def test_verify_accepts_what_prepare_made(dataset: Dataset) -> None:
    seen: list[str] = []
    dataset.verify(lambda file, _: seen.append(file))
    assert seen == [shard.file for shard in dataset.manifest.shards]
    first = dataset.manifest.shards[0]
    assert sha256_of_file(dataset.directory / first.file) == first.sha256


def test_opening_data_does_not_import_torch(environment: dict[str, str]) -> None:
    import subprocess
    import sys

    code = "import sys, steepen.data; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_narrowest_dtype_is_chosen() -> None:
    assert choose_dtype(65_536) == "uint16"
    assert choose_dtype(65_537) == "uint32"
    assert choose_dtype(300, "uint32") == "uint32"
    with pytest.raises(UsageError, match="does not fit uint16"):
        choose_dtype(65_537, "uint16")
