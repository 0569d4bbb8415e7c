"""The index of a store: the rows of its runs as they were read before, so that listings are fast.

A row is taken from the index only while the file that it was read from (the run's record; its spec until it
has finished) is the same: inode, size and times. The files stay the truth: the index can be deleted,
and where it cannot be written every run is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import SteepenError
from steepen.runs.row import RunRow, read_row
from steepen.utils.codec import from_builtins
from steepen.utils.files import file_version, read_file, write_atomically
from steepen.utils.json_io import parse_json

if TYPE_CHECKING:
    from steepen.runs.store import RunDirectory

FILE = ".index"
FORMAT = 3  # increase it when rows get other fields, or mean something else
MIN_NEW = 64  # rows that are not in the file yet, from which it is written again; also a 32nd of all
# A file that was changed so recently may be changed again without a difference in its times.
SETTLED_SECONDS = 2.0

Version = tuple[int, ...]


@dataclass
class RunIndex:
    """The rows that were read before, by run, each with the version of the file that it was read from."""

    root: Path
    rows: dict[str, tuple[Version, RunRow]] = field(default_factory=dict[str, tuple[Version, RunRow]])
    unsaved: int = 0

    @staticmethod
    def of(root: Path) -> RunIndex:
        """The index of a store, read once by a process; an unreadable or damaged one is empty."""
        root = root.absolute()
        if root not in _indexes:
            _indexes[root] = RunIndex(root)
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, SteepenError):
                _indexes[root].rows = _decode(read_file(root / FILE))
        return _indexes[root]

    def row(self, run: RunDirectory) -> RunRow | None:
        """The row of a run's record or spec, as it is now; None for a directory that holds no run."""
        name = run.path.name
        version = _version(run.record_file) or _version(run.spec_file)
        known = self.rows.get(name)
        if known is not None and known[0] == version:
            return known[1]
        try:
            row = read_row(run)
        except FileNotFoundError:
            return None
        if version is None or version != (_version(run.record_file) or _version(run.spec_file)):
            return row  # it was written meanwhile
        settled = time.time() - version[-1] / 1e9 > SETTLED_SECONDS
        if settled and row.status != "failed" and row.flops:  # 0: they depend on the code that is trusted
            self.rows[name] = (version, row)
            self.unsaved += 1
        return row

    def save(self) -> None:
        """Write the index if many rows are new; a store that cannot be written to stays without one."""
        if self.unsaved < max(MIN_NEW, len(self.rows) // 32):
            return
        self.unsaved = 0
        with contextlib.suppress(OSError):
            present = {path.name for path in self.root.iterdir()}
            write_atomically(self.root / FILE, _encode({n: r for n, r in self.rows.items() if n in present}))


_indexes: dict[Path, RunIndex] = {}


def _version(file: Path) -> Version | None:
    """What changes when the file does; without the device, which differs between machines that mount it."""
    found = file_version(file)
    return None if found is None else found[1:]


def _encode(rows: dict[str, tuple[Version, RunRow]]) -> bytes:
    """A checksum, and JSON: names of fields once for all rows that have the same ones, then their values."""
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    lines: list[list[Any]] = []
    for version, row in rows.values():
        own = row.to_dict()
        kind = kinds.setdefault((tuple(own), tuple(row.more)), len(kinds))
        lines.append([kind, version, [*own.values()], [*row.more.values()]])
    text = json.dumps([FORMAT, list(kinds), lines], separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _decode(content: bytes) -> dict[str, tuple[Version, RunRow]]:
    """The inverse of `_encode`; raises for a damaged index or one of another format."""
    checksum, _, text = content.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        raise ValueError("its checksum does not match its content")
    form, kinds, lines = parse_json(text)
    if form != FORMAT:
        raise ValueError(f"it has the format {form}")
    found: dict[str, tuple[Version, RunRow]] = {}
    for kind, version, own, more in lines:
        row = from_builtins(RunRow, dict(zip(kinds[kind][0], own, strict=True)))
        found[row.run] = (tuple(version), replace(row, more=dict(zip(kinds[kind][1], more, strict=True))))
    return found
