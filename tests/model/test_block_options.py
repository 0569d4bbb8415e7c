"""Options of the built-in block: what they equal, in fp64, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from module_count import count
from steepen.errors import UsageError
from steepen.model.arms import find_arm
from steepen.model.block_options import BlockOptions
from steepen.model.block_variant import BIAS_GRADIENT, VariantBlock, make_block
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.recipe.flops import (
    compute_active_parameters,
    flops_per_token,
    recipe_parameters,
    stored_parameters,
)

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=32)
VARIANTS = [
    "kv_heads=2",
    "window=3",
    "activation=relu2",
    "parallel=true",
    "experts=4",
    "experts=4+active_experts=1+balance=loss",
    "experts=3+shared_experts=1+kv_heads=1+window=5",
    "streams=3",
    "streams=2+parallel=true+experts=3",
]


def build(arm: str, depth: int = 4, seed: int = 0) -> Network:
    """A double-precision network without zero weights."""
    found = find_arm(arm)
    network = build_on_meta(found.shape(depth, SCALE), found, Multipliers(residual=0.5))
    materialize(network, dtype=torch.float64, embedding_std=0.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def blocks(network: Network) -> list[VariantBlock]:
    return cast("list[VariantBlock]", list(network.blocks()))


def tokens() -> Tensor:
    return torch.randint(0, SCALE.vocabulary, (2, SCALE.context), generator=torch.Generator().manual_seed(1))


def give_weights(source: Network, target: Network, rename: Any = None) -> None:
    target.embedding.data.copy_(source.embedding)
    target.head.data.copy_(source.head)
    for one, other in zip(source.blocks(), target.blocks(), strict=True):
        weights = dict(one.state_dict())
        other.load_state_dict(rename(weights) if rename else weights)


def assert_equal_functions(one: Network, other: Network, tolerance: float = 1e-12) -> None:
    """Logits and the gradient of the embedding agree."""
    found = [network(tokens()) for network in (one, other)]
    torch.testing.assert_close(*found, rtol=0, atol=tolerance)
    gradients = [torch.autograd.grad(network(tokens()).square().sum(), network.embedding)[0]
                 for network in (one, other)]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


def test_as_many_kv_heads_as_heads_are_multi_head_attention() -> None:
    vanilla, grouped = build("vanilla"), build("vanilla+kv_heads=4")

    def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        qkv = weights.pop("qkv")
        return {**weights, "query": qkv[0], "key_value": qkv[1:]}

    give_weights(vanilla, grouped, rename)
    assert_equal_functions(vanilla, grouped)


def test_grouped_heads_are_repeated_heads() -> None:
    vanilla, grouped = build("vanilla"), build("vanilla+kv_heads=2")

    def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        heads = weights.pop("key_value").unflatten(1, (2, 8)).repeat_interleave(2, dim=1).flatten(1, 2)
        query = weights.pop("query")
        return {**weights, "qkv": torch.cat([query[None], heads])}

    give_weights(grouped, vanilla, rename)
    assert_equal_functions(grouped, vanilla)


@pytest.mark.parametrize("window", [12, 100])
def test_window_as_long_as_the_context_is_full_attention(window: int) -> None:
    vanilla, windowed = build("vanilla"), build(f"vanilla+window={window}")
    give_weights(vanilla, windowed)
    assert_equal_functions(vanilla, windowed)


@pytest.mark.parametrize("base", ["vanilla", "untied-2", "loop-2"])
def test_hyper_connections_of_one_stream_are_the_residual_connection(base: str) -> None:
    residual, connected = build(base), build(f"{base}+streams=1")

    def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        zeros = torch.zeros(3, dtype=torch.float64)
        return {**weights, "attention_connection": zeros, "mlp_connection": zeros}

    give_weights(residual, connected, rename)
    assert_equal_functions(residual, connected)


def test_hyper_connections_follow_their_formula() -> None:
    """Reads, adds and mixes with the weights of their start, changed by the parameters."""
    block = blocks(build("vanilla+streams=3"))[0]
    x = torch.randn(2, 5, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    block.project = lambda y: (y.unflatten(-1, (4, 8)),) * 3  # type: ignore[method-assign]
    rotary = torch.stack([torch.ones(5, 4), torch.zeros(5, 4)]).double()
    for name in ("attention_connection", "mlp_connection"):
        weights = 0.025 * getattr(block, name)
        read = torch.tensor([1.0, 0, 0]) + weights[:3]
        mix = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]) + weights[6:].view(3, 3)
        normed = block.norm((read[:, None] * x).sum(2))
        added = 0.5 * (block.mlp(normed) if name.startswith("mlp") else block.attention(normed, rotary))
        streams = [sum(mix[i, j] * x[:, :, i] for i in range(3)) for j in range(3)]
        expected = torch.stack([streams[j] + (1 + weights[3 + j]) * added for j in range(3)], dim=2)
        branch = block.mlp if name.startswith("mlp") else lambda y: block.attention(y, rotary)
        x = block._connect(x, name, branch, torch.float64)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_query_sees_exactly_the_keys_of_its_window() -> None:
    network = build("vanilla+window=4", depth=1)
    changed = tokens()
    changed[:, 3] = (changed[:, 3] + 1) % SCALE.vocabulary
    differs = (network(tokens()) - network(changed)).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [3 <= position < 7 for position in range(SCALE.context)]


def test_one_expert_is_the_dense_mlp() -> None:
    vanilla, single = build("vanilla"), build("vanilla+experts=1+balance=none")

    def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        router = torch.ones(1, weights["out"].shape[0], dtype=torch.float64)
        gate_up, down = weights.pop("gate_up"), weights.pop("down")
        return {**weights, "router": router, "expert_gate_up": gate_up, "expert_down": down[None]}

    give_weights(vanilla, single, rename)
    assert_equal_functions(vanilla, single)


@pytest.mark.parametrize(("active", "shared"), [(1, 0), (2, 0), (2, 1), (4, 0)])
def test_experts_are_the_weighted_sum_over_all_experts(active: int, shared: int) -> None:
    """Against every expert on every token, of weight zero where it is not chosen, and the shared ones."""
    options = f"experts=4+active_experts={active}+shared_experts={shared}+balance=none"
    block = blocks(build(f"vanilla+{options}"))[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scores = x @ block.router.T
    best = scores.topk(active).indices
    chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
    logits = scores if active == 1 else scores.masked_fill(chosen == 0, -torch.inf)
    weights = logits.softmax(-1) * chosen
    expected = torch.zeros_like(x)
    for number in range(4):
        gate, up = block.expert_gate_up.unflatten(0, (4, 2))[number]
        one = (functional.silu(x @ gate.T) * (x @ up.T)) @ block.expert_down[number].T
        expected += weights[..., number : number + 1] * one
    if shared:
        gate, up = block.gate_up
        expected += (functional.silu(x @ gate.T) * (x @ up.T)) @ block.down.T
    torch.testing.assert_close(block.mlp(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", ["activation=swiglu", "activation=relu2+active_experts=1"])
def test_grouped_gemm_of_all_experts_equals_one_gemm_each(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, with an expert that no token chooses; on a CPU torch's fallback runs."""
    found: list[list[Tensor]] = []
    for grouped in (False, True):
        monkeypatch.setattr("steepen.model.block_variant.has_grouped_gemm", lambda *_, on=grouped: on)
        block = blocks(build(f"vanilla+experts=5+balance=none+{options}"))[0].float()
        block.router.data[2] = -10 * block.router.data.abs().sum(0)
        x = torch.rand(2, 6, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        y = block.mlp(x)
        y.square().sum().backward()
        assert block.expert_down.grad is not None and not block.expert_down.grad[2].any()
        found.append([y.detach(), *(p.grad for p in (x, *block.parameters()) if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_parallel_block_and_squared_relu_follow_their_formulas() -> None:
    block = blocks(build("vanilla+parallel=true+activation=relu2"))[0]
    x = torch.randn(1, SCALE.context, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotary = build("vanilla").rotary
    normed = block.norm(x)
    mlp = (normed @ block.gate_up[0].T).relu().square() @ block.down.T
    expected = x + 0.5 * (block.attention(normed, rotary) + mlp)
    torch.testing.assert_close(block(x, rotary), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", ["vanilla", "untied-2"])
def test_counts_from_modules_equal_the_formula(base: str, variant: str) -> None:
    arm = find_arm(f"{base}+{variant}")
    network = build(arm.name)
    counted, passes = count(network), network.passes
    shape = network.shape
    cost = flops_per_token(arm, shape, passes)
    assert counted.stored == stored_parameters(arm, shape, passes)
    assert counted.compute_active == compute_active_parameters(arm, shape, passes)
    found = counted.matmul_flops, counted.attention_flops, counted.head_flops
    assert found == (cost.matmul, cost.attention, cost.head)


def test_experts_cost_the_flops_of_the_dense_mlp_and_their_router() -> None:
    dense, routed = find_arm("vanilla"), find_arm("vanilla+experts=8")
    shape = dense.shape(6, SizeRule())
    router = 6 * 8 * shape.width * 6
    assert flops_per_token(routed, shape, 1).matmul == flops_per_token(dense, shape, 1).matmul + router
    used = recipe_parameters(dense, shape, 1)
    assert used < recipe_parameters(routed, shape, 1) < 1.001 * used
    idle = 6 * 6 * 3 * shape.width * shape.mlp_width // 2  # six experts of each block
    assert stored_parameters(routed, shape, 1) - recipe_parameters(routed, shape, 1) == idle


def test_bias_gets_the_excess_load_as_its_gradient() -> None:
    block = blocks(build("vanilla+experts=4"))[0]
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    block.loss_weight = 0.5
    block.mlp(x).sum().backward()
    choice = (x @ block.router.T).softmax(-1) + 0.025 * block.choice_bias
    load = functional.one_hot(choice.topk(2).indices, 4).double().mean((0, 1, 2))
    assert block.choice_bias.grad is not None
    torch.testing.assert_close(block.choice_bias.grad, 0.5 * BIAS_GRADIENT * (load - 0.25))


def test_balance_loss_adds_up_over_micro_batches() -> None:
    """The gradients of two halves with half the weight are those of the whole batch."""
    network = build("vanilla+experts=4+balance=loss", depth=2)
    targets = tokens().roll(-1, 1)
    network(tokens(), targets).backward()
    whole = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad()
    for row in range(2):
        network(tokens()[row : row + 1], targets[row : row + 1], loss_weight=0.5).backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options", ["experts=4", "experts=4+balance=loss+shared_experts=1", "streams=2+parallel=true+window=5"]
)
def test_block_with_options_is_one_compiled_graph(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where experts are grouped GEMMs: no part of a block falls back to Python."""
    monkeypatch.setattr("steepen.model.block_variant.has_grouped_gemm", lambda *_: True)
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        network = build(f"vanilla+{options}", depth=2).float()
        network.compute_dtype = torch.bfloat16
        for block in network.blocks() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        loss = network(tokens(), tokens().roll(-1, 1))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in network.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_name_of_an_arm_carries_the_options_of_its_block() -> None:
    arm = find_arm("operator-1+kv_heads=2+window=3")
    assert (arm.name, arm.core_boundary) == ("operator-1+kv_heads=2+window=3", "norm+inject")
    assert arm.block_options == BlockOptions(kv_heads=2, window=3)
    assert find_arm("loop-2+experts=8").passes == find_arm("loop-2").passes
    assert BlockOptions(experts=1).active_experts == 1


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        ("vanilla+kv_head=2", "the nearest are kv_heads"),
        ("vanilla+experts=2+active_experts=3", "from 1 to 2"),
        ("vanilla+window=0", "from 1 to"),
        ("vanilla+activation=gelu", "one of 'swiglu', 'relu2'"),
    ],
)
def test_wrong_option_of_a_block_is_rejected(arm: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        find_arm(arm)


def test_kv_heads_that_do_not_divide_the_heads_are_rejected() -> None:
    arm = find_arm("vanilla+kv_heads=3")
    with pytest.raises(UsageError, match="a divisor of the 4 heads"):
        make_block(arm, arm.shape(4, SCALE), Multipliers(), ModelOptions())
    with pytest.raises(UsageError, match="custom block"):
        replace(arm, block="mine:Block")
