"""Models of transformers: the batched scorer gives what one-at-a-time scoring gives, for any tokenizer."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from steepen.data import Dataset, Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.core.prompt_encoding import TaskEncoder
from steepen.evaluation.hf_model import (
    HuggingFaceModel,
    HuggingFaceTokenizer,
    evaluate_hugging_face,
    load_hugging_face,
    validation_texts,
)
from steepen.evaluation.score_options import ScoreOptions
from steepen.requests.app import main

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
MakeModel = Callable[[Path, int], None]


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    from steepen.inference.hf_tokenizer import hugging_face_tokenizer

    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=hugging_face_tokenizer(tokenizer), **special
    ).save_pretrained(folder)


SMALL: dict[str, Any] = {
    "max_position_embeddings": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


def gpt2(folder: Path, vocabulary: int) -> None:
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=96, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def llama(folder: Path, vocabulary: int) -> None:
    config = transformers.LlamaConfig(vocab_size=vocabulary, **SMALL)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def capped(folder: Path, vocabulary: int) -> None:
    """Gemma 2 caps its logits, so they are not the head's output."""
    config = transformers.Gemma2Config(
        vocab_size=vocabulary, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, **SMALL
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(params=[gpt2, llama, capped], ids=["gpt2", "llama", "capped"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A small random model with a tokenizer."""
    torch.manual_seed(0)
    make: MakeModel = request.param
    make(tmp_path / "model", tokenizer.size)
    save_tokenizer(tmp_path / "model", tokenizer)
    return tmp_path / "model"


@torch.no_grad()
def one_at_a_time(model: Any, ids: list[int], start: int) -> tuple[float, bool]:
    """Mean loss of the tokens from `start` on (NaN without any), and whether each is the most probable."""
    if start == len(ids):
        return math.nan, True
    logits = model(torch.tensor([ids[:-1]])).logits[0, start - 1 :].double()
    targets = torch.tensor(ids[start:])
    return functional.cross_entropy(logits, targets).item(), bool((logits.argmax(-1) == targets).all())


def test_core_is_that_of_one_example_at_a_time(folder: Path, bundle: Bundle) -> None:
    model, tokenizer = load_hugging_face(str(folder), device="cpu")
    assert model.separate_head == ("Gemma" not in type(model.model).__name__)
    request = ScoreOptions(core=bundle.directory, seeds=(0,), token_budget=400)
    core = evaluate_hugging_face(str(folder), None, request, device="cpu")["core"]
    for task in bundle.tasks:
        encoder = TaskEncoder(task, tokenizer, model.shape.context)
        nll: list[float] = []
        right: list[bool] = []
        for index in range(len(task.items)):
            example = encoder.example(index, 0)
            sequences = [sequence.tolist() for sequence in example.sequences]
            scored = [one_at_a_time(model.model, sequences[c], start) for c, start in example.spans]
            choices = [loss for loss, _ in scored[: len(sequences)]]
            best = min(range(len(choices)), key=lambda c: (not choices[c] <= np.nanmin(choices), c))
            best = 0 if math.isnan(choices[0]) else best  # comparisons with NaN are false
            language_modeling = task.kind == "language_modeling"
            right.append(scored[0][1] if language_modeling else best == example.gold)
            nll.append(scored[-1][0])
        found = core["tasks"][task.label]
        assert found["nll"] == pytest.approx(float(np.mean(nll)), abs=1e-5)
        assert found["accuracy"] == pytest.approx(float(np.mean(right)), abs=1e-9)


def test_bits_per_byte_are_those_of_one_window_at_a_time(folder: Path, dataset: Dataset) -> None:
    found = evaluate_hugging_face(str(folder), dataset, ScoreOptions(validation_tokens=600), device="cpu")[
        "validation"
    ]
    model, tokenizer = load_hugging_face(str(folder), device="cpu")
    texts = validation_texts(dataset, 600)
    ids = [token for text in texts for token in [tokenizer.end_of_text, *tokenizer.encode(text)]]
    nats = between = 0.0  # `between`: of the tokens before each text but the first
    for first in range(0, len(ids) - 1, 96):
        window = ids[first : first + 97]
        nats += one_at_a_time(model.model, window, 1)[0] * (len(window) - 1)
        places = [place for place, token in enumerate(window) if place and token == tokenizer.end_of_text]
        between += sum(one_at_a_time(model.model, window[: place + 1], place)[0] for place in places)
    size = sum(len(text.encode()) for text in texts)
    assert found["tokens"] == len(ids) - 1 and found["bytes"] == size and between > 0
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx((nats - between) / math.log(2) / size, rel=1e-6)


def test_an_exported_run_scores_as_the_run_does(
    trained: Path, dataset: Dataset, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), str(tmp_path / "hf")]) == 0
    words = ["--core", str(bundle.directory), "--data", str(dataset.directory), "--device", "cpu", "--json"]
    capsys.readouterr()
    run = shutil.copytree(trained, tmp_path / "runs" / trained.name)
    assert main(["eval", str(run), *words, "--precision", "fp32", "--no-update-record"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["eval", "--hf", str(tmp_path / "hf"), "--trust-remote-code", *words]) == 0
    other = json.loads(capsys.readouterr().out)
    with pytest.raises(SteepenError, match="add `trust_remote_code`"):
        load_hugging_face(str(tmp_path / "hf"))
    for label, task in own["core"]["tasks"].items():
        assert other["core"]["tasks"][label]["nll"] == pytest.approx(task["nll"], abs=1e-4)
        assert other["core"]["tasks"][label]["accuracy"] == pytest.approx(task["accuracy"], abs=1e-9)
    assert other["validation"]["bits_per_byte"] == pytest.approx(own["validation"]["bits_per_byte"], rel=0.05)


def test_an_exported_run_is_scored_in_bf16(trained: Path, dataset: Dataset, tmp_path: Path) -> None:
    assert main(["export", str(trained), str(tmp_path / "hf")]) == 0
    request = ScoreOptions(validation_tokens=600)
    exact, rounded = (
        evaluate_hugging_face(
            str(tmp_path / "hf"), dataset, request, device="cpu", precision=name, trust_remote_code=True
        )["validation"]["loss"]
        for name in ("fp32", "bf16")
    )
    assert rounded == pytest.approx(exact, rel=1e-2) and rounded != exact


def test_bad_requests_are_rejected_in_one_sentence(
    folder: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="needs `data`"):
        evaluate_hugging_face(str(folder), None, ScoreOptions())
    with pytest.raises(UsageError, match="leave out `kl_depth`"):
        evaluate_hugging_face(str(folder), dataset, ScoreOptions(kl_depth=True))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_hugging_face(str(tmp_path), device="cpu")
    weights = folder / "model.safetensors"
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    config = json.loads((folder / "config.json").read_text())
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    more = {**config, layers: config[layers] + 1, "layer_types": None}
    (lacking / "config.json").write_text(json.dumps(more))
    with pytest.raises(SteepenError, match=r"its files lack (transformer|model)\."):
        load_hugging_face(str(lacking), device="cpu")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SteepenError, match=r"cannot be loaded: .*incomplete"):
        load_hugging_face(str(folder), device="cpu")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(SteepenError, match="neither a begin nor an end token"):
        HuggingFaceTokenizer(tokenizer, "this")
    assert main(["eval", "--data", "somewhere"]) == 2
    assert "give a run directory and --data, or --hf" in " ".join(capsys.readouterr().err.split())
    assert HuggingFaceModel.passes == 1


def test_model_whose_losses_are_not_finite_has_no_scores(
    folder: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(folder / "model.safetensors")
    for value in weights.values():
        value.fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(["eval", "--hf", str(folder), "--data", str(dataset.directory), "--device", "cpu"]) == 1
    assert "losses that are not finite numbers" in capsys.readouterr().err
