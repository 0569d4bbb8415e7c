"""The validation set: the same tokens for every run and batch size, and their length in bytes.

Of a mixture of sources, every window has the text of one source, so that each source has a loss of its own;
windows are in proportion to the weights, so the loss over all of them is that of the mixture.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import Dataset
from steepen.data.loader import Batch
from steepen.errors import UsageError


class ValidationSet:
    """The first `tokens` predictions of the validation split, in windows of context+1 tokens.

    Of a mixture, the first ones of each source, source after source. `tokens` is rounded down to full windows
    (see `.tokens`); None takes all of them. `identity` hashes the ids, the tokenizer and the context, so runs
    with equal identities were validated on the same tokens.
    """

    def __init__(self, dataset: Dataset, context: int, tokens: int | None = None) -> None:
        if context < 1:
            raise UsageError(f"context is {context}; it must be 1 or more.")
        stream = dataset.tokens("val")
        available = len(stream) // (context + 1)
        self.context = context
        self.windows = available if tokens is None else tokens // context
        if not available:
            raise UsageError(
                f"the {len(stream):,} validation tokens of {dataset.directory} do not fill one window of "
                f"context+1 = {context + 1:,} tokens; prepare it with a larger `val_tokens` or "
                "a `val_source`, or use a shorter context."
            )
        if self.windows < 1:
            raise UsageError(
                f"cannot validate on {tokens:,} tokens at context {context:,}: at least one context is "
                f"needed; give `validation_tokens` = {context} or more."
            )
        if self.windows > available:
            raise UsageError(
                f"cannot take {tokens:,} validation tokens at context {context:,}: {dataset.directory} has "
                f"{available * context:,} to predict; ask for no more, or prepare it with a larger "
                "`val_tokens`."
            )
        # Windows [first, last) of each source of a mixture, by its name; otherwise of all, without a name.
        self.sections: dict[str, tuple[int, int]] = {"": (0, self.windows)}
        if dataset.manifest.sources:
            ids = self._windows_by_source(dataset)
        else:
            ids = stream.read(0, self.windows * (context + 1))
        if int(ids.max()) >= dataset.vocabulary:
            raise stream.invalid_id_error(0, stream.read(0, len(stream)))
        self._ids = ids.reshape(self.windows, context + 1)
        tokenizer = dataset.tokenizer()
        self._lengths, self.end_of_text = tokenizer.lengths, tokenizer.end_of_text
        self._tokenizer = dataset.manifest.tokenizer.sha256

    def _windows_by_source(self, dataset: Dataset) -> npt.NDArray[np.unsignedinteger]:
        """The ids of all windows of a mixture; sets the section of each source, and the number of windows."""
        length, stream = self.context + 1, dataset.tokens("val")
        ends = dataset.document_ends("val")
        starts, source_of = np.concatenate([[0], ends[:-1]]), dataset.val_sources()
        pieces: list[npt.NDArray[np.unsignedinteger]] = []
        self.sections, first, wanted = {}, 0, self.windows
        for number, source in enumerate(dataset.manifest.sources):
            windows = max(1, int(wanted * source.weight))
            own = source_of == number
            lengths = (ends - starts)[own]
            if windows * length > int(lengths.sum()):
                raise UsageError(
                    f"cannot validate on {windows * self.context:,} tokens of {source.name} at context "
                    f"{self.context:,}: {dataset.directory} has {int(lengths.sum()):,}; ask for fewer "
                    "`validation_tokens`, or prepare it with a larger `val_tokens`."
                )
            documents = np.searchsorted(np.cumsum(lengths), windows * length) + 1
            ids = np.empty(int(lengths[:documents].sum()), stream.dtype)
            stream.copy_pieces(starts[own][:documents], lengths[:documents], ids)
            pieces.append(ids[: windows * length])
            self.sections[source.name] = first, first + windows
            first += windows
        self.windows = first
        return np.concatenate(pieces)

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return self.windows * self.context

    @cached_property
    def identity(self) -> str:
        """Hex SHA-256 of tokenizer, context and ids."""
        head = f"steepen-validation-1 {self._tokenizer} {self.context} {self.windows}\n".encode()
        return hashlib.sha256(head + self._ids.astype("<u4").tobytes()).hexdigest()

    @cached_property
    def target_bytes(self) -> int:
        """UTF-8 bytes of all target tokens; <|endoftext|> has none."""
        return int(self._lengths[self._ids[:, 1:]].sum(dtype=np.int64))

    def rows(self, first: int, last: int) -> Batch:
        """(inputs, targets) of the windows [first, last), int64 (rows, context)."""
        ids = self._ids[first:last]
        return ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)

    def batches(
        self, rows: int, rank: int = 0, world_size: int = 1, section: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches of at most `rows` windows for rank `rank` of `world_size`; no window is dropped.

        Each rank gets a contiguous range, of equal length up to one window; of a section, if it is given.
        """
        if rows < 1:
            raise UsageError(f"validation batches of {rows} rows; it must be 1 or more.")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not in a world of {world_size} processes.")
        start, stop = section or (0, self.windows)
        first, last = (start + (stop - start) * one // world_size for one in (rank, rank + 1))
        for start in range(first, last, rows):
            yield self.rows(start, min(start + rows, last))

    def bits_per_byte(self, loss: float, end_of_text: float) -> float:
        """Bits per UTF-8 byte from the mean loss per token, in nats, over the whole set.

        `end_of_text` is the part of it that <|endoftext|> contributes: it is no text and is left out.
        """
        return (loss - end_of_text) * self.tokens / (math.log(2) * self.target_bytes)
