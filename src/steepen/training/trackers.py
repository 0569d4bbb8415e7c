"""Experiment trackers: sinks of metrics. One that fails is dropped with a message; the run continues."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from steepen.errors import UsageError
from steepen.runs.spec import RunSpec

PROJECT = "steepen"  # of W&B and trackio, and MLflow's experiment, unless their own variables name another

MLFLOW_PARAMETERS, MLFLOW_METRICS = 100, 1000  # the most that MLflow takes in one batch
MLFLOW_SECONDS = 5.0  # between batches of metrics


class _Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    """Weights & Biases; the run id is the spec's hash."""

    run: Any

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=spec.hash,
            name=_title(spec),
            config=spec.to_dict(),
            dir=str(directory),
            resume="allow",
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio(_Wandb):
    """Trackio, in its local database (TRACKIO_DIR). What it prints goes to standard error."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            trackio = importlib.import_module("trackio")
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=_title(spec),
                config=_flat(spec.to_dict()),
                resume="allow",
                embed=False,
            )

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


class _TensorBoard:
    def __init__(self, spec: RunSpec, directory: Path) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer: Any = module.SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Mlflow:
    """MLflow, at MLFLOW_TRACKING_URI or its default; a resumed run is found by the tag steepen.run.

    Metrics are sent every few seconds.
    """

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self.metric: Any = entities.Metric
        self.client: Any = mlflow.MlflowClient()
        self.queued: list[Any] = []
        self.sent = time.time()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self.client.create_experiment(name)
        before = self.client.search_runs([identity], f"tags.`steepen.run` = '{spec.hash}'", max_results=1)
        if before:
            self.run_id: str = before[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return
        run = self.client.create_run(identity, run_name=_title(spec), tags={"steepen.run": spec.hash})
        self.run_id = run.info.run_id
        parameters = [entities.Param(key, str(value)[:500]) for key, value in _flat(spec.to_dict()).items()]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self.client.log_batch(self.run_id, params=parameters[start : start + MLFLOW_PARAMETERS])

    def log(self, step: int, values: dict[str, float]) -> None:
        now = time.time()
        self.queued += [self.metric(name, value, int(now * 1000), step) for name, value in values.items()]
        if now - self.sent > MLFLOW_SECONDS or len(self.queued) > MLFLOW_METRICS - 20:
            self._send()
            self.sent = now

    def close(self) -> None:
        self._send()
        self.client.set_terminated(self.run_id)

    def _send(self) -> None:
        queued, self.queued = self.queued, []
        if queued:
            self.client.log_batch(self.run_id, metrics=queued)


_KINDS: dict[str, Callable[[RunSpec, Path], _Tracker]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
TRACKERS = tuple(_KINDS)


def require_installed(names: Iterable[str]) -> None:
    """Raise UsageError for a tracker whose package is missing."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(
                f"`track` = {name} needs the package {name}, which is not installed: "
                f"pip install 'steepen[{name}]'."
            )


class Trackers:
    """The trackers of a run; one that fails is dropped with a message."""

    def __init__(
        self, names: tuple[str, ...], spec: RunSpec, directory: Path, print_message: Callable[[str], None]
    ) -> None:
        self.print_message = print_message
        self.active: dict[str, _Tracker] = {}
        for name in names:
            self._guard(name, lambda name=name: self.active.__setitem__(name, _KINDS[name](spec, directory)))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log to every tracker that still works."""
        for name, tracker in list(self.active.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(step, values))

    def close(self) -> None:
        """Close them all."""
        for name, tracker in list(self.active.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.active.pop(name, None)
            self.print_message(
                f"the tracker {name} failed ({type(error).__name__}: {error}); the run continues without it."
            )


def _title(spec: RunSpec) -> str:
    return f"{spec.arm.name}-d{spec.shape.depth}-{spec.hash}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names, for trackers that keep flat parameters."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found
