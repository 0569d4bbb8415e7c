"""A rich console for text that comes from files: control characters cannot reach the terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
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


@contextmanager
def spinner(text: str) -> Generator[Callable[[str], None]]:
    """Show a spinner on a terminal and yield a function that changes its text; a no-op elsewhere."""
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as shown:

        def update(new_text: str) -> None:
            shown.update(new_text)

        yield update
