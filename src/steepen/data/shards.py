"""Token shards: a 64-byte header and then ids, little-endian uint16 or uint32, read by memory map.

header: magic "STEEPTOK" | u32 version | u32 bytes per id | u64 number of ids | u64 vocabulary | 32 zero bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steepen.errors import SteepenError, UsageError

MAGIC = b"STEEPTOK"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32x")
DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def choose_dtype(vocabulary: int, requested: str = "auto") -> str:
    """The narrowest dtype that holds every id, or the requested one if it holds them."""
    if requested not in {"auto", *DTYPES}:
        raise UsageError(f"unknown dtype {requested!r}; accepted are auto, {', '.join(DTYPES)}.")
    for name, dtype in DTYPES.items():
        if vocabulary - 1 <= np.iinfo(dtype).max:
            if requested in {"auto", name} or DTYPES[requested].itemsize > dtype.itemsize:
                return name if requested == "auto" else requested
            break
    wider = "use uint32" if requested == "uint16" else "use a smaller one"
    raise UsageError(f"a vocabulary of {vocabulary:,} ids does not fit {requested}; {wider}.")


def header(dtype: str, tokens: int, vocabulary: int) -> bytes:
    """The first 64 bytes of a shard."""
    return HEADER.pack(MAGIC, VERSION, DTYPES[dtype].itemsize, tokens, vocabulary)


def size_in_bytes(dtype: str, tokens: int) -> int:
    """Size of a shard file."""
    return HEADER.size + tokens * DTYPES[dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One shard file and the header it must have."""

    path: Path
    dtype: str
    tokens: int
    vocabulary: int

    def check(self) -> None:
        """Compare the file's size and header with the manifest; reads 64 bytes."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as stream:
                found = stream.read(HEADER.size)
        except OSError as error:
            raise SteepenError(
                f"shard {self.path} cannot be read ({error.strerror}); prepare it again."
            ) from None
        expected = size_in_bytes(self.dtype, self.tokens)
        if size != expected:
            kind = "truncated" if size < expected else "too long"
            raise SteepenError(
                f"shard {self.path} is {kind}: {size:,} bytes where the manifest says {expected:,}; "
                "restore it or prepare the data again."
            )
        if found != header(self.dtype, self.tokens, self.vocabulary):
            raise SteepenError(
                f"shard {self.path} was altered: its header is not the one the manifest describes; "
                "restore it or prepare the data again."
            )

    def memory_map(self) -> npt.NDArray[np.unsignedinteger]:
        """The shard's ids, memory-mapped read-only, as an ndarray (slicing an np.memmap is slower)."""
        return np.asarray(
            np.memmap(self.path, DTYPES[self.dtype], mode="r", offset=HEADER.size, shape=(self.tokens,))
        )


class TokenStream:
    """The shards of one split as one flat sequence of ids."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = [shard for shard in shards if shard.tokens]
        self._arrays = [shard.memory_map() for shard in self._shards]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])
        self._offsets: list[int] = self._starts.tolist()

    def __len__(self) -> int:
        return self._offsets[-1]

    def invalid_id_error(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> SteepenError:
        """The error for ids read from `start` on, some of which are beyond the vocabulary."""
        position = start + int(np.argmax(ids))
        shard = self._shards[int(np.searchsorted(self._starts, position, side="right")) - 1]
        return SteepenError(
            f"shard {shard.path} was altered: it has token id {int(ids.max()):,}, and the tokenizer has "
            f"only {shard.vocabulary:,} ids; check the data with `steepen data verify {shard.path.parent}`, "
            "then restore it or prepare it again."
        )

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """The ids [start, stop); a view where one shard holds them all."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) of {len(self)}")
        chunks: list[npt.NDArray[np.unsignedinteger]] = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            offset = self._offsets[shard]
            end = min(stop, self._offsets[shard + 1])
            chunks.append(self._arrays[shard][start - offset : end - offset])
            start, shard = end, shard + 1
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks or [np.zeros(0, np.uint16)])

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The ids' dtype in the shards."""
        return self._arrays[0].dtype if self._arrays else np.dtype(np.uint16)

    def copy_pieces(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[np.unsignedinteger],
    ) -> None:
        """Fill the flat `out` with the ids [starts[i], starts[i] + lengths[i]) of each piece, in order."""
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        filled = 0
        for start, length, shard in zip(starts.tolist(), lengths.tolist(), shards.tolist(), strict=True):
            first = start - self._offsets[shard]
            ids = self._arrays[shard][first : first + length]
            end = filled + length
            out[filled:end] = ids if len(ids) == length else self.read(start, start + length)
            filled = end
