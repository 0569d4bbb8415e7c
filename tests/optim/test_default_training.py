"""The default trainer path, from spec to the last step, against the fp64 reference of the authors' training.

The specs name neither optimizer nor schedule. The reference (`authors_training`) shares only the initial
weights and the batches with the trainer: network, growth, schedule and optimizer are its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.data import Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.model.arms import find_arm
from steepen.model.init import allocate
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import TrainStep

from .authors_training import AuthorsTraining, Weights
from .logical_weights import logical, settings_of, with_waiting_cores

# A vocabulary of 300 ids, padded to 384.
SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=16, vocabulary=384, real_vocabulary=300)
ARMS = [
    "vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2",
    "loop-grow", "untied-grow", "deep-vanilla-grow",
]  # fmt: skip
STEPS, GROWTH = 16, 6
STEPS_WITH_GROWTH = 50  # long enough for the 40 steps of the default re-warm
DEPTH = 3
ROWS = 4  # sequences in a batch
WORDS = ["the", "a", "model", "law", "loss", "compute", "token", "scale", "grows", "falls", "over", "depth"]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("words")
    choose = random.Random(0)
    documents = [" ".join(choose.choices(WORDS, k=60)) for _ in range(200)]
    (folder / "text.txt").write_text("<|endoftext|>".join(documents))
    request = PrepareRequest((str(folder / "text.txt"),), tokenizer="bpe:300", val_tokens=500)
    prepare(request, folder / "data")
    return Dataset.open(folder / "data")


def make_spec(name: str, dataset: Dataset) -> RunSpec:
    arm = find_arm(name)
    recipe = replace(recipe_of(arm), batch_tokens=ROWS * SCALE.context, base_depth=DEPTH)
    steps = STEPS_WITH_GROWTH if arm.passes.grows else STEPS
    rho = 1 - (GROWTH + 0.7) / steps if arm.passes.grows else None  # growth at 6.7 steps is cut to 6
    rung = recipe.at_budget(arm, DEPTH, SCALE, tokens=steps * ROWS * SCALE.context, rho=rho)
    if not arm.passes.grows:  # a warm-up of 40 steps would be all of the run
        warmup = min(rung.hyperparameters.warmup_steps, 5)
        rung = replace(rung, hyperparameters=replace(rung.hyperparameters, warmup_steps=warmup))
    return RunSpec.from_plan(rung, DataConfig(dataset.identity), validation_tokens=SCALE.context)


@dataclass
class Trained:
    """What the trainer did, step by step: batch, passes, gradients before and weights after, routing."""

    start: Weights = field(default_factory=dict)
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    muon: list[set[str]] = field(default_factory=list)
    adamw: list[set[str]] = field(default_factory=list)


def run_trainer(
    spec: RunSpec, dataset: Dataset, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> Trained:
    """Train with `steepen.training.run.train` and default options, watched from outside."""
    seen = Trained()
    take_step, step_weights = Optimizer.step, TrainStep.__call__

    def watched_optimizer(self: Optimizer, *words: Any) -> Tensor:
        named = {name: p.grad for name, p in self.parameters.items()}
        seen.gradients.append({name: g.clone() for name, g in named.items() if g is not None})
        return take_step(self, *words)

    def watched_step(self: TrainStep, inputs: Tensor, targets: Tensor, passes: int, *words: Any) -> Any:
        seen.start = seen.start or {n: p.detach().clone() for n, p in self.network.named_parameters()}
        found = step_weights(self, inputs, targets, passes, *words)
        seen.batches.append((inputs.clone(), targets.clone()))
        seen.passes.append(passes)
        seen.weights.append({n: p.detach().clone() for n, p in self.network.named_parameters()})
        names = {id(p): name for name, p in self.network.named_parameters()}
        assert isinstance(self.optimizer, Optimizer) and self.optimizer.muon is not None
        seen.muon.append({names[id(p)] for p in self.optimizer.muon.parameters.values()})
        seen.adamw.append({names[id(p)] for p in self.optimizer.adamw.parameters})
        return found

    def allocate_as(network: Network, device: torch.device) -> Network:
        network = allocate(network, device).to(dtype)
        network.reset_rotary()
        return network

    monkeypatch.setattr(Optimizer, "step", watched_optimizer)
    monkeypatch.setattr(TrainStep, "__call__", watched_step)
    monkeypatch.setattr("steepen.training.run_state.allocate", allocate_as)
    train(spec, dataset, RunStore(folder), TrainOptions(device="cpu", quiet=True))
    return seen


def check(spec: RunSpec, trained: Trained, weight_tolerance: float, gradient_tolerance: float) -> None:
    """Compare gradients before and weights after every step.

    The reference steps by the trainer's gradients, which must be its own network's at its own weights: with
    its own ones, rounding would grow from step to step.
    """
    steps, heads, grows = spec.steps, spec.shape.heads, spec.arm.passes.grows
    settings = settings_of(spec, GROWTH if grows else None)
    start = logical(trained.start, heads)
    reference = AuthorsTraining(settings, with_waiting_cores(start, settings))
    weights = start
    for step in range(steps):
        if step == settings.growth_step:
            reference.grow()
        assert trained.passes[step] == settings.passes_at(step)
        waiting = reference.waiting(step)
        found = logical(trained.gradients[step], heads)
        expected = reference.gradients(step, *trained.batches[step])
        assert found.keys() == expected.keys() - waiting
        for key, gradient in found.items():
            difference = (gradient.double() - expected[key]).abs().max().item()
            bound = gradient_tolerance * max(expected[key].abs().max().item(), 1e-3)
            assert difference < bound, f"gradient of {key} at step {step}: {difference:.1e}"
        assert not any(expected[key].any() for key in waiting)
        reference.step(step, expected | found)
        weights = logical(trained.weights[step], heads)
        assert weights.keys() == reference.weights.keys() - waiting
        for key, weight in weights.items():
            difference = (weight.double() - reference.weights[key]).abs().max().item()
            assert difference < weight_tolerance, f"{key} after step {step}: {difference:.1e}"
        # Routing, also of the cores that growth added: Muon steps block matrices, AdamW embedding and head.
        matrices = logical({name: trained.weights[step][name] for name in trained.muon[step]}, heads)
        assert matrices.keys() == reference.matrices.keys() - waiting
        assert trained.adamw[step] == reference.tensors.keys() == {"embedding", "head"}
    for key, before in start.items():
        assert (weights[key].double() - before).abs().max() > 1e-3, f"{key} was not trained"
    # The last step, and the step of growth, have rate zero and change nothing.
    for step in [steps - 1, *([GROWTH] if grows else [])]:
        for key, weight in trained.weights[step - 1].items():
            assert torch.equal(trained.weights[step][key], weight)


# In fp32, directions of tiny gradients (output projections start at zero) are rounding errors that row
# normalization and orthogonalization enlarge; steps move weights by 1e-2 and more.
TOLERANCES = {torch.float64: (1e-10, 1e-8), torch.float32: (1e-3, 5e-2)}
CASES = [
    *((name, torch.float64) for name in ARMS),
    *((name, torch.float32) for name in ("operator-1", "loop-grow", "untied-grow")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda each: str(each).removeprefix("torch."))
def test_the_default_trainer_takes_the_authors_steps(
    name: str, dtype: torch.dtype, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(name, dataset)
    trained = run_trainer(spec, dataset, tmp_path, monkeypatch, dtype)
    assert len(trained.weights) == spec.steps
    check(spec, trained, *TOLERANCES[dtype])
