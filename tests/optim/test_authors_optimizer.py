"""Optimizer, schedule and growth of the paper's authors: ours against an independent fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.errors import UsageError
from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule
from steepen.optim.config import LRScheduleConfig, OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec, override
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.training.step_schedule import build_schedule
from steepen.training.train_step import GradientAccumulator, TrainStep, accumulate

from . import authors_step as authors
from .authors_training import AuthorsTraining
from .logical_weights import logical, settings_of, with_waiting_cores

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=16, vocabulary=40, real_vocabulary=37)
ARMS = ["vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow"]
STEPS, WARMUP, WARMDOWN, MOMENTUM_WARMUP, GROWTH, REWARM = 16, 3, 0.6, 5, 9, 4
CONFIG = OptimizerConfig(momentum_warmup_steps=MOMENTUM_WARMUP)  # a run too short for 300 steps


def make_spec(name: str) -> RunSpec:
    arm = find_arm(name)
    rung = recipe_of(arm).at(arm, 4, SCALE)
    hyper = replace(rung.hyperparameters, warmup_steps=WARMUP, warmdown_fraction=WARMDOWN)
    schedule = StageSchedule.staged((0, 2), (GROWTH / STEPS, 4)) if arm.passes.grows else rung.schedule
    spec = RunSpec.from_plan(rung, DataConfig("d" * 64), optimizer=CONFIG)
    return replace(
        spec,
        hyperparameters=hyper,
        schedule=schedule,
        steps=STEPS,
        lr_schedule=LRScheduleConfig(rewarm_steps=REWARM),
    )


def make_default(name: str) -> RunSpec:
    """A spec that names neither optimizer nor schedule."""
    arm = find_arm(name)
    return RunSpec.from_plan(recipe_of(arm).at(arm, 8), DataConfig("d" * 64))


def make_network(spec: RunSpec) -> Network:
    meta = build_on_meta(spec.shape, spec.arm, spec.hyperparameters.multipliers)
    return materialize(meta, dtype=torch.float64, embedding_std=0.3)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 37, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", ARMS)
def test_fused_training_equals_the_authors_through_growth_and_rewarm(name: str) -> None:
    """The reference computes its own gradients: only the initial weights and the batches are shared."""
    spec = make_spec(name)
    schedule = build_schedule(spec)
    network, heads, grows = make_network(spec), spec.shape.heads, spec.arm.passes.grows
    settings = settings_of(spec, GROWTH if grows else None, rewarm=REWARM, momentum_warmup=MOMENTUM_WARMUP)
    start = logical({key: p.detach().clone() for key, p in network.named_parameters()}, heads)
    reference = AuthorsTraining(settings, with_waiting_cores(start, settings))
    install_fused_gpu(network, partial(FusedLinear, dtype=torch.float64))
    optimizer = Optimizer(network.named_parameters(), spec.hyperparameters, spec.optimizer, network.refresh)
    train_step = TrainStep(
        network, optimizer, GradientAccumulator(network, 4, 4, print), cuda_graphs=False, print_message=print
    )
    weights = start
    for step in range(STEPS):
        stored = schedule.networks[schedule.network[step]].passes
        if stored > network.passes:
            assert step == GROWTH
            optimizer.grow(network.named_parameters(), grow(network, stored))
        passes = int(schedule.passes[step])
        train_step(*batch(step), passes, float(schedule.lr_factor[step]), step)
        if step == settings.growth_step:
            reference.grow()
        assert passes == settings.passes_at(step)
        reference.step(step, reference.gradients(step, *batch(step)))
        weights = logical({key: p.detach() for key, p in network.named_parameters()}, heads)
        assert weights.keys() == reference.weights.keys() - reference.waiting(step)
        for key, weight in weights.items():
            difference = (weight - reference.weights[key]).abs().max().item()
            assert difference < 1e-10, f"{key} at step {step}: {difference:.1e}"
    moved = [(weights[key] - before).abs().max().item() for key, before in start.items()]
    assert min(moved) > 1e-3, "every parameter was trained"
    # Routing: Muon steps the block matrices, AdamW embedding and head.
    assert optimizer.muon is not None
    assert logical(optimizer.muon.parameters, heads).keys() == reference.matrices.keys()
    assert {id(p) for p in optimizer.adamw.parameters} == {id(network.embedding), id(network.head)}


def test_the_second_moment_is_by_row_except_for_the_down_projection() -> None:
    spec = make_spec("untied-2")
    network = make_network(spec)
    optimizer = Optimizer(network.named_parameters(), spec.hyperparameters, CONFIG)
    accumulate(network, *batch(0), 2, 4)
    optimizer.step(1.0, 0)
    for name, state in optimizer.state().items():
        if name in ("embedding", "head"):
            continue
        *stack, rows, columns = network.get_parameter(name).shape
        shape = (*stack, 1, columns) if name.endswith(".down") else (*stack, rows, 1)
        assert set(state) == {"momentum", "second_moment"} and state["second_moment"].shape == shape


def test_momentum_rises_linearly_and_then_stays() -> None:
    config = OptimizerConfig()
    values = {0: 0.85, 150: 0.90, 299: 0.85 + 0.1 * 299 / 300, 300: 0.95, 10_000: 0.95}
    for step, value in values.items():
        assert config.momentum_at(step) == pytest.approx(value, abs=1e-15)
        assert config.momentum_at(step) == pytest.approx(authors.muon_momentum(step), abs=1e-15)
    assert replace(OptimizerConfig.named("muon"), momentum=0.9).momentum_at(0) == 0.9


def test_the_default_is_the_authors_optimizer_and_schedule() -> None:
    config = OptimizerConfig()
    assert config == OptimizerConfig.named("authors") == make_default("untied-grow").optimizer
    assert (config.momentum_start, config.momentum, config.momentum_warmup_steps) == (0.85, 0.95, 300)
    assert config.kind == "muon" and config.nesterov and config.row_normalize and config.clip is None
    assert (config.orthogonalization, config.orthogonalization_steps) == ("polar-express", 5)
    assert (config.variance_reduction, config.variance_beta2) == ("row-or-column", 0.95)
    assert config.cautious_decay == "matrices" and config.shape_scaled_decay
    assert config.growth_state == "fresh"
    assert LRScheduleConfig() == LRScheduleConfig(decay_to_zero=True, rewarm_steps=40)


def test_presets_state_a_rewarm_other_than_the_authors() -> None:
    """In `tiny` growth phases are shorter than 40 steps; every spec of a study has the preset's schedule."""
    for name, vocabulary, steps in (("tiny", 512, 5), ("mini", 4096, 40), ("paper", 50_304, 40)):
        preset = load_preset(name)
        assert preset.lr_schedule == LRScheduleConfig(rewarm_steps=steps)
        arm = find_arm("untied-grow")
        context = StudyContext(preset, DatasetInfo("d" * 64, vocabulary, 10**13, 10**9))
        rung = context.recipe(arm).at(arm, preset.depths(arm)[0], context.size_rule)
        assert context.spec(rung).lr_schedule == preset.lr_schedule
        assert rung.growth_step is not None and rung.steps - rung.growth_step > 2 * steps


def test_the_settings_of_version_2_are_reachable() -> None:
    """The line in docs/training.md that gives plain Muon, its schedule and its growth."""
    settings = ["optimizer=muon", "lr_schedule.decay_to_zero=false", "lr_schedule.rewarm_steps=0"]
    spec = override(make_default("untied-grow"), settings)
    assert spec.lr_schedule == LRScheduleConfig(decay_to_zero=False, rewarm_steps=0)
    assert spec.optimizer == OptimizerConfig(
        kind="muon", momentum=0.95, momentum_start=None, nesterov=True, row_normalize=False,
        orthogonalization="newton-schulz", variance_reduction="none", cautious_decay="none",
        shape_scaled_decay=False, clip=None, growth_state="copy",
    )  # fmt: skip


def test_named_optimizers_are_whole_configurations() -> None:
    spec = make_spec("vanilla")
    for name in ("authors", "muon", "normuon", "adamw"):
        assert override(spec, [f"optimizer={name}"]).optimizer == OptimizerConfig.named(name)
    changed = override(spec, ["optimizer=normuon", "optimizer.momentum=0.9", "cautious_decay=all"]).optimizer
    assert changed == replace(OptimizerConfig.named("normuon"), momentum=0.9, cautious_decay="all")
    with pytest.raises(UsageError, match="normuon"):
        override(spec, ["optimizer=normuo"])
    with pytest.raises(UsageError, match="variance_reduction"):
        override(spec, ["optimizer.variance_reduction=rows"])
