"""fp8 linear layers equal those in the compute dtype up to quantization error, and fall back to them."""

# pyright: reportArgumentType=false
# The same calls run on the bf16 and the fp8 layer, which take different operand types.

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.errors import UsageError
from steepen.execution import gpu_fused
from steepen.execution.float8_linear import Float8Linear, float8_linear_where_aligned, quantize_weights
from steepen.execution.gpu_fused import FusedNetwork, install_fused_gpu
from steepen.execution.linear import FusedLinear, cast_weights
from steepen.execution.select import apply_execution_mode
from steepen.kernels.dispatch import REFERENCE_FP8_BLOCK, REFERENCE_FP8_GEMM
from steepen.kernels.fp8 import (
    ACTIVATION_DTYPE,
    GRADIENT_DTYPE,
    LOGIT_GRADIENT_DTYPE,
    RowwiseFp8,
    TransposedFp8,
    empty_transposed,
    quantize_activation_reference,
    quantize_gradient_reference,
    quantize_rows_reference,
)
from steepen.model.arms import find_arm
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule

SCALE = SizeRule(aspect=16, head_dim=16, mlp_multiple=32, context=48, vocabulary=96)
MULTIPLIERS = Multipliers(residual=0.6, output=1.7, injection=0.8)
# Relative error of a gradient. Measured: 0.21 in these small networks (0.04 to 0.07 per GEMM, growing with
# depth).
MAX_ERROR = 0.28
needs_fp8_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with fp8 tensor cores",
)


def build(name: str, scale: SizeRule = SCALE, device: str = "cpu", depth: int = 4) -> Network:
    arm = find_arm(name)
    bare = build_on_meta(arm.shape(depth, scale), arm, MULTIPLIERS, ModelOptions(softcap=15.0))
    network = materialize(bare, device, embedding_std=0.3, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # some weights are initialized to zero
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data.add_(noise.to(device))
    return network


def loss_and_gradients(network: Network, passes: int = 1) -> tuple[float, dict[str, Tensor]]:
    network.zero_grad()
    size = (4, network.shape.context + 1)
    tokens = torch.randint(0, network.shape.vocabulary, size, generator=torch.Generator().manual_seed(2))
    tokens = tokens.to(network.embedding.device)
    loss = network(tokens[:, :-1], tokens[:, 1:], passes=passes)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def errors(name: str, passes: int = 1) -> tuple[float, dict[str, float]]:
    """Errors of fp8 against the compute dtype: of the loss, and of each gradient relative to its norm."""
    reference, fp8 = build(name), build(name)
    install_fused_gpu(reference, partial(FusedLinear, dtype=torch.float32))
    install_fused_gpu(fp8, partial(float8_linear_where_aligned, dtype=torch.float32))
    for network in (reference, fp8):
        if passes > network.passes:
            grow(network, passes)
    (loss, want), (found, gradients) = loss_and_gradients(reference, passes), loss_and_gradients(fp8, passes)
    assert want.keys() == gradients.keys()
    relative = {key: ((gradients[key] - want[key]).norm() / want[key].norm()).item() for key in want}
    return abs(found - loss), relative


def test_forward_dgrad_and_wgrad_are_quantized() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(2, 64, 128, generator=generator))
    x, d = (torch.randn(96, 128, generator=generator) for _ in range(2))
    reference, fp8 = (kind(parameter, 0.7, torch.float32) for kind in (FusedLinear, Float8Linear))
    cast_weights([reference, fp8])
    quantize_weights([reference, fp8])
    for ours, want, bound in (
        (fp8(quantize_activation_reference(x)), reference(x), 0.045),
        (fp8.dgrad(quantize_gradient_reference(d)), reference.dgrad(d), 0.075),
        (fp8.add_to_(x.clone(), quantize_activation_reference(x)), reference.add_to_(x.clone(), x), 0.045),
    ):
        assert bound / 3 < (ours - want).norm() / want.norm() < bound
    assert torch.equal(fp8(x), reference(x)) and torch.equal(fp8.dgrad(d), reference.dgrad(d))
    grads: list[Tensor] = []
    for linear in (reference, fp8):
        parameter.grad = None
        linear.wgrad(d, x) if linear is reference else linear.wgrad(
            quantize_gradient_reference(d), quantize_activation_reference(x)
        )
        assert parameter.grad is not None
        address = parameter.grad.data_ptr()
        linear.wgrad(d, x)  # accumulates in the compute dtype
        linear.wgrad(d, x) if linear is reference else linear.wgrad(
            quantize_gradient_reference(d), quantize_activation_reference(x)
        )
        assert parameter.grad.data_ptr() == address  # as CUDA graphs need
        grads.append(parameter.grad)
    assert 0.01 < (grads[1] - grads[0]).norm() / grads[0].norm() < 0.045


def use_gemm(monkeypatch: pytest.MonkeyPatch, gemm: Any) -> None:
    kernels = replace(REFERENCE_FP8_GEMM, gemm=gemm)
    monkeypatch.setattr("steepen.execution.float8_linear.fp8_gemm_kernels_for", lambda _: kernels)


@pytest.mark.parametrize("head", [False, True])
def test_head_dgrad_accumulates_in_fp32(head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bits cost loss there; in forward GEMMs and in the dgrad of blocks they do not."""
    calls: list[bool] = []

    def spy(*operands: Any, fast_accumulation: bool) -> Tensor:
        calls.append(fast_accumulation)
        return REFERENCE_FP8_GEMM.gemm(*operands, fast_accumulation=fast_accumulation)

    use_gemm(monkeypatch, spy)
    linear = Float8Linear(torch.nn.Parameter(torch.randn(64, 128)), 1.0, torch.float32, head=head)
    cast_weights([linear])
    quantize_weights([linear])
    linear(quantize_activation_reference(torch.randn(32, 128)))
    linear.dgrad(quantize_gradient_reference(torch.randn(32, 64)))
    assert calls == [True, not head]


def test_only_the_head_is_marked_as_head() -> None:
    network = build("vanilla")
    install_fused_gpu(network, partial(float8_linear_where_aligned, dtype=torch.float32))
    assert isinstance(network.fused, FusedNetwork)
    assert [linear.head for linear in network.fused.linears] == [True, *[False] * 16]


@pytest.mark.parametrize("rows", [96, 75])
def test_head_wgrad_is_quantized(rows: int) -> None:
    """In the loss, from a transpose of the logits' gradient."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, 128, generator=generator))
    x, d = torch.randn(rows, 128, generator=generator), torch.randn(rows, 64, generator=generator)
    reference, fp8 = (kind(parameter, 0.7, torch.float32, head=True) for kind in (FusedLinear, Float8Linear))
    reference.wgrad(d, x)
    want, parameter.grad = parameter.grad, None
    transposed = empty_transposed(rows, 64, LOGIT_GRADIENT_DTYPE, d.device)
    transposed[:, :rows] = (d / 1e-4).t()
    fp8.wgrad(TransposedFp8(transposed, torch.tensor(1e-4)), quantize_activation_reference(x))
    assert want is not None and parameter.grad is not None
    assert 0.01 < (parameter.grad - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize("name", ["vanilla", "untied-2", "loop-2", "vanilla+kv_heads=1"])
def test_fp8_gradients_equal_fp32_up_to_quantization_error(name: str) -> None:
    loss, gradients = errors(name, find_arm(name).passes.max_passes)
    assert loss < 0.03
    assert 0.01 < max(gradients.values()) < MAX_ERROR  # quantized, and not worse than that


def test_chunked_logits_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("vanilla")
    install_fused_gpu(network, partial(float8_linear_where_aligned, dtype=torch.float32))
    loss, want = loss_and_gradients(network)
    monkeypatch.setattr(gpu_fused, "logit_chunk_tokens", lambda *_: 50)
    again, gradients = loss_and_gradients(network)
    assert again == pytest.approx(loss, rel=1e-6)
    for key, gradient in want.items():
        torch.testing.assert_close(
            gradients[key], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item()
        )


@pytest.mark.parametrize("which", ["activation", "gradient", "weight"])
def test_wrong_scale_exceeds_the_error_bound(which: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def wrong(x: Tensor, dtype: torch.dtype) -> RowwiseFp8:
        data, scale = quantize_rows_reference(x, dtype)
        return RowwiseFp8(x, data, scale * 1.5)

    if which == "weight":
        gemm = REFERENCE_FP8_GEMM.gemm
        use_gemm(monkeypatch, lambda x, w, scale, *rest, **more: gemm(x, w, 1.5 * scale, *rest, **more))
    else:
        quantize = partial(wrong, dtype=ACTIVATION_DTYPE if which == "activation" else GRADIENT_DTYPE)
        monkeypatch.setattr(f"steepen.kernels.norm.quantize_{which}_reference", quantize)
        fp8_block = replace(REFERENCE_FP8_BLOCK, **{f"quantize_{which}": quantize})
        choose = gpu_fused.block_kernels_for
        monkeypatch.setattr(
            gpu_fused, "block_kernels_for", lambda x, *, fp8: fp8_block if fp8 else choose(x, fp8=False)
        )
    _, gradients = errors("vanilla")
    assert max(gradients.values()) > 1.3 * MAX_ERROR


def test_validation_runs_in_the_compute_dtype() -> None:
    reference, fp8 = build("vanilla"), build("vanilla")
    install_fused_gpu(reference, partial(FusedLinear, dtype=torch.float32))
    install_fused_gpu(fp8, partial(float8_linear_where_aligned, dtype=torch.float32))
    tokens = torch.randint(0, 96, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        losses = [n(tokens[:, :-1], tokens[:, 1:]).item() for n in (reference, fp8)]
    assert losses[0] == losses[1]


def test_refresh_requantizes_changed_weights() -> None:
    network = build("vanilla")
    install_fused_gpu(network, partial(float8_linear_where_aligned, dtype=torch.float32))
    assert isinstance(network.fused, FusedNetwork) and isinstance(network.fused.head, Float8Linear)
    before, _ = loss_and_gradients(network)
    with torch.no_grad():
        network.head.mul_(3)
    network.refresh()
    after, _ = loss_and_gradients(network)
    assert abs(after - before) > 0.1
    back = network.fused.head.fp8_weight.float() * network.fused.head.scale.t()
    assert (back - 1.7 * network.head).norm() < 0.05 * back.norm()


def test_unaligned_matrices_fall_back_to_the_compute_dtype() -> None:
    unaligned = SizeRule(aspect=16, head_dim=16, mlp_multiple=56, context=48, vocabulary=90)
    reference, fp8 = build("vanilla", unaligned, depth=3), build("vanilla", unaligned, depth=3)
    assert reference.shape.mlp_width % 16 and reference.shape.vocabulary % 16
    install_fused_gpu(reference, partial(FusedLinear, dtype=torch.float32))
    install_fused_gpu(fp8, partial(float8_linear_where_aligned, dtype=torch.float32))
    (loss, want), (found, gradients) = loss_and_gradients(reference), loss_and_gradients(fp8)
    assert loss == found
    for key, gradient in want.items():
        torch.testing.assert_close(gradients[key], gradient)


def test_fp8_is_rejected_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="needs a CUDA GPU"):
        apply_execution_mode(build("vanilla"), "fp8", fused=False, compiled=False)


@needs_fp8_gpu
@pytest.mark.parametrize("name", ["vanilla", "untied-2", "vanilla+kv_heads=1"])
def test_fp8_gradients_on_a_gpu_equal_fp32_up_to_quantization_error(name: str) -> None:
    scale = SizeRule(aspect=64, head_dim=64, mlp_multiple=64, context=256, vocabulary=1024)
    passes = find_arm(name).passes.max_passes
    exact = build(name, scale, "cuda")
    found: dict[str, tuple[float, dict[str, Tensor]]] = {}
    for precision in ("bf16", "fp8"):
        network = build(name, scale, "cuda")
        apply_execution_mode(network, precision, fused=True, compiled=False)
        if passes > network.passes:
            grow(network, passes)
        found[precision] = loss_and_gradients(network, passes)
    if passes > exact.passes:
        grow(exact, passes)
    loss, want = loss_and_gradients(exact, passes)
    assert abs(found["fp8"][0] - loss) < 0.03
    for key, gradient in want.items():
        error = {p: ((g[key] - gradient).norm() / gradient.norm()).item() for p, (_, g) in found.items()}
        assert error["bf16"] < 0.05 and error["fp8"] < MAX_ERROR, (key, error)
