"""Which tokens each training window has: documents shuffled and cut anew every epoch, or fixed windows.

A window is context+1 consecutive tokens: context inputs and, shifted by one, as many targets. Both orders
answer the same question, the pieces of the token stream that make up some windows of a step, and depend on
nothing but the data, the seed and the step. A pool restricts them to a part of the data.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

# prefix: the first tokens of the data; sample: a pseudo-random part that is the same for every seed.
# In both, a smaller pool is part of a larger one. `runs/spec.py` has both types too (see there).
Pool = Literal["prefix", "sample"]
Windows = Literal["recut", "fixed"]

BLOCK = 8192  # windows permuted at a time: large enough to make numpy's call overhead negligible
DOCUMENT_BLOCK = 1 << 20  # documents permuted at a time: bounds the temporary memory

ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)

Int64s = npt.NDArray[np.int64]


class Permutation:
    """A pseudo-random permutation of 0 … size−1, given by `key` and computed on demand instead of stored.

    A Feistel network permutes the smallest power of two ≥ size; values ≥ size are passed through it again
    (cycle walking) until they are below size. Memory depends on the number of indices in a call, not on size.
    """

    def __init__(self, size: int, key: str) -> None:
        if not 0 < size < 1 << 62:
            raise ValueError(f"a permutation needs 1 to 2^62 items, not {size}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8")
        assert len(self._keys) == ROUNDS

    def __call__(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The image of each index, int64."""
        values = self._feistel(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            walked = self._feistel(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mix(high, key) & self._low_mask)
            else:
                high = high ^ (_mix(low, key) & self._high_mask)
        return (high << self._low_bits) | low


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 with a key: every input bit affects every output bit."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLY_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLY_2
    return mixed ^ (mixed >> np.uint64(31))


class RecutWindows:
    """Every epoch shuffles the pool's documents, joins them, cuts windows and shuffles the windows.

    So windows differ between epochs. The windows after the last full batch of an epoch are left out, and no
    batch spans two epochs. An epoch's order takes 16 bytes a document while it is in use: the position of
    each document in the stream and its end among the shuffled ones.
    """

    def __init__(
        self,
        ends: Int64s,
        length: int,
        rows: int,
        *,
        seed: int,
        epochs: int,
        pool: Pool,
        pool_tokens: int | None,
    ) -> None:
        self._ends, self._length, self._rows = ends, length, rows
        self._seed = seed
        total = int(ends[-1]) if len(ends) else 0
        self.tokens = total if pool_tokens is None else pool_tokens
        # Ids of the pool's documents; None: the first `_document_count`. The pool may end inside its last
        # document: `_surplus` tokens of it are left out.
        self._pool_documents: Int64s | None = None
        self._document_count, self._surplus = len(ends), 0
        if pool_tokens is not None and pool == "prefix":
            self._document_count = int(np.searchsorted(ends, pool_tokens, side="left")) + 1
            self._surplus = int(ends[self._document_count - 1]) - pool_tokens
        elif pool_tokens is not None:
            self._pool_documents, self._surplus = _sample_documents(ends, pool_tokens)
            self._document_count = len(self._pool_documents)
        self.windows = self.tokens // length
        self.steps_per_epoch = self.windows // rows
        self.steps = self.steps_per_epoch * epochs
        self._current: tuple[int, Int64s, Int64s, Permutation] | None = None

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, counted from 0."""
        return step // self.steps_per_epoch

    def pieces(self, step: int, first: int, last: int) -> tuple[Int64s, Int64s]:
        """(positions in the stream, lengths) of the pieces that make up windows [first, last) of a step."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        positions, ends, order = self._epoch(epoch)
        rows = np.arange(offset * self._rows + first, offset * self._rows + last)
        starts = order(rows) * self._length
        # Window i has the shuffled documents [first_document[i], last_document[i]].
        first_document = np.searchsorted(ends, starts, side="right")
        last_document = np.searchsorted(ends, starts + self._length, side="left")
        counts = last_document - first_document + 1
        window = np.repeat(np.arange(len(rows)), counts)
        document = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts - first_document, counts)
        begins = np.where(document > 0, ends[document - 1], 0)
        piece_starts = np.maximum(begins, starts[window])
        piece_ends = np.minimum(ends[document], starts[window] + self._length)
        return positions[document] + piece_starts - begins, piece_ends - piece_starts

    def _epoch(self, epoch: int) -> tuple[Int64s, Int64s, Permutation]:
        current = self._current
        if current is None or current[0] != epoch:
            current = self._current = None  # frees the previous epoch's order before the next is made
            order = Permutation(self._document_count, f"steepen documents {self._seed} {epoch}")
            positions = np.empty(self._document_count, np.int64)
            ends = np.empty(self._document_count, np.int64)
            for start in range(0, self._document_count, DOCUMENT_BLOCK):
                block = slice(start, min(start + DOCUMENT_BLOCK, self._document_count))
                pool_indices = order(np.arange(block.start, block.stop))
                numbers = pool_indices if self._pool_documents is None else self._pool_documents[pool_indices]
                positions[block] = np.where(numbers > 0, self._ends[numbers - 1], 0)
                ends[block] = self._ends[numbers] - positions[block]
                ends[block] -= self._surplus * (pool_indices == self._document_count - 1)
            np.cumsum(ends, out=ends)
            windows = Permutation(self.windows, f"steepen windows {self._seed} {epoch}")
            current = self._current = (epoch, positions, ends, windows)
        return current[1:]


def _sample_documents(ends: Int64s, tokens: int) -> tuple[Int64s, int]:
    """The documents of a pseudo-random order, as many as give `tokens` tokens, and how many they give more.

    They are the same for every seed.
    """
    order = Permutation(len(ends), f"steepen pool {len(ends)}")
    found: list[Int64s] = []
    for start in range(0, len(ends), DOCUMENT_BLOCK):
        numbers = order(np.arange(start, min(start + DOCUMENT_BLOCK, len(ends))))
        total = np.cumsum(ends[numbers] - np.where(numbers > 0, ends[numbers - 1], 0))
        last = int(np.searchsorted(total, tokens, side="left"))  # all of the block if it has not enough
        found.append(numbers[: last + 1])
        tokens -= int(total[min(last, len(total) - 1)])
        if tokens <= 0:
            break
    return np.concatenate(found), -tokens


class FixedWindows:
    """The stream is cut into windows once; every epoch visits each window once, in an order of its own.

    Row r of step s is item s·rows + r of the joined epochs: a batch may span two epochs, and no window of
    the pool is left out. A sampled pool is a sample of windows. Nothing is kept in memory.
    """

    def __init__(
        self,
        tokens: int,
        length: int,
        rows: int,
        *,
        seed: int,
        epochs: int,
        pool: Pool,
        pool_tokens: int | None,
    ) -> None:
        self._length, self._rows, self._seed, self._epochs = length, rows, seed, epochs
        data_windows = tokens // length
        self.windows = data_windows if pool_tokens is None else pool_tokens // length
        self.steps = self.windows * epochs // rows
        self._pool: Permutation | None = None
        if pool == "sample" and pool_tokens is not None and data_windows:
            self._pool = Permutation(data_windows, f"steepen pool {data_windows}")
        # Cached per instance; a batch usually spans one or two blocks.
        self._block = lru_cache(maxsize=4)(self._permute_block)
        self._epoch = lru_cache(maxsize=4)(self._epoch_order)

    def epoch_of(self, step: int) -> int:
        """The epoch of a step's first window, counted from 0."""
        return step * self._rows // self.windows

    def pieces(self, step: int, first: int, last: int) -> tuple[Int64s, Int64s]:
        """(positions in the stream, lengths) of windows [first, last) of a step: one piece each."""
        position = step * self._rows
        starts = self.order(position + first, position + last) * self._length
        return starts, np.full(len(starts), self._length)

    def order(self, start: int, stop: int) -> Int64s:
        """Window numbers at positions [start, stop) of the joined epochs."""
        blocks = [
            self._block(number)[max(start - number * BLOCK, 0) : stop - number * BLOCK]
            for number in range(start // BLOCK, -(-stop // BLOCK))
        ]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)

    def _permute_block(self, number: int) -> Int64s:
        end = min((number + 1) * BLOCK, self.windows * self._epochs)
        epochs, offsets = np.divmod(np.arange(number * BLOCK, end), self.windows)
        windows = np.concatenate(
            [self._epoch(int(epoch))(offsets[epochs == epoch]) for epoch in np.unique(epochs)]
        )
        return windows if self._pool is None else self._pool(windows)

    def _epoch_order(self, epoch: int) -> Permutation:
        return Permutation(self.windows, f"steepen order {self._seed} {epoch}")


WindowOrder: TypeAlias = RecutWindows | FixedWindows
