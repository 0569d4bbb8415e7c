"""Small networks with random weights, and one finished run of a few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.data import Dataset
from steepen.inference.import_model import write_run
from steepen.model.arms import find_arm
from steepen.model.config import ModelOptions
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.training.run_state import build_network
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "tiny_data"]


@pytest.fixture(scope="session")
def make_network() -> Callable[..., Network]:
    def make(
        arm: Any = "loop-2", *, depth: int = 6, dtype: torch.dtype = torch.float32, **sizes: int
    ) -> Network:
        found = find_arm(arm)
        sizes = {"aspect": 4, "head_dim": 8, "mlp_multiple": 8, "context": 96, "vocabulary": 48, **sizes}
        meta = build_on_meta(found.shape(depth, SizeRule(**sizes)), found, passes=found.passes.final)
        network = materialize(meta, dtype=dtype, embedding_std=0.5)
        generator = torch.Generator().manual_seed(0)
        for parameter in network.parameters():  # away from the zeros of the start
            noise = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.data.add_(2 * parameter.shape[-1] ** -0.5 * noise)
        return network

    return make


@pytest.fixture(scope="session")
def train_run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Dataset) -> Callable[[RunSpec], Path]:
    """Train a spec on the tiny data; returns the run directory."""
    from steepen.runs.store import RunStore
    from steepen.training.run import train
    from steepen.training.train_options import TrainOptions

    store = RunStore(tmp_path_factory.mktemp("runs"))

    def run(spec: RunSpec) -> Path:
        train(spec, tiny_data, store, TrainOptions(device="cpu", quiet=True))
        return store.run(spec).path

    return run


@pytest.fixture(scope="session")
def trained(train_run: Callable[[RunSpec], Path], make_spec: Callable[..., RunSpec]) -> Path:
    """A finished run of a few steps; copy it before changing it."""
    return train_run(make_spec())


@pytest.fixture(scope="session")
def random_run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Dataset) -> Callable[..., Path]:
    """Write the run directory of an arm with random weights; keyword arguments change its model options."""

    def make(arm: str, **options: Any) -> Path:
        found = find_arm(arm)
        rule = SizeRule(aspect=4, head_dim=8, mlp_multiple=8, context=96, vocabulary=384, real_vocabulary=300)
        rho = 0.5 if found.passes.grows else None
        recipe = replace(recipe_of(found), batch_tokens=192, base_depth=6)
        rung = recipe.at_budget(found, 6, rule, tokens=192 * 8, rho=rho)
        data = DataConfig(tiny_data.identity)
        spec = RunSpec.from_plan(rung, data, options=ModelOptions(**options), validation_tokens=192)
        passes = spec.schedule.stages[-1].max_passes
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[-1] ** -0.5
            for name, parameter in build_network(
                spec, spec.network_after(spec.steps), passes
            ).named_parameters()
        }
        return write_run(
            tmp_path_factory.mktemp("random") / spec.hash,
            spec,
            weights,
            step=spec.steps,
            stored_passes=passes,
            tokenizer=tiny_data.tokenizer(),
            record=None,
        )

    return make
