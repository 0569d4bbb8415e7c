"""A rich console for text that comes from files: control characters cannot reach the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from steepen.utils.formatting import printable
from steepen.utils.printable_stream import unwrapped


class SafeConsole(Console):
    """A console that replaces control characters in everything it prints; its own styles stay."""

    @property
    def file(self) -> IO[str]:
        """The stream itself, without `PrintableStream` before it: styles are control sequences."""
        return unwrapped(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments, without control characters in their texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
