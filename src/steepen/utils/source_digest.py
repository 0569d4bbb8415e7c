"""Digest of custom code: the source of named objects and of what they use from their own directory."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from steepen.utils.imports import import_object


def source_digest(names: Iterable[str], own: Container[str] = ()) -> str | None:
    """Digest of the source of "module:attribute" objects, 16 hex digits; None if `names` is empty.

    It covers each object and the functions, classes, constants and modules that it uses from its directory.
    """
    digest, any_name = hashlib.sha256(), False
    for name in names:
        any_name = True
        for source in own_sources(import_object(name, "custom code", own=own), name):
            digest.update(source.encode())
    return digest.hexdigest()[:16] if any_name else None


def own_sources(root: Any, name: str) -> Iterator[str]:
    """Yield the sources of `root` and of everything it uses from its module's directory, each once.

    An object without source (created at run time) contributes only its name.
    """
    directory = _directory(sys.modules.get(getattr(root, "__module__", ""), None))
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(name, root)]
    while waiting:
        name, item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        try:
            yield inspect.getsource(item)
        except (OSError, TypeError):
            yield name
        namespace = vars(item if isinstance(item, ModuleType) else sys.modules[item.__module__])
        references = sorted(namespace if isinstance(item, ModuleType) else set(_referenced_names(item)))
        for word in references:
            value = namespace.get(word)
            if _is_literal(value):
                if not isinstance(item, ModuleType):  # a module's source already contains its constants
                    yield f"{word} = {value!r}"
            elif directory is not None and _is_in(directory, value):
                waiting.append((word, value))


def _is_literal(value: Any) -> bool:
    """Whether repr(value) determines the value: an int, float or str, or a tuple of these."""
    if isinstance(value, tuple):
        return all(_is_literal(element) for element in value)
    return isinstance(value, int | float | str)


def _is_in(directory: Path, value: Any) -> bool:
    """Whether a module, function or class is defined under `directory`, site-packages excluded."""
    module = value if isinstance(value, ModuleType) else None
    if isinstance(value, FunctionType | type):
        module = sys.modules.get(value.__module__)
    home = _directory(module)
    if module is None or home is None or module.__name__.split(".")[0] == "steepen":
        return False
    installed = {"site-packages", "dist-packages"} & set(home.parts)
    return not installed and (home == directory or directory in home.parents)


def _directory(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve().parent


def _referenced_names(item: Any) -> Iterator[str]:
    """Names of globals that a function, or a class's methods and bases, refer to."""
    if isinstance(item, type):
        yield from (base.__name__ for base in item.__bases__)
        for value in vars(item).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield from _names_in_code(function.__code__)
    elif isinstance(item, FunctionType):
        yield from _names_in_code(item.__code__)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
