"""fp8 Triton kernels equal their references, and the references quantize to fp8 as documented."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels return a union of operand types, and arguments are passed as unpacked generators.

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steepen.kernels.cross_entropy import logit_gradient_scale
from steepen.kernels.dispatch import (
    REFERENCE,
    REFERENCE_FP8_BLOCK,
    REFERENCE_FP8_GEMM,
    TRITON_FP8_BLOCK,
    TRITON_FP8_GEMM,
    Fp8GemmKernels,
)
from steepen.kernels.fp8 import (
    ACTIVATION_DTYPE,
    GRADIENT_DTYPE,
    LOGIT_GRADIENT_DTYPE,
    DeferredFp8,
    RowwiseFp8,
    defer_quantization_of_norm,
    empty_transposed,
    fp8_max,
    quantize_activation_reference,
    quantize_gradient_reference,
    quantize_rows_reference,
    tensor_scale_reference,
    unquantized,
)

pytest.importorskip("triton", reason="needs Triton (its interpreter runs on a CPU)")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
supported = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not supported, reason="needs a GPU with fp8 tensor cores, or none")
EPS = 1.2e-7
# Largest relative rounding error of a value that is not subnormal.
ROUNDING = {ACTIVATION_DTYPE: 2.0**-4, LOGIT_GRADIENT_DTYPE: 2.0**-3}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Rows whose magnitudes differ by up to 1000×, as those of gradients do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    magnitudes = 10 ** (3 * torch.rand((shape[0],) + (1,) * (len(shape) - 1), generator=generator))
    return (x * magnitudes).to(DEVICE, torch.bfloat16)


def nearly_equal(ours: Tensor, theirs: Tensor) -> None:
    """Equal except for ties, whose rounding depends on the last bit of a row's multiplier."""
    one, two = ours.float(), theirs.float()
    torch.testing.assert_close(one, two, rtol=2 * ROUNDING[ours.dtype], atol=2.0**-9)
    assert (one != two).float().mean() < 0.01


def check(ours: RowwiseFp8, theirs: RowwiseFp8, dtype: torch.dtype) -> None:
    """The originals agree, and the fp8 data is the original quantized as the reference does it."""
    assert ours.data.dtype == theirs.data.dtype == dtype
    assert ours.data.shape == theirs.data.shape and ours.scale.shape == theirs.scale.shape
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2**-6, atol=0)
    if theirs.original is not None:
        size = theirs.original.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert (unquantized(ours).float() - theirs.original.float()).abs().div(size).max() <= 2**-6
        data, scale = quantize_rows_reference(unquantized(ours), dtype)
        torch.testing.assert_close(ours.scale, scale, rtol=1e-6, atol=0)
        nearly_equal(ours.data, data)
    values, expected = (t.data.float() * t.scale for t in (ours, theirs))
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert (values - expected).abs().div(size).max() <= 2 * ROUNDING[dtype]
    assert (values - expected).norm() <= 0.1 * expected.norm()  # ties may round to the other neighbour


@pytest.mark.parametrize("dtype", [ACTIVATION_DTYPE, LOGIT_GRADIENT_DTYPE], ids=str)
def test_rowwise_quantization_error_is_relative_to_each_row(dtype: torch.dtype) -> None:
    x = draw(40, 96).float()
    x[3] = 0
    data, scale = quantize_rows_reference(x, dtype)
    back = data.float() * scale
    assert torch.isfinite(back).all() and (back[3] == 0).all()
    amax = data.float().abs().amax(-1)
    assert (amax >= fp8_max(dtype) / 2).sum() == 39 and amax[3] == 0  # all but the row of zeros
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))  # powers of two
    large = x.abs() > 2e-5 * x.abs().amax(-1, keepdim=True) * (1000 if dtype == ACTIVATION_DTYPE else 1)
    assert ((back - x).abs()[large] / x.abs()[large]).max() <= ROUNDING[dtype] * 1.001


@pytest.mark.parametrize("width", [64, 384, 80])
def test_norms_equal_reference(width: int) -> None:
    x, y, d = (draw(5, width, seed=seed) for seed in range(3))
    (n, rstd), (want, want_rstd) = (k.rms_norm(x, EPS) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK))
    check(n, want, ACTIVATION_DTYPE)
    torch.testing.assert_close(rstd, want_rstd)
    (total, n, rstd), (want_total, want, want_rstd) = (
        k.add_rms_norm(x, (y,), EPS) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK)
    )
    check(n, want, ACTIVATION_DTYPE)
    torch.testing.assert_close(total, want_total, rtol=2**-7, atol=0)
    torch.testing.assert_close(rstd, want_rstd, rtol=2**-6, atol=0)
    normed = unquantized(want)
    (dx, ours), (want_dx, theirs) = (
        k.rms_norm_backward(d, normed, rstd, y) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK)
    )
    assert dx is unquantized(ours) and want_dx is unquantized(theirs)
    check(ours, theirs, GRADIENT_DTYPE)


@pytest.mark.parametrize("width", [64, 384, 80])
def test_norms_of_an_fp32_residual_stream_equal_reference(width: int) -> None:
    """The stream and its gradient are fp32; the norm is rounded to bf16 before it is quantized."""
    x, residual = draw(5, width).float(), draw(5, width, seed=3).float()
    y, d = draw(5, width, seed=1), draw(5, width, seed=2)
    found = [k.add_rms_norm(x, (y,), EPS, torch.bfloat16) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK)]
    (total, n, rstd), (want_total, want, want_rstd) = found
    assert total.dtype == torch.float32 and unquantized(n).dtype == torch.bfloat16
    torch.testing.assert_close(total, want_total)
    torch.testing.assert_close(rstd, want_rstd)
    check(n, want, ACTIVATION_DTYPE)
    normed = unquantized(want)
    (dx, ours), (want_dx, theirs) = (
        k.rms_norm_backward(d, normed, rstd, residual) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK)
    )
    assert isinstance(dx, torch.Tensor) and isinstance(want_dx, torch.Tensor) and dx.dtype == torch.float32
    torch.testing.assert_close(dx, want_dx, rtol=1e-4, atol=1e-5 * want_dx.abs().max().item())
    check(ours, theirs, GRADIENT_DTYPE)


@pytest.mark.parametrize("width", [48, 1536])
def test_rowwise_quantization_equals_reference(width: int) -> None:
    x = draw(7, width)
    x[2] = 0
    check(TRITON_FP8_BLOCK.quantize_activation(x), quantize_activation_reference(x), ACTIVATION_DTYPE)
    check(TRITON_FP8_BLOCK.quantize_gradient(x), quantize_gradient_reference(x), GRADIENT_DTYPE)


@pytest.mark.parametrize("hidden", [256, 304])
def test_swiglu_equals_reference(hidden: int) -> None:
    gate_up, dh = draw(11, 2 * hidden), draw(11, hidden, seed=1)
    check(TRITON_FP8_BLOCK.swiglu(gate_up), REFERENCE_FP8_BLOCK.swiglu(gate_up), ACTIVATION_DTYPE)
    ours, theirs = (k.swiglu_backward_(gate_up, dh) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK))
    check(ours, theirs, GRADIENT_DTYPE)


@pytest.mark.parametrize(("heads", "kv", "size"), [(2, 2, 16), (3, 3, 32), (4, 1, 16)])
def test_rope_and_qk_norm_equal_reference(heads: int, kv: int, size: int) -> None:
    batch, time = 2, 7
    angle = draw(time, size // 2).float()
    table = torch.stack([angle.cos(), angle.sin()])
    qkv = draw(batch, time, heads + 2 * kv, size)
    rstd = REFERENCE.rotate_norm_(qkv, table, EPS, kv)
    dq, dv = (draw(batch, n, time, size, seed=seed).transpose(1, 2) for seed, n in ((1, heads), (2, kv)))
    dk = draw(batch, kv, size, time, seed=3).permute(0, 3, 1, 2)  # as attention's math backend returns it
    ours, theirs = (
        k.rotate_norm_backward(dq, dk, dv, qkv, rstd, table) for k in (TRITON_FP8_BLOCK, REFERENCE_FP8_BLOCK)
    )
    check(ours, theirs, GRADIENT_DTYPE)


def loss_and_gradient(
    kernels: Fp8GemmKernels,
    logits: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    real: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses and the quantized gradient, whose transpose must be the same and where it should be."""
    rows, before = len(logits), logits.clone()
    transposed = empty_transposed(2 * rows, logits.shape[1], LOGIT_GRADIENT_DTYPE, DEVICE)
    transposed[:, : 2 * rows] = 3
    losses, d = kernels.cross_entropy(logits, targets, transposed[:, rows : 2 * rows], scale, softcap, real)
    assert torch.equal(logits, before) and d.original is None and d.data.dtype == LOGIT_GRADIENT_DTYPE
    assert (d.scale == torch.tensor(logit_gradient_scale(scale))).all() and d.scale.shape == (rows, 1)
    assert torch.equal(transposed[:, rows : 2 * rows].float(), d.data.float().t())
    assert (transposed[:, :rows].float() == 3).all() and not transposed[:, 2 * rows :].float().any()
    return losses, d.data


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("rows", "vocabulary"), [(6, 256), (70, 1008), (150, 304), (6, 19_312)])
def test_cross_entropy_equals_reference(rows: int, vocabulary: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE, torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator).to(DEVICE)
    # A confident prediction, whose gradient is almost zero. In a long row, a GPU that fuses 41.5 · log2(e)
    # with a difference could leave its rounding, 1.3e-6, in the sum once per tile from the first on.
    targets[0] = 0
    logits[0, 0] = 41.5
    logits[1, (targets[1] + 1) % vocabulary] = 40  # confidently wrong
    scale = 1 / 3000
    (losses, ours), (want, theirs) = (
        loss_and_gradient(k, logits, targets, scale, softcap) for k in (TRITON_FP8_GEMM, REFERENCE_FP8_GEMM)
    )
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-5)
    one, two = ours.float(), theirs.float()
    # A value next to a tie may round to the other neighbour; the smallest differ by a subnormal. At the
    # confident target 1 − p comes from the loss: as exact as the last bit of log Σ exp, a number above 32.
    allowed = 2 * ROUNDING[LOGIT_GRADIENT_DTYPE] * two.abs() + 2.0**-16
    allowed[0, 0] += 2.0**-18 / logit_gradient_scale(1.0)
    assert ((one - two).abs() <= allowed).all()
    assert (one != two).float().mean() < 0.02
    _, exact = REFERENCE.cross_entropy_(logits.double(), targets, 1.0, softcap)
    found = two.double() * logit_gradient_scale(1.0)
    large = exact.abs() > 2.0**-29  # smaller values are subnormal
    assert ((found - exact).abs() <= 1.01 * ROUNDING[LOGIT_GRADIENT_DTYPE] * exact.abs())[large].all()
    assert (found - exact).abs()[~large].max() <= 2.0**-31


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("real", "padded"), [(250, 256), (19_257, 19_328)])
def test_cross_entropy_leaves_padding_out(real: int, padded: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, padded, generator=generator)).to(DEVICE, torch.bfloat16)
    targets = torch.randint(0, real, (6,), generator=generator).to(DEVICE)
    logits[:, real:] = 50
    unpadded = logits[:, :real].contiguous()
    want, theirs = loss_and_gradient(REFERENCE_FP8_GEMM, unpadded, targets, 0.25, softcap)
    for kernels in (TRITON_FP8_GEMM, REFERENCE_FP8_GEMM):
        losses, d = loss_and_gradient(kernels, logits, targets, 0.25, softcap, real)
        torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-5)
        assert not d[:, real:].float().any()
        torch.testing.assert_close(
            d[:, :real].float(), theirs.float(), rtol=2 * ROUNDING[LOGIT_GRADIENT_DTYPE], atol=2.0**-16
        )


@pytest.mark.parametrize("rows", [5, 20_000])
def test_tensor_scale_equals_reference(rows: int) -> None:
    scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    given = RowwiseFp8(None, scale.to(ACTIVATION_DTYPE), scale)
    ours, theirs = (k.tensor_scale(given) for k in (TRITON_FP8_GEMM, REFERENCE_FP8_GEMM))
    assert ours.shape == () and torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(128, 64), (40, 80), (300, 48), (1200, 16)])
@pytest.mark.parametrize("dtype", [GRADIENT_DTYPE, None], ids=str)
def test_transpose_quantize_equals_reference(dtype: torch.dtype | None, shape: tuple[int, int]) -> None:
    x = draw(*shape)
    given: RowwiseFp8 | DeferredFp8
    if dtype is None:
        given = defer_quantization_of_norm(REFERENCE.rms_norm(x, EPS)[0])
        scale, bound = given.scale, ROUNDING[ACTIVATION_DTYPE]
        expected = given.original.float()
    else:
        given = RowwiseFp8(None, *quantize_rows_reference(x, dtype))
        scale, bound = tensor_scale_reference(given), 0.0  # from one power of two to another
        expected = given.data.float() * given.scale
    ours, theirs = (k.transpose_quantize(given, scale) for k in (TRITON_FP8_GEMM, REFERENCE_FP8_GEMM))
    assert ours.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(ours.float(), theirs.float()) and (ours[:, shape[0] :].float() == 0).all()
    back = ours[:, : shape[0]].float().t() * scale
    large = expected.abs() > 2.0**-6 * scale  # smaller values are subnormal
    assert ((back - expected).abs()[large] <= bound * 1.001 * expected.abs()[large]).all()
    assert torch.isfinite(back).all() and (back - expected).abs().max() <= max(
        bound * expected.abs().max(), scale
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs fp8 tensor cores")
def test_wgrad_gemm_equals_reference() -> None:
    x = quantize_activation_reference(draw(130, 48, seed=1))
    for dtype in (GRADIENT_DTYPE, LOGIT_GRADIENT_DTYPE):
        d = RowwiseFp8(None, *quantize_rows_reference(draw(130, 96), dtype))
        scales = tensor_scale_reference(d), tensor_scale_reference(x)
        transposed = [
            REFERENCE_FP8_GEMM.transpose_quantize(m, s) for m, s in zip((d, x), scales, strict=True)
        ]
        want = REFERENCE_FP8_GEMM.wgrad_gemm(*transposed, *scales)
        found = TRITON_FP8_GEMM.wgrad_gemm(*transposed, *scales)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def quantized_weight(kernels: Fp8GemmKernels, weight: Tensor) -> list[Tensor]:
    rows, columns = weight.shape
    found = [
        torch.empty(rows, columns, dtype=ACTIVATION_DTYPE, device=DEVICE),
        torch.empty(1, rows, device=DEVICE),
        torch.empty(columns, rows, dtype=ACTIVATION_DTYPE, device=DEVICE),
        torch.empty(1, columns, device=DEVICE),
    ]
    amax = torch.full((rows + columns,), 2**30, dtype=torch.int32, device=DEVICE)
    kernels.quantize_weight_(*found, amax, weight)
    return found


@pytest.mark.parametrize("shape", [(64, 128), (96, 80), (48, 200)])
def test_weight_and_transpose_are_quantized_with_separate_scales(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    weight[5] = 0
    ours, theirs = (quantized_weight(k, weight) for k in (TRITON_FP8_GEMM, REFERENCE_FP8_GEMM))
    for index in (0, 2):
        nearly_equal(ours[index], theirs[index])
        torch.testing.assert_close(ours[index + 1], theirs[index + 1])
    data, scale, transposed, transposed_scale = (t.float() for t in ours)
    for back in (data * scale.t(), (transposed * transposed_scale.t()).t()):
        assert (back - weight.float()).norm() <= 0.04 * weight.float().norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs fp8 tensor cores")
def test_gemm_equals_reference() -> None:
    for dtype in (ACTIVATION_DTYPE, LOGIT_GRADIENT_DTYPE):
        x = RowwiseFp8(None, *quantize_rows_reference(draw(130, 96), dtype))
        weight, scale, _, _ = quantized_weight(REFERENCE_FP8_GEMM, draw(48, 96, seed=1))
        want = REFERENCE_FP8_GEMM.gemm(x, weight, scale, torch.bfloat16, fast_accumulation=False)
        for fast in (False, True):
            found = TRITON_FP8_GEMM.gemm(x, weight, scale, torch.bfloat16, fast_accumulation=fast)
            torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())
