"""Muon's passes over weights and momentum against their plain twins: any shape, tall or wide."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from steepen.kernels import eager
from steepen.optim.config import OptimizerConfig
from steepen.optim.muon import Muon

pytest.importorskip("triton")
from steepen.kernels import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there on Triton's interpreter
SHAPES = [(1, 1), (64, 64), (3, 70, 40), (130, 65), (2, 2, 5, 100)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def turned(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, laid out in memory as their transposes."""
    return [x.mT.contiguous().mT for x in tensors]


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_direction_equal_their_plain_twin(
    nesterov: bool, transposed: bool, dtype: torch.dtype
) -> None:
    gradients, (ours, theirs) = draw(0), (draw(1), draw(1))
    out, expected = draw(2, dtype), draw(2, dtype)
    if transposed:
        out, gradients = turned(out), turned(gradients)
    fused.momentum_into(out, gradients, ours, 0.95, nesterov)
    eager.momentum_into(expected, gradients, theirs, 0.95, nesterov)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@DTYPES
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 70, 40), (2, 2048, 1), (2, 700, 900)])
def test_matrices_are_normalised_as_by_their_plain_twin(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Each by its own norm; one of zeros stays what it is."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x *= 1e-3 * torch.arange(1, len(x) + 1, device=DEVICE)[:, None, None]
    ours = fused.normalised(x, 1.02, 1e-7)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, eager.normalised(x, 1.02, 1e-7), rtol=TOLERANCE[dtype], atol=1e-7)
    sizes = ours.float().norm(dim=(1, 2))
    # The interpreter cuts bf16 off where a GPU rounds.
    torch.testing.assert_close(sizes, torch.full_like(sizes, 1 / 1.02), rtol=5e-3, atol=0)
    assert not fused.normalised(torch.zeros_like(x), 1.02, 1e-7).any()


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_decayed_steps_equal_their_plain_twin(
    lr: float | Tensor, transposed: bool, dtype: torch.dtype
) -> None:
    updates, (ours, theirs) = draw(0, dtype), (draw(1), draw(1))
    if transposed:
        updates = turned(updates)
    lr = lr.to(DEVICE) if isinstance(lr, Tensor) else lr
    scales = [0.5 + k for k in range(len(SHAPES))]
    fused.decay_and_add(ours, updates, scales, lr, 0.2)
    eager.decay_and_add(theirs, updates, scales, lr, 0.2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    exact = [
        (1 - 0.3 * 0.2) * p - 0.3 * s * u.float() for p, u, s in zip(draw(1), updates, scales, strict=True)
    ]
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=2e-6)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the optimizer's own tests go through the kernels"
)
@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_muon_steps_through_the_kernels_as_without_them(
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

    plain = stepped()
    asked: list[Tensor] = []
    monkeypatch.setattr("steepen.optim.muon.SYMMETRIC_MIN_ROWS", 1)
    monkeypatch.setattr("steepen.optim.muon.kernels_for", lambda x: asked.append(x) or fused)
    torch.testing.assert_close(stepped(), plain, rtol=1e-4, atol=1e-5)
    assert asked
