"""The head's product and its cross-entropy in one: the losses and gradients of the two apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels import eager

pytest.importorskip("triton")
from steepen.kernels import fused

# Without a GPU the kernels run on Triton's interpreter, which multiplies fp16 but not bf16.
DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 5.0])
# Tiles filled to the last and not, along rows, vocabulary and width; more tiles than programs; more than the
# eight rows of tiles that are taken together.
SIZES = pytest.mark.parametrize(
    "size", [(5, 64, 16), (128, 256, 64), (130, 520, 72), (300, 264, 200), (1040, 264, 16)]
)


def draw(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary, width = size
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = (width**-0.5 * torch.randn(vocabulary, width, generator=generator)).to(device, dtype)
    return n, weight, torch.randint(0, vocabulary, (rows,), generator=generator).to(device)


def truth(n: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Losses and the logits' gradient, by autograd in fp64."""
    logits = (n.double() @ weight.double().t()).requires_grad_()
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = functional.cross_entropy(x, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient


@SOFTCAPS
@SIZES
def test_the_plain_twin_gives_the_losses_and_gradients_of_cross_entropy(
    size: tuple[int, int, int], softcap: float | None
) -> None:
    n, weight, targets = draw(size, torch.float64, "cpu")
    losses, parts = eager.odds(n, weight, targets, 0.25, softcap, gradient=True)
    expected, gradient = truth(n, weight, targets, softcap)
    assert parts is not None
    odds, factor, scaled = parts
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(odds * factor[:, None], 0.25 * gradient)
    torch.testing.assert_close(scaled, n * factor[:, None])


@SOFTCAPS
@SIZES
def test_the_kernel_gives_them_too(size: tuple[int, int, int], softcap: float | None) -> None:
    n, weight, targets = draw(size, HALF, DEVICE)
    assert fused.has_odds(n, weight)
    losses, parts = fused.odds(n, weight, targets, 0.25, softcap, gradient=True)
    expected, gradient = truth(n, weight, targets, softcap)
    assert parts is not None
    odds, factor, scaled = parts
    assert odds.dtype == scaled.dtype == n.dtype and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    found = odds.double() * factor.double()[:, None]
    # Rounded once, each by itself: the small as exactly as the large.
    torch.testing.assert_close(found, 0.25 * gradient, rtol=2**-7, atol=1e-7)
    torch.testing.assert_close(scaled.double(), n.double() * factor.double()[:, None], rtol=2**-7, atol=1e-7)
    only, nothing = fused.odds(n, weight, targets, 0.25, softcap, gradient=False)
    assert nothing is None
    torch.testing.assert_close(only, losses)


@pytest.mark.parametrize("kernels", [eager, fused], ids=["eager", "fused"])
def test_a_hopeless_target_has_a_finite_gradient_that_points_away_from_the_favourite(kernels: object) -> None:
    # fp16, which the interpreter computes in, holds no e^60: there only the loss is looked at.
    dtype = torch.bfloat16 if kernels is eager else HALF
    n, weight, targets = draw((8, 64, 16), dtype, DEVICE)
    weight.zero_()
    weight[3] = 40 * n[0] / n[0].norm()
    targets.fill_(5)
    n[0] *= 100 / n[0].norm()  # its favourite is 4,000 nats above the target
    losses, (odds, factor, scaled) = kernels.odds(n, weight, targets, 1 / 65_536, None, gradient=True)  # type: ignore[attr-defined]
    assert losses[0].item() == pytest.approx(eager.MOST_NATS, abs=0.01)
    if dtype == torch.bfloat16:
        gradient = odds[0].double() * factor[0].double() * 65_536
        assert gradient[3].item() == pytest.approx(1, rel=0.01)
        assert gradient[5].item() == pytest.approx(-1, rel=0.01)
        assert torch.isfinite(scaled).all() and scaled[0].abs().max() > 0


@pytest.mark.parametrize("kernels", [eager, fused], ids=["eager", "fused"])
def test_what_is_no_number_is_not_hidden_by_the_limit(kernels: object) -> None:
    n, weight, targets = draw((8, 64, 16), HALF, DEVICE)
    n[3] = float("nan")
    for gradient in (False, True):
        losses, _ = kernels.odds(n, weight, targets, 1.0, None, gradient=gradient)  # type: ignore[attr-defined]
        assert losses.isnan().nonzero().flatten().tolist() == [3]


def test_rows_the_copy_engine_cannot_fetch_are_left_to_others() -> None:
    n, weight, _ = draw((8, 60, 16), HALF, DEVICE)
    assert not fused.has_odds(n, weight)  # 60 columns of two bytes are no multiple of sixteen
    n, weight, _ = draw((8, 64, 16), torch.float32, DEVICE)
    assert not fused.has_odds(n, weight)
