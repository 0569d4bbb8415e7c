"""A keyed pseudo-random permutation of 0 … n−1, computed on demand instead of stored.

A Feistel network permutes the smallest power of two ≥ n; values ≥ n are passed through it again (cycle
walking) until they are below n. Memory depends on the number of indices in a call, not on n.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """The permutation of `size` items determined by `key`; different keys give unrelated permutations."""

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
