"""Gradients do not depend on the micro-batch, and out-of-memory errors suggest a size that fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.data import Dataset
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import GradientAccumulator, OutOfMemory, accumulate

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=16, vocabulary=32)


class Cramped(Network):
    """A network on a simulated device whose memory holds a limited number of rows."""

    room = 100
    room_by_recomputing: int | None = None  # None: no more

    def hidden_states(self, tokens, passes=None, visit=None):  # type: ignore[no-untyped-def]
        more = self.room_by_recomputing if self.recompute else None
        if len(tokens) > (self.room if more is None else more):
            raise torch.OutOfMemoryError("no more")
        return super().hidden_states(tokens, passes, visit)


def build(room: int = 100) -> tuple[Network, torch.Tensor]:
    arm = find_arm("loop-2")
    network = materialize(build_on_meta(arm.shape(3, SCALE), arm), dtype=torch.float64, embedding_std=0.3)
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    network.__class__ = Cramped
    network.room = room  # type: ignore[assignment]
    tokens = torch.randint(0, 32, (12, 17))
    return network, tokens


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 12])
def test_accumulated_gradients_equal_one_large_batch(micro_batch: int) -> None:
    network, tokens = build()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    network(inputs, targets).backward()
    expected = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    loss = accumulate(network, inputs, targets, 2, micro_batch)
    assert loss.item() == pytest.approx(network(inputs, targets).item(), rel=1e-12)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_auto_micro_batch_halves_until_it_fits_with_the_same_gradients() -> None:
    network, tokens = build(room=4)
    said: list[str] = []
    accumulator = GradientAccumulator(network, 12, None, said.append)
    loss = accumulator(tokens[:, :-1], tokens[:, 1:], 2)
    assert accumulator.micro_batch == 3 and len(said) == 2
    network.room = 100  # type: ignore[assignment]
    assert loss.item() == pytest.approx(network(tokens[:, :-1], tokens[:, 1:], passes=2).item(), rel=1e-12)


def test_error_for_a_fixed_micro_batch_suggests_one_that_fits() -> None:
    network, tokens = build(room=4)
    with pytest.raises(OutOfMemory, match="use `micro_batch` = 3"):
        GradientAccumulator(network, 12, 12, print)(tokens[:, :-1], tokens[:, 1:], 2)


@pytest.mark.parametrize("fixed", [None, 6])
def test_blocks_are_recomputed_where_not_even_one_sequence_fits(fixed: int | None) -> None:
    network, tokens = build(room=0)
    network.room_by_recomputing = 6  # type: ignore[assignment]
    said: list[str] = []
    accumulator = GradientAccumulator(network, 12, fixed, said.append)
    loss = accumulator(tokens[:, :-1], tokens[:, 1:], 2)
    assert network.recompute and accumulator.micro_batch == 6
    assert "out of memory: continuing with blocks recomputed in the backward." in said
    gradients = [p.grad for p in network.parameters()]
    network.recompute, network.room = False, 100  # type: ignore[assignment]
    network.zero_grad()
    assert loss == accumulate(network, tokens[:, :-1], tokens[:, 1:], 2, 6)
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)
    network.room = 0  # type: ignore[assignment]
    with pytest.raises(OutOfMemory, match="even with one sequence"):
        GradientAccumulator(network, 12, fixed, print, may_recompute=False)(tokens[:, 1:], tokens[:, 1:], 2)


def test_run_that_recomputes_is_recorded_and_has_the_same_losses(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path
) -> None:
    found = {}
    for recompute in (None, True):
        options = TrainOptions(device="cpu", quiet=True, recompute=recompute)
        found[recompute] = train(make_spec(), tiny_data, RunStore(tmp_path / str(recompute)), options)
    assert found[True].recompute and not found[None].recompute
    assert found[True].train_loss == found[None].train_loss
    assert found[True].validation_loss == found[None].validation_loss


def test_micro_batch_chosen_before_growth_is_halved_where_the_grown_network_needs_it(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[int, set[int]] = {}

    def limited(network: Network, inputs: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        passes, micro_batch = rest[1], rest[2]
        if passes == 4 and micro_batch > 2:
            raise torch.OutOfMemoryError("no more")
        used.setdefault(passes, set()).add(micro_batch)
        return accumulate(network, inputs, *rest, **options)

    monkeypatch.setattr("steepen.training.train_step.accumulate", limited)
    spec = make_spec("untied-grow")
    rows = spec.batch_sequences
    train(spec, tiny_data, RunStore(tmp_path), TrainOptions(device="cpu", quiet=True, micro_batch=rows))
    assert rows > 2 and used == {2: {rows}, 4: {2}}


@pytest.mark.parametrize("fixed", [None, 4])
def test_error_when_not_even_one_sequence_fits(fixed: int | None) -> None:
    network, tokens = build(room=0)
    with pytest.raises(OutOfMemory, match="smaller depth"):
        GradientAccumulator(network, 12, fixed, print)(tokens[:, :-1], tokens[:, 1:], 2)


def test_other_errors_are_not_treated_as_out_of_memory() -> None:
    network, tokens = build()
    with pytest.raises(IndexError):
        GradientAccumulator(network, 12, None, print)(tokens[:, :-1] + 1000, tokens[:, 1:], 2)
