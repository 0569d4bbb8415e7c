"""A prepared directory of token shards: its manifest, cheap to open, verified in full on request.

manifest.json            what the other files must be: sizes, SHA-256, tokenizer, source
tokenizer.json           the tokenizer
train_00000.bin, …       ids (`shards.py`); every document begins with the tokenizer's separator
documents_SPLIT.bin      one little-endian int64 per document: the position after its last token
blocks_SPLIT.bin         checksums of the shards' blocks, compared when they are first read
sources_val.bin          of a mixture: one byte per validation document, the number of its source
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from steepen.data.shards import DTYPES, Shard, TokenStream, altered, read_block_sums, read_known
from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.utils.codec import from_builtins
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import (
    CHECKSUM,
    canonical_json,
    read_json,
    with_checksum,
    without_checksum,
    write_json,
)

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
VAL_SOURCES = "sources_val.bin"
FORMAT = "steepen-data-2"
SPLITS = ("train", "val")
_ABOUT = ("format", "identity", CHECKSUM)  # fields of the file that are not the manifest's own
PAD_TO = 128
VERIFIED_AT_ONCE = 1 << 24  # ids, which bounds the temporary memory
MAX_IDS = 1 << 32  # of a tokenizer: uint32 holds no more
_SHARD_NAME = re.compile(r"(train|val)_\d+\.bin")  # in the manifest's own directory
ENDS = np.dtype("<i8")  # an entry of documents_SPLIT.bin


def partial_directory(directory: Path) -> Path:
    """Where a preparation writes until it is complete and renamed."""
    return directory.with_name(f"{directory.name}.partial")


def documents_file(directory: Path, split: str) -> Path:
    """The file with the document ends of one split."""
    return directory / f"documents_{split}.bin"


@dataclass(frozen=True)
class ShardRecord:
    """One shard file."""

    file: str
    split: str
    tokens: int
    sha256: str

    def shard(self, directory: Path, dtype: str, vocabulary: int) -> Shard:
        """The file itself, and the header it must have."""
        return Shard(directory / self.file, dtype, self.tokens, vocabulary, self.sha256)


@dataclass(frozen=True)
class SplitRecord:
    """Totals of one split, and the hashes of the files with its document ends and block checksums."""

    documents: int
    tokens: int
    documents_sha256: str
    blocks_sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """One source of a mixture: its share of the training tokens, and what each split has of it."""

    name: str
    weight: float
    documents: dict[str, int]
    tokens: dict[str, int]


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer the ids belong to."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything known about a prepared directory.

    `identity` covers what decides a batch: tokenizer, dtype, split and content of every shard, and where the
    documents end. `source`, `request` and `notes` record how the data was made.
    """

    dtype: str
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    shards: tuple[ShardRecord, ...]
    source: dict[str, Any] = field(default_factory=dict[str, Any])
    request: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: tuple[SourceRecord, ...] = ()  # of a mixture
    val_sources_sha256: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SteepenError(f"the manifest has dtype {self.dtype!r}; accepted are {', '.join(DTYPES)}.")
        if tuple(self.splits) != SPLITS:
            raise SteepenError(f"the manifest has splits {list(self.splits)}, not {list(SPLITS)}.")
        for shard in self.shards:
            if not _SHARD_NAME.fullmatch(shard.file):
                raise SteepenError(f"the manifest names the shard {shard.file!r}, not SPLIT_NUMBER.bin.")
        if any(shard.tokens < 0 for shard in self.shards) or not 0 < self.tokenizer.size <= MAX_IDS:
            raise SteepenError("the manifest has a shard of negative length, or a tokenizer of absurd size.")
        for name, split in self.splits.items():
            found = sum(shard.tokens for shard in self.shards if shard.split == name)
            if found != split.tokens:
                raise SteepenError(
                    f"the manifest's {name} shards hold {found:,} tokens, not {split.tokens:,}."
                )
            if self.sources and sum(one.tokens.get(name, 0) for one in self.sources) != split.tokens:
                raise SteepenError(f"the sources in the manifest do not add up to its {name} tokens.")

    @property
    def identity(self) -> str:
        """Hex SHA-256 of tokenizer, dtype, shards and document ends; equal text gives equal identities."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "tokenizer": self.tokenizer.sha256,
            "dtype": self.dtype,
            "shards": [[shard.split, shard.tokens, shard.sha256] for shard in self.shards],
            "documents": [[name, split.documents_sha256] for name, split in self.splits.items()],
        }
        if self.sources:
            names = [[source.name, source.weight] for source in self.sources]
            content["mixture"] = [names, self.val_sources_sha256]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def shards_of(self, directory: Path, split: str) -> list[Shard]:
        """The shard files of one split, in order."""
        own = [record for record in self.shards if record.split == split]
        return [record.shard(directory, self.dtype, self.tokenizer.size) for record in own]

    def write(self, directory: Path) -> None:
        """Write manifest.json atomically."""
        content = {"format": FORMAT, "identity": self.identity, **asdict(self)}
        write_json(directory / MANIFEST, with_checksum(content))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read manifest.json and check that its stored identity matches its records."""
        path = directory / MANIFEST
        try:
            stored = cast("dict[str, Any]", read_json(path))
            if stored["format"] != FORMAT:
                raise SteepenError(f"{path} has format {stored['format']!r}; this version reads {FORMAT!r}.")
            facts = {key: value for key, value in stored.items() if key not in _ABOUT}
            manifest = from_builtins(cls, facts, MANIFEST)
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            reason = str(error).rstrip(".")
            raise SteepenError(
                f"{path} is not a manifest of prepared data ({reason}); prepare it again."
            ) from None
        if stored.get("identity") != manifest.identity:
            raise SteepenError(
                f"{path} was altered: its identity does not match its records; prepare it again."
            )
        try:
            without_checksum(stored)
        except ValueError as error:
            raise SteepenError(f"{path} was altered: {error}; prepare it again.") from None
        return manifest


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
        dataset = cls(path, manifest)
        for split in SPLITS:
            for shard in manifest.shards_of(path, split):
                shard.check()
            dataset._check_document_ends(split)
        return dataset

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
            sums = read_block_sums(self.directory, split, self.manifest.splits[split].blocks_sha256)
            self._streams[split] = TokenStream(self.manifest.shards_of(self.directory, split), sums)
        return self._streams[split]

    @property
    def validation_tokens(self) -> int:
        """Validation tokens that can be used: of a mixture, as many as have its proportions."""
        sources = self.manifest.sources
        if not sources:
            return self.manifest.splits["val"].tokens
        return min(int(source.tokens["val"] / source.weight) for source in sources)

    def document_ends(self, split: str) -> npt.NDArray[np.int64]:
        """Where each document of a split ends in `tokens(split)`, int64 (documents,), checked by its hash."""
        record = self.manifest.splits[split]
        if not record.documents:
            return np.zeros(0, ENDS)
        return np.frombuffer(read_known(documents_file(self.directory, split), record.documents_sha256), ENDS)

    def val_sources(self) -> npt.NDArray[np.uint8]:
        """Of a mixture, the number of the source of each validation document, uint8 (documents,)."""
        path = self.directory / VAL_SOURCES
        sources = np.frombuffer(read_known(path, self.manifest.val_sources_sha256), "u1")
        if len(sources) != self.manifest.splits["val"].documents:
            raise altered(path)
        return sources

    def _check_document_ends(self, split: str) -> None:
        """Compare the size of the file with the manifest."""
        path = documents_file(self.directory, split)
        expected = self.manifest.splits[split].documents * ENDS.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise SteepenError(f"{path} cannot be read ({error.strerror}); prepare it again.") from None
        if size != expected:
            raise SteepenError(
                f"{path} has {size:,} bytes where the manifest says {expected:,}; "
                "restore it or prepare the data again."
            )

    def verify(self, progress: Callable[[str, int], None] | None = None) -> None:
        """Check every byte: SHA-256 of each file, ids within the vocabulary, where documents begin.

        Raises on the first mismatch, naming the file. `progress(file, bytes)` is called after each shard.
        """
        for split, record in self.manifest.splits.items():
            path = documents_file(self.directory, split)
            self._check_document_ends(split)
            ends = self.document_ends(split)
            if split == "val" and self.manifest.sources:
                self.val_sources()
            read_block_sums(self.directory, split, record.blocks_sha256)
            starts = np.concatenate([[0], ends])[:-1]  # a document begins where the one before it ends
            position = documents = 0  # tokens and documents read
            for shard in self.manifest.shards_of(self.directory, split):
                begins = self._verify_shard(shard) + position
                if not np.array_equal(begins, starts[documents : documents + len(begins)]):
                    raise SteepenError(f"{path} does not match the documents in {shard.path}.")
                position, documents = position + shard.tokens, documents + len(begins)
                if progress:
                    progress(shard.path.name, shard.path.stat().st_size)
            if documents != record.documents or (documents and ends[-1] != position):
                raise SteepenError(
                    f"{self.directory} has {documents:,} documents in {split}, "
                    f"its manifest says {record.documents:,}; prepare it again."
                )

    def _verify_shard(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Check the bytes and ids of a shard; returns the positions in it at which documents begin."""
        tokenizer = self.tokenizer()
        shard.check()
        if sha256_of_file(shard.path) != shard.sha256:
            raise altered(shard.path)
        ids, begins = shard.memory_map(), [np.zeros(0, np.int64)]
        for start in range(0, len(ids), VERIFIED_AT_ONCE):
            chunk = ids[start : start + VERIFIED_AT_ONCE]
            if int(chunk.max()) >= tokenizer.size:
                raise SteepenError(f"shard {shard.path} has ids beyond the tokenizer's {tokenizer.size:,}.")
            begins.append(np.flatnonzero(chunk == tokenizer.end_of_text) + start)
        return np.concatenate(begins)
