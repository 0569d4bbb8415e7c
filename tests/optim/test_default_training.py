"""The default trainer path, from spec to the last step, against the fp64 reference of the authors' step.

The specs name neither optimizer nor schedule. The reference (`authors_step`) has its own schedule, its own
state per logical matrix and its own rule for which parameter goes where; it shares the network, growth's copy
of the cores and the order of the data with the trainer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.data import BatchLoader, Dataset
from steepen.data.prepare import PrepareRequest, prepare
from steepen.model.arms import find_arm
from steepen.model.growth import grow
from steepen.model.init import build_on_meta, materialize
from steepen.model.load_weights import allocate
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.gradient_accumulation import accumulate
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import TrainStep
from steepen.training.trainer import train

from . import authors_step as authors

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=16, vocabulary=384)
ARMS = [
    "vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2",
    "loop-grow", "untied-grow", "deep-vanilla-grow",
]  # fmt: skip
STEPS, GROWTH = 16, 12
STEPS_WITH_GROWTH = 56  # long enough for the 40 steps of the default re-warm
DEPTH = 3
ROWS = 4  # sequences in a batch
WORDS = ["the", "a", "model", "law", "loss", "compute", "token", "scale", "grows", "falls", "over", "depth"]
Weights = dict[str, Tensor]


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
    rho = 1 - (GROWTH + 0.7) / steps if arm.passes.grows else None  # growth at 12.7 steps is cut to 12
    rung = recipe.at_budget(arm, DEPTH, SCALE, tokens=steps * ROWS * SCALE.context, rho=rho)
    if not arm.passes.grows:  # a warm-up of 40 steps would be all of the run
        warmup = min(rung.hyperparameters.warmup_steps, 5)
        rung = replace(rung, hyperparameters=replace(rung.hyperparameters, warmup_steps=warmup))
    return RunSpec.from_plan(rung, DataConfig(dataset.identity), validation_tokens=SCALE.context)


@dataclass
class Trained:
    """What the trainer did, step by step: passes, gradients before and weights after each step, routing."""

    passes: list[int] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    muon: list[set[str]] = field(default_factory=list)
    adamw: list[set[str]] = field(default_factory=list)


def run_trainer(
    spec: RunSpec, dataset: Dataset, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> Trained:
    """Train with `steepen.training.trainer.train` and default options, watched from outside."""
    seen = Trained()
    take_step, step_weights = Optimizer.step, TrainStep.__call__

    def watched_optimizer(self: Optimizer, *words: Any) -> Tensor:
        named = {name: p.grad for name, p in self.parameters.items()}
        seen.gradients.append({name: g.clone() for name, g in named.items() if g is not None})
        return take_step(self, *words)

    def watched_step(self: TrainStep, inputs: Tensor, targets: Tensor, passes: int, *words: Any) -> Any:
        found = step_weights(self, inputs, targets, passes, *words)
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


class Reference:
    """The authors' training: one object per logical matrix, in fp64, by the facts about their code alone."""

    def __init__(self, spec: RunSpec, dataset: Dataset, dtype: torch.dtype) -> None:
        self.spec = spec
        hyper = spec.hyperparameters
        meta = build_on_meta(
            spec.shape, spec.arm, hyper.multipliers, spec.options, passes=spec.schedule.initial
        )
        network = materialize(
            meta, dtype=dtype, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale,
            seed=spec.seed,
        )  # fmt: skip
        self.network = network.double()
        pool = spec.pool_size(len(dataset.tokens("train")))
        self.batches = BatchLoader(
            dataset, spec.shape.context, spec.batch_tokens, spec.seed, pool_tokens=pool
        )
        self.matrices: dict[str, list[authors.MuonMatrix]] = {}
        self.tensors: dict[str, authors.AdamWTensor] = {}
        self.grows = spec.arm.passes.grows
        self._add_new()

    def _add_new(self) -> None:
        """Zero state for what is new; state that exists is kept."""
        for name, parameter in self.network.named_parameters():
            if name in ("embedding", "head"):
                self.tensors.setdefault(name, authors.AdamWTensor(parameter.detach()))
            elif name not in self.matrices:
                stack = parameter.detach().view(-1, *parameter.shape[-2:])
                self.matrices[name] = [authors.MuonMatrix(each) for each in stack]

    def gradients(self, step: int, passes: int) -> Weights:
        """Autograd's, of the step's batch at these weights."""
        self.network.zero_grad()
        inputs, targets = (torch.from_numpy(each) for each in self.batches.at(step))
        accumulate(self.network, inputs, targets, passes, ROWS)
        found = {name: p.grad for name, p in self.network.named_parameters()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def grow(self) -> None:
        """Before the step of growth: core j becomes a copy of core j mod 2, with zero state."""
        grow(self.network, 4)
        for name, parameter in self.network.named_parameters():
            part, *rest = name.split(".")
            if part == "cores":
                source = ".".join([part, str(int(rest[0]) % 2), *rest[1:]])
                assert torch.equal(parameter, self.network.get_parameter(source))
        self._add_new()

    @torch.no_grad()
    def step(self, step: int, gradients: Weights) -> None:
        hyper = self.spec.hyperparameters
        growth = GROWTH if self.grows else None
        factor = authors.learning_rate_factor(
            step, self.spec.steps, hyper.warmup_steps, hyper.warmdown_fraction, growth
        )
        lr, decay = hyper.learning_rate * factor, hyper.weight_decay
        for name, matrices in self.matrices.items():
            stack = gradients[name].double().view(-1, *gradients[name].shape[-2:])
            for matrix, gradient in zip(matrices, stack, strict=True):
                matrix.step(gradient, authors.muon_momentum(step), lr, decay)
        rates = {"embedding": hyper.embedding_lr_multiplier, "head": hyper.head_lr_multiplier}
        for name, tensor in self.tensors.items():
            betas = (hyper.beta1, hyper.beta2)
            tensor.step(gradients[name].double(), lr * rates[name], decay, betas, hyper.adam_eps)


def check(
    spec: RunSpec,
    dataset: Dataset,
    trained: Trained,
    dtype: torch.dtype,
    weight_tolerance: float,
    gradient_tolerance: float,
) -> None:
    """Compare gradients before and weights after every step.

    The reference steps by the trainer's gradients, which must be autograd's at the reference's own weights:
    with its own ones, rounding would grow from step to step.
    """
    steps = spec.steps
    reference = Reference(spec, dataset, dtype)
    start = {key: p.detach().clone() for key, p in reference.network.named_parameters()}
    for step in range(steps):
        if reference.grows and step == GROWTH:
            reference.grow()
        passes = 4 if reference.grows and step >= GROWTH else spec.schedule.initial
        assert trained.passes[step] == passes
        expected = dict(reference.network.named_parameters())
        gradients = reference.gradients(step, passes)
        assert gradients.keys() == trained.gradients[step].keys() == expected.keys()
        for key, gradient in gradients.items():
            difference = (trained.gradients[step][key].double() - gradient).abs().max().item()
            bound = gradient_tolerance * max(gradient.abs().max().item(), 1e-3)
            assert difference < bound, f"gradient of {key} at step {step}: {difference:.1e}"
        reference.step(step, trained.gradients[step])
        for key, weight in trained.weights[step].items():
            difference = (weight.double() - expected[key]).abs().max().item()
            assert difference < weight_tolerance, f"{key} after step {step}: {difference:.1e}"
        # Routing, also of the cores that growth added: Muon steps block matrices, AdamW embedding and head.
        assert trained.muon[step] == set(reference.matrices) == expected.keys() - {"embedding", "head"}
        assert trained.adamw[step] == {"embedding", "head"}
    for key, before in start.items():
        assert (trained.weights[-1][key].double() - before).abs().max() > 1e-3, f"{key} was not trained"
    # The last step, and the step of growth, have rate zero and change nothing.
    for step in [steps - 1, *([GROWTH] if reference.grows else [])]:
        for key, weight in trained.weights[step - 1].items():
            assert torch.equal(trained.weights[step][key], weight)


# In fp32, directions of tiny gradients (output projections start at zero) are rounding errors that row
# normalization and orthogonalization enlarge; steps move weights by 1e-2 and more.
@pytest.mark.parametrize(
    ("dtype", "weight_tolerance", "gradient_tolerance"),
    [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-3, 5e-2)],
)
@pytest.mark.parametrize("name", ARMS)
def test_the_default_trainer_takes_the_authors_steps(
    name: str,
    dtype: torch.dtype,
    weight_tolerance: float,
    gradient_tolerance: float,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec(name, dataset)
    trained = run_trainer(spec, dataset, tmp_path, monkeypatch, dtype)
    assert len(trained.weights) == spec.steps
    check(spec, dataset, trained, dtype, weight_tolerance, gradient_tolerance)
