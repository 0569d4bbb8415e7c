"""The source of code that a user brings: of what is named, and of what that names in its own folder."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from steepen.utils.imports import import_object


def source_digest(names: Iterable[str]) -> str | None:
    """Digest of the user's source behind "module:attribute" names, 16 hex digits; None where there is none.

    It covers each object and what it uses of its own folder: functions, classes, constants and modules.
    """
    digest, found = hashlib.sha256(), False
    for name in names:
        found = True
        for source in own_sources(import_object(name, "custom code"), name):
            digest.update(source.encode())
    return digest.hexdigest()[:16] if found else None


def own_sources(found: Any, name: str) -> Iterator[str]:
    """Sources, each once, that decide what `found` does and that lie in its module's folder.

    What was made at run time has no source: its name is all there is.
    """
    folder = _folder(sys.modules.get(getattr(found, "__module__", ""), None))
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(name, found)]
    while waiting:
        name, thing = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        try:
            yield inspect.getsource(thing)
        except (OSError, TypeError):
            yield name
        around = vars(thing if isinstance(thing, ModuleType) else sys.modules[thing.__module__])
        named = sorted(around if isinstance(thing, ModuleType) else set(_names(thing)))
        for word in named:
            value = around.get(word)
            if _is_plain(value):
                if not isinstance(thing, ModuleType):  # whose source has it
                    yield f"{word} = {value!r}"
            elif folder is not None and _is_in(folder, value):
                waiting.append((word, value))


def _is_plain(value: Any) -> bool:
    """Whether a value's text says all of it."""
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | str)


def _is_in(folder: Path, value: Any) -> bool:
    """Whether a module, a function or a class is of this folder; what is installed in it is not."""
    module = value if isinstance(value, ModuleType) else None
    if isinstance(value, FunctionType | type):
        module = sys.modules.get(value.__module__)
    home = _folder(module)
    if module is None or home is None or module.__name__.split(".")[0] == "steepen":
        return False
    installed = {"site-packages", "dist-packages"} & set(home.parts)
    return not installed and (home == folder or folder in home.parents)


def _folder(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve().parent


def _names(thing: Any) -> Iterator[str]:
    """The global names that a function, or a class's functions and bases, go by."""
    if isinstance(thing, type):
        yield from (base.__name__ for base in thing.__bases__)
        for value in vars(thing).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield from _in_code(function.__code__)
    elif isinstance(thing, FunctionType):
        yield from _in_code(thing.__code__)


def _in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _in_code(constant)
