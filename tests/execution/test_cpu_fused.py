"""The fused CPU block and the chunked head loss equal the reference: outputs and gradients."""

# pyright: reportCallIssue=false
# Arguments are passed as unpacked lists, whose length a type checker does not know.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grown_networks import grow
from steepen.execution import cpu_fused as cpu
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock, rotary_table
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.init import build_on_meta, materialize
from steepen.model.loss import linear_cross_entropy
from steepen.model.network import Network, TokenLayout
from steepen.model.shape import SizeRule


def reference_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, cap: float | None
) -> Tensor:
    logits = scale * functional.linear(hidden, weight)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def build(arm: str, *, context: int = 10, multipliers: Multipliers | None = None, **options: Any) -> Network:
    found_arm = find_arm(arm)
    shape = found_arm.shape(3, SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=context, vocabulary=17))
    bare = build_on_meta(shape, found_arm, multipliers or Multipliers(0.7, 1.3, 0.9), ModelOptions(**options))
    network = materialize(bare, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():  # output projections start at zero, which would hide errors
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return network


def gradients(network: Network, tokens: Tensor, targets: Tensor, passes: int | None = None) -> list[Tensor]:
    network.zero_grad()
    loss = network(tokens, targets, passes)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_head_loss_gradients_equal_finite_differences(softcap: float | None, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(7, (2, 5), generator=generator)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return 3 * linear_cross_entropy(hidden, weight, targets, scale=1.7, softcap=softcap, chunk=chunk)

    assert torch.autograd.gradcheck(loss, (hidden, weight))
    expected = 3 * reference_loss(hidden, weight, targets, 1.7, softcap)
    torch.testing.assert_close(loss(hidden, weight), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_head_loss_equals_the_reference_in_every_dtype(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(50, 8, generator=generator), torch.randn(33, 8, generator=generator)]
    targets = torch.randint(33, (50,), generator=generator)
    found = [x.to(dtype).requires_grad_() for x in exact]
    expected = [x.detach().double().requires_grad_() for x in found]
    loss = linear_cross_entropy(*found, targets, scale=0.5, softcap=None, chunk=16)
    reference = reference_loss(*expected, targets, 0.5, None)
    assert loss.dtype == torch.float32
    for total in (loss, reference):
        total.backward()
    torch.testing.assert_close(loss.double(), reference, rtol=tolerance, atol=0)
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == dtype
        assert (one.grad - other.grad).norm() < tolerance * other.grad.norm()


def test_head_loss_does_not_overflow_on_large_logits() -> None:
    hidden, weight = torch.full((4, 1), 100.0), torch.tensor([[50.0], [-50.0]])
    targets = torch.tensor([0, 0, 0, 1])
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(10_000 / 4)


@pytest.mark.parametrize("arm", ["vanilla", "operator-1", "loop-2", "untied-2"])
def test_fused_block_equals_the_reference_block(arm: str) -> None:
    network = build(arm, qk_scale=1.5)
    tokens = torch.randint(17, (3, 11), generator=torch.Generator().manual_seed(0))
    before = gradients(network, tokens[:, :-1], tokens[:, 1:])
    cpu.install_fused_cpu(network)
    assert all(isinstance(vars(block)["fused_forward"], cpu.FusedCpuBlock) for block in network.blocks())
    after = gradients(network, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-12)


def test_queries_and_keys_are_normalized_after_a_rotation_that_changes_their_length() -> None:
    """A table rounded to bf16 rotates with cos² + sin² up to 0.4% from 1."""
    network = build("vanilla", context=40, rope_table="bf16")
    tokens = torch.randint(17, (2, 41), generator=torch.Generator().manual_seed(2))
    expected = gradients(network, tokens[:, :-1], tokens[:, 1:])
    cpu.install_fused_cpu(network)
    found = gradients(network, tokens[:, :-1], tokens[:, 1:])
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


def test_tiled_attention_scores_equal_untiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("vanilla", context=11)
    tokens = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(0))
    expected = gradients(network, tokens[:, :-1], tokens[:, 1:])
    cpu.install_fused_cpu(network)
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 4)  # blocks of 4, 4 and 3 queries
    monkeypatch.setattr(cpu, "MAX_CACHED_SCORES", 4 * 11 * 2)  # two of the nine heads at a time
    tiled = gradients(network, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(tiled, expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(cpu, "MAX_KEPT_SCORES", 0)  # computed again in the backward pass: the same bits
    again = gradients(network, tokens[:, :-1], tokens[:, 1:])
    assert all(torch.equal(one, other) for one, other in zip(tiled, again, strict=True))


def test_blocks_added_by_growth_are_fused_and_use_their_weights() -> None:
    fused, reference = build("untied-grow"), build("untied-grow")
    cpu.install_fused_cpu(fused)
    for network in (fused, reference):
        grow(network, 3)
        for index, block in enumerate(network.blocks()):  # no longer equal: each must use its own weights
            nn.init.normal_(block.get_parameter("out"), generator=torch.Generator().manual_seed(index))
    assert all(vars(block)["fused_forward"].block is block for block in fused.blocks())
    tokens = torch.randint(17, (3, 11), generator=torch.Generator().manual_seed(0))
    result, expected = (gradients(n, tokens[:, :-1], tokens[:, 1:], 3) for n in (fused, reference))
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def test_masks_low_precision_and_large_scores_run_the_reference_block() -> None:
    tokens = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(0))
    visible = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    tree = TokenLayout(torch.arange(8).expand(2, 8), visible | torch.eye(8, dtype=torch.bool))
    low_precision = build("vanilla", residual_stream="bf16").bfloat16()
    large_scores = build("vanilla", qk_scale=1e4)
    fp32_stream = build("vanilla", residual_stream="fp32").bfloat16()
    masked, others = build("vanilla"), (low_precision, large_scores, fp32_stream)
    with torch.no_grad():
        before = [masked.hidden_states(tokens, layout=tree), *(network(tokens) for network in others)]
        for network in (masked, *others):
            cpu.install_fused_cpu(network)
        after = [masked.hidden_states(tokens, layout=tree), *(network(tokens) for network in others)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert low_precision.hidden_states(tokens).dtype == torch.bfloat16
    assert fp32_stream.hidden_states(tokens).dtype == torch.float32


def test_fused_block_gradients_equal_finite_differences() -> None:
    shape = find_arm("vanilla").shape(
        1, SizeRule(aspect=4, head_dim=2, mlp_multiple=2, context=5, vocabulary=7)
    )
    block = TransformerBlock(shape, Multipliers(residual=0.6), ModelOptions()).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    rotary = rotary_table(shape, ModelOptions())
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    names, weights = zip(*block.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for name, weight in zip(names, weights, strict=True):
            block.__dict__[name] = weight  # shadows the parameter of that name
        return cpu.FusedCpuBlock(block)(x, rotary)

    assert torch.autograd.gradcheck(run, (x, *weights))


def test_no_grad_head_loss_runs_only_the_logits_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms: list[tuple[int, ...]] = []  # rows, contraction, columns
    mm = torch.mm

    def counted(a: Tensor, b: Tensor) -> Tensor:
        gemms.append((*a.shape, b.shape[1]))
        return mm(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    weight = nn.Parameter(torch.randn(7, 3))
    hidden, targets = torch.randn(5, 3), torch.randint(7, (5,))
    linear_cross_entropy(hidden, weight, targets)
    assert len(gemms) == 3
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets)
    assert gemms[3:] == [(7, 3, 5)]  # the logits
