"""metrics.jsonl: one line per step, and one per validation. A log to look at; analysis reads records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line; what a killed process left of its last line is passed over."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


class Metrics:
    """Appends lines; opened at a step, it first drops what was logged after that step."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        self.path = path
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self.losses = [line["loss"] for line in kept if "loss" in line]
        self.file: TextIO = path.open("a")

    def write(self, **values: Any) -> None:
        """Add a line."""
        if "loss" in values:
            self.losses.append(values["loss"])
        self.file.write(json.dumps(values) + "\n")

    def sync(self) -> None:
        """Have all lines on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Have all lines on disk and let go of the file."""
        self.sync()
        self.file.close()
