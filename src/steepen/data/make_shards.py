"""One pass over a source: documents are split and encoded into shards, and a manifest says what they are.

It works in a directory that is its own. What it writes there can be trusted as far as the journal says, and
to the end once there is a manifest.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from steepen.data.manifest import TOKENIZER, Manifest, ShardRecord, SplitRecord, TokenizerRecord
from steepen.data.parallel_tokenize import Unit, digest_of, encode_in_order
from steepen.data.prepare_journal import JOURNAL, State, write_journal
from steepen.data.prepare_options import PrepareProgress, PrepareRequest, Reporter
from steepen.data.shard_writer import SplitWriter
from steepen.data.shards import dtype_for
from steepen.data.sources.resolve import Source
from steepen.data.tokenizer import Tokenizer, parse_tokenizer
from steepen.data.validation_split import ValidationSplit, plan
from steepen.errors import UsageError

CHOSEN = "validation_documents.bin"
STAGING = "downloads"
JOURNAL_SECONDS = 5.0
TRAINING_CHARACTERS = 50_000_000  # of the source, from its start, that a tokenizer is trained on


class Preparation:
    """One run over the source, on from a journal's state."""

    def __init__(
        self,
        request: PrepareRequest,
        source: Source,
        validation: Source | None,
        *,
        asked: dict[str, Any],
        state: State,
        work: Path,
        report: Reporter,
        threads: int,
    ) -> None:
        self.request, self.source, self.work, self.threads = request, source, work, threads
        self.asked, self.state, self.report = asked, state, report
        for_validation = [] if validation is None else list(validation.parts)
        self.parts = [*for_validation, *source.parts]
        self.first_part = len(for_validation)  # parts before it are validation text alone
        self.wanted, self.share = plan(source.size, request.val_tokens, request.max_tokens)
        if validation is not None:
            self.wanted = sys.maxsize if request.val_tokens is None else request.val_tokens
            self.share = 0.0
        self.split = ValidationSplit(work / CHOSEN, self.wanted, self.share, self.state.chosen)
        self.writers: dict[str, SplitWriter] = {}

    def run(self) -> None:
        """Write shards, tokenizer and manifest into the working directory."""
        try:
            self._write_journal()  # first of all, so that nothing on disk lacks the request it belongs to
            self._settle()
            tokenizer = self._tokenizer()
            dtype = dtype_for(tokenizer.size, self.request.dtype)
            for name in ("train", "val"):
                writer = SplitWriter(self.work, name, dtype, tokenizer.size, self.request.shard_tokens)
                finished = [ShardRecord(**shard) for shard in self.state.finished[name]]
                writer.restore(finished, self.state.open_tokens[name])
                self.writers[name] = writer
            self._encode(tokenizer)
            self._finish(tokenizer, dtype)
        finally:
            self.split.close()
            for writer in self.writers.values():
                writer.close()

    def _settle(self) -> None:
        """See to it that there will be text for validation, and for training."""
        state = self.state
        name = self.source.description["name"]
        if state.threshold is not None:
            self.split.threshold = state.threshold
        elif not any(state.documents.values()):
            texts = (unit.text for unit in self._units(self.first_part, 0) if unit.text)
            sizes = ((digest_of(text), len(text.encode("utf-8", "surrogatepass"))) for text in texts)
            most = min(self.request.max_tokens or TRAINING_CHARACTERS, TRAINING_CHARACTERS)
            if self.share and not self.split.settle(sizes, most):
                raise UsageError(
                    f"source {name!r} is one document, and validation is split off by document: cut plain "
                    "text with --separator (as '\\n\\n', at blank lines), name files with --val-source, or "
                    "do without validation by --val-tokens 0."
                )
            apart = self.parts[: self.first_part]
            if self.wanted and apart and not any(text for part in apart for text in part.documents(0)):
                raise UsageError("the files of --val-source hold no text; name others, or leave it out.")
            state.threshold = self.split.threshold

    def _tokenizer(self) -> Tokenizer:
        path = self.work / TOKENIZER
        size = parse_tokenizer(self.request.tokenizer)
        if path.exists():
            return Tokenizer.load(path)
        tokenizer = Tokenizer.gpt2() if size is None else Tokenizer.train(self._training_texts(), size)
        tokenizer.save(path)
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        read = 0
        total = min(self.source.size, TRAINING_CHARACTERS)
        for count, unit in enumerate(self._units(self.first_part, 0)):
            if unit.text and not self.split.may_validate(digest_of(unit.text)):
                yield unit.text
                read += len(unit.text)
                if count % 256 == 0:
                    self.report(PrepareProgress("reading text for the tokenizer", read, total, 0, count))
                if read >= TRAINING_CHARACTERS:
                    break
        self.report(PrepareProgress("training the tokenizer", total, total, 0, 0))

    def _units(self, part: int, start: int) -> Iterator[Unit]:
        for number in range(part, len(self.parts)):
            first = start if number == part else 0
            for unit, text in enumerate(self.parts[number].documents(first), start=first):
                yield Unit(number, unit, text)

    def _encode(self, tokenizer: Tokenizer) -> None:
        state, train, val = self.state, self.writers["train"], self.writers["val"]
        end = np.array([tokenizer.end_of_text], dtype=np.uint32)
        most = self.request.max_tokens
        journal_at = time.monotonic() + JOURNAL_SECONDS
        if most is not None and train.tokens >= most:
            return
        for group in encode_in_order(tokenizer, self._units(state.part, state.unit), self.threads):
            for unit in group:
                state.part, state.unit = unit.part, unit.number + 1
                state.characters += unit.characters
                if unit.ids is None:
                    state.empty += 1
                    continue
                split = self.split.of(unit.digest, val.tokens, unit.part < self.first_part)
                if split is None:
                    state.dropped += 1
                    continue
                state.documents[split] += 1
                self.writers[split].append(unit.ids)
                self.writers[split].append(end)
                if most is not None and train.tokens >= most:
                    return
            self._say("tokenizing")
            if time.monotonic() >= journal_at:
                self._write_journal()
                journal_at = time.monotonic() + JOURNAL_SECONDS

    def _say(self, stage: str) -> None:
        state = self.state
        tokens = self.writers["train"].tokens + self.writers["val"].tokens
        total = max(state.characters, self.source.size)
        most = self.request.max_tokens
        if most is not None and tokens:  # the run ends at whichever comes first
            total = min(total, int(state.characters * most / max(1, self.writers["train"].tokens)))
        self.report(PrepareProgress(stage, state.characters, total, tokens, sum(state.documents.values())))

    def _finish(self, tokenizer: Tokenizer, dtype: str) -> None:
        documents = self.state.documents
        if not documents["train"]:
            name, empty, val = self.source.description["name"], self.state.empty, documents["val"]
            raise UsageError(
                f"source {name!r} has no text to train on: of {empty + val:,} units read, {empty:,} were "
                f"empty and {val:,} went to validation."
            )
        for writer in self.writers.values():
            writer.finish_shard()
        self._write_journal()
        manifest = Manifest(
            dtype=dtype,
            tokenizer=TokenizerRecord(tokenizer.name, tokenizer.size, tokenizer.identity),
            splits={
                name: SplitRecord(documents[name], writer.tokens) for name, writer in self.writers.items()
            },
            shards=tuple(shard for writer in self.writers.values() for shard in writer.finished),
            source=self.asked["source"],
            request=self.asked["request"],
            notes={
                "characters": self.state.characters,
                "empty_units": self.state.empty,
                "documents_dropped": self.state.dropped,
                "validation_tokens_wanted": None if self.wanted == sys.maxsize else self.wanted,
                "validation_share": self.share,
            },
        )
        # From here on the manifest says that the shards are whole; what is left is tidying.
        manifest.write(self.work)
        self.split.close()
        for name in (JOURNAL, CHOSEN):
            (self.work / name).unlink(missing_ok=True)
        shutil.rmtree(self.work / STAGING, ignore_errors=True)

    def _write_journal(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        self.split.sync()
        self.state.chosen = self.split.chosen
        for name, writer in self.writers.items():
            self.state.finished[name] = [asdict(shard) for shard in writer.finished]
            self.state.open_tokens[name] = writer.open_tokens
        write_journal(self.work, self.asked, self.state)
