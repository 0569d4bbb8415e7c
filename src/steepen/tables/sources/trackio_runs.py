"""Runs of Trackio, from its local database (TRACKIO_DIR)."""

from __future__ import annotations

import contextlib
import sys

from steepen.tables.sources.tracked_runs import TrackedRun, by_metric, flat, import_tracker


def read(place: str) -> list[TrackedRun]:
    """The runs of a project."""
    source = f"trackio:{place}"
    with contextlib.redirect_stdout(sys.stderr):  # it prints while it is imported
        api = import_tracker("trackio", "trackio", source).Api()
        storage = import_tracker("trackio.sqlite_storage", "trackio", source).SQLiteStorage
    found: list[TrackedRun] = []
    for run in api.runs(place):
        logs = storage.get_logs(place, run.name, run_id=run.id)
        points = by_metric((int(row.get("step") or 0), row) for row in logs)
        points.pop("step", None)
        found.append(
            TrackedRun(
                run.name, flat(run.config or {}), list(points), lambda key, own=points: own.get(key, [])
            )
        )
    return found
