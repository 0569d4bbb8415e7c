"""The embedding as the paper's authors store it: weight, gradient and moments in bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training.checkpoint import list_checkpoints
from steepen.training.run import train
from steepen.training.step_schedule import learning_rate_factors
from steepen.training.train_options import TrainOptions


def test_steps_equal_those_of_an_adamw_that_stores_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, 16, generator=generator).bfloat16()
    hyper = recipe_of(find_arm("vanilla")).base
    ours = nn.Parameter(start.float())
    optimizer = Optimizer([("embedding", ours)], hyper, OptimizerConfig(embedding_precision="bf16"))
    weight, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 6):
        gradient = torch.randn(40, 16, generator=generator)
        ours.grad = gradient.clone()
        optimizer.step(1.0, step - 1)
        # The textbook's AdamW on bf16 tensors: computed in fp32, stored in bf16.
        g, lr = gradient.bfloat16().float(), hyper.embedding_lr
        m = hyper.beta1 * first.float() + (1 - hyper.beta1) * g
        v = hyper.beta2 * second.float() + (1 - hyper.beta2) * g * g
        decayed = weight.float() * (1 - lr * hyper.weight_decay)
        scaled = (v / (1 - hyper.beta2**step)).sqrt() + hyper.adam_eps
        moved = decayed - lr * (m / (1 - hyper.beta1**step)) / scaled
        weight, first, second = moved.bfloat16(), m.bfloat16(), v.bfloat16()
        # A value half-way between two of bf16 may round the other way.
        assert (ours.detach() == weight.float()).float().mean() > 0.99
        torch.testing.assert_close(ours.detach(), weight.float(), rtol=2**-7, atol=0)
        weight = ours.detach().bfloat16()
        state = optimizer.state()["embedding"]
        first, second = state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16()
        assert torch.equal(first.float(), state["exp_avg"]) and torch.equal(
            second.float(), state["exp_avg_sq"]
        )
        assert torch.equal(weight.float(), ours.detach())


# Frequent, middle and rare rows: the fraction of steps at which a row has a gradient.
FREQUENCY = {"frequent": 1.0, "middle": 0.03, "rare": 0.01}
ROWS, WIDTH, STEPS = 32, 64, 1200


def synthetic_gradients(step: int) -> Tensor:
    """Standard normal rows, each present at random with the frequency of its class."""
    generator = torch.Generator().manual_seed(step)
    frequency = torch.tensor(list(FREQUENCY.values())).repeat_interleave(ROWS)
    present = torch.rand(len(frequency), generator=generator) < frequency
    return torch.randn(len(frequency), WIDTH, generator=generator) * present[:, None]


def authors_embedding(start: Tensor, hyper: Hyperparameters) -> Tensor:
    """Train bf16 weights and moments by AdamW, in fp64 between two roundings; nothing of ours is called."""
    weight, first, second = (
        start.bfloat16(),
        torch.zeros_like(start).bfloat16(),
        torch.zeros_like(start).bfloat16(),
    )
    decay_start = max(hyper.warmup_steps, STEPS - round(hyper.warmdown_fraction * STEPS))
    for step in range(STEPS):
        up = (step + 1) / hyper.warmup_steps if step < hyper.warmup_steps else 1.0
        down = (STEPS - 1 - step) / (STEPS - 1 - decay_start) if step >= decay_start else 1.0
        lr = 0.04 * hyper.embedding_lr_multiplier * up * down
        gradient = synthetic_gradients(step).bfloat16().double()
        m = hyper.beta1 * first.double() + (1 - hyper.beta1) * gradient
        v = hyper.beta2 * second.double() + (1 - hyper.beta2) * gradient**2
        move = (m / (1 - hyper.beta1 ** (step + 1))) / (
            (v / (1 - hyper.beta2 ** (step + 1))) ** 0.5 + hyper.adam_eps
        )
        weight = (weight.double() * (1 - lr * hyper.weight_decay) - lr * move).bfloat16()
        first, second = m.bfloat16(), v.bfloat16()
    return weight.double()


def row_rms(weight: Tensor) -> dict[str, float]:
    """Root mean square of the rows of each class."""
    return {
        name: float(rows.square().mean().sqrt())
        for name, rows in zip(FREQUENCY, weight.split(ROWS), strict=True)
    }


@pytest.mark.parametrize(("name", "shrinks_by"), [("vanilla", 0.25), ("operator-1", 0.3)])
def test_rows_have_the_size_of_the_authors_bf16_rows(name: str, shrinks_by: float) -> None:
    """In bf16 the decay of rare rows is rounded away; in fp32 they end a quarter to a third smaller."""
    hyper = recipe_of(find_arm(name)).base
    factors = learning_rate_factors(STEPS, hyper.warmup_steps, hyper.warmdown_fraction)
    start = hyper.embedding_init_std * torch.randn(
        3 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)
    )
    theirs = row_rms(authors_embedding(start, hyper))
    found: dict[str, dict[str, float]] = {}
    for precision in ("bf16", "fp32"):
        weight = nn.Parameter(start.bfloat16().float())
        optimizer = Optimizer([("embedding", weight)], hyper, OptimizerConfig(embedding_precision=precision))
        for step in range(STEPS):
            weight.grad = synthetic_gradients(step)
            optimizer.step(float(factors[step]), step)
        found[precision] = row_rms(weight.detach())
    assert found["bf16"] == pytest.approx(theirs, rel=1e-3)
    assert found["fp32"]["rare"] < (1 - shrinks_by) * theirs["rare"]
    assert found["fp32"]["frequent"] == pytest.approx(theirs["frequent"], rel=0.02)


def trained(world: World, spec: RunSpec, data: Dataset, store: Path) -> float:
    options = TrainOptions(device="cpu", quiet=True, micro_batch=2)
    return train(spec, data, RunStore(store), options, world=world).validation_loss


def test_a_run_stores_only_bf16_values_on_any_number_of_ranks(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("vanilla", optimizer=OptimizerConfig(embedding_precision="bf16"))
    plain = make_spec("vanilla")
    assert spec.hash != plain.hash
    loss = trained(World(), spec, tiny_data, tmp_path / "1")
    (saved,) = list_checkpoints(tmp_path / "1" / spec.hash / "checkpoints")[-1:]
    with saved.reader() as reader:
        embedding = reader.read("model", "embedding")
        head = reader.read("model", "head")
    assert torch.equal(embedding.bfloat16().float(), embedding)
    assert not torch.equal(head.bfloat16().float(), head)
    assert on_ranks(2, trained, spec, tiny_data, tmp_path / "2") == [loss, loss]
    assert abs(trained(World(), plain, tiny_data, tmp_path / "1") - loss) > 1e-6
