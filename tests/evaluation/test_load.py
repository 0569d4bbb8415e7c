"""`load`: from a run directory or a checkpoint directory to network, tokenizer, spec and record."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
from steepen.requests.app import main
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import with_checksum, write_json


def test_run_directory_gives_the_network_of_the_record(trained: Path, dataset: Dataset) -> None:
    run = load(trained, device="cpu")
    assert run.record is not None and run.spec == run.record.spec
    assert run.checkpoint.is_final and run.passes == 4
    validation = ValidationSet(dataset, run.spec.shape.context, run.spec.validation_tokens)
    loss = validate(run.network, validation, run.passes).loss
    assert loss == pytest.approx(run.record.validation_loss, abs=1e-6)
    assert run.tokenizer.size == dataset.vocabulary


def test_run_directory_has_its_tokenizer(trained: Path, dataset: Dataset, tmp_path: Path) -> None:
    run = load(trained, device="cpu")
    assert run.tokenizer.identity == dataset.manifest.tokenizer.sha256
    text = "the cat sat under a tree"
    assert run.tokenizer.encode(text) == dataset.tokenizer().encode(text)
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    file = copy / "tokenizer.json"
    kept = json.loads(file.read_text())
    file.unlink()
    with pytest.raises(SteepenError, match=r"has no tokenizer\.json"):
        load(copy, device="cpu")
    for damage, says in {
        "{": "not the tokenizer of a run",
        json.dumps({**kept, "format": "other"}): "has format 'other'",
        json.dumps({**kept, "sha256": "0" * 64}): "is corrupt",
    }.items():
        file.write_text(damage)
        with pytest.raises(SteepenError, match=says):
            load(copy, device="cpu")


def test_tokenizer_with_more_ids_than_the_network_is_rejected(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / trained.name))
    write_run_tokenizer(Tokenizer.gpt2(), copy / "tokenizer.json")  # copied from another run
    with pytest.raises(SteepenError, match="50,257 ids and the run's network a vocabulary of 384"):
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
    assert found.tokens == gpt2.tokens
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


def with_weights(trained: Path, target: Path, value: float) -> Path:
    """A copy of a run with this value in its last checkpoint's head, and the checksums of that."""
    copy = Path(shutil.copytree(trained, target / trained.name))
    checkpoint = sorted((copy / "checkpoints").iterdir())[-1]
    file = checkpoint / "state.safetensors"
    tensors = load_file(file)
    tensors["model//head"][3:] = value
    save_file(tensors, file)
    facts = json.loads((checkpoint / "checkpoint.json").read_text())
    facts["files"] = {file.name: sha256_of_file(file)}
    write_json(checkpoint / "checkpoint.json", with_checksum(facts))
    return copy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_that_are_not_finite_have_no_scores_text_or_export(
    value: float, trained: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(with_weights(trained, tmp_path, value))
    words = ["--device", "cpu"]
    commands = [["eval", run, "--data", str(dataset.directory), *words]]
    if not math.isfinite(value):
        commands += [
            [*commands[0], "--kl-depth"],
            ["generate", run, "--prompt", "the", "--max-tokens", "2", *words],
            ["export", run, str(tmp_path / "export")],
        ]
    for command in commands:
        assert main(command) == 1, command
        said = capsys.readouterr().err
        expected = "validation loss of" if math.isfinite(value) else "weights that are not finite numbers"
        assert expected in said and "Traceback" not in said
    assert not (tmp_path / "export").exists()
