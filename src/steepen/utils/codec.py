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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union

from steepen.errors import UsageError, nearest, shorten, show

T = TypeVar("T")
Decoder = Callable[[Any], Any]


@dataclass(frozen=True)
class Range:
    """Limits of a number, both included unless it says otherwise: `Annotated[int, Range(1, 512)]`."""

    low: float
    high: float
    above: bool = False  # `low` itself is excluded
    below: bool = False  # `high` itself is excluded

    def __str__(self) -> str:
        ends = ((self.low, self.above), (self.high, self.below))
        return " to ".join(
            (f"{end:,}" if isinstance(end, int) else f"{end:g}") + " (excluded)" * excluded
            for end, excluded in ends
        )

    def holds(self, number: float) -> bool:
        """Whether a number keeps the limits; NaN does not."""
        above = self.low < number if self.above else self.low <= number
        return above and (number < self.high if self.below else number <= self.high)


@dataclass(frozen=True)
class Distinct:
    """Limits of a list: different items, so many at least; `Annotated[tuple[int, ...], Distinct(3)]`."""

    least: int = 1
    rising: bool = False

    def __str__(self) -> str:
        order = ", in rising order" if self.rising else ""
        return f"a list without repeats, of at least {self.least}{order}"

    def holds(self, items: Any) -> bool:
        """Whether a list keeps the limits."""
        enough = len(items) >= self.least and len(set(items)) == len(items)
        return enough and (not self.rising or list(items) == sorted(items))


@dataclass(frozen=True)
class OneOf:
    """Names that a text may be, after `spelled` has replaced other spellings by them."""

    names: tuple[str, ...]
    spelled: Callable[[str], str] = str

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    def holds(self, name: Any) -> bool:
        """Whether it is one of the names."""
        return name in self.names


@dataclass(frozen=True)
class Option:
    """How a field is shown and given: what it means, its panel in `--help`, its name on the command line."""

    help: str
    panel: str = "Options"
    flag: str = ""  # other than the field's name: "--from", "-j"; several with spaces
    shown: str = ""  # what help shows as the default, where the field's own (None) says nothing
    python: str = ""  # what Python accepts besides, for its documentation
    metavar: str = ""


class HelpPanel(str):
    """The name of a panel of `--help`. Called, it makes a field with a default that is an option there."""

    @typing.overload
    def __call__(self, help: str, *, limits: Range | None = None, **more: str) -> None: ...
    @typing.overload
    def __call__(self, help: str, default: T, limits: Range | None = None, **more: str) -> T: ...
    def __call__(self, help: str, default: Any = None, limits: Range | None = None, **more: str) -> Any:
        """The field; `more` are the other fields of `Option`."""
        found = Option(help, self, **more)
        return dataclasses.field(default=default, metadata={"option": found, "limits": limits})


option = HelpPanel("Options")


class _InvalidValue(UsageError):
    """A value of the wrong type or range; enclosing decoders prepend their part of the field's path."""

    def __init__(self, message: str, accepted: str = "") -> None:
        super().__init__(message)
        self.path, self.message, self.accepted = "", message, accepted


def to_builtins(value: Any) -> Any:
    """A dataclass as nested dicts and lists, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for field in _stored_fields(value):
            item = to_builtins(getattr(value, field.name))
            found |= item if field.metadata.get("rest") else {field.name: item}
        return found
    if isinstance(value, tuple | list):
        return [to_builtins(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_builtins(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _stored_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that JSON holds: all but those with the metadata "transient"."""
    return [field for field in dataclasses.fields(kind) if not field.metadata.get("transient")]


def from_builtins(kind: type[T], value: Any, where: str = "") -> T:
    """Inverse of `to_builtins`; raises UsageError with the path of a wrong field."""
    return typing.cast("T", decode(kind, value, where or kind.__name__))


def decode(hint: Any, value: Any, where: str) -> Any:
    """A value of the type that an annotation names; raises UsageError that begins with `where`."""
    try:
        return _decoder(hint)(value)
    except _InvalidValue as invalid:
        raise UsageError(f"{where}{invalid.path} {invalid.message}") from None


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:])
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
    if kind is Path:
        return lambda value: Path(value) if isinstance(value, str | Path) else _reject(value, "a path")
    nouns: dict[Any, str] = {str: "text", bool: "true or false"}
    return _exact_type(kind, nouns[kind])


def check_fields(value: Any) -> None:
    """Check and convert every field of a frozen dataclass by its annotation, in its `__post_init__`."""
    kind = type(value)
    for name, decoder in _field_decoders(kind).items():
        try:
            object.__setattr__(value, name, decoder(getattr(value, name)))
        except _InvalidValue as invalid:
            raise UsageError(f"{kind.__name__}.{name}{invalid.path} {invalid.message}") from None


class Checked:
    """Base of frozen dataclasses whose fields are checked by their annotations at construction."""

    def __post_init__(self) -> None:
        check_fields(self)


@functools.cache
def _field_decoders(kind: type) -> dict[str, Decoder]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _decoder(hints[field.name]) for field in _stored_fields(kind)}


def _annotated(kind: Any, extras: tuple[Any, ...]) -> Decoder:
    """Decode the type itself, then apply limits; what else is annotated says how the value is shown."""
    inner = _decoder(kind)
    limits = next((extra for extra in extras if isinstance(extra, Range | Distinct | OneOf)), None)
    if limits is None:
        return inner
    accepted = str(limits)
    if isinstance(limits, Range):
        whole = int in (kind, *typing.get_args(kind))
        accepted = f"a {'whole ' if whole else ''}number from {limits}"

    def decode(value: Any) -> Any:
        found: Any = inner(value)
        if isinstance(limits, OneOf):
            found = limits.spelled(found)
        # None and words (auto) are allowed by the type of a number, and have no limits.
        free = isinstance(limits, Range) and not isinstance(found, int | float)
        return found if free or limits.holds(found) else _reject(value, accepted)

    return decode


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
    fields = {field.name: field for field in _stored_fields(kind)}
    # A field with the metadata "rest" takes the names that are no fields; the class checks them.
    rest = next((name for name, field in fields.items() if field.metadata.get("rest")), "")
    names = [name for name in fields if name != rest]
    decoders = [(name, _field_decoders(kind)[name]) for name in names]
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
            if name not in known and not rest:
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
        if rest:
            arguments[rest] = {str(name): item for name, item in value.items() if name not in known}
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
        errors: list[UsageError] = []
        for decoder in decoders:
            try:
                return decoder(value)
            except UsageError as problem:
                errors.append(problem)
        accepted = [
            problem.accepted for problem in errors if isinstance(problem, _InvalidValue) and not problem.path
        ]
        if len(accepted) == len(errors) > 1 and all(accepted):  # each rejects the value itself
            _reject(value, " or ".join(accepted))
        raise errors[-1]

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
    raise _InvalidValue(f"= {show(value)} is not valid: it must be {accepted}.", accepted)
