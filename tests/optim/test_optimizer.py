"""One step of every optimizer variant against an independent double-precision reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grown_networks import grow
from steepen.execution.cuda_graphs import StreamPool
from steepen.model.arms import ARMS, find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.optim.config import OptimizerConfig
from steepen.optim.muon import Muon, orthogonalize, orthogonalize_normalized, run_split
from steepen.optim.optimizer import Optimizer, parameter_group
from steepen.recipe.paper_tables import BASE

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=8, vocabulary=32)
HYPER = replace(BASE["untied-2"], weight_decay=0.3)

MUON = OptimizerConfig.named("muon")  # without the pieces that the authors add
VARIANTS = {
    "newton-schulz": MUON,
    "polar-express": replace(MUON, orthogonalization="polar-express"),
    "no nesterov": replace(MUON, nesterov=False),
    "row normalised": replace(MUON, row_normalize=True),
    "row normalised polar-express": replace(MUON, row_normalize=True, orthogonalization="polar-express"),
    "momentum warm-up": replace(MUON, momentum_start=0.6, momentum_warmup_steps=2),
    "variance by row": replace(MUON, variance_reduction="row", variance_beta2=0.7),
    "variance by row or column": replace(MUON, variance_reduction="row-or-column"),
    "cautious": replace(MUON, cautious_decay="all"),
    "cautious matrices": replace(MUON, cautious_decay="matrices"),
    "shape-scaled decay": replace(MUON, shape_scaled_decay=True),
    "authors": OptimizerConfig.named("authors"),
    "clipped": replace(MUON, clip=0.1),
    "adamw": OptimizerConfig.named("adamw"),
    "cautious adamw": replace(MUON, kind="adamw", cautious_decay="all"),
    "cautious adamw matrices": replace(MUON, kind="adamw", cautious_decay="matrices"),
}


def network_with_gradients(arm: str = "untied-2", seed: int = 0) -> Network:
    found = find_arm(arm)
    network = materialize(
        build_on_meta(found.shape(6, SCALE), found), dtype=torch.float64, embedding_std=0.3, seed=seed
    )
    give_gradients(network, seed)
    return network


def give_gradients(network: Network, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(0.1 * noise)
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


class Reference:
    """Reference of the optimizers: one numpy matrix at a time."""

    def __init__(self, network: Network, config: OptimizerConfig) -> None:
        self.config = config
        self.weights = {n: p.detach().numpy().copy() for n, p in network.named_parameters()}
        self.momentum = {n: np.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: np.zeros_like(w) for n, w in self.weights.items()}
        self.variance: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.steps = 0

    def step(self, gradients: dict[str, np.ndarray], factor: float) -> None:
        self.steps += 1
        if self.config.clip is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
            gradients = {n: g * min(1.0, self.config.clip / (norm + 1e-6)) for n, g in gradients.items()}
        for name, gradient in gradients.items():
            rate = (
                {"embedding": HYPER.embedding_lr_multiplier, "head": HYPER.head_lr_multiplier}.get(name, 1.0)
                * HYPER.learning_rate
                * factor
            )
            block = name not in ("embedding", "head")
            if block and self.config.kind == "muon":
                update = self.muon(name, gradient) * rate
            else:
                update = self.adam(name, gradient) * rate
            weight = self.weights[name]
            decay = rate * HYPER.weight_decay * weight
            if block and self.config.kind == "muon" and self.config.shape_scaled_decay:
                decay = decay * max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
            if self.config.cautious_decay == "all" or (block and self.config.cautious_decay == "matrices"):
                decay = np.where(weight * update >= 0, decay, 0.0)
            self.weights[name] = weight - decay - update

    def muon(self, name: str, gradient: np.ndarray) -> np.ndarray:
        beta = self.config.momentum
        if self.config.momentum_start is not None:
            rise = (self.steps - 1) / self.config.momentum_warmup_steps
            beta = self.config.momentum_start + (beta - self.config.momentum_start) * min(1.0, rise)
        self.momentum[name] = beta * self.momentum[name] + (1 - beta) * gradient
        direction = self.momentum[name]
        if self.config.nesterov:
            direction = beta * direction + (1 - beta) * gradient
        out = np.empty_like(direction)
        rows, columns = direction.shape[-2:]
        for place in np.ndindex(direction.shape[:-2]):
            each = direction[place]
            if self.config.row_normalize:
                each = each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-7)
            update = self.polynomial(each)
            if self.config.variance_reduction != "none":
                by_column = self.config.variance_reduction == "row-or-column" and rows < columns
                mean = (update**2).mean(0 if by_column else 1, keepdims=True)
                beta2 = self.config.variance_beta2
                old = self.variance.setdefault((name, place), np.zeros_like(mean))
                running = beta2 * old + (1 - beta2) * mean
                self.variance[name, place] = running
                scaled = update / np.sqrt(np.maximum(running, 1e-10))
                update = scaled * np.linalg.norm(update) / max(np.linalg.norm(scaled), 1e-10)
            out[place] = update * max(1.0, rows / columns) ** 0.5
        return out

    def polynomial(self, matrix: np.ndarray) -> np.ndarray:
        """Through the singular values: an odd matrix polynomial only changes those."""
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        if self.config.orthogonalization == "newton-schulz":
            table = [(3.4445, -4.7750, 2.0315)] * 5
            values = values / (np.sqrt((values**2).sum()) + 1e-7)
        else:
            table = [
                (8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
            ]
            values = values / (1.02 * np.sqrt((values**2).sum()) + 1e-6)
        for a, b, c in table:
            values = a * values + b * values**3 + c * values**5
        return left @ np.diag(values) @ right

    def adam(self, name: str, gradient: np.ndarray) -> np.ndarray:
        b1, b2 = HYPER.beta1, HYPER.beta2
        self.momentum[name] = b1 * self.momentum[name] + (1 - b1) * gradient
        self.second[name] = b2 * self.second[name] + (1 - b2) * gradient**2
        mean = self.momentum[name] / (1 - b1**self.steps)
        size = np.sqrt(self.second[name] / (1 - b2**self.steps))
        return mean / (size + HYPER.adam_eps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_an_independent_reference_in_fp64(variant: str) -> None:
    config = VARIANTS[variant]
    network = network_with_gradients()
    optimizer = Optimizer(network.named_parameters(), HYPER, config, network.refresh)
    reference = Reference(network, config)
    for step, factor in enumerate((1.0, 0.7, 0.2)):
        if step:
            generator = torch.Generator().manual_seed(step)
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        gradients = {n: p.grad.numpy().copy() for n, p in network.named_parameters() if p.grad is not None}
        optimizer.step(factor, step)
        reference.step(gradients, factor)
        for name, parameter in network.named_parameters():
            np.testing.assert_allclose(
                parameter.detach().numpy(), reference.weights[name], rtol=1e-9, atol=1e-11, err_msg=name
            )


def test_each_logical_matrix_is_orthogonalized_separately() -> None:
    """A stack steps exactly as its matrices do separately: Q, K and V are never one matrix."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 16, 16, generator=generator, dtype=torch.float64)
    gradients = (
        torch.randn(3, 16, 16, generator=generator, dtype=torch.float64)
        * torch.tensor([1, 10, 100])[:, None, None]
    )
    stack = nn.Parameter(weights.clone())
    stack.grad = gradients.clone()
    Muon({"qkv": stack}, OptimizerConfig()).step(0.1, 0.0)
    for index in range(3):
        single = nn.Parameter(weights[index].clone())
        single.grad = gradients[index].clone()
        Muon({"q": single}, OptimizerConfig()).step(0.1, 0.0)
        torch.testing.assert_close(stack[index], single, rtol=1e-12, atol=1e-12)


def test_muon_agrees_with_torch_muon_on_one_matrix() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no torch.optim.Muon")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 16, generator=generator)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    muon = Muon({"w": ours}, MUON)
    torch_muon = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.95, nesterov=True)
    for _ in range(3):
        ours.grad = torch.randn(24, 16, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step(0.1, 0.2)
        torch_muon.step()
    # Torch orthogonalizes in bf16 whatever the device; a step moves weights by about 0.1.
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize(("method", "slack"), [("newton-schulz", 0.35), ("polar-express", 0.15)])
def test_orthogonalized_singular_values_are_near_one(method: str, slack: float) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(4, 24, 40, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, method))
    assert (values - 1).abs().max() < slack


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_gradients_leave_finite_weights(variant: str) -> None:
    network = network_with_gradients()
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh).step(1.0)
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", ARMS)
def test_every_parameter_is_in_one_group_and_block_matrices_in_muon(name: str) -> None:
    network = network_with_gradients(name)
    optimizer = Optimizer(network.named_parameters(), HYPER, OptimizerConfig(), network.refresh)
    named = dict(network.named_parameters())
    assert optimizer.muon is not None
    matrices = optimizer.muon.parameters
    assert set(matrices) == {name for name, p in named.items() if parameter_group(name, p) == "matrices"}
    assert named.keys() - set(matrices) == {
        "embedding",
        "head",
    }
    # The check itself must be able to fail.
    matrices.pop(next(iter(matrices)))
    with pytest.raises(AssertionError):
        optimizer._check(named)


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_returns_the_gradient_norm_before_clipping(variant: str) -> None:
    network = network_with_gradients()
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    norm = Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh).step(1.0)
    assert norm.item() == pytest.approx(math.sqrt(sum(g.double().square().sum().item() for g in gradients)))
    assert norm.item() > 0.1, "more than the clipped have left"


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("policy", ["copy", "zero", "fresh"])
def test_grown_cores_follow_their_state_policy(kind: Any, policy: Any) -> None:
    network = network_with_gradients("untied-grow")
    optimizer = Optimizer(
        network.named_parameters(), HYPER, OptimizerConfig(kind=kind, growth_state=policy), network.refresh
    )  # type: ignore[arg-type]
    optimizer.step(1.0)
    sources = grow(network, 4)
    optimizer.grow(network.named_parameters(), sources)
    state = optimizer.state()
    # The order of a network that is rebuilt from a checkpoint: sums over parameters must round alike.
    assert list(optimizer.parameters) == [name for name, _ in network.named_parameters()]
    assert list(optimizer.matrices) == [name for name in optimizer.parameters if name in optimizer.matrices]
    key = "momentum" if kind == "muon" else "exp_avg"
    for new, source in sources.items():
        if policy == "fresh":
            assert new not in state
        else:
            expected = state[source][key] if policy == "copy" else torch.zeros_like(state[source][key])
            assert torch.equal(state[new][key], expected)
    give_gradients(network, 1)
    optimizer.step(1.0)
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_survives_a_round_trip_by_name(variant: str) -> None:
    def trained(steps: int) -> tuple[Network, Optimizer]:
        network = network_with_gradients()
        optimizer = Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh)
        for step in range(steps):
            give_gradients(network, step + 1)
            optimizer.step(0.5)
        return network, optimizer

    network, optimizer = trained(2)
    copy = network_with_gradients(seed=9)
    copy.load_state_dict(network.state_dict())
    other = Optimizer(copy.named_parameters(), HYPER, VARIANTS[variant], copy.refresh)
    other.load_state({n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state().items()})
    for each, stepper in ((network, optimizer), (copy, other)):
        give_gradients(each, 7)
        stepper.step(0.5)
    pairs: zip[tuple[Tensor, Tensor]] = zip(network.parameters(), copy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_parameters_without_a_gradient_are_unchanged() -> None:
    network = network_with_gradients()
    optimizer = Optimizer(network.named_parameters(), HYPER, OptimizerConfig(), network.refresh)
    silent = {"embedding", next(iter(optimizer.matrices))}
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if name in silent:
            parameter.grad = None
    optimizer.step(1.0)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in silent), name
    assert silent.isdisjoint(optimizer.state())


@pytest.mark.parametrize("variant", VARIANTS)
def test_learning_rates_persist_until_set_again(variant: str) -> None:
    networks = [network_with_gradients(), network_with_gradients()]
    one, two = (
        Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh)
        for network in networks
    )
    for factor in (0.7, 0.2):
        one.set_lr_factor(factor)
        for seed in (1, 2):
            for network in networks:
                give_gradients(network, seed)
            one.step_at_current_lr()
            two.step(factor)
    pairs: zip[tuple[Tensor, Tensor]] = zip(*(n.parameters() for n in networks), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_warm_up_leaves_the_state_unchanged_and_covers_every_shape(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_with_gradients()
    optimizer = Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh)
    before = [(p.detach().clone(), p.grad) for p in network.parameters()]
    seen: list[tuple[int, ...]] = []

    def spy(matrices: Tensor, *words: Any) -> Tensor:
        seen.append(tuple(matrices.shape[1:]))
        return orthogonalize_normalized(matrices, *words)

    monkeypatch.setattr("steepen.optim.muon.orthogonalize_normalized", spy)
    optimizer.warm_up()
    assert set(seen) == {tuple(sorted(p.shape[-2:])) for p in optimizer.matrices.values()}
    assert not optimizer.state()
    for parameter, (weight, gradient) in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter, weight) and parameter.grad is gradient


@pytest.mark.parametrize("count", [1, 6, 7, 13])
def test_run_split_covers_every_item_once(count: int) -> None:
    done: list[tuple[int, int]] = []

    def work(tensors: list[Tensor], numbers: list[int]) -> None:
        done.extend((int(tensor), number) for tensor, number in zip(tensors, numbers, strict=True))

    class Sides(StreamPool):
        def __call__(self, works: Any, device: torch.device) -> list[Any]:
            assert 1 <= len(works) <= 6
            return [work() for work in works]

    tensors = [torch.tensor(k) for k in range(count)]
    run_split(Sides(), work, tensors, list(range(count)))
    assert sorted(done) == [(k, k) for k in range(count)]


def on_gpu() -> Network:
    found = find_arm("untied-2")
    scale = SizeRule(aspect=128, head_dim=64, mlp_multiple=64, context=8, vocabulary=128)
    network = materialize(build_on_meta(found.shape(3, scale), found), "cuda", embedding_std=0.3, seed=0)
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, device="cuda"))
    return network


def same_gradients(networks: list[Network], seed: int) -> None:
    """Write new gradients into the existing buffers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameters in zip(*(n.parameters() for n in networks), strict=True):
        gradient = torch.randn(parameters[0].shape, generator=generator, device="cuda")
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_step_replays_at_the_latest_learning_rates(
    variant: str, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepen.optim.optimizer.PARALLEL_MAX_ELEMENTS", 2**40 if side_by_side else 0)
    torch.manual_seed(0)
    networks = [on_gpu(), on_gpu()]
    networks[1].load_state_dict(networks[0].state_dict())
    plain, captured = (
        Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh)
        for network in networks
    )
    same_gradients(networks, 0)
    plain.step(0.5, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step(0.5, 0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step_at_current_lr()
    for step, factor in enumerate((1.0, 0.3, 0.01)):
        same_gradients(networks, step + 1)
        before = [[p.detach().clone() for p in network.parameters()] for network in networks]
        plain.step(factor, step + 1)
        captured.set_lr_factor(factor)
        captured.set_momentum(step + 1)
        graph.replay()
        for index, (name, parameter) in enumerate(networks[0].named_parameters()):
            moved = parameter - before[0][index]
            other = list(networks[1].parameters())[index] - before[1][index]
            # Products may be rounded otherwise in a graph; another rate would be far further off.
            assert (moved - other).norm() < 0.02 * moved.norm(), f"{name} at step {step}"
    counts = [s["step"].item() for o in (plain, captured) for s in o.state().values() if "step" in s]
    assert counts and set(counts) == {4.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_on_a_gpu_equal_those_on_a_cpu_within_bf16(variant: str) -> None:
    torch.manual_seed(0)
    ours = on_gpu()
    found = find_arm("untied-2")
    theirs = materialize(build_on_meta(ours.shape, found), dtype=torch.float64, embedding_std=0.3, seed=0)
    theirs.load_state_dict(ours.state_dict())
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    optimizers = [
        Optimizer(network.named_parameters(), HYPER, VARIANTS[variant], network.refresh)
        for network in (ours, theirs)
    ]
    for step in range(2):
        same_gradients([ours], step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.to(other)
        for optimizer in optimizers:
            optimizer.step(0.5)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        moved = other - before[name]
        off = (mine.cpu().double() - other).norm() / moved.norm()
        assert off < 0.05, f"{name}: {off:.3f} of the way off"
