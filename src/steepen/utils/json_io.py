"""JSON: strict text of results, canonical text for hashes, and atomic JSON files."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, cast

from steepen.utils.files import read_file, write_atomically

CHECKSUM = "checksum"


def json_safe(value: Any) -> Any:
    """Nested dicts, lists and scalars for strict JSON: arrays as lists, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in cast("list[Any]", value)]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return json_safe(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(data: Any, indent: int | None = 2) -> str:
    """Strict JSON text of `data`; NaN and infinities, which JSON cannot express, are written as null."""
    return json.dumps(json_safe(data), indent=indent, ensure_ascii=False)


def canonical_json(value: Any) -> bytes:
    """Canonical JSON encoding for hashes: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text; raises ValueError for anything else, also for absurd nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises OSError (see `read_file`) or ValueError."""
    return parse_json(read_file(path))


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """The value with the field "checksum", the SHA-256 of the others; it reveals damage, not forgery."""
    # As it is read back: keys that are not text become text, and sort as such.
    content = {**json.loads(json.dumps(value))}
    content.pop(CHECKSUM, None)
    return {**content, CHECKSUM: _sha256(content)}


def without_checksum(value: Any, *, required: bool = False) -> Any:
    """The value without its checksum; raises ValueError if that is wrong, or missing where `required`."""
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    if CHECKSUM not in found:
        if required:
            raise ValueError("it has no checksum")
        return found
    content = {name: item for name, item in found.items() if name != CHECKSUM}
    if _sha256(content) != found[CHECKSUM]:
        raise ValueError("its checksum does not match its content")
    return content


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically. NaN is kept as NaN: Python reads it back."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
