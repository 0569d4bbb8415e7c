"""Fused linear cross-entropy gives the losses and gradients of a GEMM followed by cross-entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")
from steepen.kernels.dispatch import REFERENCE, TRITON, Kernels
from steepen.kernels.fused_linear_cross_entropy import MAX_LOGIT_DIFFERENCE

# Without a GPU the kernels run on Triton's interpreter, which multiplies fp16 but not bf16.
DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 5.0])
# Full and partial tiles along rows, vocabulary and width; more tiles than programs; more than one group of
# eight row tiles.
SIZES = pytest.mark.parametrize(
    "size", [(5, 64, 16), (128, 256, 64), (130, 520, 72), (300, 264, 200), (1040, 264, 16)]
)


def draw(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary, width = size
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = (width**-0.5 * torch.randn(vocabulary, width, generator=generator)).to(device, dtype)
    return n, weight, torch.randint(0, vocabulary, (rows,), generator=generator).to(device)


def exact_loss_and_gradient(
    n: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of the logits, by autograd in fp64."""
    logits = (n.double() @ weight.double().t()).requires_grad_()
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = functional.cross_entropy(x, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient


@SOFTCAPS
@SIZES
def test_reference_equals_gemm_and_cross_entropy(size: tuple[int, int, int], softcap: float | None) -> None:
    n, weight, targets = draw(size, torch.float64, "cpu")
    losses, logit_gradient = REFERENCE.fused_linear_cross_entropy(
        n, weight, targets, 0.25, softcap, gradient=True
    )
    expected, gradient = exact_loss_and_gradient(n, weight, targets, softcap)
    assert logit_gradient is not None
    exp_differences, row_factor, scaled_input = logit_gradient
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(exp_differences * row_factor[:, None], 0.25 * gradient)
    torch.testing.assert_close(scaled_input, n * row_factor[:, None])


@SOFTCAPS
@SIZES
def test_triton_equals_gemm_and_cross_entropy(size: tuple[int, int, int], softcap: float | None) -> None:
    n, weight, targets = draw(size, HALF, DEVICE)
    assert TRITON.supports_fused_linear_cross_entropy(n, weight)
    losses, logit_gradient = TRITON.fused_linear_cross_entropy(
        n, weight, targets, 0.25, softcap, gradient=True
    )
    expected, gradient = exact_loss_and_gradient(n, weight, targets, softcap)
    assert logit_gradient is not None
    exp_differences, row_factor, scaled_input = logit_gradient
    assert exp_differences.dtype == scaled_input.dtype == n.dtype and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    found = exp_differences.double() * row_factor.double()[:, None]
    # Each value is rounded once, so small ones are relatively as exact as large ones.
    torch.testing.assert_close(found, 0.25 * gradient, rtol=2**-7, atol=1e-7)
    expected_input = n.double() * row_factor.double()[:, None]
    torch.testing.assert_close(scaled_input.double(), expected_input, rtol=2**-7, atol=1e-7)
    only_losses, nothing = TRITON.fused_linear_cross_entropy(
        n, weight, targets, 0.25, softcap, gradient=False
    )
    assert nothing is None
    torch.testing.assert_close(only_losses, losses)


@SOFTCAPS
@pytest.mark.parametrize(("real", "padded"), [(257, 264), (250, 256), (3, 520), (512, 520)])
@pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_padding_has_no_logit_and_no_gradient(
    kernels: Kernels, real: int, padded: int, softcap: float | None
) -> None:
    n, weight, _ = draw((130, padded, 72), HALF, DEVICE)
    targets = torch.arange(130, device=DEVICE) % real
    weight[real:] = 5  # would change every loss
    expected, gradient = exact_loss_and_gradient(n, weight[:real], targets, softcap)
    for wanted in (False, True):
        losses, logit_gradient = kernels.fused_linear_cross_entropy(
            n, weight, targets, 0.25, softcap, real, gradient=wanted
        )
        torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    assert logit_gradient is not None
    found = logit_gradient.exp_differences.double() * logit_gradient.row_factor.double()[:, None]
    torch.testing.assert_close(found[:, :real], 0.25 * gradient, rtol=2**-7, atol=1e-7)
    assert not found[:, real:].any()


@pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_clamped_logit_difference_has_a_finite_gradient_of_the_right_sign(kernels: Kernels) -> None:
    # e^60 overflows fp16, which the interpreter computes in: there only the loss is checked.
    dtype = torch.bfloat16 if kernels is REFERENCE else HALF
    n, weight, targets = draw((8, 64, 16), dtype, DEVICE)
    weight.zero_()
    weight[3] = 40 * n[0] / n[0].norm()
    targets.fill_(5)
    n[0] *= 100 / n[0].norm()  # logit 3 is 4,000 nats above the target's
    losses, logit_gradient = kernels.fused_linear_cross_entropy(
        n, weight, targets, 1 / 65_536, None, gradient=True
    )
    assert logit_gradient is not None
    exp_differences, row_factor, scaled_input = logit_gradient
    assert losses[0].item() == pytest.approx(MAX_LOGIT_DIFFERENCE, abs=0.01)
    if dtype == torch.bfloat16:
        gradient = exp_differences[0].double() * row_factor[0].double() * 65_536
        assert gradient[3].item() == pytest.approx(1, rel=0.01)
        assert gradient[5].item() == pytest.approx(-1, rel=0.01)
        assert torch.isfinite(scaled_input).all() and scaled_input[0].abs().max() > 0


@pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_clamp_propagates_nan(kernels: Kernels) -> None:
    n, weight, targets = draw((8, 64, 16), HALF, DEVICE)
    n[3] = float("nan")
    for gradient in (False, True):
        losses, _ = kernels.fused_linear_cross_entropy(n, weight, targets, 1.0, None, gradient=gradient)
        assert losses.isnan().nonzero().flatten().tolist() == [3]


def test_operands_not_aligned_for_tma_are_not_supported() -> None:
    n, weight, _ = draw((8, 60, 16), HALF, DEVICE)
    assert not TRITON.supports_fused_linear_cross_entropy(
        n, weight
    )  # 60 columns of 2 bytes are not a multiple of 16 bytes
    n, weight, _ = draw((8, 64, 16), torch.float32, DEVICE)
    assert not TRITON.supports_fused_linear_cross_entropy(n, weight)
