"""A request: one verb, declared once as a frozen dataclass.

    @dataclass(frozen=True)
    class Power(Request[PowerResult]):
        '''Estimate the power of a planned ladder, and find the cheapest one.'''

        delta_gamma: Annotated[float, Range(-1, 1), Option("Expected difference in exponent.")]
        _: KW_ONLY
        rungs: int = LADDER("Rungs of each ladder.", 8, Range(3, 1_000))

        def run(self) -> PowerResult: ...

Derived from the fields: the command and its help (`app.py`), the Python function (`function`), the checks
when a request is constructed, JSON (`to_dict`, `decode`), and the reference pages of the documentation.

A field is named in backticks in help, docstrings and errors (`delta_gamma`); the command line prints the
option's name there (--delta-gamma).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, ParamSpec, TypeVar, cast

from steepen.errors import UsageError, nearest, show
from steepen.utils.codec import HelpPanel, Option, to_builtins
from steepen.utils.codec import decode as decode_value
from steepen.utils.formatting import wrap_to_terminal
from steepen.utils.values import from_text, repeats

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
OUTPUT = HelpPanel("Output")  # the options that every command has


@dataclass(frozen=True)
class Argument(Option):
    """A field that the command line takes by position."""


@dataclass(frozen=True)
class Field:
    """A field of a request, with everything that is derived from it."""

    name: str
    hint: Any  # the type without `Option`
    option: Option
    default: Any  # dataclasses.MISSING where it is required
    keyword_only: bool

    @property
    def required(self) -> bool:
        """Whether the request cannot be constructed without it."""
        return self.default is dataclasses.MISSING

    @property
    def flags(self) -> list[str]:
        """Its names on the command line, the long one first."""
        own = self.option.flag.split()
        long = [flag for flag in own if flag.startswith("--")] or [f"--{self.name.replace('_', '-')}"]
        return [*long, *(flag for flag in own if not flag.startswith("--"))]


class Request(ABC, Generic[R_co]):
    """Base of all requests. Text is converted and every value checked where the request is constructed."""

    examples: ClassVar[tuple[str, ...]] = ()  # commands that `--help` shows
    figure: ClassVar[bool] = False  # whether the command takes --figure: the result has panels
    tables: ClassVar[bool] = False  # whether the command takes --write-result
    first_panel: ClassVar[str] = ""  # of `--help`, where it is not that of the first field

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            object.__setattr__(self, field.name, _converted(field, getattr(self, field.name)))
        self.check()

    def check(self) -> None:
        """Raise UsageError for fields that do not go together; each by itself is valid."""

    @abstractmethod
    def run(self) -> R_co:
        """Do what is asked, and return the result."""

    def run_in_worker(self) -> Any:
        """Do what is asked, in a process that another one has started; returns the JSON of the result."""
        return cast("Any", self.run()).to_dict()

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """What the command does: `run`, whose result it prints; None from a verb that has printed it.

        With `as_json` the result is printed as JSON, and nothing else to standard output.
        """
        return self.run()

    @classmethod
    def verb_name(cls) -> str:
        """The words of its verb, on the command line and in JSON."""
        from steepen.requests.registry import verb_of

        return verb_of(cls).name

    @classmethod
    def check_words(cls, words: Sequence[str]) -> None:
        """Raise UsageError for words of the command line that need a better answer than "no such option"."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `requests.decode` reads; raises UsageError for a table or arm in memory."""
        value: dict[str, Any] = {"request": self.verb_name()}
        for field in fields_of(type(self)):
            own = getattr(self, field.name)
            value[field.name] = to_builtins(own)
            try:
                json.dumps(value[field.name])
            except TypeError:
                raise UsageError(
                    f"`{field.name}` is a {type(own).__name__} in memory, which JSON cannot hold; write it "
                    "to a file and give its path, or name it module:attribute."
                ) from None
        return value


def option_fields(kind: type) -> Iterator[Field]:
    """The fields of a dataclass that are options."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(cast("Any", kind)):
        hint = hints[field.name]
        inner, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        found = [one for one in (*extras, field.metadata.get("option")) if isinstance(one, Option)]
        if found:
            rest = [extra for extra in (*extras, field.metadata.get("limits")) if extra not in (None, *found)]
            hint = Annotated[(inner, *rest)] if rest else inner  # pyright: ignore[reportInvalidTypeForm]
            yield Field(field.name, hint, found[0], field.default, bool(field.kw_only))


@functools.cache
def fields_of(kind: type[Request[Any]]) -> tuple[Field, ...]:
    """The fields of a request, in the order of its signature."""
    return tuple(sorted(option_fields(kind), key=lambda one: one.keyword_only))


def function(kind: Callable[P, Request[R]]) -> Callable[P, R]:
    """The Python function of a request: its parameters are the fields, its result is what `run` returns."""
    request = cast("type[Request[R]]", kind)
    known = {field.name for field in fields_of(request)}
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", request.__name__).lower()

    def call(*args: P.args, **keywords: P.kwargs) -> R:
        unknown = next((word for word in keywords if word not in known), None)
        if unknown is not None:
            raise UsageError(f"{name} has no setting {unknown!r}; the nearest are {nearest(unknown, known)}.")
        return kind(*args, **keywords).run()

    call.__name__ = call.__qualname__ = name
    call.__module__ = "steepen"
    call.__doc__ = _docstring(request)
    parameter = inspect.Parameter
    call.__dict__["__signature__"] = inspect.Signature(
        [
            parameter(
                one.name,
                parameter.KEYWORD_ONLY if one.keyword_only else parameter.POSITIONAL_OR_KEYWORD,
                default=parameter.empty if one.required else one.default,
                annotation=_TypeName(type_name(one.hint)),
            )
            for one in fields_of(request)
        ]
    )
    call.__dict__["request"] = request
    return call


def decode(value: Mapping[str, Any]) -> Request[Any]:
    """The request that `to_dict` wrote; raises UsageError for an unknown verb or field, or a bad value."""
    from steepen.requests.registry import load

    fields = dict(value)
    kind = load(str(fields.pop("request", "")))
    known = [field.name for field in fields_of(kind)]
    for name in fields:
        if name not in known:
            raise UsageError(
                f"a request to {value['request']} has no field {show(name)}; the nearest are "
                f"{nearest(str(name), known)}."
            )
    missing = [field.name for field in fields_of(kind) if field.required and field.name not in fields]
    if missing:
        raise UsageError(f"a request to {value['request']} lacks the field {missing[0]!r}.")
    return kind(**fields)


def replace_fields(text: str, replacement: Callable[[str], str | None]) -> str:
    """The text with what `replacement` gives for each name in backticks; None leaves the name as it is."""

    def found(match: re.Match[str]) -> str:
        new = replacement(match[1])
        return match[0] if new is None else new + (" " if match[2] else "")

    return re.sub(r"`(\w+)`( = )?", found, text)


def with_flags(kind: type[Request[Any]], text: str) -> str:
    """A text with the names of options in place of fields in backticks."""
    names = {
        one.name: one.option.metavar or one.name.upper() if isinstance(one.option, Argument) else one.flags[0]
        for one in fields_of(kind)
    }
    return replace_fields(text, names.get)


def print_notes(kind: type[Request[Any]], notes: Iterable[str]) -> None:
    """Print remarks on a result to standard error, with the names of options."""
    for note in notes:
        print_to_stderr(f"note: {with_flags(kind, note)}")


def print_to_stderr(sentence: str) -> None:
    """Print a sentence to standard error, wrapped to the terminal."""
    print(wrap_to_terminal(sentence, sys.stderr), file=sys.stderr)


def _converted(field: Field, value: Any) -> Any:
    """A field's value in its type, from text where it is text; a field that is left at None stays so."""
    if value is None and field.default is None:
        return None
    if repeats(field.hint) and isinstance(value, Mapping):  # KEY=VALUE options as a dict
        value = [f"{key}={one}" for key, one in cast("Mapping[str, Any]", value).items()]
    if repeats(field.hint) and not isinstance(value, str | list | tuple):
        value = (value,)
    try:
        if isinstance(value, str):
            value = from_text(field.hint, value)
        elif isinstance(value, list | tuple):
            inner = typing.get_args(_plain(field.hint))[:1]
            value = tuple(
                from_text(inner[0], one) if inner and isinstance(one, str) else one for one in value
            )
    except ValueError as error:
        raise UsageError(f"`{field.name}` = {show(value)} is not valid: it must be {error}.") from None
    return decode_value(field.hint, value, f"`{field.name}`")


def _plain(hint: Any) -> Any:
    """The type inside `Annotated`, and without None."""
    if typing.get_origin(hint) is Annotated:
        return _plain(typing.get_args(hint)[0])
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    is_union = type(None) in typing.get_args(hint)
    return _plain(options[0]) if is_union and len(options) == 1 else hint


def type_name(hint: Any) -> str:
    """A type as documentation shows it, without ranges: `float | None`, `"joint" | "paper"`."""
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is typing.Literal:
        return " | ".join(f'"{word}"' for word in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("None" if one is type(None) else type_name(one) for one in arguments)
    if arguments:
        return f"{origin.__name__}[{', '.join('...' if one is ... else type_name(one) for one in arguments)}]"
    return "Any" if plain in (Any, object) else plain.__name__


def _docstring(kind: type[Request[Any]]) -> str:
    lines = [inspect.cleandoc(kind.__doc__ or ""), "", "Parameters:"]
    for field in fields_of(kind):
        text = " ".join([field.option.help, field.option.python]).strip()
        lines += textwrap.wrap(f"{field.name} ({type_name(field.hint)}): {text}", 100, initial_indent="    ",
                               subsequent_indent="        ")  # fmt: skip
    return "\n".join(lines)


class _TypeName(str):
    """A type in a signature, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)
