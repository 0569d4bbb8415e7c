"""Reads metrics.jsonl, one line per logged step and validation, and samples.jsonl, one per sampled text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steepen.errors import is_whole
from steepen.utils.files import read_file
from steepen.utils.formatting import is_number

TEXTS = frozenset({"prompt", "text"})  # fields of a sample


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, one dict per line; damaged lines, as a killed process leaves, are dropped."""
    return read_lines(path)[0]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl with step, prompt and text, in order; empty if there is no such file."""
    lines, _ = read_lines(path)
    return [
        line for line in lines if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str)
    ]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines that have a step and only numbers (and texts, of samples); how many others before the last."""
    try:
        texts = read_file(path).split(b"\n")
    except FileNotFoundError:
        return [], 0
    lines: list[dict[str, Any]] = []
    damaged = 0
    for number, text in enumerate(texts):
        value = _parse(text)
        if value is not None:
            lines.append(value)
        elif number < len(texts) - 1:  # a killed process cuts the last line short
            damaged += 1
    return lines, damaged


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not is_whole(value.get("step")):
        return None
    good = (isinstance(item, str) if name in TEXTS else is_number(item) for name, item in value.items())
    return value if all(good) else None
