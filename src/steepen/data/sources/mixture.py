"""Mixtures of sources by shares of the tokens: `web=0.7,code=0.2`, or a YAML file.

    web:                       # the name, by which validation losses are reported
      source: fineweb-edu:sample-10BT
      weight: 0.7
    code:
      source: corpus/code      # files, hf:OWNER/NAME, builtin, module:attribute, as for a single source
      weight: 0.3
      field: content           # how this source is read: field, format, separator, replace_invalid
      repeat: 4                # read at most so many times; 1 if not given

Paths are relative to the working directory.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import yaml

from steepen.data.sources.hub import REPOSITORIES
from steepen.data.sources.readers import ReadOptions
from steepen.errors import SteepenError, UsageError, require, require_positive, shorten
from steepen.utils.codec import from_builtins
from steepen.utils.expression import number_of
from steepen.utils.files import read_text
from steepen.utils.yaml_io import load_yaml

MAX_SOURCES = 256  # a byte tells which source a validation document is from
MAX_REPEAT = 1000
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture: its share of the tokens, how it is read and how often at most."""

    source: str
    weight: float
    repeat: int = 1
    read_options: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        require_positive(self, ("repeat",), MAX_REPEAT)
        good = 0 < self.weight < math.inf
        require(good, f"source {shorten(self.source)!r}", "weight", self.weight, "a number above 0")


def parse_mixture(text: str, options: ReadOptions) -> dict[str, MixedSource]:
    """The sources of a YAML file or of SOURCE=WEIGHT pairs by their names, weights adding up to 1.

    `options` is how sources are read of which the mixture does not say it.
    """
    entries = _read(Path(text)) if text.endswith((".yaml", ".yml")) else _pairs(text)
    reading = {each.name for each in fields(ReadOptions)}
    found: dict[str, MixedSource] = {}
    for name, entry in entries.items():
        own = {key: entry[key] for key in reading & entry.keys()}
        rest = {key: value for key, value in entry.items() if key not in own}
        found[name] = from_builtins(
            MixedSource, {**rest, "read_options": {**asdict(options), **own}}, f"mixture.{name}"
        )
    if not 2 <= len(found) <= MAX_SOURCES:
        raise UsageError(f"a mixture of {len(found)} sources; it takes 2 to {MAX_SOURCES}.")
    total = sum(each.weight for each in found.values())
    return {name: replace(each, weight=each.weight / total) for name, each in found.items()}


def _pairs(text: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for pair in text.split(","):
        source, _, weight = (part.strip() for part in pair.rpartition("="))
        name, share = _short_name(source), number_of(weight)
        if not source or share is None or math.isnan(share) or name in entries:
            raise UsageError(
                f"`mix` {shorten(text)!r} is not a mixture: write SOURCE=WEIGHT,SOURCE=WEIGHT, or name a "
                "YAML file, in which sources that would have the same name have names of their own."
            )
        entries[name] = {"source": source, "weight": share}
    return entries


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).split("\n")[0]
        raise SteepenError(f"the mixture {path} cannot be read ({reason}).") from None
    entries = cast("dict[Any, Any]", content) if isinstance(content, dict) else {}
    if not entries or not all(isinstance(entry, dict) for entry in entries.values()):
        raise UsageError(f"{path} is not a mixture: every name in it needs a `source` and a `weight`.")
    for name in entries:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UsageError(
                f"{path} names a source {shorten(str(name))!r}; a name has letters, digits, _, . and -."
            )
    return entries


def _short_name(source: str) -> str:
    """A name for a source: fineweb, NAME of hf:OWNER/NAME, or the last word of a path (web: web/*.txt)."""
    kind, _, rest = source.partition(":")
    if kind in REPOSITORIES and kind != "hf":
        return kind
    if kind == "hf":
        return re.split("[:@]", rest)[0].rpartition("/")[2]
    words = re.findall(r"[A-Za-z0-9][\w-]*", re.sub(r"\.[a-z]\w*(\.\w+)?$", "", source))
    return words[-1] if words else source
