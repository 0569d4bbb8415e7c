"""Truncated or altered shards are rejected by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steepen.data import Dataset
from steepen.data.shards import (
    BLOCK_TOKENS,
    HEADER,
    Shard,
    TokenStream,
    choose_dtype,
    header,
    read_block_sums,
    write_block_sums,
)
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import with_checksum, write_json


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


def test_altered_tokenizer_is_rejected(copy: Path) -> None:
    path = copy / "tokenizer.json"
    stored = json.loads(path.read_bytes())
    stored["tokens"][300], stored["tokens"][301] = stored["tokens"][301], stored["tokens"][300]
    path.write_text(json.dumps(stored))
    with pytest.raises(SteepenError, match=r"tokenizer\.json is not the tokenizer"):
        Dataset.open(copy).tokenizer()


@pytest.mark.parametrize("damage", ["", "{}", '{"format": "else"}', "[1]", "\x00"])
def test_damaged_manifest_is_rejected(copy: Path, damage: str) -> None:
    (copy / "manifest.json").write_text(damage)
    with pytest.raises(SteepenError, match=r"manifest\.json"):
        Dataset.open(copy)


@pytest.mark.parametrize("file", ["/etc/hostname", "../train_00000.bin", "train_00000.bin/../x", ""])
def test_manifest_names_no_file_outside_its_directory(file: str, copy: Path, dataset: Dataset) -> None:
    stored = json.loads((copy / "manifest.json").read_bytes())
    stored["shards"][0]["file"] = file
    write_json(copy / "manifest.json", with_checksum(stored))
    with pytest.raises(SteepenError, match="names the shard"):
        Dataset.open(copy)


def test_note_of_a_manifest_cannot_be_edited_unnoticed(copy: Path) -> None:
    stored = json.loads((copy / "manifest.json").read_bytes())
    stored["source"]["name"] = "another"
    (copy / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(SteepenError, match="was altered: its checksum"):
        Dataset.open(copy)


def test_edited_manifest_is_rejected(copy: Path) -> None:
    path = copy / "manifest.json"
    stored = json.loads(path.read_bytes())
    stored["shards"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(stored))
    with pytest.raises(SteepenError, match="was altered"):
        Dataset.open(copy)


@pytest.mark.parametrize("split", ["train", "val"])
def test_missing_or_altered_document_ends_are_named(copy: Path, split: str) -> None:
    path = copy / f"documents_{split}.bin"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    with pytest.raises(SteepenError, match=rf"documents_{split}\.bin was altered"):
        Dataset.open(copy).verify()
    path.write_bytes(content[:-8])
    with pytest.raises(SteepenError, match=rf"documents_{split}\.bin has .* bytes where"):
        Dataset.open(copy)
    path.unlink()
    with pytest.raises(SteepenError, match=rf"documents_{split}\.bin cannot be read"):
        Dataset.open(copy)


def test_verify_compares_the_document_ends_with_the_tokens(copy: Path, dataset: Dataset) -> None:
    path = copy / "documents_train.bin"
    ends = np.fromfile(path, "<i8")
    ends[5] += 1
    ends.tofile(path)
    splits = {
        name: replace(record, documents_sha256=sha256_of_file(copy / f"documents_{name}.bin"))
        for name, record in dataset.manifest.splits.items()
    }
    replace(dataset.manifest, splits=splits).write(copy)
    opened = Dataset.open(copy)
    assert opened.identity != dataset.identity
    with pytest.raises(SteepenError, match=r"documents_train\.bin does not match the documents in"):
        opened.verify()


def test_every_document_begins_with_end_of_text(dataset: Dataset) -> None:
    for split in ("train", "val"):
        ends, stream = dataset.document_ends(split), dataset.tokens(split)
        ids = stream.read(0, len(stream))
        begins = np.flatnonzero(ids == dataset.tokenizer().end_of_text)
        assert begins.tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == len(stream)


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


def flip_bits(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("split", ["train", "val"])
def test_altered_ids_are_found_when_they_are_first_read(split: str, copy: Path, dataset: Dataset) -> None:
    record = next(shard for shard in dataset.manifest.shards if shard.split == split)
    flip_bits(copy / record.file, 64 + 2 * (record.tokens - 1))  # the last id of the shard
    stream = Dataset.open(copy).tokens(split)
    with pytest.raises(SteepenError, match=f"{record.file} was altered"):
        stream.read(record.tokens - 3, record.tokens)
    with pytest.raises(SteepenError, match=f"{record.file} was altered"):  # and again
        stream.read(record.tokens - 3, record.tokens)


def test_only_the_altered_block_is_rejected(tmp_path: Path) -> None:
    ids = np.arange(3 * BLOCK_TOKENS + 5, dtype="<u2")
    shards: list[Shard] = []
    for number, part in enumerate((ids[: 2 * BLOCK_TOKENS + 1], ids[2 * BLOCK_TOKENS + 1 :])):
        shard = Shard(tmp_path / f"train_{number}.bin", "uint16", len(part), 65_536)
        shard.path.write_bytes(header("uint16", len(part), 65_536) + part.tobytes())
        shards.append(shard)
    checksum = write_block_sums(tmp_path, "train", shards)
    stream = TokenStream(shards, read_block_sums(tmp_path, "train", checksum))
    assert np.array_equal(stream.read(0, len(ids)), ids)
    flip_bits(shards[0].path, 64 + 2 * BLOCK_TOKENS)  # the first id of the second block
    stream = TokenStream(shards, read_block_sums(tmp_path, "train", checksum))
    assert np.array_equal(stream.read(5, BLOCK_TOKENS), ids[5:BLOCK_TOKENS])
    assert np.array_equal(stream.read(2 * BLOCK_TOKENS, len(ids)), ids[2 * BLOCK_TOKENS :])
    with pytest.raises(SteepenError, match=r"train_0\.bin was altered"):
        stream.read(BLOCK_TOKENS - 1, BLOCK_TOKENS + 1)
    flip_bits(tmp_path / "blocks_train.bin", 0)
    with pytest.raises(SteepenError, match=r"blocks_train\.bin was altered"):
        read_block_sums(tmp_path, "train", checksum)


def test_shard_that_shrinks_while_it_is_in_use_gives_an_error(copy: Path, dataset: Dataset) -> None:
    stream = Dataset.open(copy).tokens("train")
    stream.read(0, len(stream))
    path = copy / dataset.manifest.shards[0].file
    os.truncate(path, 100)
    with pytest.raises(SteepenError, match="became shorter while it was read"):
        stream.read(0, len(stream))


def test_altered_document_ends_are_found_before_training(copy: Path) -> None:
    flip_bits(copy / "documents_train.bin", 8)
    with pytest.raises(SteepenError, match=r"documents_train\.bin was altered"):
        Dataset.open(copy).document_ends("train")
