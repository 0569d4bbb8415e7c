"""Load exported models with transformers alone and write what they compute; run in a fresh process.

Arguments: a JSON file with requests (a list), and the output file (safetensors).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.modules["steepen"] = None  # type: ignore[assignment]  # importing it fails, even where it is installed

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
PROMPT = 12


@torch.no_grad()
def compute(request: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, greedy tokens and encoded texts of one exported model."""
    folder: str = request["folder"]
    tokens = torch.tensor(request["tokens"])
    results: dict[str, torch.Tensor] = {}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    model: Any = loaded.eval()
    results["float32"] = model(tokens).logits
    results["float64"] = model.double()(tokens).logits
    if request.get("cache", True):
        cache = DynamicCache(config=model.config)
        parts = tokens.split([5, *[1] * (PROMPT - 5)], dim=1)
        results["cached"] = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
        results["layers"] = torch.tensor([len(cache.layers), model.config.num_hidden_layers])
    else:
        options = {**GREEDY, "max_new_tokens": 8, "attention_mask": torch.ones_like(tokens)}
        results["greedy"] = model.generate(tokens, **options)
    if "prompts" in request:
        results |= generate(model, request)
    if "passes" in request:
        other = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, passes=request["passes"], trust_remote_code=True
        )
        results["other passes"] = other(tokens).logits
    if "texts" in request:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        for number, text in enumerate(request["texts"]):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            results[f"text {number}"] = torch.tensor(ids)
        words = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(
            request["texts"][0], max_new_tokens=4, do_sample=False, return_full_text=True
        )
        assert words[0]["generated_text"].startswith(request["texts"][0])
        results["loss"] = model(tokens, labels=tokens).loss
    if "save" in request:
        model.float().save_pretrained(request["save"])
        results["trained"] = train(model, tokens, request["save"])
    return results


@torch.no_grad()
def generate(model: Any, request: dict[str, Any]) -> dict[str, torch.Tensor]:
    """64 greedy tokens of a padded batch, and what computing the whole text of each row chooses."""
    results: dict[str, torch.Tensor] = {}
    rows: list[list[int]] = request["prompts"]
    width = max(map(len, rows))
    padded = torch.tensor([[model.config.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    made = model.generate(padded, attention_mask=mask, **GREEDY)[:, width:]
    results["greedy"] = made
    # What is most probable after each token, computed without a cache and without padding.
    for number, row in enumerate(rows):
        whole = torch.tensor([row + made[number, :-1].tolist()])
        logits = model(whole, use_cache=False).logits
        results[f"uncached {number}"] = logits[0, len(row) - 1 :].argmax(-1)
    if "without cache" in request:
        options: dict[str, Any] = {**GREEDY, "use_cache": False}
        made = model.generate(padded, attention_mask=mask, **options)
        results["greedy without cache"] = made[:, width:]
    return results


def train(model: Any, tokens: torch.Tensor, folder: str) -> torch.Tensor:
    """The loss after each of a few steps of transformers' Trainer; empty where it cannot run."""
    if importlib.util.find_spec("accelerate") is None:
        return torch.zeros(0)
    with torch.enable_grad():
        settings = TrainingArguments(
            f"{folder}-trainer", max_steps=6, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True
        )
        examples = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model, settings, train_dataset=examples)  # pyright: ignore[reportArgumentType]
        trainer.train()
    return torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    found = {f"{one['name']}/{key}": value for one in requests for key, value in compute(one).items()}
    save_file({name: value.contiguous() for name, value in found.items()}, sys.argv[2])
