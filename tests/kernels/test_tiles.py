"""Products with a weight are the same whichever tiles they are made in, and cuBLAS is told what to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.kernels import tiles
from steepen.kernels.tiles import multiply, preferred

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
    """Offers candidates with these tiles, as cuBLAS does, and remembers which of them multiplied."""

    def __init__(self, offered: list[int], status: int = 0) -> None:
        self.offered, self.status = offered, status
        self.handle = "handle"
        self.taken: list[int] = []
        self.layouts: list[tuple[int, ...]] = []

    def call(self, name: str, *arguments: Any) -> None:
        assert self.try_to(name, *arguments) == 0

    def try_to(self, name: str, *arguments: Any) -> int:
        if name == "MatrixLayoutCreate":
            self.layouts.append(tuple(value.value for value in arguments[2:]))
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
            self.taken.append(arguments[12]._obj.data[0])
            return self.status
        return 0


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        stream = type("Stream", (), {"cuda_stream": 0})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)


def test_cublas_is_told_the_sizes_and_the_candidate() -> None:
    library: Any = FakeLibrary([LARGE, 23, SMALL])
    plan = tiles._Plan(library, 7, 5, 3, turned=True, adds=False)
    x, weight, out = torch.zeros(7, 3), torch.zeros(5, 3), torch.zeros(7, 5)
    assert plan.run(x, weight, out) and library.taken == [2]
    assert library.layouts == [(3, 5, 3), (3, 7, 3), (5, 7, 5)], "columns first, as cuBLAS counts"


def test_what_cublas_does_not_offer_or_do_is_left_to_torch() -> None:
    library: Any = FakeLibrary([LARGE, 23])
    assert tiles._Plan(library, 7, 5, 3, turned=False, adds=False).algorithm is None
    refusing: Any = FakeLibrary([SMALL], status=15)
    plan = tiles._Plan(refusing, 7, 5, 3, turned=False, adds=True)
    x, weight, out = torch.zeros(7, 3), torch.zeros(3, 5), torch.zeros(7, 5)
    assert not plan.run(x, weight, out)
    assert not plan.run(x, weight, out) and refusing.taken == [0], "and not asked again"


def draw(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def planned(rows: int, columns: int, inner: int) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    return tiles._plan(device, rows, columns, inner, True, False) is not None


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == tiles.HOPPER


@gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(16_384, 384, 1152), (16_384, 1024, 384), (8_192, 1024, 5632), (100, 72, 40), (33, 9, 7)],
)
def test_on_a_gpu_products_are_right(turned: bool, adds: bool, rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight, total = draw(rows, inner), draw(inner, columns), draw(rows, columns)
    weight = weight.t().contiguous().t() if turned else weight
    expected = x.double() @ weight.double() + (total.double() if adds else 0)
    given = multiply(x, weight, onto=total if adds else None)
    assert given.dtype == torch.bfloat16 and (given is total) == adds
    torch.testing.assert_close(given.double(), expected, rtol=2**-8, atol=1e-3 * inner**0.5)


@gpu
@pytest.mark.skipif(not is_hopper(), reason="the rule is Hopper's")
def test_training_sizes_are_planned_and_can_be_recorded() -> None:
    assert all(planned(65_536, 3 * width, width) for width in (256, 384, 1024, 1536))
    x, weight = draw(16_384, 384), draw(1152, 384)
    multiply(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply(x, weight.t())
    x.copy_(draw(16_384, 384))
    graph.replay()
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=2**-8, atol=0.02)


@gpu
def test_tensors_that_begin_anywhere_are_multiplied_too() -> None:
    x, weight = draw(2049 * 384)[8 : 8 + 2048 * 384].view(2048, 384), draw(1152, 384)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(multiply(x, weight.t()).double(), expected, rtol=2**-8, atol=0.02)
