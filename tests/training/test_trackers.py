"""Trackers receive every step of a run, and a missing package is named with the extra that installs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.requests.app import main
from steepen.requests.train import Train
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training import trackers
from steepen.training.run import train
from steepen.training.trackers import MLFLOW_METRICS, _Mlflow, require_installed
from steepen.training.train_options import TrainOptions

QUIET = TrainOptions(device="cpu", quiet=True)
MakeSpec = Callable[..., RunSpec]


class FakeMlflow:
    """The part of MLflow's client that the tracker uses, in memory."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiments: list[str], condition: str, max_results: int) -> list[Any]:
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=name))
            for name, run in self.runs.items()
            if run["tags"]["steepen.run"] in condition
        ]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs[run_name] = {"tags": tags, "metrics": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= MLFLOW_METRICS and len(params) <= 100
        self.runs[run]["metrics"] += metrics
        self.runs[run]["params"] |= dict(params)

    def set_terminated(self, run: str) -> None:
        self.runs[run]["status"] = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    client = FakeMlflow()
    entities = SimpleNamespace(
        Metric=lambda name, value, now, step: (name, value, step), Param=lambda key, value: (key, value)
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    return client


def test_mlflow_gets_parameters_and_every_step(
    mlflow: FakeMlflow, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla", steps=4)
    train(spec, tiny_data, RunStore(tmp_path), replace(QUIET, track=("mlflow",)))
    (run,) = mlflow.runs.values()
    assert [step for name, _, step in run["metrics"] if name == "loss"] == [1, 2, 3, 4]
    assert [step for name, _, step in run["metrics"] if name == "validation_loss"] == [4]
    assert run["params"]["hyperparameters.learning_rate"] == str(spec.hyperparameters.learning_rate)
    assert run["status"] == "FINISHED" and list(mlflow.experiments) == ["steepen"]


def test_mlflow_goes_on_with_the_run_of_the_same_spec(
    mlflow: FakeMlflow, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MLFLOW_SECONDS", 1e9)
    for first in (1, 3):
        tracker = _Mlflow(make_spec("vanilla"), tmp_path)
        tracker.log(first, {"loss": 1.0})
        tracker.log(first + 1, {"loss": 1.0})
        tracker.close()
    (run,) = mlflow.runs.values()
    assert [step for _, _, step in run["metrics"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_of_wandb_and_trackio_gets_every_step(
    name: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, *values))

        def finish(self) -> None:
            calls.append("finished")

    def init(**settings: Any) -> Run:
        calls.append((settings["project"], settings["name"]))
        return Run()

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))  # type: ignore[arg-type]
    spec = make_spec("vanilla", steps=3)
    train(spec, tiny_data, RunStore(tmp_path), replace(QUIET, track=(name,)))
    assert calls[0] == ("steepen", f"vanilla-d3-{spec.hash}") and calls[-1] == "finished"
    assert [call[0] for call in calls[1:-1] if "loss" in call] == [1, 2, 3]
    assert (3, "validation_loss", "bits_per_byte", "epoch", "residual_rms/prelude") in calls


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_the_real_library_takes_a_run(
    name: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name, reason=f"needs {name}: pip install 'steepen[{name}]'")
    options = replace(QUIET, quiet=False, track=(name,))
    run = train(make_spec("vanilla", steps=3), tiny_data, RunStore(tmp_path / "runs"), options)
    assert "failed" not in capfd.readouterr().err
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    part = {"wandb": ".wandb", "tensorboard": "tfevents", "mlflow": "mlflow.db", "trackio": ".db"}[name]
    assert run is not None and any(part in file for file in written)


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(module: str) -> None:
        return None if module == name else importlib.util.find_spec(module)  # type: ignore[return-value]

    monkeypatch.setattr(trackers, "find_spec", absent)
    with pytest.raises(UsageError, match=rf"pip install 'steepen\[{name}\]'"):
        require_installed([name])
    assert main(["study", "ladder", "--track", name]) == 2
    assert f"steepen[{name}]" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UsageError, match="one of 'wandb', 'tensorboard', 'mlflow', 'trackio'"):
        Train(arm="vanilla", depth=3, track=("wnadb",))  # type: ignore[arg-type]
