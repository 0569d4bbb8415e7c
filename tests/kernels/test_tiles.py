"""Products with a weight are the same whichever tiles they are made in, and cuBLAS is told what to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.kernels import cublaslt_gemm as tiles
from steepen.kernels.cublaslt_gemm import multiply, preferred

SMALL, LARGE = 29, 24  # a tile that is wanted, and one of those cuBLAS puts first
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_first_small_tile_without_scratch_memory_is_preferred() -> None:
    assert preferred([(LARGE, 0), (SMALL, 0), (SMALL, 0)]) == 1
    assert preferred([(LARGE, 0), (201, 0), (SMALL, 0)]) == 2, "the order is ours"
    assert preferred([(LARGE, 0), (SMALL, 4096), (197, 0)]) == 2, "sums in parts need scratch memory"
    assert preferred([(LARGE, 0), (23, 0)]) is None
    assert preferred([]) is None


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_elsewhere_it_is_torchs_product(turned: bool, adds: bool) -> None:
    x, weight, total = torch.randn(5, 3), torch.randn(3, 4), torch.randn(5, 4)
    weight = weight.t().contiguous().t() if turned else weight
    expected = x @ weight + (total if adds else 0)
    given = multiply(x, weight, onto=total if adds else None)
    torch.testing.assert_close(given, expected)
    assert (given is total) == adds


class FakeLibrary:
    """Offers candidates with these tiles, as cuBLAS does, and remembers what it was told."""

    def __init__(self, offered: list[int], status: int = 0) -> None:
        self.offered, self.status = offered, status
        self.handle = "handle"
        self.types: list[int] = []  # of sums and of factors
        self.turned: dict[int, int] = {}
        self.layouts: list[tuple[int, ...]] = []  # type, rows, columns, from column to column
        self.multiplied: list[dict[str, Any]] = []

    def call(self, name: str, *arguments: Any) -> None:
        assert self.try_to(name, *arguments) == 0

    def try_to(self, name: str, *arguments: Any) -> int:
        if name == "MatmulDescCreate":
            self.types = [value.value for value in arguments[1:]]
        elif name == "MatmulDescSetAttribute":
            _, attribute, value, size = arguments
            assert size.value == 4
            self.turned[attribute.value] = value._obj.value
        elif name == "MatrixLayoutCreate":
            self.layouts.append(tuple(value.value for value in arguments[1:]))
            arguments[0]._obj.value = len(self.layouts)
        elif name == "MatmulAlgoGetHeuristic":
            *_, asked, candidates, returned = arguments
            assert asked.value >= len(self.offered)
            for place in range(len(self.offered)):
                candidates[place].algorithm.data[0] = place
            returned._obj.value = len(self.offered)
        elif name == "MatmulAlgoConfigGetAttribute":
            algorithm, attribute, tile, *_ = arguments
            assert attribute.value == 1
            tile._obj.value = self.offered[algorithm._obj.data[0]]
        elif name == "Matmul":
            _, _, alpha, a, in_a, b, in_b, beta, c, in_c, d, in_d, algorithm, *_ = arguments
            self.multiplied.append({
                "factors": (alpha._obj.value, beta._obj.value),
                "tensors": [pointer.value for pointer in (a, b, c, d)],
                "layouts": [self.layouts[layout.value - 1] for layout in (in_a, in_b, in_c, in_d)],
                "candidate": algorithm._obj.data[0],
            })  # fmt: skip
            return self.status
        return 0


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors here are a CPU's, which has none."""
    stream = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)


@pytest.mark.usefixtures("no_stream")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_cublas_is_told_what_to_multiply_and_how(turned: bool, adds: bool) -> None:
    """Its matrices go down columns: it makes the transposed product, of the transposed weight and x."""
    library: Any = FakeLibrary([LARGE, 23, SMALL])
    plan = tiles._Plan(library, 7, 5, 3, turned=turned, adds=adds)
    x, weight = torch.zeros(7, 3), torch.zeros((5, 3) if turned else (3, 5))
    total, out = torch.zeros(2, 7, 5)
    assert plan.run(x, weight.t() if turned else weight, total, out)
    assert library.types == [68, 0], "sums in fp32"
    assert library.turned == {3: int(turned), 4: 0}
    (told,) = library.multiplied
    assert told["candidate"] == 2 and told["factors"] == (1.0, float(adds))
    assert told["tensors"] == [t.data_ptr() for t in (weight, x, total, out)]
    bf16 = 14
    matrices = [(3, 5) if turned else (5, 3), (3, 7), (5, 7), (5, 7)]
    assert told["layouts"] == [(bf16, rows, columns, rows) for rows, columns in matrices]


@pytest.mark.usefixtures("no_stream")
def test_what_cublas_does_not_offer_or_do_is_left_to_torch() -> None:
    library: Any = FakeLibrary([LARGE, 23])
    assert tiles._Plan(library, 7, 5, 3, turned=False, adds=False).algorithm is None
    refusing: Any = FakeLibrary([SMALL], status=15)
    plan = tiles._Plan(refusing, 7, 5, 3, turned=False, adds=True)
    x, weight, out = torch.zeros(7, 3), torch.zeros(3, 5), torch.zeros(7, 5)
    with pytest.warns(UserWarning, match="status 15"):
        assert not plan.run(x, weight, out, out)
    assert not plan.run(x, weight, out, out) and len(refusing.multiplied) == 1, "and not asked again"


@pytest.mark.usefixtures("no_stream")
def test_a_sum_that_cublas_refuses_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: Any = FakeLibrary([SMALL], status=15)
    plan = tiles._Plan(refusing, 7, 5, 3, turned=False, adds=True)
    monkeypatch.setattr(tiles, "_plan_for", lambda *_: plan)
    x, weight, total = torch.zeros(7, 3), torch.zeros(3, 5), torch.zeros(7, 5)
    with pytest.warns(UserWarning, match="status 15"):
        assert tiles.multiply_and_add(x, weight, total) is None
    assert tiles.multiply_and_add(x, weight, total) is None and len(refusing.multiplied) == 1


def draw(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == tiles.HOPPER


# Of training: 65,536 tokens through matrices of d2, d3, d8, d12. For fewer, cuBLAS may offer no such tile.
SIZES = [(65_536, *sides) for sides in ((256, 768), (384, 1152), (1024, 384), (1024, 5632), (1536, 8192))]


@gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), [*SIZES, (100, 72, 40), (33, 9, 7)])
def test_on_a_gpu_products_are_right(turned: bool, adds: bool, rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight, total = draw(rows, inner), draw(inner, columns), draw(rows, columns)
    weight = weight.t().contiguous().t() if turned else weight
    onto = total if adds else None
    expected = x.float() @ weight.float() + (total.float() if adds else 0)
    given = multiply(x, weight, onto=onto)
    assert given.dtype == torch.bfloat16 and (given is total) == adds
    torch.testing.assert_close(given.float(), expected, rtol=2**-7, atol=2e-2 * inner**0.5)
    if is_hopper() and (rows, inner, columns) in SIZES:
        assert tiles.tile_of(x, weight, onto=onto) is not None, "it was made as torch makes it"


@gpu
@pytest.mark.skipif(not is_hopper(), reason="the rule is Hopper's")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(65_536, 384, 384), (65_536, 1024, 1024)])
def test_a_product_is_added_to_a_total_that_stays(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight, total = draw(rows, inner), draw(columns, inner).t(), draw(rows, columns)
    before = total.clone()
    given = tiles.multiply_and_add(x, weight, total)
    assert given is not None and torch.equal(total, before)
    expected = x.float() @ weight.float() + total.float()
    torch.testing.assert_close(given.float(), expected, rtol=2**-7, atol=2e-2 * inner**0.5)


@gpu
@pytest.mark.skipif(not is_hopper(), reason="the rule is Hopper's")
def test_a_product_can_be_recorded() -> None:
    x, weight = draw(16_384, 384), draw(1152, 384)
    multiply(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply(x, weight.t())
    x.copy_(draw(16_384, 384))
    graph.replay()
    assert tiles.tile_of(x, weight.t()) is not None
    torch.testing.assert_close(out.float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.4)


@gpu
def test_what_does_not_fit_together_is_refused_as_ever() -> None:
    with pytest.raises(RuntimeError):
        multiply(draw(512, 384), draw(256, 128))
    with pytest.raises(RuntimeError):
        multiply(draw(512, 384), draw(384, 128), onto=draw(1, 128))


@gpu
def test_tensors_that_begin_anywhere_are_multiplied_too() -> None:
    x, weight = draw(2049 * 384)[8 : 8 + 2048 * 384].view(2048, 384), draw(1152, 384)
    assert tiles.tile_of(x, weight.t()) is None
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(multiply(x, weight.t()).float(), expected, rtol=2**-7, atol=0.4)
