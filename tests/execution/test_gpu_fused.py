"""The fused path equals the reference in fp64: loss, gradients, growth, evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from grown_networks import grow
from steepen.execution.gpu_fused import FusedBlock, Stream, install_fused_gpu
from steepen.execution.linear import FusedLinear
from steepen.kernels.dispatch import REFERENCE, TRITON, TRITON_BLOCK
from steepen.model.arms import ARMS, find_arm
from steepen.model.block import TransformerBlock
from steepen.model.config import ModelOptions, Multipliers, StreamPrecision
from steepen.model.init import build_on_meta, copy_weights, initialize, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule

SCALE = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=12, vocabulary=40)
MULTIPLIERS = Multipliers(residual=0.6, output=1.7, injection=0.8)


def build(
    name: str,
    softcap: float | None = None,
    block: str = "transformer",
    injection: float = 0.8,
    stream: StreamPrecision = "bf16",
) -> Network:
    arm = replace(find_arm(name), block=block)
    options = ModelOptions(softcap=softcap, residual_stream=stream)
    bare = build_on_meta(arm.shape(6, SCALE), arm, replace(MULTIPLIERS, injection=injection), options)
    network = materialize(bare, dtype=torch.float64, embedding_std=0.3, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # away from weights initialized to zero
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def gradients(
    network: Network, passes: int, loss_weights: tuple[float, ...] = (1.0,), rows: int = 2
) -> list[torch.Tensor]:
    network.zero_grad()
    tokens = torch.randint(0, 40, (rows, 13), generator=torch.Generator().manual_seed(2))
    tokens = tokens.repeat_interleave(2, dim=1)[:, ::2]  # not contiguous
    losses = [
        network(tokens[:, :-1], tokens[:, 1:], passes=passes, loss_weight=weight) for weight in loss_weights
    ]
    for loss in losses:
        loss.backward()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(found) == len(list(network.parameters())) or passes < len(network.cores)
    return [*(loss.detach() for loss in losses), *found]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*ARMS, "vanilla+kv_heads=6", "loop-2+kv_heads=2", "untied-grow+kv_heads=1"])
def test_fused_equals_reference_for_every_arm_before_and_after_growth(name: str) -> None:
    reference, fused = build(name), build(name)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fused, fused.passes), gradients(reference, reference.passes))
    max_passes = find_arm(name).passes.max_passes
    for network in (reference, fused):
        grow(network, max_passes)
        with torch.no_grad():  # cores are copies of each other after growth; make them differ
            for index, parameter in enumerate(network.parameters()):
                parameter.mul_(1 + index / 100)
        network.refresh()
    same(gradients(fused, max_passes), gradients(reference, max_passes))


@pytest.mark.parametrize("name", ["operator-1", "loop-2", "untied-2-inject-only"])
def test_injection_weight_of_one_equals_reference(name: str) -> None:
    reference, fused = build(name, injection=1.0), build(name, injection=1.0)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fused, fused.passes), gradients(reference, reference.passes))


@pytest.mark.parametrize("name", ["vanilla", "loop-2", "untied-2"])
def test_output_projection_with_fused_residual_add_equals_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, where cuBLASLt adds the residual in the GEMM's epilogue."""
    reference, fused = build(name), build(name)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    calls: list[torch.Tensor] = []

    def add(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        calls.append(total)
        return total + x @ weight

    monkeypatch.setattr("steepen.execution.linear.gemm_add", add)
    same(gradients(fused, fused.passes), gradients(reference, reference.passes))
    assert calls


def test_gradients_of_scaled_losses_add_up() -> None:
    reference, fused = build("untied-2", softcap=3.0), build("untied-2", softcap=3.0)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    same(gradients(fused, 2, (0.25, 0.75)), gradients(reference, 2, (0.25, 0.75)))


@pytest.mark.parametrize("name", ["loop-2", "loop-2+kv_heads=2"])
def test_every_gradient_is_announced_once_with_truncated_backpropagation(name: str) -> None:
    """Else it would not be reduced while the rest of the backward runs."""
    reference, fused = build(name), build(name)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    complete: list[nn.Parameter] = []
    assert fused.fused is not None
    fused.fused.signal.listener = complete.append
    for network in (reference, fused):
        network.arm = replace(network.arm, backprop_passes=1)
    same(gradients(fused, 3), gradients(reference, 3))
    announced = [id(parameter) for parameter in complete]
    assert sorted(announced) == sorted(map(id, fused.parameters())) and not fused.fused.signal.uses


def test_refresh_picks_up_changed_weights() -> None:
    reference, fused = build("operator-1"), build("operator-1")
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    with torch.no_grad():
        for network in (reference, fused):
            for parameter in network.parameters():
                parameter.mul_(1.1)
    fused.refresh()
    same(gradients(fused, 1), gradients(reference, 1))


def test_initialize_and_copy_weights_refresh_the_fused_weights() -> None:
    reference, fused = build("untied-2"), build("untied-2")
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    saved = {name: 1.3 * p.detach() for name, p in reference.named_parameters()}
    for network in (reference, fused):
        initialize(network, embedding_std=0.5, init_scale=1.0, seed=7)
    same(gradients(fused, 2), gradients(reference, 2))
    for network in (reference, fused):
        copy_weights(network, saved)
    same(gradients(fused, 2), gradients(reference, 2))


def test_no_grad_computes_only_the_loss() -> None:
    reference, fused = build("loop-2"), build("loop-2")
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    tokens = torch.randint(0, 40, (2, 13))
    with torch.no_grad():
        one, two = (n(tokens[:, :-1], tokens[:, 1:]) for n in (fused, reference))
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(fused(tokens[:, :-1]), reference(tokens[:, :-1]))
    assert all(p.grad is None for p in fused.parameters())


def test_chunked_logits_equal_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, fused = build("vanilla"), build("vanilla")
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    monkeypatch.setattr("steepen.execution.gpu_fused.logit_chunk_tokens", lambda *_: 5)
    same(gradients(fused, 1), gradients(reference, 1))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_separate_head_and_cross_entropy_equal_reference(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    reference, fused = build("vanilla", softcap), build("vanilla", softcap)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    kernels = replace(REFERENCE, supports_fused_linear_cross_entropy=lambda *_: False)
    monkeypatch.setattr("steepen.execution.gpu_fused.kernels_for", lambda _: kernels)
    same(gradients(fused, 1), gradients(reference, 1))


@pytest.mark.parametrize("adds_in_norm", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "loop-2", "untied-grow", "vanilla+kv_heads=2"])
def test_chained_blocks_equal_reference(
    name: str, adds_in_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a stream that is wider than the GEMMs, or to which these cannot add."""
    monkeypatch.setattr(FusedBlock, "adds_in_norm", adds_in_norm)
    reference, fused = build(name), build(name)
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.float64))
    monkeypatch.setattr(FusedBlock, "gains_by_chain", lambda *_: True)
    called: list[bool] = []
    for block in fused.blocks():  # hooks of a block run: on several ranks one waits for its weights
        block.register_forward_pre_hook(lambda _, given: called.append(isinstance(given[0], Stream)))
    same(gradients(fused, fused.passes), gradients(reference, reference.passes))
    assert called == [True] * reference.shape.allocation.executed(fused.passes)


class WithGain(TransformerBlock):
    """A custom block with an fp32 gain, which promotes the hidden states to fp32."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.empty(self.out.shape[0]))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a custom block may have no cache)
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return self.gain * super().forward(x, rotary, mask)


class ChannelMajor(TransformerBlock):
    """A block whose output is channel-major in memory."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a custom block may have no cache)
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, rotary, mask).mT.contiguous().mT


@pytest.mark.parametrize("name", ["deep-vanilla-grow", "loop-grow", "untied-grow", "untied-2-norm-only"])
def test_fp32_stream_with_bf16_branches_equals_reference_up_to_bf16_rounding(name: str) -> None:
    """Against fp32, the fused fp32 stream errs as its reference does; a bf16 stream errs more."""
    passes = ARMS[name].passes.max_passes
    found: dict[str, list[Tensor]] = {}
    for kind in ("exact", "reference", "fused", "narrow"):
        network = build(name, stream="bf16" if kind == "narrow" else "fp32").float()
        if kind != "exact":
            network.compute_dtype = torch.bfloat16
        if kind in ("fused", "narrow"):
            install_fused_gpu(network, partial(FusedLinear, dtype=torch.bfloat16))
        if passes > network.passes:
            grow(network, passes)
        hidden = network.hidden_states(torch.arange(24).view(2, 12), passes)
        assert hidden.dtype == (torch.bfloat16 if kind == "narrow" else torch.float32)
        found[kind] = [*gradients(network, passes), hidden.detach().float()]

    def errors(kind: str) -> list[float]:
        pairs = zip(found[kind], found["exact"], strict=True)
        return [((one - exact).norm() / exact.norm()).item() for one, exact in pairs]

    fused, reference, narrow = errors("fused"), errors("reference"), errors("narrow")
    assert all(one <= max(1.5 * other, 1e-2) for one, other in zip(fused, reference, strict=True))
    # Hidden states only: the bf16 branches dominate the errors of gradients, whatever the stream's dtype.
    assert fused[-1] < 0.9 * narrow[-1]


def test_custom_block_may_promote_the_hidden_states() -> None:
    reference, fused = (build("operator-1", block=f"{__name__}:WithGain").float() for _ in range(2))
    for network in (reference, fused):
        network.compute_dtype = torch.bfloat16
    install_fused_gpu(fused, partial(FusedLinear, dtype=torch.bfloat16))
    one, two = gradients(fused, 1)[0], gradients(reference, 1)[0]
    assert one.item() == pytest.approx(two.item(), rel=1e-2)


class Recorder(TransformerBlock):
    """Records the dtypes of a GEMM's result and of the hidden states."""

    seen: ClassVar[list[torch.dtype]] = []

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a custom block may have no cache)
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        self.seen.extend([x.dtype, (x @ self.out.t()).dtype])
        return super().forward(x, rotary, mask)


@pytest.mark.parametrize(("stream", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_custom_block_computes_its_gemms_in_bf16_whatever_the_stream(
    stream: StreamPrecision, dtype: torch.dtype
) -> None:
    network = build("vanilla", block=f"{__name__}:Recorder", stream=stream).float()
    network.compute_dtype = torch.bfloat16
    network.to(torch.bfloat16)
    Recorder.seen.clear()
    network(torch.arange(12)[None])
    assert set(Recorder.seen[::2]) == {dtype} and set(Recorder.seen[1::2]) == {torch.bfloat16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on Triton's interpreter")
def test_kernels_accept_any_strides_of_tokens_and_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    reference, strided = (
        build("operator-1").float(),
        build("operator-1", block=f"{__name__}:ChannelMajor").float(),
    )
    install_fused_gpu(strided, partial(FusedLinear, dtype=torch.float32))
    monkeypatch.setattr("steepen.execution.gpu_fused.kernels_for", lambda _: TRITON)
    monkeypatch.setattr("steepen.execution.gpu_fused.block_kernels_for", lambda *_, **__: TRITON_BLOCK)
    for one, two in zip(gradients(strided, 1, rows=1), gradients(reference, 1, rows=1), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
