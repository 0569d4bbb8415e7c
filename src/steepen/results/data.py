"""What the verbs of `data` return: what a prepared directory holds, and that it is intact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import is_whole
from steepen.results.result import Result
from steepen.results.table import Column, columns_of, table_of
from steepen.results.text import Block, Facts, Lines

if TYPE_CHECKING:
    from steepen.data import Dataset


@dataclass(frozen=True)
class SplitRow:
    """Training or validation documents."""

    split: str
    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True)
class MixedRow:
    """One source of a mixture."""

    source: str
    weight: Annotated[float, Column("weight", ".4f")]
    train_share: Annotated[float, Column("of training", ".4f")]
    train_tokens: int
    val_tokens: int


@dataclass(frozen=True, eq=False, repr=False)
class DataResult(Result):
    """What a prepared directory holds."""

    dataset: Dataset

    @property
    def rows(self) -> list[SplitRow]:
        """The splits."""
        manifest = self.dataset.manifest
        return [
            SplitRow(name, split.documents, split.tokens, sum(one.split == name for one in manifest.shards))
            for name, split in manifest.splits.items()
        ]

    @property
    def sources(self) -> list[MixedRow]:
        """The sources of a mixture."""
        manifest = self.dataset.manifest
        total = max(1, manifest.splits["train"].tokens)
        return [
            MixedRow(
                one.name, one.weight, one.tokens["train"] / total, one.tokens["train"], one.tokens["val"]
            )
            for one in manifest.sources
        ]

    def headline(self) -> str:
        """The directory."""
        return str(self.dataset.directory)

    def to_dict(self) -> dict[str, Any]:
        """The manifest, the directory and the sizes of the vocabulary."""
        found = self.dataset
        return {
            "directory": str(found.directory),
            "identity": found.identity,
            "vocabulary": found.vocabulary,
            "padded_vocabulary": found.padded_vocabulary,
            **asdict(found.manifest),
        }

    def blocks(self, width: int) -> Iterable[Block]:
        """The splits, the source, the tokenizer and the identity."""
        yield self.table()
        if self.sources:
            yield table_of(self.sources, [*columns_of(MixedRow).values()])
        found, manifest, tokenizer = self.dataset, self.dataset.manifest, self.dataset.tokenizer()
        padded = f"{found.vocabulary:,} ids, {found.padded_vocabulary:,} padded"
        facts = [
            ("source", str(manifest.source.get("name", "?"))),
            ("tokenizer", f"{manifest.tokenizer.name} ({padded}), {manifest.dtype}"),
            ("separator", f"{tokenizer.end_text} (id {tokenizer.end_of_text:,}), before every document"),
            ("identity", found.identity),
        ]
        requested, there = manifest.notes.get("validation_tokens_requested"), manifest.splits["val"].tokens
        if is_whole(requested) and there < requested:
            note = f"the source has {there:,} of the {requested:,} validation tokens requested"
            facts.append(("note", note))
        if ran_out := manifest.notes.get("ran_out"):
            facts.append(("note", f"the mixture ends where {ran_out} ran out"))
        yield Facts(facts)


@dataclass(frozen=True)
class FileRow:
    """A shard that was verified."""

    file: str
    bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class VerifiedData(Result):
    """A prepared directory whose every byte is as it was written."""

    dataset: Dataset
    sizes: Mapping[str, int]

    @property
    def rows(self) -> list[FileRow]:
        """The shards."""
        return [FileRow(name, size) for name, size in self.sizes.items()]

    def headline(self) -> str:
        """That it is valid."""
        found = self.dataset
        shards = f"{len(found.manifest.shards)} shards and the tokenizer"
        return f"{found.directory} is valid: {shards} match identity {found.identity}."

    def to_dict(self) -> dict[str, Any]:
        """Directory and identity."""
        found = self.dataset
        return {"directory": str(found.directory), "identity": found.identity, "valid": True}

    def blocks(self, width: int) -> Iterable[Block]:
        """One sentence."""
        yield Lines(self.headline())
