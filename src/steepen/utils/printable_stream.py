"""Standard streams through which no control character of printed text reaches the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import IO, Any

from steepen.utils.formatting import printable


class PrintableStream:
    """A text stream that replaces control characters in what is written to it."""

    def __init__(self, stream: Any, keep: str = "") -> None:
        self.rich_proxied_file = stream  # rich writes to the stream of this name
        self._keep = keep

    def write(self, text: str) -> int:
        """Write printable text; returns its length."""
        return self.rich_proxied_file.write(printable(text, self._keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def unwrapped(stream: IO[str]) -> IO[str]:
    """The stream behind `PrintableStream` and rich's own proxies, for control sequences of steepen itself."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream


@contextlib.contextmanager
def printable_output() -> Generator[None]:
    """Let only printable text reach standard output and standard error, whoever prints it."""
    before = sys.stdout, sys.stderr
    # Progress bars of other libraries go to standard error and return to the start of the line.
    streams: Any = PrintableStream(sys.stdout), PrintableStream(sys.stderr, keep="\r")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
