"""Runs with the CORE scores in their records, as `eval filter` and `forecast` read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError, UsageError


@dataclass(frozen=True)
class Scored:
    """What the commands need of a run: who, how much training, and the scores of its tasks."""

    run: str
    arm: str
    depth: int
    tokens: float
    flops: float
    core: dict[str, Any]

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Scores by task label."""
        return self.core["tasks"]

    def mean_centered(self, labels: Sequence[str]) -> float:
        """Mean centred accuracy of some tasks."""
        return sum(float(self.tasks[label]["centered"]) for label in labels) / len(labels)


def read_scored(paths: Sequence[Path]) -> list[Scored]:
    """The runs with CORE scores among stores, run directories and record files, by compute."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif (path / "record.json").is_file():
            files.append(path / "record.json")
        elif path.is_dir():
            files += sorted(path.glob("*/record.json"))
        else:
            raise UsageError(f"{path} does not exist; give a store, a run directory or a record.json.")
    found = [scored for file in dict.fromkeys(files) if (scored := _read(file)) is not None]
    if not found:
        raise UsageError(
            f"none of the {len(files)} records has CORE scores; "
            "`steepen eval RUN --data … --core …` joins them."
        )
    return sorted(found, key=lambda scored: scored.flops)


def by_arm(runs: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Runs grouped by their arm, in order of compute; an arm is one series."""
    groups: dict[str, list[Scored]] = {}
    for run in runs:
        groups.setdefault(run.arm, []).append(run)
    return groups


def _read(file: Path) -> Scored | None:
    from steepen.runs.record import RunRecord

    try:
        record = RunRecord.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError, SteepenError) as error:
        raise SteepenError(f"the record {file} cannot be read ({error}).") from error
    core = record.evaluation.get("core")
    if core is None:
        return None
    spec = record.spec
    return Scored(record.run, spec.arm.name, spec.shape.depth, record.tokens, record.flops, core)
