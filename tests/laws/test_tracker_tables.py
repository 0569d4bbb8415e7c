"""A project of 300 messy runs, logged with the real libraries of four trackers, gives one answer.

Each test skips where its library is not installed: pip install 'steepen[trackers]'.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import steepen
from laws.messy_project import ARMS, IRREDUCIBLE, project
from steepen.errors import UsageError
from steepen.tables.clean_table import Cleaning, clean
from steepen.tables.read_table import read_table
from steepen.tables.sources import tensorboard_runs
from steepen.tables.sources.tracked_runs import tracked_table
from steepen.tables.table import Table, table_from

TRUTH = {"Mamba hybrid": ("better", "constant"), "moe_8x": ("better", "grows"),
         "no-norm": ("no difference", "constant")}  # fmt: skip


def logged() -> list[dict[str, Any]]:
    """The 300 runs of the project, with NaN, holes, divergences and odd spellings among them."""
    return project()


def points(run: dict[str, Any]) -> list[float]:
    """Validation losses of a run: the best is not the last."""
    final = run["val_loss"]
    return [9.0, final - 0.01, final] if math.isfinite(final) else [9.0, 8.0, math.nan]


def settings(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "val_loss" and value is not None}


def in_memory() -> dict[str, list[Any]]:
    runs = logged()
    columns: dict[str, list[Any]] = {name: [run.get(name) for run in runs] for name in runs[0]}
    columns["val_loss"] = [math.inf if math.isnan(loss) else loss for loss in columns["val_loss"]]
    return columns


def expected() -> Table:
    return understood(table_from(in_memory()))


def understood(table: Table) -> Table:
    return clean(table.where(["dataset=c4"]), Cleaning(drop_missing=True))


def rows(table: Table) -> list[tuple[Any, ...]]:
    numbers = [table.columns[name] for name in ("flops", "loss", "parameters", "seed")]
    return sorted(
        (arm, *(float(f"{float(value):.6g}") for value in values))  # TensorBoard has 32 bits
        for arm, *values in zip(table.columns["arm"], *numbers, strict=True)
    )


@functools.cache
def answers(source: str = "") -> list[dict[str, Any]]:
    """The verdicts on both data sets, from a tracker or from memory."""
    fit = cast("Any", steepen.fit)
    found = fit(
        source or in_memory(),
        reference="Baseline",
        by="dataset",
        drop_missing=True,
        draws=100,
        method="joint",
    )
    return sorted(found.to_rows(), key=lambda row: (row["dataset"], row["arm"]))


def test_messy_project_has_its_truth_on_both_data_sets() -> None:
    for row in answers():
        if row["arm"] != "Baseline":
            assert (row["better"], row["growth"]) == TRUTH[row["arm"]], row
        assert row["gamma"] == pytest.approx(ARMS[row["arm"]][1], abs=0.006)
        assert pytest.approx(IRREDUCIBLE[row["dataset"]], abs=0.08) == row["E"]


def check(source: str) -> None:
    """Table and answer are those of the runs; best losses are lower, a step that none has is missing."""
    found = understood(read_table(source))
    assert rows(found) == rows(expected())
    for row, own in zip(answers(source), answers(), strict=True):
        assert (row["arm"], row["dataset"], row["growth"]) == (own["arm"], own["dataset"], own["growth"])
        assert row["better"] == own["better"]
        assert row["gamma"] == pytest.approx(own["gamma"], rel=1e-3)
        assert row["multiplier"] == (own["multiplier"] and pytest.approx(own["multiplier"], rel=1e-3))
    best = understood(read_table(source, at="best"))
    assert min(best.columns["loss"]) < min(found.columns["loss"])
    assert set(understood(read_table(source, at="0")).columns["loss"]) == {9.0}
    with pytest.raises(UsageError, match="is empty"):
        clean(read_table(source, at="99").where(["dataset=c4"]), Cleaning())


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs W&B: pip install 'steepen[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for i, run in enumerate(logged()):
        active = wandb.init(project="messy", name=f"run {i}", config={"trainer": {"lr": 1}, **settings(run)},
                            dir=str(tmp_path), reinit="finish_previous")  # fmt: skip
        for step, loss in enumerate(points(run)):
            active.log({"val/loss": loss, "train/grad_norm": 1.0}, step=step)
        active.finish()
    check(str(tmp_path))


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install 'steepen[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    for i, run in enumerate(logged()):
        writer = SummaryWriter(str(tmp_path / f"run {i}"))
        for step, loss in enumerate(points(run)):
            writer.add_scalar("val/loss", loss, step)
        writer.add_hparams(settings(run), {"hparam/val_loss": points(run)[-1]})
        writer.close()
    check(str(tmp_path))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'steepen[mlflow]'")
    monkeypatch.chdir(tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("messy")
    for run in logged():
        identity = client.create_run(experiment).info.run_id
        for name, value in settings(run).items():
            client.log_param(identity, name, value)
        for step, loss in enumerate(points(run)):
            client.log_metric(identity, "val_loss", loss, step=step)
        client.set_terminated(identity)
    check(str(tmp_path / "mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)
    assert rows(understood(read_table("mlflow:messy"))) == rows(expected())
    with pytest.raises(UsageError, match="no experiment 'mesy'; the nearest are messy"):
        read_table("mlflow:mesy")
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: '0'\n")
    with pytest.raises(UsageError, match=r"mlruns (cannot be read|has no runs)"):
        read_table(tmp_path / "mlruns")


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="needs Trackio: pip install 'steepen[trackio]'")
    for i, run in enumerate(logged()):
        active = trackio.init(project="messy", name=f"run {i}", config=settings(run), embed=False)
        for step, loss in enumerate(points(run)):
            active.log({"val_loss": loss}, step=step)
        active.finish()
    check("trackio:messy")


def test_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(UsageError, match=rf"pip install 'steepen\[{name}\]'"):
            read_table(f"{name}:someone/project")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    module = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UsageError, match=r"pip install 'steepen\[tensorboard\]'"):
        read_table(str(tmp_path))


def wandb_file(folder: Path, *records: dict[str, str]) -> None:
    """A file of W&B with these history records, as JSON where the library has protobuf."""
    entries = [json.dumps(record).encode() for record in records]
    log = b"".join(struct.pack("<IHB", 0, len(entry), 1) + entry for entry in entries)
    (folder / "run-x.wandb").write_bytes(bytes(7) + log)


class Record:
    """What wandb.proto.wandb_internal_pb2.Record has, read from JSON."""

    def ParseFromString(self, data: bytes) -> None:
        items = [SimpleNamespace(key=key, value_json=value) for key, value in json.loads(data).items()]
        self.history = SimpleNamespace(item=items, step=SimpleNamespace(num=0))

    def WhichOneof(self, _: str) -> str:
        return "history"


@pytest.mark.parametrize(
    "record",
    [{"loss": "{"}, {"loss": "[" * 20_000}, {"_step": '"x"', "loss": "1"}, {"_step": "1e999", "loss": "1"},
     {"_step": "[]", "loss": "1"}, {"loss": "9" * 4000}],
    ids=["half", "nested", "step as text", "infinite step", "step as list", "huge number"],
)  # fmt: skip
def test_damaged_runs_of_a_tracker_give_one_sentence(
    record: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "wandb.proto.wandb_internal_pb2", cast(Any, SimpleNamespace(Record=Record))
    )
    wandb_file(tmp_path, {"loss": "2.5", "_step": "1"})
    assert tracked_table(str(tmp_path), {}, "final") is not None
    wandb_file(tmp_path, {"loss": "2.5", "_step": "1"}, record)
    with pytest.raises(UsageError, match="cannot be read"):
        tracked_table(str(tmp_path), {}, "final")
    (tmp_path / "run-x.wandb").unlink()
    os.mkfifo(tmp_path / "run-x.wandb")  # reading it would wait
    with pytest.raises(UsageError, match="cannot be read"):
        tracked_table(str(tmp_path), {}, "final")


def test_tensor_of_any_stated_size_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[Any] = []
    module = SimpleNamespace(make_ndarray=lambda proto: allocated.append(proto) or np.float32(2.5))
    monkeypatch.setitem(sys.modules, "tensorboard.util.tensor_util", cast(Any, module))
    large = SimpleNamespace(tensor_shape=SimpleNamespace(dim=[SimpleNamespace(size=10**12)]))
    assert math.isnan(tensorboard_runs._scalar(large)) and not allocated
    assert tensorboard_runs._scalar(SimpleNamespace(tensor_shape=SimpleNamespace(dim=[]))) == 2.5
