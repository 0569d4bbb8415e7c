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

from core_bundle import words, write_bundle
from steepen.data import Dataset, Tokenizer
from steepen.data.prepare import PrepareRequest, prepare
from steepen.evaluation.core.bundle import Bundle
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.runs.spec import RunSpec


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
    from steepen.training.run import train
    from steepen.training.train_options import TrainOptions

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
