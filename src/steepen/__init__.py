"""steepen: does a change to an architecture make its scaling law steeper, or only lower?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steepen.inference.generate import generate as generate

    __version__: str

# Functions of the package, imported on first use: torch takes seconds to import.
_FUNCTIONS = {"generate": "steepen.inference.generate"}


def __getattr__(name: str) -> Any:
    """Import a public function, or look up `__version__`, on first use."""
    if name in _FUNCTIONS:
        from importlib import import_module

        return getattr(import_module(_FUNCTIONS[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("steepen")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return _source_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _source_version() -> str:
    """The version in the pyproject.toml beside `src/`, or "unknown" if there is none."""
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])
    except (OSError, KeyError, ValueError, IndexError):
        return "unknown"
