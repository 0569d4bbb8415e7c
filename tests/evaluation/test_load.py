"""`load`: from a run directory or a checkpoint directory to network, tokenizer, spec and record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from steepen.data import Dataset, ValidationSet
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.evaluate_run import EvaluationRequest, evaluate
from steepen.evaluation.load import load
from steepen.evaluation.validation_loss import validate


def test_run_directory_gives_the_network_of_the_record(trained: Path, dataset: Dataset) -> None:
    run = load(trained, data=dataset.directory, device="cpu")
    assert run.record is not None and run.spec == run.record.spec
    assert run.checkpoint.is_final and run.passes == 4
    validation = ValidationSet(dataset, run.spec.shape.context, run.spec.validation_tokens)
    loss = validate(run.network, validation, run.passes).loss
    assert loss == pytest.approx(run.record.validation_loss, abs=1e-6)
    assert run.tokenizer is not None and run.tokenizer.size == dataset.vocabulary


def test_checkpoint_directory_gives_its_own_step(trained: Path) -> None:
    first = sorted((trained / "checkpoints").iterdir())[0]
    run = load(str(first), device="cpu", precision="bf16")
    assert run.checkpoint.step == 2 and run.passes == 2 and not run.checkpoint.is_final
    assert run.network.embedding.dtype == torch.bfloat16 and run.precision == "bf16"
    assert run.tokenizer is None


def test_unfinished_run_has_no_record(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    (copy / "record.json").unlink()
    assert load(copy, device="cpu").record is None


def test_bad_path_or_precision_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run directory"):
        load(tmp_path)
    with pytest.raises(UsageError, match="use auto, fp32 or bf16"):
        load(trained, precision="fp8")
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(SteepenError, match="has no checkpoint yet"):
        load(copy)


def test_evaluate_in_python_gives_scores_and_joins_them(
    trained: Path, dataset: Dataset, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    seen: list[float] = []
    found = evaluate(
        copy,
        dataset.directory,
        EvaluationRequest(passes=(1, 2)),
        device="cpu",
        on_scores=lambda scores: seen.append(scores["validation"]["loss"]),
    )
    assert found.in_record and found.saved == copy.resolve() / "record.json" and not found.notes
    assert seen == [found.scores["validation"]["loss"]]
    record = load(copy, device="cpu").record
    assert record is not None and record.evaluation["test_time_passes"]["passes"] == [1, 2]
