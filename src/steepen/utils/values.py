"""Types of options, and how their values are written as text: 100M, 2h, 2-6, loss=val_loss.

The fields of a request and the parameters of a study have them: `Annotated[Flops, Option("…")]`.
The same text is accepted on the command line, in Python and in JSON. A quantity that several verbs take has
its type here, so it has one range.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, Union

from steepen.errors import MAX_WHOLE
from steepen.utils.codec import Range

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_SECONDS = 36_500 * 86_400.0
MAX_DEPTH = 10_000
MAX_LIST = 10_000  # items that a range like 0-9999 may have


@dataclass(frozen=True)
class Text:
    """How a value is read from one word of text; `parse` raises ValueError for other text."""

    parse: Callable[[str], Any]
    accepted: str  # what the text may be, for errors
    metavar: str = "<str>"


def parse_number(text: str) -> float:
    """The number that a text such as 250000, 250_000, 2e9, 100M or 30B means."""
    words = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", words):  # 1,000 but not 6,12
        words = words.replace(",", "")
    factor = SUFFIXES.get(words[-1:].upper(), 1.0)
    if factor == 1.0:
        return int(words) if re.fullmatch(r"[+-]?\d{1,30}", words) else float(words)
    value = float(words[:-1]) * factor
    return round(value) if value.is_integer() else value


def parse_duration(text: str) -> float:
    """Seconds of a text such as 90s, 30m, 2h, 1d or 1h30m."""
    words = text.lower().replace(" ", "")
    value = sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", words))
    if not (re.fullmatch(r"([\d.]+[smhd])+", words) and 0 < value <= MAX_SECONDS):
        raise ValueError
    return value


def parse_device(text: str) -> str:
    """The name of a device, which this machine may lack."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise ValueError
    return text


def parse_words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_numbers(text: str) -> tuple[float, ...]:
    """The numbers of a list with commas."""
    return tuple(map(parse_number, parse_words(text)))


def parse_integers(text: str) -> tuple[int, ...]:
    """Integers and ranges, ends included (2,3,5; 0-2; 6-20:2), sorted and without repeats."""
    found: set[int] = set()
    for word in parse_words(text):
        match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?", word)
        if match is None:
            raise ValueError
        first, last, step = (int(part) if part else None for part in match.groups())
        assert first is not None
        if (last or first) < first or (last or first) > MAX_LIST or step == 0:
            raise ValueError
        found |= set(range(first, (last or first) + 1, step or 1))
    if not found:
        raise ValueError
    return tuple(sorted(found))


def parse_pairs(text: str) -> dict[str, str]:
    """{"loss": "val_loss", "arm": "method"} from `loss=val_loss,arm=method`."""
    found: dict[str, str] = {}
    for word in parse_words(text):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not (key and equals and value):
            raise ValueError
        found[key] = value
    return found


# Lists and pairs in one word of text; in Python a list, a tuple or a dict.
Words: TypeAlias = Annotated[tuple[str, ...], Text(parse_words, "words with commas, as a,b")]
Numbers: TypeAlias = Annotated[tuple[float, ...], Text(parse_numbers, "numbers with commas, as 6,12,24")]
Integers: TypeAlias = Annotated[
    tuple[int, ...],
    Text(parse_integers, f"a list like 2,3,5, a range like 0-2 or, with a step, 6-20:2, up to {MAX_LIST:,}"),
]
Pairs: TypeAlias = Annotated[
    dict[str, str], Text(parse_pairs, "pairs with commas, as loss=val_loss,arm=model")
]
Device: TypeAlias = Annotated[str, Text(parse_device, "auto, cpu, cuda or cuda:N")]
Duration: TypeAlias = Annotated[float, Text(parse_duration, "a time like 90s, 30m, 2h or 1d", "<time>")]

if typing.TYPE_CHECKING:
    Several: TypeAlias = Any  # editors accept one value too
else:
    Several = tuple[Any, ...]

# Quantities.
Flops: TypeAlias = Annotated[float, Range(1, 1e40)]
Count: TypeAlias = Annotated[int, Range(1, MAX_WHOLE)]
Tokens: TypeAlias = Count
Depth: TypeAlias = Annotated[int, Range(1, MAX_DEPTH)]
Seed: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
Decay: TypeAlias = Annotated[float, Range(0, 1, below=True)]  # of a running mean, per step
Noise: TypeAlias = Annotated[float, Range(1e-9, 100)]
Level: TypeAlias = Annotated[float, Range(1e-6, 0.5)]
Confidence: TypeAlias = Annotated[float, Range(0.01, 0.9999)]


def from_text(hint: Any, text: str) -> Any:
    """The value that a text means for a type; the text itself where it means none, to be rejected later.

    Raises ValueError, with what is accepted, for text that a `Text` does not read.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        reader = next((extra for extra in arguments[1:] if isinstance(extra, Text)), None)
        if reader is None:
            return from_text(arguments[0], text)
        try:
            return reader.parse(text)
        except (ValueError, KeyError, OverflowError):
            raise ValueError(reader.accepted) from None
    if origin in (Union, types.UnionType):
        choices = {word for option in arguments if typing.get_origin(option) is Literal
                   for word in typing.get_args(option)}  # fmt: skip
        others = [option for option in arguments if option is not types.NoneType]
        return text if text in choices else from_text(others[0], text)
    if origin is tuple and arguments[-1] is Ellipsis:  # one word of a repeated option
        return (from_text(arguments[0], text),)
    if hint in (int, float):
        try:
            return parse_number(text)
        except (ValueError, OverflowError):
            return text
    return text


def repeats(hint: Any) -> bool:
    """Whether an option of this type is repeated for several values: a tuple that one text does not hold."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(map(repeats, typing.get_args(hint)))
    return typing.get_origin(hint) is tuple


def metavar(hint: Any) -> str:
    """The kind of a value in `--help`: <float>, <path>; nothing for a flag."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        reader = next((extra for extra in arguments[1:] if isinstance(extra, Text)), None)
        return reader.metavar if reader else metavar(arguments[0])
    if origin in (Union, types.UnionType, tuple):
        return metavar(arguments[0])
    names: dict[Any, str] = {int: "<int>", float: "<float>", bool: ""}
    return names.get(hint, "<path>" if getattr(hint, "__name__", "") == "Path" else "<str>")
