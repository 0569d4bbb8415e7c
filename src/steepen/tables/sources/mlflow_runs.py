"""Runs of MLflow: of a tracking server, of a database file, and of a folder mlruns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.tables.sources.tracked_runs import Points, TrackedRun, import_tracker

PAGE = 1000  # runs that MLflow gives at once


def read(place: str) -> list[TrackedRun]:
    """The runs of an experiment of MLFLOW_TRACKING_URI, or of a store's file or folder."""
    if Path(place).exists():
        return _read_store(Path(place))
    client = import_tracker("mlflow", "mlflow", f"mlflow:{place}").MlflowClient()
    experiments = {one.name: one.experiment_id for one in client.search_experiments()}
    if place not in experiments:
        known = nearest(place, experiments)
        raise UsageError(f"mlflow:{place}: there is no experiment {place!r}; the nearest are {known}.")
    return _read(client, [experiments[place]])


def _read_store(path: Path) -> list[TrackedRun]:
    """The runs of all experiments of a database file or a folder."""
    mlflow = import_tracker("mlflow", "mlflow", str(path))
    uri = f"sqlite:///{path.resolve()}" if path.is_file() else path.resolve().as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    return _read(client, [one.experiment_id for one in client.search_experiments()])


def _read(client: Any, experiments: list[str]) -> list[TrackedRun]:
    found = list[Any](page := client.search_runs(experiments, max_results=PAGE))
    while page.token:
        page = client.search_runs(experiments, max_results=PAGE, page_token=page.token)
        found += page
    # MLflow gives the newest first; a table is read in the order of the runs.
    return [_run(client, run) for run in sorted(found, key=lambda run: run.info.start_time or 0)]


def _run(client: Any, run: Any) -> TrackedRun:
    def history(metric: str) -> Points:
        values = client.get_metric_history(run.info.run_id, metric)
        return sorted(((int(one.step), float(one.value)) for one in values), key=lambda point: point[0])

    return TrackedRun(
        run.info.run_name or run.info.run_id, dict(run.data.params), list(run.data.metrics), history,
        run.info.status.lower(), {name: float(value) for name, value in run.data.metrics.items()},
    )  # fmt: skip
