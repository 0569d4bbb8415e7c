"""steepen: does a change to an architecture make its scaling law steeper, or only lower?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Look up `__version__` on first use: importing package metadata costs more than the package itself."""
    if name == "__version__":
        from importlib.metadata import version

        return version("steepen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
