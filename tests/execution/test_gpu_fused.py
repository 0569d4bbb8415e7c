"""The fast path computes what the plain one does: loss, gradients, growth, evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from steepen.execution.gpu_fused import install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.model.arms import ARMS
from steepen.model.block import TransformerBlock
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.growth import grow
from steepen.model.init import initialise, materialise, on_meta
from steepen.model.load_weights import copy_weights
from steepen.model.network import Network
from steepen.model.shape import SizeRule

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=40)
MULTIPLIERS = Multipliers(residual=0.6, output=1.7, injection=0.8)


def build(
    name: str, softcap: float | None = None, block: str = "transformer", injection: float = 0.8
) -> Network:
    arm = replace(ARMS[name], block=block)
    bare = on_meta(
        arm.shape(6, SCALE), arm, replace(MULTIPLIERS, injection=injection), ModelOptions(softcap=softcap)
    )
    network = materialise(bare, dtype=torch.float64, embedding_std=0.3, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # away from the zeros of the start
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def gradients(
    network: Network, passes: int, shares: tuple[float, ...] = (1.0,), rows: int = 2
) -> list[torch.Tensor]:
    network.zero_grad()
    tokens = torch.randint(0, 40, (rows, 13), generator=torch.Generator().manual_seed(2))
    tokens = tokens.repeat_interleave(2, dim=1)[:, ::2]  # not side by side in memory
    losses = [network(tokens[:, :-1], tokens[:, 1:], passes=passes, loss_scale=share) for share in shares]
    for loss in losses:
        loss.backward()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(found) == len(list(network.parameters())) or passes < len(network.cores)
    return [*(loss.detach() for loss in losses), *found]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ARMS)
def test_fast_equals_plain_for_every_arm_before_and_after_growth(name: str) -> None:
    plain, fast = build(name), build(name)
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fast, fast.passes), gradients(plain, plain.passes))
    most = ARMS[name].passes.max_passes
    for network in (plain, fast):
        grow(network, most)
        with torch.no_grad():  # cores that are copies of one another no more: each must use its own weights
            for index, parameter in enumerate(network.parameters()):
                parameter.mul_(1 + index / 100)
        network.refresh()
    same(gradients(fast, most), gradients(plain, most))


@pytest.mark.parametrize("name", ["operator-1", "loop-2", "untied-2-inject-only"])
def test_an_injection_of_one_leaves_the_preludes_output_whole(name: str) -> None:
    plain, fast = build(name, injection=1.0), build(name, injection=1.0)
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fast, fast.passes), gradients(plain, plain.passes))


@pytest.mark.parametrize("name", ["vanilla", "loop-2", "untied-2"])
def test_an_output_projection_that_adds_to_the_stream_itself_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the GPUs where that takes no pass of its own."""
    plain, fast = build(name), build(name)
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    asked: list[torch.Tensor] = []

    def add(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        asked.append(total)
        return total + x @ weight

    monkeypatch.setattr("steepen.execution.linear.multiply_and_add", add)
    same(gradients(fast, fast.passes), gradients(plain, plain.passes))
    assert asked


def test_gradients_of_shares_add_up() -> None:
    plain, fast = build("untied-2", softcap=3.0), build("untied-2", softcap=3.0)
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fast, 2, (0.25, 0.75)), gradients(plain, 2, (0.25, 0.75)))


def test_a_changed_weight_counts_after_a_refresh() -> None:
    plain, fast = build("operator-1"), build("operator-1")
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    with torch.no_grad():
        for network in (plain, fast):
            for parameter in network.parameters():
                parameter.mul_(1.1)
    fast.refresh()
    same(gradients(fast, 1), gradients(plain, 1))


def test_weights_copied_or_drawn_into_a_fast_network_count() -> None:
    plain, fast = build("untied-2"), build("untied-2")
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    saved = {name: 1.3 * p.detach() for name, p in plain.named_parameters()}
    for network in (plain, fast):
        initialise(network, embedding_std=0.5, init_scale=1.0, seed=7)
    same(gradients(fast, 2), gradients(plain, 2))
    for network in (plain, fast):
        copy_weights(network, saved)
    same(gradients(fast, 2), gradients(plain, 2))


def test_without_gradients_only_the_loss_is_computed() -> None:
    plain, fast = build("loop-2"), build("loop-2")
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    tokens = torch.randint(0, 40, (2, 13))
    with torch.no_grad():
        one, two = (n(tokens[:, :-1], tokens[:, 1:]) for n in (fast, plain))
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(fast(tokens[:, :-1]), plain(tokens[:, :-1]))
    assert all(p.grad is None for p in fast.parameters())


def test_logits_made_in_pieces_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = build("vanilla"), build("vanilla")
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    monkeypatch.setattr("steepen.execution.gpu_fused.piece_rows", lambda *_: 5)
    same(gradients(fast, 1), gradients(plain, 1))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gpus_without_the_joined_head_give_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    plain, fast = build("vanilla", softcap), build("vanilla", softcap)
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    monkeypatch.setattr("steepen.kernels.eager.has_odds", lambda *_: False)
    same(gradients(fast, 1), gradients(plain, 1))


def test_networks_too_large_to_keep_the_activation_give_the_same_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fast = build("vanilla"), build("vanilla")
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.float64))
    monkeypatch.setattr("steepen.execution.gpu_fused.KEEP_ACTIVATION_MAX_WIDTH", 0)
    same(gradients(fast, 1), gradients(plain, 1))


class Gained(TransformerBlock):
    """A block of a user's own, with a gain: not rounded to bf16, it makes the stream fp32."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.empty(self.out.shape[0]))

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.gain * super().forward(x, rotary, mask)


class Turned(TransformerBlock):
    """A block whose result lies in memory channel by channel."""

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, rotary, mask).mT.contiguous().mT


def test_a_block_of_a_users_own_may_widen_the_stream() -> None:
    plain, fast = (build("operator-1", block=f"{__name__}:Gained").float() for _ in range(2))
    for network in (plain, fast):
        network.compute_dtype = torch.bfloat16
    install_fused_gpu(fast, partial(FusedLinear, dtype=torch.bfloat16))
    one, two = gradients(fast, 1)[0], gradients(plain, 1)[0]
    assert one.item() == pytest.approx(two.item(), rel=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run on Triton's interpreter")
def test_kernels_read_tokens_and_stream_however_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from steepen.kernels import fused

    plain, turned = build("operator-1").float(), build("operator-1", block=f"{__name__}:Turned").float()
    install_fused_gpu(turned, partial(FusedLinear, dtype=torch.float32))
    monkeypatch.setattr("steepen.execution.gpu_fused.kernels_for", lambda *_, **__: fused)
    for one, two in zip(gradients(turned, 1, rows=1), gradients(plain, 1, rows=1), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
