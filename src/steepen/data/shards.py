"""Token shards: a 64-byte header and then ids, little-endian uint16 or uint32.

header: magic "STEEPTOK" | u32 version | u32 bytes per id | u64 number of ids | u64 vocabulary | 32 zero bytes
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steepen.errors import SteepenError, UsageError
from steepen.utils.files import file_version, open_regular, read_file, sha256_of_file, write_atomically

Int64s = npt.NDArray[np.int64]
Ids = npt.NDArray[np.unsignedinteger]
MAGIC = b"STEEPTOK"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32x")
BLOCK_TOKENS = 1 << 15  # ids under one checksum: 64 kB of uint16
MAX_OPEN_FILES = 256  # shards that are open at a time
MAX_READS = 5  # of a batch whose shards change meanwhile
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


@dataclass(frozen=True)
class Shard:
    """One shard file and the header it must have."""

    path: Path
    dtype: str
    tokens: int
    vocabulary: int
    sha256: str = ""  # of the file; empty: not known

    def check(self) -> None:
        """Compare the file's size and header with the manifest; reads 64 bytes."""
        try:
            size = self.path.stat().st_size
            with open(self.path, "rb", opener=open_regular) as stream:
                found = stream.read(HEADER.size)
        except OSError as error:
            raise SteepenError(
                f"shard {self.path} cannot be read ({error.strerror}); prepare it again."
            ) from None
        expected = HEADER.size + self.tokens * DTYPES[self.dtype].itemsize
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

    def memory_map(self) -> Ids:
        """The shard's ids, memory-mapped read-only, as an ndarray (slicing an np.memmap is slower)."""
        dtype = DTYPES[self.dtype]
        return np.asarray(np.memmap(self.path, dtype, "r", HEADER.size, (self.tokens,)))


class TokenStream:
    """The shards of one split as one flat sequence of ids.

    Ids are read with `pread`, not through a memory map: a shard that is truncated while it is in use gives
    an error, not SIGBUS. Every block of a shard is compared with its checksum when it is first read, and
    again after the file has changed, so what is returned is what the checksums (`sums`) say.
    """

    def __init__(self, shards: Sequence[Shard], sums: npt.NDArray[np.uint64]) -> None:
        self._shards = [shard for shard in shards if shard.tokens]
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._offsets: list[int] = self._starts.tolist()
        self._files: dict[int, FileIO] = {}
        self._versions: dict[int, tuple[int, ...] | None] = {}  # of each shard when its blocks were checked
        self._sums = sums
        counts = [-(-shard.tokens // BLOCK_TOKENS) for shard in self._shards]
        self._first_blocks = np.cumsum([0, *counts])
        self._unchecked = np.ones(int(self._first_blocks[-1]), bool)
        if len(sums) != len(self._unchecked):
            raise SteepenError(
                f"there are {len(sums):,} checksums for {len(self._unchecked):,} blocks of tokens."
            )

    def __len__(self) -> int:
        return self._offsets[-1]

    def invalid_id_error(self, start: int, ids: Ids) -> SteepenError:
        """The error for ids read from `start` on, some of which are beyond the vocabulary."""
        position = start + int(np.argmax(ids))
        shard = self._shards[int(np.searchsorted(self._starts, position, side="right")) - 1]
        return SteepenError(
            f"shard {shard.path} was altered: it has token id {int(ids.max()):,}, and the tokenizer has "
            f"only {shard.vocabulary:,} ids; check the data with `steepen data verify {shard.path.parent}`, "
            "then restore it or prepare it again."
        )

    def read(self, start: int, stop: int) -> Ids:
        """The ids [start, stop)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) of {len(self)}")
        out = np.empty(stop - start, self.dtype)
        self.copy_pieces(np.array([start]), np.array([stop - start]), out)
        return out

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The ids' dtype in the shards."""
        return DTYPES[self._shards[0].dtype] if self._shards else np.dtype(np.uint16)

    def copy_pieces(self, starts: Int64s, lengths: Int64s, out: Ids) -> None:
        """Fill the flat `out` with the ids [starts[i], starts[i] + lengths[i]) of each piece, in order."""
        if not len(out):
            return
        content, changed = out.view(np.uint8), [0]
        for _ in range(MAX_READS):
            if self._unchecked.any():
                self._check(starts, lengths)
            used = self._copy(starts, lengths, content)
            changed = [shard for shard in used if self._has_changed(shard)]
            if not changed:
                return
        raise SteepenError(
            f"shard {self._shards[changed[0]].path} keeps changing while it is read; stop what writes to it, "
            "then restore it or prepare the data again."
        )

    def _copy(self, starts: Int64s, lengths: Int64s, content: npt.NDArray[np.uint8]) -> set[int]:
        """Fill `content` with the bytes of the pieces, unchecked; returns the shards that it read."""
        size = self.dtype.itemsize
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        filled = 0
        used: set[int] = set()
        for start, length, first in zip(starts.tolist(), lengths.tolist(), shards.tolist(), strict=True):
            position, shard, stop = start, first, start + length
            while position < stop:  # a piece may span shards
                count = min(stop, self._offsets[shard + 1]) - position
                end = filled + count * size
                self._read_bytes(shard, (position - self._offsets[shard]) * size, content[filled:end])
                used.add(shard)
                position, shard, filled = position + count, shard + 1, end
        return used

    def _has_changed(self, shard: int) -> bool:
        """Whether a shard is another than when its blocks were checked; if so, they must be checked again."""
        version = file_version((self._files.get(shard) or self._open(shard)).fileno())
        if version == self._versions.get(shard):
            return False
        self._unchecked[self._first_blocks[shard] : self._first_blocks[shard + 1]] = True
        self._versions[shard] = version
        return True

    def _read_bytes(self, number: int, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from `offset` on that follow a shard's header."""
        file = self._files.get(number) or self._open(number)
        done = os.preadv(file.fileno(), [out.data], HEADER.size + offset)
        while 0 < done < len(out):
            more = os.preadv(file.fileno(), [out[done:].data], HEADER.size + offset + done)
            done = done + more if more else 0
        if done != len(out):
            raise SteepenError(
                f"shard {self._shards[number].path} became shorter while it was read; restore it or prepare "
                "the data again."
            )

    def _open(self, number: int) -> FileIO:
        try:
            file = FileIO(self._shards[number].path, opener=open_regular)
        except OSError as error:
            path = self._shards[number].path
            raise SteepenError(f"shard {path} cannot be read ({error.strerror}); prepare it again.") from None
        if len(self._files) >= MAX_OPEN_FILES:
            # Not closed here: another thread may be reading it. The last reference closes it.
            self._files.pop(next(iter(self._files)))
        self._files[number] = file
        return file

    def _check(self, starts: Int64s, lengths: Int64s) -> None:
        """Compare the blocks of these pieces with their checksums, those that have not been yet."""
        first, last = self._blocks_at(starts), self._blocks_at(starts + np.maximum(lengths, 1) - 1)
        if int((last - first).max(initial=0)) > 1:
            blocks = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)])
        else:
            blocks = np.concatenate([first, last])
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            shard = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
            if shard not in self._versions:
                self._has_changed(shard)
            path = self._shards[shard].path
            first_id = (block - int(self._first_blocks[shard])) * BLOCK_TOKENS
            count = min(BLOCK_TOKENS, self._shards[shard].tokens - first_id)
            content = np.empty(count * self.dtype.itemsize, np.uint8)
            self._read_bytes(shard, first_id * self.dtype.itemsize, content)
            if block_sum(content.data) != int(self._sums[block]):
                raise SteepenError(
                    f"shard {path} was altered: its content does not match its checksum; check the data with "
                    f"`steepen data verify {path.parent}`, then restore it or prepare it again."
                )
            self._unchecked[block] = False

    def _blocks_at(self, positions: Int64s) -> Int64s:
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        return self._first_blocks[shards] + (positions - self._starts[shards]) // BLOCK_TOKENS


def block_sum(content: memoryview | bytes) -> int:
    """Checksum of a block: the first 64 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def blocks_file(directory: Path, split: str) -> Path:
    """The file with the checksums of a split's blocks, one little-endian uint64 each, shard after shard."""
    return directory / f"blocks_{split}.bin"


def write_block_sums(directory: Path, split: str, shards: Sequence[Shard]) -> str:
    """Write the checksums of all blocks of a split's shards; returns the SHA-256 of the file.

    Raises if a shard is not the one whose SHA-256 is known.
    """
    sums: list[int] = []
    for shard in shards:
        size = BLOCK_TOKENS * DTYPES[shard.dtype].itemsize
        with shard.path.open("rb") as stream:
            whole = hashlib.sha256(stream.read(HEADER.size))
            while content := stream.read(size):
                sums.append(block_sum(content))
                whole.update(content)
        if shard.sha256 not in ("", whole.hexdigest()):
            raise SteepenError(f"shard {shard.path} was altered while it was prepared; prepare it again.")
    path = blocks_file(directory, split)
    write_atomically(path, np.array(sums, "<u8").tobytes())
    return sha256_of_file(path)


def read_block_sums(directory: Path, split: str, sha256: str) -> npt.NDArray[np.uint64]:
    """The checksums that `write_block_sums` wrote; raises if the file was altered."""
    return np.frombuffer(read_known(blocks_file(directory, split), sha256), "<u8")


def read_known(path: Path, sha256: str) -> bytes:
    """The content of a file that must have a known hash."""
    try:
        content = read_file(path, limit=sys.maxsize)
    except OSError as error:
        raise SteepenError(f"{path} cannot be read ({error.strerror}); prepare it again.") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise altered(path)
    return content


def altered(path: Path) -> SteepenError:
    """The error for a file that has another hash than the manifest says."""
    return SteepenError(
        f"{path} was altered: its SHA-256 is not the manifest's; restore it or prepare the data again."
    )
