"""Tokenize sources into shards: split documents, tokenize them, write the manifest.

Each source is a feed of tokenized documents, read ahead by threads. The next document is of the feed that is
furthest behind its share of the tokens, so any beginning of the shards is mixed in the given proportions, to
within a document; a single source is the case of one feed. What comes next depends on the documents alone,
not on the threads.

It works in a directory of its own. The journal records how far the files there are valid; once the manifest
exists, all of them are.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import (
    TOKENIZER,
    VAL_SOURCES,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
)
from steepen.data.prepare_request import PrepareRequest, ProgressReporter
from steepen.data.shard_writer import ShardWriter, SplitWriter
from steepen.data.shards import choose_dtype
from steepen.data.sources.builtin import shipped_tokenizer
from steepen.data.sources.source import Source, document_hash
from steepen.data.sources.tokenizers import parse_tokenizer
from steepen.data.tokenizer import Tokenizer
from steepen.data.validation_split import ValidationSplit, plan_split
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json
from steepen.utils.threads import map_ahead

JOURNAL = "journal.json"
VALIDATION_HASHES = "validation_documents.bin"
STAGING = "downloads"
JOURNAL_SECONDS = 5.0
TOKENIZER_CHARACTERS = 50_000_000  # of the source, from its start, that a tokenizer is trained on
GROUP_CHARACTERS = 1 << 18  # given to a thread at a time
GROUPS_PER_THREAD = 8  # in flight: enough work to keep threads busy while the main thread writes


def _both() -> dict[str, int]:
    return {"train": 0, "val": 0}


@dataclass
class FeedState:
    """How far one source was read, and what it has given to each split."""

    part: int = 0
    unit: int = 0  # number of the next document to read
    documents: dict[str, int] = field(default_factory=_both)
    tokens: dict[str, int] = field(default_factory=_both)
    versions: list[list[int] | None] = field(default_factory=list[list[int] | None])  # of its files


@dataclass
class JournalState:
    """Position in each source, lengths of the files written up to it, and counts for the manifest."""

    feeds: list[FeedState] = field(default_factory=list[FeedState])
    characters: int = 0
    empty: int = 0
    dropped: int = 0
    threshold: int | None = None  # of the validation split, once it is fixed
    finished: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    open_tokens: dict[str, int] = field(default_factory=_both)

    def documents(self, split: str) -> int:
        """Documents of a split, of all sources."""
        return sum(feed.documents[split] for feed in self.feeds)


def read_journal(directory: Path) -> tuple[dict[str, Any], JournalState] | None:
    """The identity and state of an interrupted preparation, or None if there is none."""
    path = directory / JOURNAL
    try:
        stored = cast("dict[str, Any]", without_checksum(read_json(path)))
        feeds = [FeedState(**feed) for feed in stored["state"].pop("feeds")]
        return stored["identity"], JournalState(feeds, **stored["state"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SteepenError(f"{path} is damaged ({error}); use `restart` to begin again.") from None


class Feed:
    """One source while it is tokenized; `number` is its place among those of a mixture."""

    def __init__(self, number: int, name: str, weight: float, source: Source, state: FeedState) -> None:
        self.number, self.name, self.weight = number, name, weight
        self.source, self.state = source, state
        self.val_tokens = 0  # to be split off
        self.ready = deque[Document]()  # tokenized, and not written yet
        state.versions = state.versions or [part.version for part in source.parts]
        self.require_unchanged(*range(len(source.parts)))

    def documents(self, part: int = 0, start: int = 0) -> Iterator[Document]:
        """The documents from number `start` of a part on."""
        for number in range(part, len(self.source.parts)):
            first = start if number == part else 0
            for document, text in enumerate(self.source.parts[number].documents(first), start=first):
                yield Document(number, document, text)
            self.require_unchanged(number)

    def require_unchanged(self, *numbers: int) -> None:
        """Raise if the file of a part is another than when the preparation began: texts would be mixed."""
        for number in numbers:
            part = self.source.parts[number]
            if self.state.versions[number] != part.version:
                raise SteepenError(
                    f"{part.file} has changed since its preparation began; restore it, or begin again with "
                    "`restart`."
                )


class TokenizationJob:
    """Tokenization of one source or a mixture of sources, from their start or from a journal's state."""

    def __init__(
        self,
        request: PrepareRequest,
        sources: Sequence[tuple[str, float, Source]],
        validation: Source | None,
        *,
        identity: dict[str, Any],
        state: JournalState,
        directory: Path,
        progress: ProgressReporter,
        threads: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """`sources` are names, weights that add up to 1, and sources; `validation` is a separate one.

        Without a `tokenizer`, one is trained.
        """
        self.request, self.directory, self.threads = request, directory, threads
        self.tokenizer = tokenizer
        self.identity, self.state, self.progress = identity, state, progress
        state.feeds = state.feeds or [FeedState() for _ in range(len(sources) + (validation is not None))]
        self.feeds = [
            Feed(number, *each, at)
            for number, (each, at) in enumerate(zip(sources, state.feeds, strict=False))
        ]
        self.validation = None if validation is None else Feed(0, "", 1.0, validation, state.feeds[-1])
        # Text to be read: a mixture ends with the source that runs out first.
        self.size = min(int(feed.source.size / feed.weight) for feed in self.feeds)
        self.val_tokens, self.val_fraction = plan_split(self.size, request.val_tokens, request.max_tokens)
        if validation is not None:
            self.val_tokens = sys.maxsize if request.val_tokens is None else request.val_tokens
            self.val_fraction = 0.0
        else:
            for feed in self.feeds:
                feed.val_tokens = round(self.val_tokens * feed.weight)
        self.split = ValidationSplit(
            directory / VALIDATION_HASHES, self.val_fraction, state.documents("val"), request.dedup_tokens
        )
        self.writers: dict[str, SplitWriter] = {}
        self.mixed = len(self.feeds) > 1
        self.ran_out: str | None = None  # the source that ended a mixture

    def run(self) -> None:
        """Write shards, tokenizer and manifest into the working directory."""
        try:
            self._write_journal()  # first of all, so that no file on disk lacks the request it belongs to
            self._set_threshold()
            tokenizer = self._tokenizer()
            dtype = choose_dtype(tokenizer.size, self.request.dtype)
            for name in ("train", "val"):
                shards = ShardWriter(self.directory, name, dtype, tokenizer.size, self.request.shard_tokens)
                finished = [ShardRecord(**shard) for shard in self.state.finished[name]]
                shards.restore(finished, self.state.open_tokens[name])
                documents = self.state.documents(name)
                self.writers[name] = SplitWriter(shards, tokenizer.end_of_text, documents, self.mixed)
            self._tokenize(tokenizer)
            self._finish(tokenizer)
        finally:
            for writer in (self.split.file, *self.writers.values()):
                writer.close()

    def _set_threshold(self) -> None:
        """Fix the split's threshold so that validation and training each get a document of each source."""
        state = self.state
        if state.threshold is not None:
            self.split.threshold = state.threshold
            return
        max_tokens = self.request.max_tokens or TOKENIZER_CHARACTERS
        for feed in self.feeds if self.val_fraction else ():
            texts = (document.text for document in feed.documents() if document.text)
            sizes = ((document_hash(text), len(text.encode("utf-8", "surrogatepass"))) for text in texts)
            max_bytes = min(max(1, int(max_tokens * feed.weight)), TOKENIZER_CHARACTERS)
            if not self.split.adjust_threshold(sizes, max_bytes, feed.val_tokens):
                raise UsageError(
                    f"source {feed.name!r} is one document, and validation is split off by document: cut "
                    "plain text with `separator` (as '\\n\\n', at blank lines), name files with "
                    "`val_source`, or do without validation by `val_tokens` = 0."
                )
        separate = self.validation
        if self.val_tokens and separate and not any(document.text for document in separate.documents()):
            raise UsageError("`val_source` has no text; name other files, or leave it out.")
        state.threshold = self.split.threshold

    def _tokenizer(self) -> Tokenizer:
        path = self.directory / TOKENIZER
        if path.exists():
            return Tokenizer.load(path)
        size, tokenizer = parse_tokenizer(self.request.tokenizer), self.tokenizer
        if size is None:
            assert tokenizer is not None
        elif self.identity["source"]["kind"] == "builtin":
            texts = list(self._tokenizer_texts())
            tokenizer = shipped_tokenizer(texts, size) or Tokenizer.train(texts, size)
        else:
            tokenizer = Tokenizer.train(self._tokenizer_texts(), size)
        tokenizer.save(path)
        return tokenizer

    def _tokenizer_texts(self) -> Iterator[str]:
        """Texts to train a tokenizer on, of each source its share; without those eligible for validation."""
        total = min(self.size, TOKENIZER_CHARACTERS)
        done = 0
        for feed in self.feeds:
            read = 0
            for count, document in enumerate(feed.documents()):
                if document.text and not self.split.is_eligible(document_hash(document.text)):
                    yield document.text
                    read += len(document.text)
                    if count % 256 == 0:
                        self.progress("reading text for the tokenizer", done + read, total)
                    if read >= TOKENIZER_CHARACTERS * feed.weight:
                        break
            done += read
        self.progress("making the tokenizer", total, total)

    def _tokenize(self, tokenizer: Tokenizer) -> None:
        """Tokenize a separate validation source as far as it is needed, then the training sources."""
        separate = self.validation
        if separate is not None and separate.state.part < len(separate.source.parts):
            self._tokenize_feeds(tokenizer, [separate], "val", self.val_tokens)
            separate.state.part = len(separate.source.parts)  # what is left of it is not needed
            self._write_journal()
        self._tokenize_feeds(tokenizer, self.feeds, "train", self.request.max_tokens)

    def _tokenize_feeds(
        self, tokenizer: Tokenizer, feeds: Sequence[Feed], split: str, enough: int | None
    ) -> None:
        """Tokenize from the journal's positions on, until a split has `enough` tokens or a feed has ended."""
        filled = self.writers[split].shards
        next_journal = time.monotonic() + JOURNAL_SECONDS
        with ExitStack() as stack:
            groups: dict[str, Generator[list[Document]]] = {}
            for feed in feeds:
                left = feed.documents(feed.state.part, feed.state.unit)
                groups[feed.name] = tokenize_in_order(tokenizer, left, self.threads)
                stack.enter_context(closing(groups[feed.name]))
            while enough is None or filled.tokens < enough:
                feed = min(feeds, key=lambda each: each.state.tokens[split] / each.weight)
                if not feed.ready:
                    self._report()
                    # Between documents: positions, counts and files are those of the same document.
                    if time.monotonic() >= next_journal:
                        self._write_journal()
                        next_journal = time.monotonic() + JOURNAL_SECONDS
                    feed.ready.extend(next(groups[feed.name], ()))
                    if not feed.ready:
                        self.ran_out = feed.name if len(feeds) > 1 else None
                        break
                limit = None
                if self.request.clip_validation and split == "val" and enough is not None:
                    limit = enough - filled.tokens - 1  # less the separator
                self._write(feed.ready.popleft(), feed, limit)
        self._report()

    def _write(self, document: Document, feed: Feed, limit: int | None) -> None:
        """Write a document to its split, at most `limit` tokens of it, and count it as read."""
        feed.state.part, feed.state.unit = document.part, document.number + 1
        self.state.characters += len(document.text or "")
        if document.ids is None:
            self.state.empty += 1
            return
        ids = document.ids[:limit]
        separate = feed is self.validation
        split = self.split.assign(document.hash, ids, self._split_of_eligible(feed), separate)
        if split is None:
            self.state.dropped += 1
            return
        self.writers[split].append(ids, feed.number)
        feed.state.documents[split] += 1
        feed.state.tokens[split] += 1 + len(ids)

    def _split_of_eligible(self, feed: Feed) -> Literal["train", "val"] | None:
        """The split of a document that is eligible for validation; None: neither.

        A source that has given its part of the validation set keeps such documents out of training until the
        others have too: one of them may have the same text.
        """
        if feed.state.tokens["val"] < feed.val_tokens:
            return "val"
        return None if any(each.state.tokens["val"] < each.val_tokens for each in self.feeds) else "train"

    def _report(self) -> None:
        state = self.state
        train = self.writers["train"].shards.tokens
        tokens = train + self.writers["val"].shards.tokens
        total = max(state.characters, self.size)
        max_tokens = self.request.max_tokens
        if max_tokens is not None and tokens:  # the pass ends at whichever comes first
            total = min(total, int(state.characters * max_tokens / max(1, train)))
        self.progress("tokenizing", state.characters, total, tokens)

    def _check_sources(self) -> None:
        """Raise if a source has changed meanwhile, or has given a split nothing."""
        for feed in self.feeds if self.validation is None else (*self.feeds, self.validation):
            last = min(feed.state.part + 1, len(feed.source.parts))
            feed.require_unchanged(*range(last))  # one that was not read to its end too
        empty = self.state.empty
        for feed in self.feeds:
            train, val = feed.state.documents["train"], self.state.documents("val")
            if not train:
                raise UsageError(
                    f"source {feed.name!r} has no text to train on: of {empty + val:,} documents read, "
                    f"{empty:,} were empty and {val:,} went to validation."
                )
            if self.mixed and feed.val_tokens and not feed.state.documents["val"]:
                raise UsageError(
                    f"source {feed.name!r} of the mixture has no document in validation; use more "
                    "`val_tokens`, or none by `val_tokens` = 0."
                )

    def _finish(self, tokenizer: Tokenizer) -> None:
        """Complete the last shards, write the manifest and remove what only a preparation needs."""
        self._check_sources()
        writers = self.writers.values()
        for writer in writers:
            writer.shards.finish_shard()
        self._write_journal()  # which syncs every file that the manifest is about to describe
        manifest = Manifest(
            dtype=self.writers["train"].shards.dtype,
            tokenizer=TokenizerRecord(tokenizer.name, tokenizer.size, tokenizer.identity),
            splits={name: writer.record() for name, writer in self.writers.items()},
            shards=tuple(shard for writer in writers for shard in writer.shards.finished),
            source=self.identity["source"],
            request=self.identity["request"],
            notes={
                "characters": self.state.characters,
                "empty_units": self.state.empty,
                "documents_dropped": self.state.dropped,
                "validation_tokens_requested": None if self.val_tokens == sys.maxsize else self.val_tokens,
                "validation_fraction": self.val_fraction,
                **({"ran_out": self.ran_out} if self.mixed else {}),
            },
            sources=tuple(
                SourceRecord(feed.name, feed.weight, feed.state.documents, feed.state.tokens)
                for feed in (self.feeds if self.mixed else ())
            ),
            val_sources_sha256=sha256_of_file(self.directory / VAL_SOURCES) if self.mixed else "",
        )
        # From here on the manifest declares the shards complete; what is left is deleting temporary files.
        manifest.write(self.directory)
        self.split.file.close()
        for name in (JOURNAL, VALIDATION_HASHES):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(self.directory / STAGING, ignore_errors=True)

    def _write_journal(self) -> None:
        for file in (self.split.file, *self.writers.values()):
            file.sync()
        for name, writer in self.writers.items():
            self.state.finished[name] = [asdict(shard) for shard in writer.shards.finished]
            self.state.open_tokens[name] = writer.shards.open_tokens
        # Last: everything the journal names must be on the disk already.
        content = {"identity": self.identity, "state": asdict(self.state)}
        write_json(self.directory / JOURNAL, with_checksum(content))


class Document(NamedTuple):
    """A document of a source (a line, a row or a text): its place, text and, once it is tokenized, ids."""

    part: int
    number: int
    text: str | None  # None if it is empty
    hash: bytes = b""
    ids: npt.NDArray[np.uint32] | None = None


def tokenize_in_order(
    tokenizer: Tokenizer, documents: Iterable[Document], threads: int
) -> Generator[list[Document]]:
    """Tokenize documents on `threads` threads; yields groups in the order of the documents."""

    def tokenize(group: list[Document]) -> list[Document]:
        arrays = iter(tokenizer.encode_arrays([document.text for document in group if document.text]))
        return [
            each._replace(hash=document_hash(each.text), ids=next(arrays)) if each.text else each
            for each in group
        ]

    ahead = GROUPS_PER_THREAD * threads
    return map_ahead(tokenize, _groups(documents), threads, ahead, "steepen-tokenize")


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += 64 + len(document.text or "")  # so that empty documents fill a group too
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
