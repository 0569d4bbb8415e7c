"""How a study was measured, from its records: how many runs, on what, with which data."""

from __future__ import annotations

from collections.abc import Sequence

from steepen.runs.record import RunRecord
from steepen.utils.formatting import format_value


def provenance_rows(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(name, value) rows: runs, compute, time, depths, seeds, data, hardware, versions."""
    if not records:
        return []
    specs = [record.spec for record in records]
    hours = sum(record.seconds_training for record in records) / 3600
    rows = [
        ("runs", format_value(len(records))),
        ("training compute", f"{format_value(sum(r.flops for r in records), 3)} FLOPs in all"),
        (
            "training time",
            f"{format_value(hours, 3)} hours in all"
            if hours >= 1
            else f"{format_value(60 * hours, 3)} minutes in all",
        ),
        ("depths", _each(sorted({spec.shape.depth for spec in specs}))),
        ("seeds", _each(sorted({spec.seed for spec in specs}))),
        ("precision", _each(sorted({spec.precision for spec in specs}))),
        ("data", _each(sorted({spec.data.identity for spec in specs}))),
        ("validation set", _each(sorted({record.validation_identity for record in records}))),
        ("hardware", _each(sorted({_hardware(record) for record in records}))),
        ("versions", _each(sorted({_versions(record) for record in records}))),
    ]
    return [(name, value) for name, value in rows if value]


def run_title(record: RunRecord) -> str:
    """A short title of a run: depth, seed and tokens."""
    spec = record.spec
    return f"d{spec.shape.depth}, seed {spec.seed}, {format_value(float(spec.tokens), 3)} tokens"


def _each(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _hardware(record: RunRecord) -> str:
    return ", ".join(f"{key} {format_value(value)}" for key, value in record.hardware.items())


def _versions(record: RunRecord) -> str:
    return ", ".join(f"{key} {value}" for key, value in record.versions.items())
