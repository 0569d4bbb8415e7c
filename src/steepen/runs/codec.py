"""Frozen dataclasses to plain JSON values and back, with errors that name the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar, Union

from steepen.errors import UsageError, nearest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A dataclass as nested dicts and lists, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def from_plain(kind: type[T], value: Any, where: str = "") -> T:
    """The dataclass that `to_plain` made `value` of; a wrong field is refused by name."""
    return typing.cast("T", _decode(kind, value, where or kind.__name__))


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    if origin is Literal:
        return _expect(value in arguments, value, where, f"one of {', '.join(map(repr, arguments))}")
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin is tuple:
        _expect(isinstance(value, list | tuple), value, where, "a list")
        if arguments[-1] is Ellipsis:
            return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        _expect(len(value) == len(arguments), value, where, f"a list of {len(arguments)}")
        pairs = zip(arguments, value, strict=True)
        return tuple(_decode(one, item, f"{where}[{i}]") for i, (one, item) in enumerate(pairs))
    if origin in (dict, list):
        return _expect(isinstance(value, origin), value, where, "an object" if origin is dict else "a list")
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_expect(number, value, where, "a number"))
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return _expect(whole, value, where, "a whole number")
    plain: dict[Any, str] = {str: "text", bool: "true or false"}
    return _expect(type(value) is kind, value, where, plain[kind])


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, where, "an object with fields")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise UsageError(f"{where} has no field {name!r}; the nearest are {nearest(name, fields)}.")
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where} lacks the field {name!r}.")
    return kind(**arguments)


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    rest = [option for option in options if option is not types.NoneType]
    error: UsageError | None = None
    for option in rest:
        try:
            return _decode(option, value, where)
        except UsageError as problem:
            error = problem
    assert error is not None
    raise error


def _expect(holds: bool, value: Any, where: str, accepted: str) -> Any:
    if not holds:
        raise UsageError(f"{where} = {value!r} is not valid: it must be {accepted}.")
    return value
