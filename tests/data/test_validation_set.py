"""The validation set: the same tokens for any batch size, and their length in bytes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from steepen.data import Dataset, ValidationSet
from steepen.data.prepare import PrepareRequest, prepare
from steepen.errors import SteepenError, UsageError

CONTEXT = 31


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_batch_and_world_size_sees_each_token_once(dataset: Dataset, rows: int, world_size: int) -> None:
    validation = ValidationSet(dataset, CONTEXT, 20 * CONTEXT)
    seen = [pair for rank in range(world_size) for pair in validation.batches(rows, rank, world_size)]
    inputs = np.concatenate([pair[0] for pair in seen])
    targets = np.concatenate([pair[1] for pair in seen])
    flat = dataset.tokens("val").read(0, 20 * (CONTEXT + 1)).reshape(20, CONTEXT + 1)
    assert np.array_equal(inputs, flat[:, :-1])
    assert np.array_equal(targets, flat[:, 1:])
    assert all(len(pair[0]) <= rows for pair in seen)


def test_byte_count_is_that_of_the_decoded_targets(dataset: Dataset) -> None:
    validation = ValidationSet(dataset, CONTEXT, 20 * CONTEXT)
    tokenizer = dataset.tokenizer()
    text = b"".join(tokenizer.decode_bytes(row) for row in validation.rows(0, 20)[1])
    assert validation.target_bytes == len(text.replace(b"<|endoftext|>", b""))


def test_uniform_byte_coder_has_eight_bits_per_byte(dataset: Dataset) -> None:
    validation = ValidationSet(dataset, CONTEXT)
    nats = validation.target_bytes * 8 * math.log(2)
    assert validation.bits_per_byte(nats / validation.tokens, 0.0) == pytest.approx(8.0)
    # What predicting <|endoftext|> costs is part of the loss, not of the text.
    assert validation.bits_per_byte(nats / validation.tokens + 0.5, 0.5) == pytest.approx(8.0)


def test_validation_identity_depends_on_the_tokens_only(tmp_path: Path, dataset: Dataset) -> None:
    here = ValidationSet(dataset, CONTEXT, 620)
    assert (
        ValidationSet(Dataset.open(dataset.directory), CONTEXT, 620 + CONTEXT - 1).identity == here.identity
    )
    assert ValidationSet(dataset, CONTEXT, 651).identity != here.identity
    assert ValidationSet(dataset, 30, 620).identity != here.identity
    wide = PrepareRequest((dataset.manifest.source["name"],), val_tokens=2_000, dtype="uint32")
    assert ValidationSet(prepare(wide, tmp_path / "wide"), CONTEXT, 620).identity == here.identity


@pytest.mark.parametrize(
    ("context", "tokens", "remedy"),
    [
        (31, 10**9, "ask for no more, or prepare it with a larger `val_tokens`"),
        (31, 5, "at least one context is needed; give `validation_tokens` = 31 or more"),
        (10**6, None, "larger `val_tokens` or a `val_source`, or use a shorter context"),
        (10**6, 5, "larger `val_tokens` or a `val_source`, or use a shorter context"),
        (0, 10, "context is 0"),
    ],
)
def test_too_many_or_too_few_tokens_are_rejected_with_a_remedy(
    dataset: Dataset, context: int, tokens: int | None, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        ValidationSet(dataset, context, tokens)


def test_altered_validation_shard_is_rejected_by_name(tmp_path: Path, dataset: Dataset) -> None:
    copy = Path(shutil.copytree(dataset.directory, tmp_path / "copy"))
    shard = copy / "val_00000.bin"
    content = bytearray(shard.read_bytes())
    content[2000:2002] = b"\xff\xff"
    shard.write_bytes(content)
    with pytest.raises(SteepenError, match=r"val_00000\.bin was altered.*`steepen data verify"):
        ValidationSet(Dataset.open(copy), CONTEXT, None)
