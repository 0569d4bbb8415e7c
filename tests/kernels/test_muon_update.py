"""Muon's elementwise passes in Triton equal the reference: any shape, tall or wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from steepen.optim.config import OptimizerConfig
from steepen.optim.muon import Muon

pytest.importorskip("triton")
from steepen.kernels import muon_update
from steepen.kernels.dispatch import REFERENCE, TRITON
from steepen.kernels.muon_update import row_square_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU runs Triton's interpreter
SHAPES = [(1, 1), (64, 64), (3, 70, 40), (130, 65), (2, 2, 5, 100)]
STEPPED_SHAPES = [(70, 40), (2, 1, 5, 100)]  # an orthogonalization takes seconds on the interpreter
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def draw(
    seed: int, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


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
    TRITON.update_momentum(out, gradients, ours, beta=0.95, nesterov=nesterov)
    REFERENCE.update_momentum(expected, gradients, theirs, beta=0.95, nesterov=nesterov)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_row_sums_of_squares_are_those_of_the_direction(
    nesterov: bool, transposed: bool, dtype: torch.dtype
) -> None:
    """Exact in fp32, also where the direction itself is stored in bf16; momentum may be a tensor."""
    gradients, momenta, exact, out = draw(0), draw(1), draw(1), draw(2, dtype)
    if transposed:
        out = stored_transposed(out)
    for kernels, beta in ((TRITON, 0.9), (TRITON, torch.tensor(0.9, device=DEVICE)), (REFERENCE, 0.9)):
        momenta = draw(1)
        squares = [
            torch.full((x[..., 0, 0].numel(), row_square_parts(x.shape[-1]), x.shape[-2]), 7.0, device=DEVICE)
            for x in gradients
        ]
        kernels.update_momentum(out, gradients, momenta, squares, beta=beta, nesterov=nesterov)
        for gradient, old, found in zip(gradients, exact, squares, strict=True):
            direction = 0.9 * old + 0.1 * gradient
            if nesterov:
                direction = 0.9 * direction + 0.1 * gradient
            expected = direction.square().sum(-1).view(len(found), -1)
            torch.testing.assert_close(found.sum(1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_read_from_a_tensor_equals_the_number(nesterov: bool) -> None:
    gradients, (ours, theirs), (out, expected) = draw(0), (draw(1), draw(1)), (draw(2), draw(2))
    beta = torch.tensor(0.87, device=DEVICE)
    for kernels in (TRITON, REFERENCE):
        kernels.update_momentum(out, gradients, ours, beta=beta, nesterov=nesterov)
        REFERENCE.update_momentum(expected, gradients, theirs, beta=0.87, nesterov=nesterov)
        torch.testing.assert_close([*ours, *out], [*theirs, *expected], rtol=1e-5, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 40, 70), (2, 5, 300)])
def test_scaled_matrices_equal_reference(
    size: tuple[int, int, int], by_row: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(size, generator=generator).to(DEVICE, dtype)
    count, rows, columns = size
    shape = (count, rows, 1) if by_row else (count, 1, columns)
    factors = torch.rand(shape, generator=generator).to(DEVICE)
    theirs, exact = ours.clone(), ours.float() * factors
    TRITON.scale_matrices_(ours, factors)
    REFERENCE.scale_matrices_(theirs, factors)
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=1e-7)
    torch.testing.assert_close(ours.float(), exact, rtol=TOLERANCE[dtype], atol=1e-7)


@DTYPES
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 70, 40), (2, 2048, 1), (2, 100, 130)])
def test_frobenius_normalize_equals_reference(
    size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix is divided by its own norm; a matrix of zeros stays zero."""
    monkeypatch.setattr(muon_update, "NORM_MAX_PROGRAMS", 4)  # of 2,048 elements: the last size needs seven
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
    TRITON.apply_update(ours, updates, scales, lr=lr, weight_decay=0.2)
    REFERENCE.apply_update(theirs, updates, scales, lr=lr, weight_decay=0.2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    exact = [
        (1 - 0.3 * 0.2) * p - 0.3 * s * u.float() for p, u, s in zip(draw(1), updates, scales, strict=True)
    ]
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("factors", ["none", "row", "column"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("cautious", "scaled_decay"), [(True, False), (False, True), (True, True)])
def test_cautious_and_scaled_updates_equal_reference(
    cautious: bool, scaled_decay: bool, transposed: bool, factors: str
) -> None:
    updates, (ours, theirs, exact) = draw(0), (draw(1), draw(1), draw(1))
    vectors = None
    if factors != "none":
        vectors = [x.abs().mean(-1 if factors == "row" else -2, keepdim=True) for x in updates]
    if transposed:
        updates = stored_transposed(updates)
    scales = [0.5 + k for k in range(len(SHAPES))]
    for kernels, parameters in ((TRITON, ours), (REFERENCE, theirs)):
        kernels.apply_update(
            parameters, updates, scales, vectors,
            lr=0.3, weight_decay=0.2, cautious=cautious, scaled_decay=scaled_decay,
        )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    for k, (p, u, scale) in enumerate(zip(exact, updates, scales, strict=True)):
        update = u if vectors is None else u * vectors[k]
        decay = 0.3 * 0.2 * (scale if scaled_decay else 1.0) * p
        if cautious:
            decay = torch.where(p * update >= 0, decay, 0.0)
        torch.testing.assert_close(ours[k], p - decay - 0.3 * scale * update, rtol=1e-6, atol=4e-6)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the optimizer's own tests go through the kernels"
)
@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig.named("muon"),
        replace(OptimizerConfig.named("muon"), orthogonalization="polar-express"),
        replace(OptimizerConfig.named("normuon"), row_normalize=True),
        OptimizerConfig(),
    ],
)
def test_muon_steps_with_triton_equal_steps_with_the_reference(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped() -> list[Tensor]:
        parameters = {str(k): nn.Parameter(weight) for k, weight in enumerate(draw(0, shapes=STEPPED_SHAPES))}
        muon = Muon(parameters, config)
        for step in range(2):
            gradients = draw(step + 1, shapes=STEPPED_SHAPES)
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            muon.step(0.1, 0.2)
        return [p.detach() for p in parameters.values()]

    reference = stepped()
    calls: list[Tensor] = []
    monkeypatch.setattr("steepen.optim.muon.SYMMETRIC_MIN_ROWS", 1)
    monkeypatch.setattr("steepen.optim.muon.kernels_for", lambda x: calls.append(x) or TRITON)
    torch.testing.assert_close(stepped(), reference, rtol=1e-4, atol=1e-5)
    assert calls
