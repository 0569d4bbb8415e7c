"""Training batches by step number: one global order per seed and epoch, for any world size or micro-batch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import Dataset
from steepen.data.permutation import Permutation
from steepen.errors import UsageError

BLOCK = 8192  # positions permuted at a time: large enough to make numpy's call overhead negligible

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class BatchLoader:
    """Training batches of `batch_tokens` tokens; `at(step)` depends on nothing but its arguments.

    The training split is cut into flat chunks of context+1 tokens. Epoch e visits every chunk once, in the
    order of a pseudo-random permutation keyed by (seed, e); a batch may span two epochs, so no chunk is
    dropped. Row r of step s is item s·rows + r of the concatenated epochs.

    `pool_tokens` restricts training to that many unique tokens (a sample of chunks that is the same for every
    seed, and nested: a smaller pool is part of a larger one). `epochs` limits how often the data is repeated.
    """

    def __init__(
        self,
        dataset: Dataset,
        context: int,
        batch_tokens: int,
        seed: int,
        *,
        pool_tokens: int | None = None,
        epochs: int = 1,
    ) -> None:
        _require_positive("context", context)
        _require_positive("batch_tokens", batch_tokens)
        _require_positive("epochs", epochs)
        if batch_tokens % context:
            raise UsageError(f"batch_tokens {batch_tokens:,} is not a multiple of the context {context:,}.")
        self.dataset = dataset
        self.context = context
        self.batch_tokens = batch_tokens
        self.rows = batch_tokens // context
        self.seed = seed
        self.epochs = epochs
        self._stream = dataset.tokens("train")
        data_chunks = len(self._stream) // (context + 1)
        self.chunks = data_chunks
        self._pool: Permutation | None = None
        if pool_tokens is not None:
            _require_positive("pool_tokens", pool_tokens)
            if pool_tokens > len(self._stream):
                raise UsageError(
                    f"a pool of {pool_tokens:,} unique tokens exceeds the {len(self._stream):,} training "
                    f"tokens of {dataset.directory}; prepare more data or use a smaller pool."
                )
            self.chunks = pool_tokens // (context + 1)
            self._pool = Permutation(data_chunks, f"steepen pool {data_chunks}") if data_chunks else None
        if not self.chunks:
            available = len(self._stream) if pool_tokens is None else pool_tokens
            raise UsageError(
                f"{available:,} training tokens do not fill one chunk of context+1 = {context + 1:,} tokens."
            )
        # Cached per instance; a batch usually spans one or two blocks.
        self._block = lru_cache(maxsize=4)(self._permute_block)
        self._epoch = lru_cache(maxsize=4)(self._epoch_order)

    @property
    def steps(self) -> int:
        """Number of full batches in all epochs."""
        return self.chunks * self.epochs // self.rows

    @property
    def unique_tokens(self) -> int:
        """Tokens predicted in one epoch: chunks × context."""
        return self.chunks * self.context

    def require_steps(self, steps: int) -> None:
        """Raise if `steps` batches need more tokens than the data has."""
        if steps > self.steps:
            epochs = "one epoch" if self.epochs == 1 else f"{self.epochs} epochs"
            raise UsageError(
                f"{steps:,} steps of {self.batch_tokens:,} need {steps * self.batch_tokens:,} tokens, but "
                f"{epochs} of {self.dataset.directory} give {self.unique_tokens * self.epochs:,}; "
                "prepare more data, train on fewer tokens, or allow more epochs."
            )

    def epoch_of(self, step: int) -> int:
        """The epoch of a step's first row, counted from 0."""
        return step * self.rows // self.chunks

    def at(self, step: int) -> Batch:
        """One global batch: (inputs, targets), int64 (rows, context); targets are inputs shifted by one."""
        return self.batch_rows(step, 0, self.rows)

    def rank_batch(self, step: int, rank: int, world: int) -> Batch:
        """The rows of a global batch for rank `rank` of `world`."""
        first, last = self.row_range(rank, world)
        return self.batch_rows(step, first, last)

    def row_range(self, rank: int, world: int) -> tuple[int, int]:
        """The range [first, last) of rows that rank `rank` of `world` reads in every batch."""
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} is not in a world of {world} processes.")
        if self.rows % world:
            raise UsageError(
                f"a batch of {self.rows:,} rows ({self.batch_tokens:,} tokens of context {self.context:,}) "
                f"cannot be divided evenly among {world} processes."
            )
        rows_per_rank = self.rows // world
        return rank * rows_per_rank, (rank + 1) * rows_per_rank

    def batch_rows(self, step: int, first: int, last: int) -> Batch:
        """Rows [first, last) of the global batch of a step, for ranks and micro-batches."""
        if not 0 <= first <= last <= self.rows:
            raise IndexError(f"rows [{first}, {last}) of a batch of {self.rows}")
        if not 0 <= step < self.steps:
            raise IndexError(
                f"step {step} of {self.steps} ({self.epochs} epochs of {self.unique_tokens} tokens)"
            )
        position = step * self.rows
        chunks = self.chunk_order(position + first, position + last)
        tokens = np.empty((last - first, self.context + 1), dtype=self._stream.dtype)
        starts = chunks * (self.context + 1)
        self._stream.gather(starts, tokens)
        # Checked here: on the device, an id beyond the embedding fails as an assertion that names no file.
        if tokens.size and int(tokens.max()) >= self.dataset.vocabulary:
            row = int(np.argmax(tokens.max(axis=1)))
            raise self._stream.invalid_id_error(int(starts[row]), tokens[row])
        return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)

    def chunk_order(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Chunk numbers at positions [start, stop) of the global order, int64."""
        blocks = [
            self._block(number)[max(start - number * BLOCK, 0) : stop - number * BLOCK]
            for number in range(start // BLOCK, -(-stop // BLOCK))
        ]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)

    def _permute_block(self, number: int) -> npt.NDArray[np.int64]:
        end = min((number + 1) * BLOCK, self.chunks * self.epochs)
        epochs, offsets = np.divmod(np.arange(number * BLOCK, end), self.chunks)
        chunks = np.concatenate(
            [self._epoch(int(epoch))(offsets[epochs == epoch]) for epoch in np.unique(epochs)]
        )
        return chunks if self._pool is None else self._pool(chunks)

    def _epoch_order(self, epoch: int) -> Permutation:
        return Permutation(self.chunks, f"steepen order {self.seed} {epoch}")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be 1 or more.")
