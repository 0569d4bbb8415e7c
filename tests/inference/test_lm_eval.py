"""A run in lm-eval gives the log-likelihoods that steepen gives, and so does its export through `hf`."""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steepen.errors import UsageError
from steepen.evaluation.load import LoadedRun, load
from steepen.inference.export import export
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'steepen[lm-eval]')")
REPOSITORY = Path(__file__).resolve().parents[2]
TASK = """\
task: steepen_local
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {file}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - metric: acc
"""
WORDS = ["the", "a", "model", "law", "loss", "compute", "token", "scale", "grows", "falls", "over", "depth"]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with one multiple-choice task of local files."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    items = [
        {"query": words(5), "choices": [words(2), words(3)], "gold": rng.randrange(2)} for _ in range(12)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "task.yaml").write_text(TASK.format(file=folder / "items.jsonl"))
    return folder


def evaluate(task: Path, model: str, **arguments: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["steepen_local"],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )


class Doubled(TransformerBlock):
    """A custom block: twice the MLP."""

    def mlp(self, x: Tensor) -> Tensor:
        return 2 * super().mlp(x)


@torch.no_grad()
def log_likelihoods(run: LoadedRun, items: list[dict[str, Any]]) -> list[list[float]]:
    """Of each choice of each item, by steepen's own network."""
    tokenizer = run.tokenizer
    found: list[list[float]] = []
    for item in items:
        start = [tokenizer.end_of_text, *tokenizer.encode(item["query"])]
        losses: list[float] = []
        for choice in item["choices"]:
            whole = [tokenizer.end_of_text, *tokenizer.encode(f"{item['query']} {choice}")]
            logits = run.network(torch.tensor([whole[:-1]]), passes=run.passes)[0, len(start) - 1 :]
            targets = torch.tensor(whole[len(start) :])
            losses.append(-functional.cross_entropy(logits, targets, reduction="sum").item())
        found.append(losses)
    return found


@pytest.mark.parametrize("custom", [False, True])
def test_log_likelihoods_are_those_of_steepen(
    custom: bool, trained: Path, random_run: Any, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run by its name `steepen`, and of its export by `hf`; with a custom block of the export."""
    import steepen.inference.lm_eval_model

    assert steepen.inference.lm_eval_model.SteepenLM.__name__ == "SteepenLM"  # importing registers it
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = random_run(find_arm(Doubled)) if custom else trained
    items = [json.loads(line) for line in (task / "items.jsonl").read_text().splitlines()]
    expected = log_likelihoods(load(path, device="cpu"), items)
    right = [values.index(max(values)) == item["gold"] for values, item in zip(expected, items, strict=True)]
    folder = export(path, tmp_path / "hf", include_code=custom)
    hf = {"pretrained": str(folder), "trust_remote_code": True, "add_bos_token": True, "dtype": "float32"}
    for model, arguments in (("steepen", {"run": str(path)}), ("hf", hf)):
        if custom and model == "steepen":
            with pytest.raises(UsageError, match="--include-code"):
                evaluate(task, model, **arguments)
            continue
        found = evaluate(task, model, **arguments)
        samples = sorted(found["samples"]["steepen_local"], key=lambda sample: sample["doc_id"])
        values = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), atol=1e-4, rtol=0)
        assert found["results"]["steepen_local"]["acc,none"] == pytest.approx(sum(right) / len(right))


def test_the_default_device_of_lm_eval_is_not_needed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line passes cuda:0 on a machine without a GPU."""
    from steepen.inference.lm_eval_model import SteepenLM

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert SteepenLM(str(trained), device="cuda:0").device.type == "cpu"


@pytest.mark.parametrize(
    ("passes", "says"), [(9, "this untied network has 4 cores"), (0, "at least once"), ("x", "whole number")]
)
def test_wrong_passes_are_rejected_in_one_sentence(trained: Path, passes: Any, says: str) -> None:
    from steepen.inference.lm_eval_model import SteepenLM

    with pytest.raises(UsageError, match=says):
        SteepenLM(str(trained), passes=passes, device="cpu")


def test_the_entry_point_names_the_class() -> None:
    from steepen.inference.lm_eval_model import SteepenLM

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["steepen"].partition(":")
    assert (module, name) == (SteepenLM.__module__, SteepenLM.__name__)
