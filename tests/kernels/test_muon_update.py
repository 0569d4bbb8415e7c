"""Muon's elementwise passes in Triton equal the reference: any shape, tall or wide."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from steepen.optim.config import OptimizerConfig
from steepen.optim.muon import Muon

pytest.importorskip("triton")
from steepen.kernels.dispatch import REFERENCE, TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU runs Triton's interpreter
SHAPES = [(1, 1), (64, 64), (3, 70, 40), (130, 65), (2, 2, 5, 100)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def stored_transposed(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, with the memory layout of their transposes."""
    return [x.mT.contiguous().mT for x in tensors]


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_direction_equal_reference(nesterov: bool, transposed: bool, dtype: torch.dtype) -> None:
    gradients, (ours, theirs) = draw(0), (draw(1), draw(1))
    out, expected = draw(2, dtype), draw(2, dtype)
    if transposed:
        out, gradients = stored_transposed(out), stored_transposed(gradients)
    TRITON.update_momentum(out, gradients, ours, 0.95, nesterov)
    REFERENCE.update_momentum(expected, gradients, theirs, 0.95, nesterov)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@DTYPES
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 70, 40), (2, 2048, 1), (2, 700, 900)])
def test_frobenius_normalize_equals_reference(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Each matrix is divided by its own norm; a matrix of zeros stays zero."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x *= 1e-3 * torch.arange(1, len(x) + 1, device=DEVICE)[:, None, None]
    ours = TRITON.frobenius_normalize(x, 1.02, 1e-7)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours, REFERENCE.frobenius_normalize(x, 1.02, 1e-7), rtol=TOLERANCE[dtype], atol=1e-7
    )
    norms = ours.float().norm(dim=(1, 2))
    # The interpreter truncates to bf16 where a GPU rounds.
    torch.testing.assert_close(norms, torch.full_like(norms, 1 / 1.02), rtol=5e-3, atol=0)
    assert not TRITON.frobenius_normalize(torch.zeros_like(x), 1.02, 1e-7).any()


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_apply_update_equals_reference(lr: float | Tensor, transposed: bool, dtype: torch.dtype) -> None:
    updates, (ours, theirs) = draw(0, dtype), (draw(1), draw(1))
    if transposed:
        updates = stored_transposed(updates)
    lr = lr.to(DEVICE) if isinstance(lr, Tensor) else lr
    scales = [0.5 + k for k in range(len(SHAPES))]
    TRITON.apply_update(ours, updates, scales, lr, 0.2)
    REFERENCE.apply_update(theirs, updates, scales, lr, 0.2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    exact = [
        (1 - 0.3 * 0.2) * p - 0.3 * s * u.float() for p, u, s in zip(draw(1), updates, scales, strict=True)
    ]
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=2e-6)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the optimizer's own tests go through the kernels"
)
@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_muon_steps_with_triton_equal_steps_with_the_reference(
    method: Literal["newton-schulz", "polar-express"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped() -> list[Tensor]:
        parameters = {str(k): nn.Parameter(weight) for k, weight in enumerate(draw(0))}
        muon = Muon(parameters, OptimizerConfig(orthogonalisation=method))
        for step in range(2):
            for parameter, gradient in zip(parameters.values(), draw(step + 1), strict=True):
                parameter.grad = gradient
            muon.step(0.1, 0.2)
        return [p.detach() for p in parameters.values()]

    reference = stepped()
    calls: list[Tensor] = []
    monkeypatch.setattr("steepen.optim.muon.SYMMETRIC_MIN_ROWS", 1)
    monkeypatch.setattr("steepen.optim.muon.kernels_for", lambda x: calls.append(x) or TRITON)
    torch.testing.assert_close(stepped(), reference, rtol=1e-4, atol=1e-5)
    assert calls
