"""A prepared directory of token shards: cheap to open, memory-mapped, verified in full on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steepen.data.documents import check_document_ends, documents_file, read_document_ends
from steepen.data.manifest import MANIFEST, SPLITS, TOKENIZER, Manifest
from steepen.data.shards import TokenStream, read_block_sums
from steepen.data.tokenizer import PAD_TO, Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import sha256_of_file


def partial_directory(directory: Path) -> Path:
    """Where a preparation writes until it is complete and renamed."""
    return directory.with_name(f"{directory.name}.partial")


class Dataset:
    """Token shards with their tokenizer and manifest. Use `Dataset.open`."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._streams: dict[str, TokenStream] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Dataset:
        """Open prepared data, checking size and header of every shard; `verify` checks every byte."""
        path = Path(directory)
        if not (path / MANIFEST).is_file():
            if partial_directory(path.absolute()).is_dir():
                raise UsageError(
                    f"the preparation of {path} is not finished; run its `steepen data prepare` again."
                )
            raise UsageError(
                f"{path} has no prepared data (no {MANIFEST}); "
                f"make it with `steepen data prepare SOURCE --out {path}`."
            )
        manifest = Manifest.read(path)
        for split in SPLITS:
            for shard in manifest.shards_of(path, split):
                shard.check()
            check_document_ends(documents_file(path, split), manifest.splits[split].documents)
        return cls(path, manifest)

    @property
    def identity(self) -> str:
        """Hex SHA-256 of tokenizer, splits and shard contents, as run specs record it."""
        return self.manifest.identity

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.manifest.tokenizer.size

    @property
    def padded_vocabulary(self) -> int:
        """`vocabulary` rounded up to a multiple of 128 (50,257 → 50,304)."""
        return -(-self.vocabulary // PAD_TO) * PAD_TO

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.directory / TOKENIZER
        tokenizer = Tokenizer.load(path)
        record = self.manifest.tokenizer
        if (tokenizer.identity, tokenizer.size) != (record.sha256, record.size):
            raise SteepenError(f"{path} is not the tokenizer these shards were made with; restore it.")
        return tokenizer

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of these shards, checked against the manifest's hash."""
        return self._tokenizer

    def tokens(self, split: str) -> TokenStream:
        """The ids of one split as one flat sequence; each document begins with <|endoftext|>."""
        if split not in SPLITS:
            raise UsageError(f"unknown split {split!r}; accepted are {', '.join(SPLITS)}.")
        if split not in self._streams:
            checksum = self.manifest.splits[split].blocks_sha256
            sums = read_block_sums(self.directory, split, checksum) if checksum else None
            self._streams[split] = TokenStream(self.manifest.shards_of(self.directory, split), sums)
        return self._streams[split]

    def document_ends(self, split: str) -> npt.NDArray[np.int64]:
        """Where each document of a split ends in `tokens(split)`, int64 (documents,), checked by its hash."""
        record = self.manifest.splits[split]
        path = documents_file(self.directory, split)
        return read_document_ends(path, record.documents, record.documents_sha256)

    def verify(self, progress: Callable[[str, int], None] | None = None) -> None:
        """Check every byte: SHA-256 of each file, ids within the vocabulary, where documents begin.

        Raises on the first mismatch, naming the file. `progress(file, bytes)` is called after each shard.
        """
        tokenizer = self.tokenizer()
        files = {record.file: record.sha256 for record in self.manifest.shards}
        for split, record in self.manifest.splits.items():
            path = documents_file(self.directory, split)
            check_document_ends(path, record.documents)
            ends = self.document_ends(split)
            if record.blocks_sha256:
                read_block_sums(self.directory, split, record.blocks_sha256)
            position = documents = 0  # tokens and documents read
            for shard in self.manifest.shards_of(self.directory, split):
                shard.check()
                if sha256_of_file(shard.path) != files[shard.path.name]:
                    raise _altered(shard.path)
                ids = shard.memory_map()
                for start in range(0, len(ids), 1 << 24):
                    chunk = ids[start : start + (1 << 24)]
                    if int(chunk.max()) >= tokenizer.size:
                        raise SteepenError(
                            f"shard {shard.path} has ids beyond the tokenizer's {tokenizer.size:,}."
                        )
                    begins = np.flatnonzero(chunk == tokenizer.end_of_text) + position
                    position += len(chunk)
                    numbers = np.arange(documents, min(documents + len(begins), record.documents))
                    documents += len(begins)
                    # A document begins where the one before it ends.
                    if not np.array_equal(begins, np.where(numbers > 0, ends[numbers - 1], 0)):
                        raise SteepenError(f"{path} does not match the documents in {shard.path}.")
                if progress:
                    progress(shard.path.name, shard.path.stat().st_size)
            if documents != record.documents or (documents and ends[-1] != position):
                raise SteepenError(
                    f"{self.directory} has {documents:,} documents in {split}, "
                    f"its manifest says {record.documents:,}; prepare it again."
                )


def _altered(path: Path) -> SteepenError:
    return SteepenError(
        f"{path} was altered: its SHA-256 is not the manifest's; restore it or prepare the data again."
    )
