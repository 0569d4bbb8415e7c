"""Extension points by name: "module:attribute" to an object, and an object back to its name."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Generator, Iterable

from steepen.errors import UsageError, shorten

# Modules whose code may be imported by name; None: any, as in a Python program, which chooses its own names.
_trusted: set[str] | None = None
_EVERY_MODULE = "*"
_NAME = re.compile(r"(?:^|[=,\s])([A-Za-z_][\w.]*):[A-Za-z_]")


@contextlib.contextmanager
def code_from(words: Iterable[str], *, trust_all: bool = False) -> Generator[None]:
    """Import only modules that are named as module:attribute in the words of a command line, or all.

    Names also come from files (specs, presets, recipes, run directories), which others may have written.
    """
    global _trusted  # noqa: PLW0603  (one command line per process)
    before = _trusted
    _trusted = {match[1] for word in words for match in _NAME.finditer(word)}
    if trust_all:
        _trusted.add(_EVERY_MODULE)
    try:
        yield
    finally:
        _trusted = before


def trust_code(names: Iterable[str]) -> None:
    """Trust the modules of these names too: those that trusted code itself refers to."""
    if _trusted is not None:
        _trusted.update(name.partition(":")[0] for name in names)


def _require_trust(name: str, what: str) -> None:
    module = name.partition(":")[0]
    if _trusted is None or module.split(".")[0] == "steepen" or {module, _EVERY_MODULE} & _trusted:
        return
    raise UsageError(
        f"the {what} {shorten(name)!r} is named in a file, and loading it would run the code of its module; "
        "add --trust-code if you trust that code."
    )


def import_object(name: str, what: str) -> object:
    """Import the object "module:attribute"; `what` ("arm", "block", …) is used in the error message."""
    _require_trust(name, what)
    module, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    except Exception as error:  # whatever the user's module does when it is imported
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the {what} {name!r} could not be loaded: {reason}.") from error


def object_name(value: object, what: str) -> str:
    """The "module:attribute" name of a class or function, for use in specs and on the command line.

    A name is returned unchanged. Raises UsageError for an object that cannot be imported by name (a lambda, a
    local class).
    """
    if isinstance(value, str):
        return value
    module = getattr(value, "__module__", None)
    attribute = getattr(value, "__qualname__", None)
    if not module or not attribute or "<" in attribute or module == "__main__":
        raise UsageError(
            f"the {what} {value!r} cannot be imported by name: define it at the top level of a module "
            "that can be imported."
        )
    return f"{module}:{attribute}"
