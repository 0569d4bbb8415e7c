"""`load`: from a run directory or a checkpoint directory to network, tokenizer, spec and record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from steepen.data import Dataset, Tokenizer, ValidationSet
from steepen.data.prepare import PrepareRequest, prepare
from steepen.data.tokenizer import (
    GPT2_IDENTITY,
    load_run_tokenizer,
    run_tokenizer_identity,
    write_run_tokenizer,
)
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.evaluate_run import evaluate
from steepen.evaluation.load import load
from steepen.evaluation.score_options import ScoreOptions
from steepen.evaluation.validation_loss import validate


def test_run_directory_gives_the_network_of_the_record(trained: Path, dataset: Dataset) -> None:
    run = load(trained, data=dataset.directory, device="cpu")
    assert run.record is not None and run.spec == run.record.spec
    assert run.checkpoint.is_final and run.passes == 4
    validation = ValidationSet(dataset, run.spec.shape.context, run.spec.validation_tokens)
    loss = validate(run.network, validation, run.passes).loss
    assert loss == pytest.approx(run.record.validation_loss, abs=1e-6)
    assert run.tokenizer is not None and run.tokenizer.size == dataset.vocabulary


def test_run_directory_has_its_tokenizer(trained: Path, dataset: Dataset, tmp_path: Path) -> None:
    run = load(trained, device="cpu")
    assert run.tokenizer is not None
    assert run.tokenizer.identity == dataset.manifest.tokenizer.sha256
    text = "the cat sat under a tree"
    assert run.tokenizer.encode(text) == dataset.tokenizer().encode(text)
    # A run of an earlier version has none, unless data is given.
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    file = copy / "tokenizer.json"
    kept = json.loads(file.read_text())
    file.unlink()
    assert load(copy, device="cpu").tokenizer is None
    assert load(copy, data=dataset, device="cpu").tokenizer is not None
    for damage, says in {
        "{": "not the tokenizer of a run",
        json.dumps({**kept, "format": "other"}): "has format 'other'",
        json.dumps({**kept, "sha256": "0" * 64}): "is corrupt",
    }.items():
        file.write_text(damage)
        with pytest.raises(SteepenError, match=says):
            load(copy, device="cpu")


def test_gpt2_tokenizer_is_kept_by_name(tmp_path: Path) -> None:
    gpt2 = Tokenizer.gpt2()
    assert gpt2.identity == GPT2_IDENTITY
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {n} of a few"}) + "\n" for n in range(200)))
    data = prepare(PrepareRequest(source=(str(source),), val_tokens=200), tmp_path / "data")
    file = tmp_path / "tokenizer.json"
    write_run_tokenizer(data.tokenizer(), file)
    assert file.stat().st_size < 1000
    found = load_run_tokenizer(file)
    assert found is not None and found.tokens == gpt2.tokens
    assert run_tokenizer_identity(file) == gpt2.identity


def test_checkpoint_directory_gives_its_own_step(trained: Path) -> None:
    first = sorted((trained / "checkpoints").iterdir())[0]
    run = load(str(first), device="cpu", precision="bf16")
    assert run.checkpoint.step == 2 and run.passes == 2 and not run.checkpoint.is_final
    assert run.network.embedding.dtype == torch.bfloat16 and run.precision == "bf16"


def test_unfinished_run_has_no_record(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    (copy / "record.json").unlink()
    assert load(copy, device="cpu").record is None


def test_bad_path_or_precision_is_rejected(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run directory"):
        load(tmp_path)
    with pytest.raises(UsageError, match="use auto, fp32 or bf16"):
        load(trained, precision="fp8")
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(SteepenError, match="its checkpoints were removed"):
        load(copy)


def test_evaluate_in_python_gives_scores_and_joins_them(
    trained: Path, dataset: Dataset, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    found = evaluate(copy, dataset.directory, ScoreOptions(passes=(1, 2)), device="cpu")
    assert found.in_record and found.saved == copy.resolve() / "record.json" and not found.notes
    record = load(copy, device="cpu").record
    assert record is not None and record.evaluation["test_time_passes"]["passes"] == [1, 2]
