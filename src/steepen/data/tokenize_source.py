"""Tokenize a source into shards: split documents, tokenize them, write the manifest.

It works in a directory of its own. The journal records how far the files there are valid; once the manifest
exists, all of them are.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from steepen.data.documents import DocumentEndsWriter, documents_file
from steepen.data.manifest import TOKENIZER, Manifest, ShardRecord, SplitRecord, TokenizerRecord
from steepen.data.parallel_tokenize import SourceDocument, tokenize_in_order
from steepen.data.prepare_request import PrepareProgress, PrepareRequest, ProgressReporter
from steepen.data.shard_writer import ShardWriter
from steepen.data.shards import Shard, choose_dtype, write_block_sums
from steepen.data.sources.builtin import shipped_tokenizer
from steepen.data.sources.source import Source, document_hash
from steepen.data.tokenizer import Tokenizer, parse_tokenizer
from steepen.data.validation_split import ValidationSplit, plan_split
from steepen.errors import SteepenError, UsageError
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

JOURNAL = "journal.json"
VALIDATION_HASHES = "validation_documents.bin"
STAGING = "downloads"
JOURNAL_SECONDS = 5.0
TOKENIZER_CHARACTERS = 50_000_000  # of the source, from its start, that a tokenizer is trained on


@dataclass
class JournalState:
    """Position in the source, lengths of the files written up to it, and counts for the manifest."""

    part: int = 0
    unit: int = 0  # number of the next document to read
    characters: int = 0
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    empty: int = 0
    dropped: int = 0
    validation_documents: int = 0
    threshold: int | None = None  # of the validation split, once it is fixed
    finished: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    open_tokens: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    versions: list[list[int] | None] = field(default_factory=list[list[int] | None])  # of the source's files


def read_journal(directory: Path) -> tuple[dict[str, Any], JournalState] | None:
    """The identity and state of an interrupted preparation, or None if there is none."""
    path = directory / JOURNAL
    try:
        stored = cast("dict[str, Any]", without_checksum(read_json(path)))
        return stored["identity"], JournalState(**stored["state"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise SteepenError(f"{path} is damaged ({error}); use `restart` to begin again.") from None


class TokenizationJob:
    """Tokenization of one source, from its start or from a journal's state."""

    def __init__(
        self,
        request: PrepareRequest,
        source: Source,
        validation: Source | None,
        *,
        identity: dict[str, Any],
        state: JournalState,
        directory: Path,
        progress: ProgressReporter,
        threads: int,
    ) -> None:
        self.request, self.source, self.directory, self.threads = request, source, directory, threads
        self.identity, self.state, self.progress = identity, state, progress
        validation_parts = [] if validation is None else list(validation.parts)
        self.parts = [*validation_parts, *source.parts]
        self.first_train_part = len(validation_parts)
        state.versions = state.versions or [part.version for part in self.parts]
        self._require_unchanged(*range(len(self.parts)))
        self.val_tokens, self.val_fraction = plan_split(source.size, request.val_tokens, request.max_tokens)
        if validation is not None:
            self.val_tokens = sys.maxsize if request.val_tokens is None else request.val_tokens
            self.val_fraction = 0.0
        hashes = directory / VALIDATION_HASHES
        self.split = ValidationSplit(
            hashes, self.val_tokens, self.val_fraction, state.validation_documents, request.dedup_tokens
        )
        self.writers: dict[str, ShardWriter] = {}
        self.ends: dict[str, DocumentEndsWriter] = {}

    def run(self) -> None:
        """Write shards, tokenizer and manifest into the working directory."""
        try:
            self._write_journal()  # first of all, so that no file on disk lacks the request it belongs to
            self._set_threshold()
            tokenizer = self._tokenizer()
            dtype = choose_dtype(tokenizer.size, self.request.dtype)
            for name in ("train", "val"):
                writer = ShardWriter(self.directory, name, dtype, tokenizer.size, self.request.shard_tokens)
                finished = [ShardRecord(**shard) for shard in self.state.finished[name]]
                writer.restore(finished, self.state.open_tokens[name])
                self.writers[name] = writer
                path = documents_file(self.directory, name)
                self.ends[name] = DocumentEndsWriter(path, self.state.documents[name])
            self._tokenize(tokenizer)
            self._finish(tokenizer, dtype)
        finally:
            self.split.close()
            for writer in (*self.writers.values(), *self.ends.values()):
                writer.close()

    def _set_threshold(self) -> None:
        """Fix the split's threshold so that validation and training each get a document."""
        state = self.state
        name = self.source.description["name"]
        if state.threshold is not None:
            self.split.threshold = state.threshold
        elif not any(state.documents.values()):
            texts = (document.text for document in self._documents(self.first_train_part, 0) if document.text)
            sizes = ((document_hash(text), len(text.encode("utf-8", "surrogatepass"))) for text in texts)
            max_bytes = min(self.request.max_tokens or TOKENIZER_CHARACTERS, TOKENIZER_CHARACTERS)
            if self.val_fraction and not self.split.adjust_threshold(sizes, max_bytes):
                raise UsageError(
                    f"source {name!r} is one document, and validation is split off by document: cut plain "
                    "text with `separator` (as '\\n\\n', at blank lines), name files with `val_source`, or "
                    "do without validation by `val_tokens` = 0."
                )
            separate = self.parts[: self.first_train_part]
            if self.val_tokens and separate and not any(t for part in separate for t in part.documents(0)):
                raise UsageError("`val_source` has no text; name other files, or leave it out.")
            state.threshold = self.split.threshold

    def _tokenizer(self) -> Tokenizer:
        path = self.directory / TOKENIZER
        size = parse_tokenizer(self.request.tokenizer)
        if path.exists():
            return Tokenizer.load(path)
        if size is None:
            tokenizer = Tokenizer.gpt2()
        elif self.source.description["kind"] == "builtin":
            texts = list(self._tokenizer_texts())
            tokenizer = shipped_tokenizer(texts, size) or Tokenizer.train(texts, size)
        else:
            tokenizer = Tokenizer.train(self._tokenizer_texts(), size)
        tokenizer.save(path)
        return tokenizer

    def _tokenizer_texts(self) -> Iterator[str]:
        """Texts to train a tokenizer on; documents eligible for validation are excluded."""
        read = 0
        total = min(self.source.size, TOKENIZER_CHARACTERS)
        for count, document in enumerate(self._documents(self.first_train_part, 0)):
            if document.text and not self.split.is_eligible(document_hash(document.text)):
                yield document.text
                read += len(document.text)
                if count % 256 == 0:
                    self.progress(PrepareProgress("reading text for the tokenizer", read, total, 0, count))
                if read >= TOKENIZER_CHARACTERS:
                    break
        self.progress(PrepareProgress("making the tokenizer", total, total, 0, 0))

    def _documents(self, part: int, start: int, stop: int | None = None) -> Iterator[SourceDocument]:
        """The documents from number `start` of a part on, up to part `stop`."""
        for number in range(part, len(self.parts) if stop is None else stop):
            first = start if number == part else 0
            for document, text in enumerate(self.parts[number].documents(first), start=first):
                yield SourceDocument(number, document, text)
            self._require_unchanged(number)

    def _require_unchanged(self, *numbers: int) -> None:
        """Raise if the file of a part is another than when the preparation began: texts would be mixed."""
        for number in numbers:
            part = self.parts[number]
            if self.state.versions[number] != part.version:
                raise SteepenError(
                    f"{part.file} has changed since its preparation began; restore it, or begin again with "
                    "`restart`."
                )

    def _tokenize(self, tokenizer: Tokenizer) -> None:
        """Tokenize a separate validation source as far as it is needed, then the training source."""
        state = self.state
        if state.part < self.first_train_part:
            self._tokenize_documents(tokenizer, self.first_train_part, "val", self.val_tokens)
            state.part, state.unit = self.first_train_part, 0
            self._write_journal()
        self._tokenize_documents(tokenizer, len(self.parts), "train", self.request.max_tokens)

    def _tokenize_documents(self, tokenizer: Tokenizer, stop: int, split: str, enough: int | None) -> None:
        """Tokenize from the journal's position up to part `stop`, or until a split has `enough` tokens."""
        state, filled = self.state, self.writers[split]
        beginning = np.array([tokenizer.end_of_text], dtype=np.uint32)
        next_journal = time.monotonic() + JOURNAL_SECONDS
        if enough is not None and filled.tokens >= enough:
            return
        documents = self._documents(state.part, state.unit, stop)
        for group in tokenize_in_order(tokenizer, documents, self.threads):
            for document in group:
                state.part, state.unit = document.part, document.number + 1
                state.characters += document.characters
                if document.ids is None:
                    state.empty += 1
                    continue
                ids = document.ids
                if self.request.clip_validation and split == "val" and enough is not None:
                    ids = ids[: enough - filled.tokens - 1]
                assigned = self.split.assign(
                    document.hash,
                    ids,
                    self.writers["val"].tokens,
                    document.part < self.first_train_part,
                )
                if assigned is None:
                    state.dropped += 1
                    continue
                state.documents[assigned] += 1
                writer = self.writers[assigned]
                writer.append(beginning)
                writer.append(ids)
                self.ends[assigned].append(writer.tokens)
                if enough is not None and filled.tokens >= enough:
                    return
            self._report("tokenizing")
            if time.monotonic() >= next_journal:
                self._write_journal()
                next_journal = time.monotonic() + JOURNAL_SECONDS

    def _report(self, stage: str) -> None:
        state = self.state
        tokens = self.writers["train"].tokens + self.writers["val"].tokens
        total = max(state.characters, self.source.size)
        max_tokens = self.request.max_tokens
        if max_tokens is not None and tokens:  # the pass ends at whichever comes first
            total = min(total, int(state.characters * max_tokens / max(1, self.writers["train"].tokens)))
        self.progress(PrepareProgress(stage, state.characters, total, tokens, sum(state.documents.values())))

    def _finish(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._require_unchanged(*range(self.state.part + 1))  # one that was not read to its end too
        documents = self.state.documents
        if not documents["train"]:
            name, empty, val = self.source.description["name"], self.state.empty, documents["val"]
            raise UsageError(
                f"source {name!r} has no text to train on: of {empty + val:,} documents read, {empty:,} were "
                f"empty and {val:,} went to validation."
            )
        for writer in self.writers.values():
            writer.finish_shard()
        self._write_journal()
        hashes = {name: sha256_of_file(documents_file(self.directory, name)) for name in documents}
        blocks: dict[str, str] = {}
        for name, writer in self.writers.items():
            shards = [
                Shard(self.directory / each.file, dtype, each.tokens, tokenizer.size, each.sha256)
                for each in writer.finished
            ]
            blocks[name] = write_block_sums(self.directory, name, shards)
        manifest = Manifest(
            dtype=dtype,
            tokenizer=TokenizerRecord(tokenizer.name, tokenizer.size, tokenizer.identity),
            splits={
                name: SplitRecord(documents[name], writer.tokens, hashes[name], blocks[name])
                for name, writer in self.writers.items()
            },
            shards=tuple(shard for writer in self.writers.values() for shard in writer.finished),
            source=self.identity["source"],
            request=self.identity["request"],
            notes={
                "characters": self.state.characters,
                "empty_units": self.state.empty,
                "documents_dropped": self.state.dropped,
                "validation_tokens_requested": None if self.val_tokens == sys.maxsize else self.val_tokens,
                "validation_fraction": self.val_fraction,
            },
        )
        # From here on the manifest declares the shards complete; what is left is deleting temporary files.
        manifest.write(self.directory)
        self.split.close()
        for name in (JOURNAL, VALIDATION_HASHES):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(self.directory / STAGING, ignore_errors=True)

    def _write_journal(self) -> None:
        for writer in (*self.writers.values(), *self.ends.values()):
            writer.sync()
        self.split.sync()
        self.state.validation_documents = self.split.documents
        for name, writer in self.writers.items():
            self.state.finished[name] = [asdict(shard) for shard in writer.finished]
            self.state.open_tokens[name] = writer.open_tokens
        # Last: everything the journal names must be on the disk already.
        content = {"identity": self.identity, "state": asdict(self.state)}
        write_json(self.directory / JOURNAL, with_checksum(content))
