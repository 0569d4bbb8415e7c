"""What verbs that write files return: a report with its figures and tables, a packed study, a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Lines
from steepen.utils.formatting import counted, format_bytes


@dataclass(frozen=True)
class FileRow:
    """A file of a report; `kind` is page, figures or tables."""

    kind: str
    file: str


@dataclass(frozen=True, eq=False, repr=False)
class Report(Result):
    """The files of a report; `page` is the one to open."""

    page: Path
    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()  # figures and tables in the directory that an earlier report wrote

    @property
    def rows(self) -> list[FileRow]:
        """One row per file."""
        return [FileRow("page" if one == self.page else one.parent.name, str(one)) for one in self.files]

    @property
    def notes(self) -> Sequence[str]:
        """What else is in the directory."""
        count = counted(len(self.others), "file")
        text = f"{self.page.parent} also has {count} that this report did not write, such as "
        return [f"{text}{min(self.others)}."] if self.others else []

    def headline(self) -> str:
        """Where the page is."""
        return f"report {self.page}: {len(self.files)} files"

    def to_dict(self) -> dict[str, Any]:
        """The names of the files."""
        return {"page": str(self.page), "files": list(map(str, self.files))}

    def blocks(self, width: int) -> Iterable[Block]:
        """The page, and how many figures and tables there are."""
        yield Lines(f"{self.page}: open it in any browser.")
        for kind in ("figures", "tables"):
            if count := sum(row.kind == kind for row in self.rows):
                yield Lines(f"{self.page.parent / kind}: {count} files.")


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Result):
    """A study as one file, or the directory that it was unpacked to."""

    row_columns: ClassVar = {
        "path": Column(value=lambda packed: str(packed.path)),
        **{name: Column() for name in ("study", "runs", "files", "bytes")},
    }

    path: Path
    study: str
    runs: int
    files: int
    bytes: int  # of the file itself, or of the files unpacked from it
    unpacked: bool = False

    def headline(self) -> str:
        """Where it is and what it holds."""
        size = f"{self.files} files, {format_bytes(self.bytes)}"
        return f"{self.path}: {self.study}, {self.runs} runs, {size}"

    def to_dict(self) -> dict[str, Any]:
        """The row itself."""
        return self.to_rows()[0]

    def blocks(self, width: int) -> Iterable[Block]:
        """The headline; of an unpacked study, how to look at it."""
        see = f"{self.path}: {self.study}, {self.runs} runs; see `steepen status {self.path}`."
        yield Lines(see if self.unpacked else f"{self.headline()}.")


@dataclass(frozen=True, eq=False, repr=False)
class Written(Result):
    """A folder or file that was written; it can be used as a path."""

    row_columns: ClassVar = {"path": Column()}

    path: Path
    remarks: tuple[str, ...] = ()
    contents: dict[str, Any] = field(default_factory=dict[str, Any])  # further values of the JSON
    sentence: str = ""  # printed after the path

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about it."""
        return self.remarks

    def __fspath__(self) -> str:
        return str(self.path)

    def headline(self) -> str:
        """The path, with a sentence about it."""
        return f"{self.path}: {self.sentence}" if self.sentence else str(self.path)

    def to_dict(self) -> dict[str, Any]:
        """The path, and what is known about its contents."""
        return {"path": str(self.path), **self.contents}

    def blocks(self, width: int) -> Iterable[Block]:
        """The path, with a sentence about it."""
        return [Lines(self.headline())]
