"""A run on a mixture has a validation loss for each source: in its record, its metrics, tables and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.report.run_panels import source_panels
from steepen.requests.tables import as_table
from steepen.runs.record import RunRecord
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions

OPTIONS = TrainOptions(device="cpu", quiet=True, validate_every=6)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Counting upwards is harder here than one word over and over."""
    folder = tmp_path_factory.mktemp("mixed")
    texts = {
        "count": [" ".join(str(n * 31 + i) for i in range(40)) for n in range(300)],
        "same": [f"number {n} " + "word " * 60 for n in range(300)],
    }
    for name, own in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in own))
    request = PrepareRequest(
        mix=f"{folder}/count.jsonl=3,{folder}/same.jsonl=1", tokenizer="bpe:300", val_tokens=4_000
    )
    return prepare(request, folder / "data")


def test_losses_by_source_are_recorded_and_make_up_the_loss(
    tmp_path: Path, mixed: Dataset, make_spec: Callable[..., RunSpec]
) -> None:
    records: list[RunRecord] = []
    store = RunStore(tmp_path / "runs")
    for depth in (2, 3):
        spec = make_spec("vanilla", depth=depth)
        spec = replace(spec, data=DataConfig(mixed.identity), validation_tokens=1024)
        records.append(train(spec, mixed, store, OPTIONS))
    for record in records:
        assert [set(score.by_source) for score in record.validation_scores] == [{"count", "same"}] * 2
        last = record.validation_scores[-1]
        assert last.by_source["same"] < last.by_source["count"]
        combined = 0.75 * last.by_source["count"] + 0.25 * last.by_source["same"]
        assert record.validation_loss == pytest.approx(combined, rel=1e-12)
        assert RunRecord.from_dict(record.to_dict()) == record
        lines = (store.root / record.run / "metrics.jsonl").read_text().splitlines()
        written = [json.loads(line) for line in lines if "validation_loss/same" in line]
        assert written[-1]["validation_loss/same"] == last.by_source["same"]

    table = as_table(store.root, columns={"loss": "loss.same"})
    losses = [record.validation_scores[-1].by_source["same"] for record in records]
    assert sorted(table.columns["loss"]) == sorted(losses)

    panels = source_panels(records)
    assert [panel.title for panel in panels] == ["count", "same"]
    assert panels[1].series[0].y == tuple(losses)


def test_panels_of_sources_need_a_mixture(
    tmp_path: Path, tiny_data: Dataset, make_spec: Callable[..., RunSpec]
) -> None:
    record = train(make_spec("vanilla", depth=2), tiny_data, RunStore(tmp_path), OPTIONS)
    assert record.validation_scores[-1].by_source == {}
    assert source_panels([record]) == []
