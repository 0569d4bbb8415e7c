"""Files that change while they are in use: what is read is what the identity says, or the file is named."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from steepen.data import BatchLoader, Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.shard_writer import ShardWriter
from steepen.data.shards import HEADER, TokenStream
from steepen.data.sources.resolve import custom_source
from steepen.data.tokenize_source import TokenizationJob
from steepen.errors import SteepenError


@pytest.fixture
def copy(tmp_path: Path, dataset: Dataset) -> Path:
    return Path(shutil.copytree(dataset.directory, tmp_path / "copy"))


def shuffle(file: Path, seed: int = 0) -> None:
    """Overwrite a shard in place with its own tokens in another order."""
    content = file.read_bytes()
    tokens = list(np.frombuffer(content[HEADER.size :], "<u2"))
    random.Random(seed).shuffle(tokens)
    with file.open("r+b") as out:
        out.seek(HEADER.size)
        out.write(np.array(tokens, "<u2").tobytes())


def test_shard_that_was_checked_and_then_overwritten_is_rejected(copy: Path) -> None:
    stream = Dataset.open(copy).tokens("train")
    before = stream.read(0, 1000)
    shuffle(copy / "train_00000.bin")
    with pytest.raises(SteepenError, match=r"train_00000\.bin was altered"):
        stream.read(0, 1000)
    assert len(before) == 1000


def test_shard_overwritten_while_a_batch_is_read_is_rejected(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Dataset.open(copy).tokens("train")
    stream.read(0, len(stream))
    original = TokenStream._read_bytes

    def read_and_change(self: TokenStream, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        shuffle(copy / "train_00001.bin")

    monkeypatch.setattr(TokenStream, "_read_bytes", read_and_change)
    start = int(stream._offsets[1])
    with pytest.raises(SteepenError, match=r"train_00001\.bin was altered"):
        stream.read(start, start + 10)


def test_shard_with_the_same_content_is_accepted(copy: Path) -> None:
    stream = Dataset.open(copy).tokens("train")
    before = stream.read(0, 1000)
    file = copy / "train_00000.bin"
    os.utime(file)
    assert np.array_equal(stream.read(0, 1000), before)
    file.write_bytes(file.read_bytes())
    assert np.array_equal(stream.read(0, 1000), before)
    assert stream.read(0, len(stream)).size == len(stream)


def test_open_shard_whose_name_got_another_file_is_still_read(copy: Path) -> None:
    stream = Dataset.open(copy).tokens("train")
    before = stream.read(0, 1000)
    file = copy / "train_00000.bin"
    other = shutil.copy(file, copy / "other")
    shuffle(Path(other))
    os.replace(other, file)  # noqa: PTH105
    assert np.array_equal(stream.read(0, 1000), before)
    stream._files.clear()  # more shards than may be open: it is opened again
    with pytest.raises(SteepenError, match=r"train_00000\.bin was altered"):
        stream.read(0, 1000)


def test_shard_that_never_rests_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Dataset.open(copy).tokens("train")
    original = TokenStream._copy

    def copy_and_touch(self: TokenStream, *arguments: object) -> object:
        used = original(self, *arguments)  # type: ignore[arg-type]
        os.utime(copy / "train_00000.bin")
        return used

    monkeypatch.setattr(TokenStream, "_copy", copy_and_touch)
    with pytest.raises(SteepenError, match=r"train_00000\.bin keeps changing"):
        stream.read(0, 1000)


def test_batches_after_a_change_are_those_before_it(copy: Path) -> None:
    clean = BatchLoader(Dataset.open(copy), 16, 256, 0, epochs=3)
    expected = [clean.at(step)[0] for step in range(clean.steps)]
    loader = BatchLoader(Dataset.open(copy), 16, 256, 0, epochs=3)
    for step in range(loader.steps):
        os.utime(copy / f"train_{step % 3:05d}.bin")
        assert np.array_equal(loader.at(step)[0], expected[step])


# Sources of a preparation.


@pytest.fixture
def text(tmp_path: Path, documents: list[str]) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("<|endoftext|>".join(documents))
    return file


def request(*sources: Path) -> PrepareRequest:
    return PrepareRequest(tuple(map(str, sources)), tokenizer="bpe:300", val_tokens=500)


@pytest.mark.parametrize("when", ["_tokenizer", "_tokenize", "_finish"])
def test_text_that_changes_during_its_preparation_is_named(
    when: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., object] = getattr(TokenizationJob, when)

    def change_first(self: TokenizationJob, *arguments: object) -> object:
        text.write_text(text.read_text().replace("the", "and"))
        return original(self, *arguments)

    monkeypatch.setattr(TokenizationJob, when, change_first)
    with pytest.raises(SteepenError, match=r"text\.txt has changed since its preparation began"):
        prepare(request(text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_that_changes_while_a_preparation_is_interrupted_is_named(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: TokenizationJob, *_: object) -> None:
        self.state.feeds[0].documents["train"] = 1
        self._write_journal()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenizationJob, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(request(text), tmp_path / "out")
    text.write_text(text.read_text().replace("the", "and"))  # as long as before
    with pytest.raises(SteepenError, match=r"text\.txt has changed since its preparation began"):
        prepare(request(text), tmp_path / "out")
    prepare(request(text), tmp_path / "out", restart=True)


def test_source_function_that_changes_its_mind_is_rejected(tmp_path: Path, documents: list[str]) -> None:
    calls: list[int] = []

    def fickle() -> Iterator[str]:
        calls.append(1)
        yield from documents[:-1]
        yield documents[-1] if len(calls) < 3 else "something else"

    source = custom_source(fickle)
    assert len(list(source.parts[0].documents(5))) == len(documents) - 5
    with pytest.raises(SteepenError, match="returned other documents than before"):
        list(source.parts[0].documents(0))


def test_shard_altered_during_its_preparation_is_named(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ShardWriter.finish_shard

    def finish_and_alter(self: ShardWriter) -> None:
        opened = self._stream is not None
        original(self)
        if opened and self.split == "train":
            shuffle(self.directory / self.finished[-1].file)

    monkeypatch.setattr(ShardWriter, "finish_shard", finish_and_alter)
    with pytest.raises(SteepenError, match=r"train_00000\.bin was altered while it was prepared"):
        prepare(request(text), tmp_path / "out")
