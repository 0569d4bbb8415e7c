"""Extension points: "module:attribute" to an object and back, and the digest of custom source code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Container, Generator, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from steepen.errors import UsageError, first_line, shorten

MODULE_ATTRIBUTE = re.compile(r"([^\W\d]\w*(?:\.\w+)*):[^\W\d]\w*(?:\.\w+)*")

# Names that may be imported, and modules of which every own object may be; None: any, as in a Python program,
# which chooses its own names.
_trusted: set[str] | None = None
_EVERYTHING = "*"


@contextlib.contextmanager
def code_from(words: Iterable[str], *, trust_all: bool = False) -> Generator[None]:
    """Import only what is named as module:attribute in the words of a command line, or everything.

    Names also come from files (specs, presets, recipes, run directories), which others may have written.
    """
    global _trusted  # noqa: PLW0603  (one command line per process)
    before = _trusted
    _trusted = {_EVERYTHING} if trust_all else set()
    trust_code(part.strip() for word in words for part in re.split("[=,]", word))
    try:
        yield
    finally:
        _trusted = before


def trust_code(names: Iterable[str]) -> None:
    """Trust these names and what their modules define: those that trusted code itself refers to."""
    for match in filter(None, map(MODULE_ATTRIBUTE.fullmatch, names)):
        if _trusted is not None:
            _trusted.update(match.group(0, 1))


def import_object(name: str, what: str, *, own: Container[str] = (), values: type | None = None) -> object:
    """Import the object "module:attribute"; `what` ("arm", "block", …) is used in the error message.

    `own` are names of steepen's objects that a file may give here. Of a module that the command line names, a
    file may give functions and classes which that module defines, and its objects of the type `values`.
    """
    module, _, attribute = name.partition(":")
    named = _trusted is None or name in own or bool({name, _EVERYTHING} & _trusted)
    if not named and module not in (_trusted or ()):
        raise UsageError(
            f"the {what} {shorten(name)!r} is named in a file, and loading it would run the code of its "
            "module; add --trust-code if you trust that code."
        )
    try:
        found: object = _import_module(module)
        for part in attribute.split(".") if named else ():
            found = getattr(found, part)
    except Exception as error:  # whatever the user's module does when it is imported
        raise UsageError(f"the {what} {name!r} could not be loaded: {first_line(error)}.") from error
    if named:
        return found
    found = vars(found).get(attribute)  # no dotted names: they lead to other modules and to builtins
    home = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
    if home == (module, attribute) or (values is not None and isinstance(found, values)):
        return found
    raise UsageError(
        f"the {what} {shorten(name)!r} is named in a file, and {module} does not define it itself; "
        "add --trust-code if you trust that code."
    )


def _import_module(name: str) -> object:
    """The module of this name; of a command line, also one in the current directory."""
    # At the end of the path, and only now: it never replaces an installed or optional module.
    if _trusted is not None and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


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
