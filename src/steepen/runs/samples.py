"""Reads samples.jsonl: texts that a run generated while it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steepen.runs.metrics import read_lines


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl with step, prompt and text, in order; empty if there is no such file."""
    lines, _ = read_lines(path)
    return [
        line for line in lines if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str)
    ]
