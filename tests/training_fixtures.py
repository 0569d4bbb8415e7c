"""A tiny dataset, specs of runs that take a second, and the comparison of their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore, read_metrics
from steepen.training import checkpoint as checkpoints
from steepen.training.run import train
from steepen.training.train_options import TrainOptions

SCALE = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=32, vocabulary=384)
QUIET = TrainOptions(device="cpu", quiet=True, checkpoint_every=3, validate_every=4)
WORDS = ["the", "a", "model", "law", "loss", "compute", "token", "scale", "grows", "falls", "over", "depth"]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Sentences of a small grammar: real enough to be learnt, small enough to be made in a second."""
    return prepare_words(tmp_path_factory.mktemp("tiny"), documents=400, val_tokens=2_000, seed=0)


def prepare_words(folder: Path, *, documents: int, val_tokens: int, seed: int) -> Dataset:
    """Prepare documents of sixty random words in `folder`/data, with a tokenizer trained on them."""
    choose = random.Random(seed)
    texts = [" ".join(choose.choices(WORDS, k=60)) for _ in range(documents)]
    (folder / "text.txt").write_text("<|endoftext|>".join(texts))
    prepare(
        PrepareRequest((str(folder / "text.txt"),), tokenizer="bpe:300", val_tokens=val_tokens),
        folder / "data",
    )
    return Dataset.open(folder / "data")


@pytest.fixture(scope="session")
def make_spec(tiny_data: Dataset) -> Callable[..., RunSpec]:
    """Build the spec of a one-second run; keyword arguments change fields."""

    def make(arm: str = "untied-grow", depth: int = 3, steps: int = 12, **changes: Any) -> RunSpec:
        found = find_arm(arm)
        recipe = replace(recipe_of(found), batch_tokens=256, base_depth=depth)
        rho = 0.5 if found.passes.grows else None
        rung = recipe.at_budget(found, depth, SCALE, tokens=256 * steps, rho=rho)
        rung = replace(rung, hyperparameters=replace(rung.hyperparameters, warmup_steps=2))
        spec = RunSpec.from_plan(rung, DataConfig(tiny_data.identity), validation_tokens=512)
        return replace(spec, **changes)

    return make


@pytest.fixture(scope="session")
def whole_run(tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunSpec], RunStore]:
    """The store of an uninterrupted run with the options QUIET, trained once per process: only to read."""
    stores: dict[str, RunStore] = {}

    def store_of(spec: RunSpec) -> RunStore:
        if spec.hash not in stores:
            store = RunStore(tmp_path_factory.mktemp("whole"))
            train(spec, tiny_data, store, QUIET)
            stores[spec.hash] = store
        return stores[spec.hash]

    return store_of


def final_state(store: RunStore, spec: RunSpec) -> dict[str, torch.Tensor]:
    newest = checkpoints.list_checkpoints(store.run(spec).checkpoints)[-1]
    assert newest.step == spec.steps
    return load_file(newest.path / checkpoints.STATE_FILE)


TIMING = {"tokens_per_second", "data_wait", "checkpoint_wait"}


def metrics(store: RunStore, spec: RunSpec) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl without what the clock decides."""
    lines = read_metrics(store.run(spec).metrics_file)
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


def assert_same_result(one: RunStore, other: RunStore, spec: RunSpec) -> None:
    assert metrics(one, spec) == metrics(other, spec)
    first, second = final_state(one, spec), final_state(other, spec)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    records = [store.record(spec) for store in (one, other)]
    assert records[0] is not None and records[1] is not None
    assert records[0].validation_scores == records[1].validation_scores
    assert records[0].validation_loss == records[1].validation_loss
    assert records[0].flops == records[1].flops
