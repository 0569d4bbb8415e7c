"""A rich console for text that comes from files: control characters cannot reach the terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from steepen.utils.formatting import printable, unwrapped

MANY_ROWS = 500  # of a table, from which rich (0.5 ms a row) gives way to `plain_table`


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool]) -> str:
    """A table as text, each column as wide as its longest cell; `right` says which are aligned so."""
    lines = [[printable(cell) for cell in line] for line in (header, *rows)]
    sizes = [list(map(cell_len, column)) for column in zip(*lines, strict=True)]
    widths = list(map(max, sizes))
    padded = [
        "  ".join(
            gap + cell if left_gap else cell + gap
            for cell, size, width, left_gap in zip(line, own, widths, right, strict=True)
            for gap in (" " * (width - size),)
        ).rstrip()
        for line, own in zip(lines, zip(*sizes, strict=True), strict=True)
    ]
    return "\n".join(padded)


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
