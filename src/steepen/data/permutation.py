"""A keyed pseudo-random permutation of 0 … n−1 that is computed, never stored.

A Feistel network permutes the smallest power of two that covers n; values that land beyond n are sent through
again (cycle walking) until they land inside. Memory is that of the indices asked for, whatever n is.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """The permutation of `size` items that belongs to a key; two keys give unrelated orders."""

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
        """Where each index goes."""
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
    """The finaliser of splitmix64, keyed: every bit of the input reaches every bit of the output."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLY_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLY_2
    return mixed ^ (mixed >> np.uint64(31))
