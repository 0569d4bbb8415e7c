"""The index: one file that makes ten thousand records quick to list, filter and load.

Files are the truth. The index keeps, for every record.json, its stamp (time of change, size, inode) and its
content in a form that decodes fast; an entry whose stamp is not the file's is read from the file again. An
index that is missing, old or damaged is as good as empty. It is replaced whole, so many processes may do it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import typing
import zlib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.status import Row, Status, unfinished_row
from steepen.runs.store import RunDirectory
from steepen.utils.codec import from_builtins
from steepen.utils.files import write_atomically

NAME = ".index"
SETTLED_SECONDS = 2.0  # a file changed this lately may change again without a new stamp: it is not indexed
_PARTS = tuple(field.name for field in fields(RunSpec))
_FORMAT = f"steepen index 1 {RunRecord.__name__} {' '.join(_PARTS)}"


@dataclass(frozen=True)
class _Entry:
    """One record: its stamp, what a table shows of it, and the rest as JSON still to be decoded."""

    stamp: str
    summary: str  # JSON list: arm, depth, seed, tokens, flops, loss, tokens per second, finished
    parts: tuple[str, ...]  # the spec's fields, each as JSON: most are the same in many records
    rest: str  # the record without its spec

    def row(self, name: str) -> Row:
        arm, depth, seed, tokens, flops, loss, rate, finished = json.loads(self.summary)
        return Row(
            run=name,
            arm=arm,
            depth=depth,
            seed=seed,
            tokens=tokens,
            flops=flops,
            status="finished",
            loss=loss,
            tokens_per_second=rate,
            finished=finished,
        )

    def record(self) -> RunRecord:
        value = json.loads(self.rest)
        value["spec"] = RunSpec(
            **{name: _part(name, text) for name, text in zip(_PARTS, self.parts, strict=True)}
        )
        return RunRecord.from_dict(value)


@functools.lru_cache(maxsize=65536)
def _part(name: str, text: str) -> Any:
    """One field of a spec. Specs are frozen, so records may share it."""
    return from_builtins(_hints()[name], json.loads(text), f"spec.{name}")


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(RunSpec)


class Index:
    """The records of a store's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def rows(
        self, *, arm: str | None = None, depth: int | None = None, status: Status | None = None
    ) -> list[Row]:
        """Runs as rows of a table, in the order of their names; a record that can't be read is a failure."""
        rows: list[Row] = []
        entries, others = self._look()
        if status in (None, "finished"):
            rows = [entry.row(name) for name, entry in entries.items()]
        if status != "finished":
            found = [other if isinstance(other, Row) else unfinished_row(other) for other in others]
            rows += [row for row in found if row is not None and status in (None, row.status)]
        chosen = [row for row in rows if arm in (None, row.arm) and depth in (None, row.depth)]
        return sorted(chosen, key=lambda row: row.run)

    def records(
        self,
        *,
        arm: str | None = None,
        depth: int | None = None,
        runs: Collection[str] | None = None,
    ) -> list[RunRecord]:
        """Whole records of finished runs, in the order of their names."""
        entries, others = self._look()
        wanted = None if runs is None else set(runs)
        for other in others:
            if isinstance(other, Row) and (wanted is None or other.run in wanted):
                raise SteepenError(other.cause)
        found: list[RunRecord] = []
        for name, entry in sorted(entries.items()):
            if wanted is not None and name not in wanted:
                continue
            if arm is not None or depth is not None:
                row = entry.row(name)
                if arm not in (None, row.arm) or depth not in (None, row.depth):
                    continue
            found.append(entry.record())
        return found

    def rebuild(self) -> int:
        """Forget the index and make it from the files; returns how many records it holds."""
        self.file.unlink(missing_ok=True)
        entries, _ = self._look(write=True)
        return len(entries)

    @property
    def file(self) -> Path:
        """Where it is."""
        return self.root / NAME

    def _look(self, write: bool = False) -> tuple[dict[str, _Entry], list[RunDirectory | Row]]:
        """Every finished run's entry; and the other runs, those whose record can't be read as failed rows."""
        known = self._load()
        entries: dict[str, _Entry] = {}
        others: list[RunDirectory | Row] = []
        fresh, root = 0, str(self.root)
        for name in _folders(self.root):
            old = known.get(name)
            try:
                stamp = _stamp(os.stat(f"{root}/{name}/record.json"))  # noqa: PTH116 - Path costs more than stat
            except OSError:
                others.append(RunDirectory(self.root / name))
                continue
            if old is not None and old.stamp == stamp:
                entries[name] = old
                continue
            run = RunDirectory(self.root / name)
            try:
                entries[name] = _read(run)
                fresh += entries[name].stamp != ""
            except FileNotFoundError:  # it went away between two looks
                others.append(run)
            except SteepenError as error:
                others.append(Row(name, "?", 0, 0, 0, 0.0, "failed", str(error)))
        # A few new records are read from their files at every look; the index is worth replacing for more.
        if write or fresh > max(8, len(entries) // 50):
            self._save(entries)
        return entries, others

    def _load(self) -> dict[str, _Entry]:
        try:
            head, _, body = self.file.read_text().partition("\n")
        except (OSError, UnicodeDecodeError):
            return {}
        if head != _head(body):
            return {}
        entries: dict[str, _Entry] = {}
        for line in body.splitlines():
            name, stamp, summary, rest, *parts = line.split("\t")
            entries[name] = _Entry(stamp, summary, tuple(parts), rest)
        return entries

    def _save(self, entries: dict[str, _Entry]) -> None:
        body = "".join(
            "\t".join((name, entry.stamp, entry.summary, entry.rest, *entry.parts)) + "\n"
            for name, entry in entries.items()
            if entry.stamp
        )
        with contextlib.suppress(OSError):  # a store that can only be read is read without an index
            write_atomically(self.file, f"{_head(body)}\n{body}")


def _head(body: str) -> str:
    """The first line: what made this index, and a checksum of the rest."""
    return f"{_FORMAT} {zlib.crc32(body.encode()):08x}"


def _folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as found:
            return [one.name for one in found if not one.name.startswith(".") and one.is_dir()]
    except OSError:
        return []


def _stamp(facts: os.stat_result) -> str:
    return f"{facts.st_mtime_ns}:{facts.st_size}:{facts.st_ino}"


def _read(run: RunDirectory) -> _Entry:
    """The entry of a record, from its file; without a stamp where the file is too new to trust one."""
    with run.record_file.open("rb") as file:
        facts = os.fstat(file.fileno())
        text = file.read()
    try:
        value = json.loads(text)
        record = RunRecord.from_dict(value)  # what is indexed is known to be good
    except (ValueError, SteepenError) as error:
        raise run.unreadable(error) from error
    settled = time.time() - facts.st_mtime > SETTLED_SECONDS
    spec = record.spec
    plain = value["spec"]
    if plain.keys() != set(_PARTS):  # written before a field was added: with the defaults put in
        plain = spec.to_dict()
    summary = [
        spec.arm.name,
        spec.shape.depth,
        spec.seed,
        record.tokens,
        record.flops,
        record.validation_loss,
        record.tokens_per_second,
        record.finished,
    ]
    return _Entry(
        _stamp(facts) if settled else "",
        _dump(summary),
        tuple(_dump(plain[part]) for part in _PARTS),
        _dump({name: part for name, part in value.items() if name != "spec"}),
    )


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
