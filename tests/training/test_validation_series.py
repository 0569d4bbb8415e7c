"""What a validation records besides its loss: epoch, training loss, sizes of the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steepen.data import Dataset
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.requests.app import main
from steepen.runs.record import RunRecord
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore, read_metrics
from steepen.training.metrics import watch_stream
from steepen.training.run import train
from steepen.training.train_options import TrainOptions

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=16, vocabulary=32)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("vanilla", ["prelude"]),
        ("operator-1", ["prelude", "core 1", "coda"]),
        ("loop-2", ["prelude", "core 1", "core 2", "coda"]),
        ("untied-2", ["prelude", "core 1", "core 2", "coda"]),
    ],
)
def test_stream_sizes_are_those_after_the_last_block_of_each_section(name: str, sections: list[str]) -> None:
    arm = find_arm(name)
    network = materialize(build_on_meta(arm.shape(6, SCALE), arm), embedding_std=0.3)
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    tokens, others = torch.arange(16)[None], torch.arange(16)[None].flip(1)
    states: list[Tensor] = []
    with torch.no_grad():
        network.hidden_states(tokens, visit=states.append)
        with watch_stream(network, network.passes) as found:
            network(tokens, tokens)
            network(others, tokens)  # only the first forward counts
    names = network.shape.allocation.sections(network.passes)
    assert list(found) == sections and network.visit is None
    for section, size in found.items():
        last = max(index for index, own in enumerate(names) if own == section)
        assert size == pytest.approx(float(states[last].square().mean().sqrt()), rel=1e-6)


def test_a_validation_that_fails_leaves_nothing_behind() -> None:
    arm = find_arm("vanilla")
    network = materialize(build_on_meta(arm.shape(2, SCALE), arm))
    with pytest.raises(RuntimeError, match="stop"), watch_stream(network, 1):
        raise RuntimeError("stop")
    assert network.visit is None


@pytest.fixture(scope="module")
def repeated(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunRecord, Path]:
    """A run of three epochs, validated after each."""
    spec = make_spec("operator-1", steps=12)
    pool = 4 * spec.batch_sequences * (spec.shape.context + 1)
    spec = replace(spec, data=DataConfig(tiny_data.identity, pool_tokens=pool, epochs=3))
    folder = tmp_path_factory.mktemp("runs")
    options = TrainOptions(device="cpu", quiet=True, validate_every="epoch")
    record = train(spec, tiny_data, RunStore(folder), options)
    return record, folder / spec.hash / "metrics.jsonl"


def test_every_epoch_ends_with_a_score_and_the_training_loss_of_the_epoch(
    repeated: tuple[RunRecord, Path],
) -> None:
    record, metrics = repeated
    assert [(score.step, score.epoch) for score in record.validation_scores] == [(4, 1), (8, 2), (12, 3)]
    losses = [line["loss"] for line in read_metrics(metrics) if "loss" in line]
    for first, score in zip((0, 4, 8), record.validation_scores, strict=True):
        assert score.train_loss == pytest.approx(sum(losses[first : first + 4]) / 4)
        assert set(score.residual_rms) == {"prelude", "core 1", "coda"}
    assert RunRecord.from_dict(record.to_dict()) == record


def test_metrics_have_a_line_of_numbers_for_every_validation(repeated: tuple[RunRecord, Path]) -> None:
    record, metrics = repeated
    lines = [line for line in read_metrics(metrics) if "validation_loss" in line]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    for line, score in zip(lines, record.validation_scores, strict=True):
        assert line["residual_rms/core 1"] == score.residual_rms["core 1"] > 0


def test_words_and_numbers_of_validate_every_are_checked(
    tiny_data: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--arm", "vanilla", "--depth", "2", "--data", str(tiny_data.directory)]
    for wrong in ("epochs", "0", "-1", "1.5"):
        assert main([*words, f"--validate-every={wrong}"]) == 2
        assert "validate-every" in capsys.readouterr().err
