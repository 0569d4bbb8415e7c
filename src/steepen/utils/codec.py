"""Convert frozen dataclasses to JSON values and back, with errors that name the field.

Each type's decoder is built once from its annotations and cached. The path to a wrong field is assembled
only when an error is raised.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar, Union

from steepen.errors import UsageError, nearest, shorten, show

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class _InvalidValue(UsageError):
    """A value of the wrong type or range; enclosing decoders prepend their part of the field's path."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path, self.message = "", message


def to_builtins(value: Any) -> Any:
    """A dataclass as nested dicts and lists, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_builtins(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_builtins(item) for key, item in value.items()}
    return value


def from_builtins(kind: type[T], value: Any, where: str = "") -> T:
    """Inverse of `to_builtins`; raises UsageError with the path of a wrong field."""
    try:
        return typing.cast("T", _decoder(kind)(value))
    except _InvalidValue as invalid:
        raise UsageError(f"{where or kind.__name__}{invalid.path} {invalid.message}") from None


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind)
    if origin is Literal:
        accepted = f"one of {', '.join(map(repr, arguments))}"
        # Only text and numbers are compared: a list is never one of them, and `in` would walk through it.
        return lambda value: (
            value if isinstance(value, str | int) and value in arguments else _reject(value, accepted)
        )
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is dict:
        return _exact_type(dict, "an object") if arguments[1] is Any else _dict(_decoder(arguments[1]))
    if origin is list:
        return _exact_type(list, "a list")
    if kind in (float, int):
        return _float if kind is float else _int
    nouns: dict[Any, str] = {str: "text", bool: "true or false"}
    return _exact_type(kind, nouns[kind])


def _exact_type(kind: Any, noun: str) -> Decoder:
    return lambda value: value if type(value) is kind else _reject(value, noun)


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            _reject("a number of too many digits", "a number")
    _reject(value, "a number")


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    _reject(value, "a whole number")


def _dataclass(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    decoders = [(name, _decoder(hints[name])) for name in names]
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    known = set(names)
    aliases: dict[str, str] = dict(getattr(kind, "ALIASES", {}))  # other spellings of fields, in lower case

    def decode(value: Any) -> Any:
        if type(value) is kind:  # decoded already
            return value
        if not isinstance(value, dict):
            _reject(value, "an object with fields")
        if aliases:
            value = _without_aliases(value, aliases)
        for name in value:
            if name not in known:
                raise _InvalidValue(
                    f"has no field {show(name)}; the nearest are {nearest(str(name), names)}."
                )
        arguments: dict[str, Any] = {}
        name = ""
        try:
            for name, decoder in decoders:
                if name in value:
                    arguments[name] = decoder(value[name])
        except _InvalidValue as invalid:
            invalid.path = f".{name}{invalid.path}"
            raise
        if not needed <= arguments.keys():
            missing = next(name for name in names if name in needed and name not in arguments)
            raise _InvalidValue(f"lacks the field {missing!r}.")
        return kind(**arguments)

    return decode


def _without_aliases(value: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Replace aliases by field names; raises if a field is given under two names."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        own = aliases.get(str(name).lower(), name)
        if own in found:
            raise _InvalidValue(f"has {own!r} twice, once as {show(name)}.")
        found[own] = item
    return found


def _union(options: tuple[Any, ...]) -> Decoder:
    nothing = types.NoneType in options
    decoders = [_decoder(option) for option in options if option is not types.NoneType]

    def decode(value: Any) -> Any:
        if value is None and nothing:
            return None
        error: UsageError | None = None
        for decoder in decoders:
            try:
                return decoder(value)
            except UsageError as problem:
                error = problem
        assert error is not None
        raise error

    return decode


def _tuple(arguments: tuple[Any, ...]) -> Decoder:
    repeated = arguments[-1] is Ellipsis
    decoders = [_decoder(argument) for argument in arguments if argument is not Ellipsis]

    def decode(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            _reject(value, "a list")
        if not repeated and len(value) != len(decoders):
            _reject(value, f"a list of {len(decoders)}")
        items: list[Any] = []
        try:
            for index, item in enumerate(value):
                items.append(decoders[0 if repeated else index](item))
        except _InvalidValue as invalid:
            invalid.path = f"[{len(items)}]{invalid.path}"
            raise
        return tuple(items)

    return decode


def _dict(decoder: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            _reject(value, "an object")
        items: dict[Any, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                items[key] = decoder(item)
        except _InvalidValue as invalid:
            invalid.path = f".{shorten(str(key))}{invalid.path}"
            raise
        return items

    return decode


def _reject(value: Any, accepted: str) -> NoReturn:
    raise _InvalidValue(f"= {show(value)} is not valid: it must be {accepted}.")
