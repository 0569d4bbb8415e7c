"""Training batches by step number: one global order per seed and epoch, for any world size or micro-batch.

`BatchLoader` reads them; `Prefetcher` reads ahead in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Self, get_args

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import Dataset
from steepen.data.windows import FixedWindows, Pool, RecutWindows, WindowOrder, Windows
from steepen.errors import UsageError
from steepen.utils.threads import map_ahead

if TYPE_CHECKING:
    import torch

    Item = tuple[int, torch.Tensor, torch.Tensor]

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class BatchLoader:
    """Training batches of `batch_tokens` tokens; `at(step)` depends on nothing but its arguments.

    A batch is rows = batch_tokens / context windows of context+1 tokens. `windows` is "recut" (every epoch
    shuffles the documents, cuts windows anew and shuffles them; whole batches per epoch) or "fixed" (the
    windows are cut once and shuffled every epoch).

    `pool_tokens` restricts training to that many unique tokens: the first ones of the data, or a sample that
    is the same for every seed (`pool`). `epochs` limits how often they are repeated.
    """

    def __init__(
        self,
        dataset: Dataset,
        context: int,
        batch_tokens: int,
        seed: int,
        *,
        pool_tokens: int | None = None,
        pool: Pool = "prefix",
        windows: Windows = "recut",
        epochs: int = 1,
    ) -> None:
        counts = {"context": context, "batch_tokens": batch_tokens, "epochs": epochs}
        for name, value in (counts | {"pool_tokens": 1 if pool_tokens is None else pool_tokens}).items():
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be 1 or more.")
        for name, value, names in (("pool", pool, Pool), ("windows", windows, Windows)):
            if value not in (accepted := get_args(names)):
                raise UsageError(f"{name} is {value!r}; accepted are {', '.join(accepted)}.")
        if batch_tokens % context:
            raise UsageError(f"batch_tokens {batch_tokens:,} is not a multiple of the context {context:,}.")
        self.dataset = dataset
        self.context = context
        self.batch_tokens = batch_tokens
        self.rows = batch_tokens // context
        self.seed = seed
        self.epochs = epochs
        self._stream = dataset.tokens("train")
        available = len(self._stream)
        if pool_tokens is not None and pool_tokens > available:
            raise UsageError(
                f"a pool of {pool_tokens:,} unique tokens exceeds the {available:,} training "
                f"tokens of {dataset.directory}; prepare more data or use a smaller pool."
            )
        available = available if pool_tokens is None else pool_tokens
        if available <= context:
            raise UsageError(
                f"{available:,} training tokens do not fill one window of context+1 = {context + 1:,} tokens."
            )
        kind = partial(RecutWindows, dataset.document_ends("train"))
        if windows == "fixed":
            kind = partial(FixedWindows, len(self._stream))
        self.order: WindowOrder = kind(
            context + 1, self.rows, seed=seed, epochs=epochs, pool=pool, pool_tokens=pool_tokens
        )
        self.windows = self.order.windows  # of context+1 tokens, in one epoch
        self.steps = self.order.steps  # full batches, in all epochs

    def require_steps(self, steps: int) -> None:
        """Raise if `steps` batches need more tokens than the data has."""
        if steps > self.steps:
            epochs = "one epoch" if self.epochs == 1 else f"{self.epochs} epochs"
            raise UsageError(
                f"{steps:,} steps of {self.batch_tokens:,} need {steps * self.batch_tokens:,} tokens, but "
                f"{epochs} of {self.dataset.directory} give {self.steps * self.batch_tokens:,}; "
                "prepare more data, train on fewer tokens, or allow more epochs."
            )

    def epoch_of(self, step: int) -> int:
        """The epoch of a step's first row, counted from 0."""
        return self.order.epoch_of(step)

    def at(self, step: int) -> Batch:
        """One global batch: (inputs, targets), int64 (rows, context); targets are inputs shifted by one."""
        return self.batch_rows(step, 0, self.rows)

    def row_range(self, rank: int, world_size: int) -> tuple[int, int]:
        """The range [first, last) of rows that rank `rank` of `world_size` reads in every batch."""
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not in a world of {world_size} processes.")
        if self.rows % world_size:
            raise UsageError(
                f"a batch of {self.rows:,} rows ({self.batch_tokens:,} tokens of context {self.context:,}) "
                f"cannot be divided evenly among {world_size} processes."
            )
        rows_per_rank = self.rows // world_size
        return rank * rows_per_rank, (rank + 1) * rows_per_rank

    def batch_rows(self, step: int, first: int, last: int) -> Batch:
        """Rows [first, last) of the global batch of a step, for ranks and micro-batches."""
        if not 0 <= first <= last <= self.rows:
            raise IndexError(f"rows [{first}, {last}) of a batch of {self.rows}")
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps} ({self.epochs} epochs of {self.windows} windows)")
        starts, lengths = self.order.pieces(step, first, last)
        tokens = np.empty((last - first, self.context + 1), dtype=self._stream.dtype)
        self._stream.copy_pieces(starts, lengths, tokens.reshape(-1))
        # Checked here: on the device, an id beyond the embedding fails as an assertion that names no file.
        if tokens.size and int(tokens.max()) >= self.dataset.vocabulary:
            ends = np.cumsum(lengths)
            piece = int(np.searchsorted(ends, np.argmax(tokens), side="right"))
            start, length = int(starts[piece]), int(lengths[piece])
            raise self._stream.invalid_id_error(start, self._stream.read(start, start + length))
        return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)


class Prefetcher:
    """Iterates (step, inputs, targets) from `start_step` on: int64 on `device`, (rows of this rank, context).

    The batches depend on the loader and the step number alone, not on the thread. For CUDA they are copied
    from pinned memory without blocking. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        batches: BatchLoader,
        start_step: int,
        device: torch.device | str,
        *,
        stop_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        queue_size: int = 4,
    ) -> None:
        import torch

        self._batches = batches
        self._device = torch.device(device)
        stop_step = batches.steps if stop_step is None else stop_step
        batches.require_steps(stop_step)
        self._first, self._last = batches.row_range(rank, world_size)
        steps = range(start_step, stop_step)
        self._ready = map_ahead(self._read, steps, 1, queue_size, "steepen-prefetch")

    def __iter__(self) -> Iterator[Item]:
        for step, inputs, targets in self._ready:
            yield (
                step,
                inputs.to(self._device, non_blocking=True),
                targets.to(self._device, non_blocking=True),
            )

    def close(self) -> None:
        """Stop the thread. There is no state to save: the position is the caller's step number."""
        self._ready.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, step: int) -> Item:
        import torch

        inputs, targets = map(torch.from_numpy, self._batches.batch_rows(step, self._first, self._last))
        if self._device.type == "cuda":
            return step, inputs.pin_memory(), targets.pin_memory()
        return step, inputs, targets
