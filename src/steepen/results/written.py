"""What verbs return that write a folder or a file: its path, and what to know about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepen.results.result import Result
from steepen.results.text import Block, Lines


@dataclass(frozen=True)
class WrittenRow:
    """A path that was written."""

    path: Path


@dataclass(frozen=True, eq=False, repr=False)
class Written(Result):
    """A folder or file that was written; it can be used as a path."""

    path: Path
    remarks: tuple[str, ...] = ()
    contents: dict[str, Any] = field(default_factory=dict[str, Any])  # further values of the JSON
    sentence: str = ""  # printed after the path

    @property
    def rows(self) -> list[WrittenRow]:
        """The path."""
        return [WrittenRow(self.path)]

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
