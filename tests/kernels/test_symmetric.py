"""The symmetric products against their plain twins: any size, any strides, both halves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steepen.kernels import eager

pytest.importorskip("triton")
from steepen.kernels import fused
from steepen.kernels import gram as symmetric

# Without a GPU the kernels run on Triton's interpreter, which multiplies fp16 but not bf16.
DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])
SIZES = [(1, 64, 64), (3, 128, 64), (2, 1, 1), (2, 70, 33), (1, 65, 130), (2, 200, 7), (1, 513, 40)]
LARGE = [(1, 640, 64), (2, 600, 100)]  # past 512 rows the tiles are others
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, dtype)


def check(result: Tensor, expected: Tensor) -> None:
    """Close to the exact value at the precision the inputs have, and symmetric to the last bit."""
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(result, result.mT)


@DTYPES
@pytest.mark.parametrize("size", SIZES + LARGE)
def test_gram_equals_its_plain_twin(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(size, dtype)
    result = fused.gram(x)
    assert result.dtype == dtype
    check(result, eager.gram(x.double()))
    torch.testing.assert_close(result, eager.gram(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("a", [0.0, 3.4445])
@pytest.mark.parametrize("size", [(2, 64), (3, 1), (2, 70), (1, 200), (1, 600)])
def test_polynomial_equals_its_plain_twin(size: tuple[int, int], a: float, dtype: torch.dtype) -> None:
    count, rows = size
    x = eager.gram(draw((count, rows, rows), torch.float32))
    x = (x / x.norm(dim=(-2, -1), keepdim=True)).to(dtype)
    check(
        fused.symmetric_polynomial(x, -4.775, 2.0315, a=a),
        eager.symmetric_polynomial(x.double(), -4.775, 2.0315, a=a),
    )


def test_any_strides_are_read() -> None:
    x = draw((4, 90, 50), torch.float32)
    for view in (x.mT, x[::2], x[:, 10:40], x[:, :, 3:30], x.transpose(0, 1)):
        check(fused.gram(view), eager.gram(view.double()))


def test_results_go_where_they_are_asked_to() -> None:
    x = draw((2, 70, 30), torch.float32)
    first, second = (torch.full((2, 70, 70), torch.nan, device=DEVICE) for _ in range(2))
    assert fused.gram(x, out=first) is first
    check(first, eager.gram(x.double()))
    assert fused.symmetric_polynomial(first, -2.0, 1.0, a=3.0, out=second) is second
    check(second, eager.symmetric_polynomial(first.double(), -2.0, 1.0, a=3.0))
    with pytest.raises(AssertionError, match="input"):
        fused.symmetric_polynomial(first, -2.0, 1.0, out=first)
    with pytest.raises(AssertionError, match="contiguous"):
        fused.gram(x, out=torch.empty(2, 71, 71, device=DEVICE))


@DTYPES
def test_a_matrix_s_product_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    x = draw((5, 130, 70), dtype)
    together = fused.gram(x)
    for index in range(5):
        assert torch.equal(together[index], fused.gram(x[index : index + 1])[0])


@DTYPES
@pytest.mark.parametrize("size", [(3, 128, 64), (2, 192, 104), (2, 640, 128)])
def test_both_ways_of_fetching_agree(
    size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(size, dtype)
    assert symmetric._strips(x, symmetric.SMALL) is not None
    engine = fused.gram(x), fused.symmetric_polynomial(fused.gram(x), -4.775, 2.0315, a=3.4445)
    monkeypatch.setattr(symmetric, "COPY_ENGINE", False)
    threads = fused.gram(x), fused.symmetric_polynomial(fused.gram(x), -4.775, 2.0315, a=3.4445)
    for one, other in zip(engine, threads, strict=True):
        check(one, other.double())
