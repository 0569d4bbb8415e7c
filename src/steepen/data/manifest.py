"""The manifest of a prepared directory, and the identity by which run specs refer to the data."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from steepen.data.shards import DTYPES, Shard
from steepen.errors import SteepenError, UsageError
from steepen.utils.codec import from_builtins
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
FORMAT = "steepen-data-2"
FORMER_FORMAT = "steepen-data-1"  # <|endoftext|> after each document, and no record of where it ends
SPLITS = ("train", "val")
_ABOUT = ("format", "identity", CHECKSUM)  # fields of the file that are not the manifest's own
MAX_IDS = 1 << 32  # of a tokenizer: uint32 holds no more
_SHARD_NAME = re.compile(r"(train|val)_\d+\.bin")  # in the manifest's own directory


@dataclass(frozen=True)
class ShardRecord:
    """One shard file."""

    file: str
    split: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """Totals of one split, and the hashes of the files with its document ends and block checksums."""

    documents: int
    tokens: int
    documents_sha256: str
    blocks_sha256: str = ""  # of the file with the blocks' checksums; empty: prepared by an earlier version


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

    @property
    def identity(self) -> str:
        """Hex SHA-256 of tokenizer, dtype, shards and document ends; equal text gives equal identities."""
        content = {
            "format": FORMAT,
            "tokenizer": self.tokenizer.sha256,
            "dtype": self.dtype,
            "shards": [[shard.split, shard.tokens, shard.sha256] for shard in self.shards],
            "documents": [[name, split.documents_sha256] for name, split in self.splits.items()],
        }
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def shards_of(self, directory: Path, split: str) -> list[Shard]:
        """The shard files of one split, in order."""
        return [
            Shard(directory / record.file, self.dtype, record.tokens, self.tokenizer.size, record.sha256)
            for record in self.shards
            if record.split == split
        ]

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
            if stored["format"] == FORMER_FORMAT:
                raise SteepenError(
                    f"{directory} was prepared by an older version of steepen; delete it and prepare it "
                    f"again with `{_command(stored, directory)}`."
                )
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


def _command(stored: dict[str, Any], directory: Path) -> str:
    """The command that prepares the source of a manifest again."""
    source, request = stored["source"], stored["request"]
    name = str(source["name"])
    words = ["steepen data prepare", "SOURCE" if "…" in name else name, f"--out {directory}"]
    for option, default in (("tokenizer", "gpt2"), ("val_tokens", None), ("max_tokens", None)):
        if request.get(option, default) != default:
            words.append(f"--{option.replace('_', '-')} {request[option]}")
    if "validation" in source:
        words.append(f"--val-source {source['validation']['name']}")
    return " ".join(words)
