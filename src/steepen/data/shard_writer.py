"""Writes the shards of a split and files of entries beside them; a journal's state can be restored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import ShardRecord
from steepen.data.shards import DTYPES, HEADER, header
from steepen.errors import SteepenError
from steepen.utils.files import open_without_links, sha256_of_file


class EntryWriter:
    """Appends entries of one size to a file that has `count` valid ones; what follows them is cut off."""

    def __init__(self, path: Path, size: int, count: int = 0) -> None:
        self.path, self.size = path, size
        self._stream = open(path, "a+b", opener=open_without_links)  # noqa: SIM115
        if path.stat().st_size < count * size:
            self._stream.close()
            raise SteepenError(f"{path} is shorter than the journal says; use `restart` to begin again.")
        self._stream.truncate(count * size)

    def entries(self) -> list[bytes]:
        """The entries of a file that was opened just now."""
        self._stream.seek(0)
        content = self._stream.read()
        return [content[start : start + self.size] for start in range(0, len(content), self.size)]

    def append(self, entry: bytes) -> None:
        """Add an entry."""
        self._stream.write(entry)

    def sync(self) -> None:
        """Flush to the disk; called before a journal records the number of entries."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class ShardWriter:
    """Writes `split`_00000.bin, _00001.bin, … of `shard_tokens` ids each; only the last may be shorter."""

    def __init__(self, directory: Path, split: str, dtype: str, vocabulary: int, shard_tokens: int) -> None:
        self.directory = directory
        self.split = split
        self.dtype = dtype
        self.vocabulary = vocabulary
        self.shard_tokens = shard_tokens
        self.finished: list[ShardRecord] = []
        self.open_tokens = 0
        self._finished_tokens = 0
        self._stream: BinaryIO | None = None

    @property
    def tokens(self) -> int:
        """Ids written so far."""
        return self._finished_tokens + self.open_tokens

    def restore(self, finished: list[ShardRecord], open_tokens: int) -> None:
        """Restore a recorded state: truncate the open shard to its recorded length, delete later shards."""
        for record in finished:
            record.shard(self.directory, self.dtype, self.vocabulary).check()
        self.finished = list(finished)
        self.open_tokens = open_tokens
        self._finished_tokens = sum(shard.tokens for shard in finished)
        for number, file in enumerate(sorted(self.directory.glob(f"{self.split}_*.bin"))):
            if number > len(finished) or (number == len(finished) and not open_tokens):
                file.unlink()
        if open_tokens:
            path, size = self._path(), HEADER.size + open_tokens * DTYPES[self.dtype].itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise SteepenError(f"{path} is shorter than the journal says; use `restart` to begin again.")
            self._stream = open(path, "r+b", opener=open_without_links)  # noqa: SIM115
            self._stream.truncate(size)
            self._stream.seek(0, os.SEEK_END)

    def append(self, ids: npt.NDArray[np.unsignedinteger]) -> None:
        """Write ids, starting a new shard whenever one is full."""
        while len(ids):
            if self._stream is None:
                self._stream = open(self._path(), "wb", opener=open_without_links)  # noqa: SIM115
                self._stream.write(header(self.dtype, 0, self.vocabulary))
            written = ids[: self.shard_tokens - self.open_tokens]
            self._stream.write(written.astype(DTYPES[self.dtype], copy=False).data)
            self.open_tokens += len(written)
            ids = ids[len(written) :]
            if self.open_tokens == self.shard_tokens:
                self.finish_shard()

    def sync(self) -> None:
        """Flush to the disk; called before a journal records the length."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish_shard(self) -> None:
        """Complete the open shard, if there is one: final header, hash, record."""
        if self._stream is None:
            return
        self._stream.seek(0)
        self._stream.write(header(self.dtype, self.open_tokens, self.vocabulary))
        self.sync()
        self._stream.close()
        path = self._path()
        self.finished.append(ShardRecord(path.name, self.split, self.open_tokens, sha256_of_file(path)))
        self._finished_tokens += self.open_tokens
        self._stream, self.open_tokens = None, 0

    def close(self) -> None:
        """Close the open file without completing the shard."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _path(self) -> Path:
        return self.directory / f"{self.split}_{len(self.finished):05d}.bin"
