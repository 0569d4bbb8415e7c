"""Writes the files of a split: shards, and entries for its documents; a journal's state can be restored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from steepen.data.dataset import ENDS, VAL_SOURCES, ShardRecord, SplitRecord, documents_file
from steepen.data.shards import DTYPES, HEADER, header, write_block_sums
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
                # 0 tokens until it is complete, so that part of a shard never passes for a whole one.
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
        self.sync()  # before its record, which a journal may hold from now on
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


class SplitWriter:
    """Writes the documents of one split: ids into shards, where each ends, and of a mixture whose it is.

    Each document is written with `separator` before it. `documents` are there already.
    """

    def __init__(self, shards: ShardWriter, separator: int, documents: int = 0, mixed: bool = False) -> None:
        self.shards, self.documents = shards, documents
        self._separator = np.array([separator], np.uint32)
        self._ends = EntryWriter(documents_file(shards.directory, shards.split), ENDS.itemsize, documents)
        # One byte a document; only the validation set is measured source by source.
        own = mixed and shards.split == "val"
        self._sources = EntryWriter(shards.directory / VAL_SOURCES, 1, documents) if own else None

    @property
    def _files(self) -> list[ShardWriter | EntryWriter]:
        return [self.shards, self._ends, *(() if self._sources is None else (self._sources,))]

    def append(self, ids: npt.NDArray[np.uint32], source: int) -> None:
        """Write a document of the source of this number."""
        self.shards.append(self._separator)
        self.shards.append(ids)
        self._ends.append(self.shards.tokens.to_bytes(ENDS.itemsize, "little"))
        if self._sources is not None:
            self._sources.append(bytes([source]))
        self.documents += 1

    def sync(self) -> None:
        """Flush to the disk; called before a journal records what there is."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def record(self) -> SplitRecord:
        """Totals and checksums for the manifest, when all shards are finished and synced."""
        shards = self.shards
        files = [each.shard(shards.directory, shards.dtype, shards.vocabulary) for each in shards.finished]
        return SplitRecord(
            self.documents,
            shards.tokens,
            sha256_of_file(documents_file(shards.directory, shards.split)),
            write_block_sums(shards.directory, shards.split, files),
        )
