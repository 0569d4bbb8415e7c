"""A small bundle with every task type, a small tokenizer, small networks, and one trained run."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.data import Dataset, Tokenizer
from steepen.data.prepare import PrepareRequest, prepare
from steepen.evaluation.core.bundle import Bundle
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.runs.spec import RunSpec

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "red", "blue", "mat", "house", "tree"]
WORDS += ["and", "then", "because", "so", "it", "was", "old", "new"]
CONFIG = """\
icl_tasks:
-
  label: choose
  dataset_uri: one/choose.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
-
  label: choose_shots
  dataset_uri: one/choose.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
-
  label: ending
  dataset_uri: two/ending.jsonl
  num_fewshot: [2]
  icl_task_type: schema
-
  label: complete
  dataset_uri: two/complete.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
"""


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def write_bundle(root: Path) -> Path:
    rng = random.Random(7)
    choose = [
        {
            "query": words(rng, 3, 12) + rng.choice(["", " ", "\n"]),
            "choices": [words(rng, 1, 6) for _ in range(rng.randint(2, 5))],
        }
        for _ in range(14)
    ]
    for item in choose:
        item["gold"] = rng.randrange(len(item["choices"]))
    # The traps of the real bundle: a choice that begins another, equal choices, a leading blank.
    choose[0] |= {"choices": ["the mat", "the mat was old"], "gold": 1}
    choose[1] |= {"choices": ["so it", "so it"], "gold": 1}
    choose[2] |= {"choices": [" red", "  blue", "mat"], "gold": 2}
    ending = [
        {
            "context_options": [f"{stem} {end}" for end in ("cat", "old dog")],
            "continuation": words(rng, 2, 5),
            "gold": rng.randrange(2),
        }
        for stem in (words(rng, 3, 8) for _ in range(9))
    ]
    complete = [
        {"context": words(rng, 4, 10) + rng.choice(["", "  ", "\n"]), "continuation": words(rng, 1, 3)}
        for _ in range(11)
    ]
    complete[0]["continuation"] += " "  # ends in a blank: prompts with it cannot be cut there
    for name, items in {"one/choose": choose, "two/ending": ending, "two/complete": complete}.items():
        file = root / "eval_data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    (root / "core.yaml").write_text(CONFIG)
    rows = ["choose,30", "choose_shots,30", "ending,50", "complete,0", "mmlu,"]
    (root / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + "\n".join(rows) + "\n")
    return root


@pytest.fixture
def bundle_folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("bundle")))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    rng = random.Random(3)
    return Tokenizer.train((words(rng, 20, 60) + "\nAnswer: no" for _ in range(60)), 300)


@pytest.fixture(scope="session")
def make_network() -> Callable[..., Network]:
    def make(
        arm: Any = "loop-2", context: int = 96, vocabulary: int = 384, passes: int | None = None
    ) -> Network:
        found = find_arm(arm) if isinstance(arm, str) else arm
        scale = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=context, vocabulary=vocabulary)
        network = materialize(build_on_meta(found.shape(3, scale), found, passes=passes), embedding_std=0.5)
        generator = torch.Generator().manual_seed(0)
        for parameter in network.parameters():  # away from the zeros of the start
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(parameter.shape[-1] ** -0.5 * noise)
        return network

    return make


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rng = random.Random(5)
    source = tmp_path_factory.mktemp("text") / "text.jsonl"
    source.write_text("".join(json.dumps({"text": words(rng, 30, 80)}) + "\n" for _ in range(400)))
    out = tmp_path_factory.mktemp("data") / "small"
    return prepare(PrepareRequest(source=(str(source),), tokenizer="bpe:300", val_tokens=4000), out)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    """A finished run of a few steps; copy it before changing it."""
    from steepen.recipe.paper_tables import recipe_of
    from steepen.recipe.planner import make_plan
    from steepen.runs.spec import DataConfig
    from steepen.runs.store import RunStore
    from steepen.training.train_options import TrainOptions
    from steepen.training.trainer import train

    arm = find_arm("untied-grow")
    scale = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=64, vocabulary=dataset.padded_vocabulary)
    recipe = replace(recipe_of(arm), batch_tokens=256)
    plan = make_plan(arm, depth=3, size_rule=scale, recipe=recipe, tokens=256 * 8)
    spec = RunSpec.from_plan(plan.run, DataConfig(dataset.identity), validation_tokens=1024)
    store = RunStore(tmp_path_factory.mktemp("runs"))
    train(spec, dataset, store, TrainOptions(device="cpu", quiet=True, checkpoint_every=2, keep_every=2))
    return store.run(spec).path


@pytest.fixture(scope="session")
def core_bundle(reference_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The real CORE bundle."""
    folder = tmp_path_factory.mktemp("core")
    with tarfile.open(reference_data("core_bundle/eval_bundle.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return Bundle.open(folder)
