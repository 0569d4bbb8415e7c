"""Gram matrices and symmetric polynomials in Triton equal the reference, for any size and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from steepen.kernels import gram
from steepen.kernels.dispatch import REFERENCE, TRITON

# Without a GPU the kernels run on Triton's interpreter, which multiplies fp16 but not bf16.
DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])
SIZES = [(1, 64, 64), (3, 128, 64), (2, 1, 1), (2, 70, 33), (1, 65, 130), (2, 200, 7), (1, 513, 40)]
LARGE = [(1, 640, 64), (2, 600, 100)]  # more than 512 rows use the large tile
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, dtype)


def check(result: Tensor, expected: Tensor) -> None:
    """Close to the exact value at the inputs' precision, and symmetric to the last bit.

    Triton's interpreter multiplies a tile on the diagonal with numpy, whose sums for (i, j) and (j, i) may
    have different orders, so there only the mirrored tiles must be equal to the last bit.
    """
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    mirrored = result.clone()
    if DEVICE == "cpu":
        size = gram.tile_config(result.shape[-1], result.element_size()).size
        tile = torch.arange(result.shape[-1]) // size
        mirrored[:, tile[:, None] == tile] = 0
    assert torch.equal(mirrored, mirrored.mT)


@DTYPES
@pytest.mark.parametrize("size", SIZES + LARGE)
def test_gram_equals_reference(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(size, dtype)
    result = TRITON.gram(x)
    assert result.dtype == dtype
    check(result, REFERENCE.gram(x.double()))
    torch.testing.assert_close(result, REFERENCE.gram(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("a", [0.0, 3.4445])
@pytest.mark.parametrize("size", [(2, 64), (3, 1), (2, 70), (1, 200), (1, 600)])
def test_polynomial_equals_reference(size: tuple[int, int], a: float, dtype: torch.dtype) -> None:
    count, rows = size
    x = REFERENCE.gram(draw((count, rows, rows), torch.float32))
    x = (x / x.norm(dim=(-2, -1), keepdim=True)).to(dtype)
    check(
        TRITON.symmetric_polynomial(x, -4.775, 2.0315, a=a),
        REFERENCE.symmetric_polynomial(x.double(), -4.775, 2.0315, a=a),
    )


def test_gram_accepts_any_strides() -> None:
    x = draw((4, 90, 50), torch.float32)
    for view in (x.mT, x[::2], x[:, 10:40], x[:, :, 3:30], x.transpose(0, 1)):
        check(TRITON.gram(view), REFERENCE.gram(view.double()))


def test_results_are_written_to_out() -> None:
    x = draw((2, 70, 30), torch.float32)
    first, second = (torch.full((2, 70, 70), torch.nan, device=DEVICE) for _ in range(2))
    assert TRITON.gram(x, out=first) is first
    check(first, REFERENCE.gram(x.double()))
    assert TRITON.symmetric_polynomial(first, -2.0, 1.0, a=3.0, out=second) is second
    check(second, REFERENCE.symmetric_polynomial(first.double(), -2.0, 1.0, a=3.0))
    with pytest.raises(AssertionError, match="input"):
        TRITON.symmetric_polynomial(first, -2.0, 1.0, out=first)
    with pytest.raises(AssertionError, match="contiguous"):
        TRITON.gram(x, out=torch.empty(2, 71, 71, device=DEVICE))


@DTYPES
def test_result_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x = draw((5, 130, 70), dtype)
    batched = TRITON.gram(x)
    for index in range(5):
        assert torch.equal(batched[index], TRITON.gram(x[index : index + 1])[0])


@DTYPES
@pytest.mark.parametrize("size", [(3, 128, 64), (2, 192, 104), (2, 640, 128)])
def test_loads_with_and_without_tma_agree(
    size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(size, dtype)
    assert gram._row_tiles(x, gram.SMALL_TILE) is not None
    with_tma = TRITON.gram(x), TRITON.symmetric_polynomial(TRITON.gram(x), -4.775, 2.0315, a=3.4445)
    monkeypatch.setattr(gram, "USE_TMA", False)
    without = TRITON.gram(x), TRITON.symmetric_polynomial(TRITON.gram(x), -4.775, 2.0315, a=3.4445)
    for one, other in zip(with_tma, without, strict=True):
        check(one, other.double())
