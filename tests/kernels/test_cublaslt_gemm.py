"""GEMMs with a selected cuBLASLt algorithm equal torch's, and cuBLASLt receives the right arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steepen.kernels import cublaslt_gemm
from steepen.kernels.cublaslt_gemm import gemm, select_algorithm

BF16, FP32 = 14, 0  # cudaDataType_t
SMALL, LARGE = 29, 24  # a preferred tile, and one that cuBLAS puts first
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_first_preferred_tile_without_workspace_is_selected() -> None:
    assert select_algorithm([(LARGE, 0), (SMALL, 0), (SMALL, 0)]) == 1
    assert select_algorithm([(LARGE, 0), (201, 0), (SMALL, 0)]) == 2, "by our order of preference"
    assert select_algorithm([(LARGE, 0), (SMALL, 4096), (197, 0)]) == 2, "split-K needs workspace"
    assert select_algorithm([(LARGE, 0), (23, 0)]) is None
    assert select_algorithm([]) is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gemm_on_a_cpu_equals_torch(transposed: bool, adds: bool) -> None:
    x, weight, total = torch.randn(5, 3), torch.randn(3, 4), torch.randn(5, 4)
    weight = weight.t().contiguous().t() if transposed else weight
    expected = x @ weight + (total if adds else 0)
    given = gemm(x, weight, accumulate_into=total if adds else None)
    torch.testing.assert_close(given, expected)
    assert (given is total) == adds


class FakeLibrary:
    """A cuBLASLt whose heuristic returns these tiles, and which records its arguments."""

    def __init__(self, tiles: list[int], matmul_status: int = 0) -> None:
        self.tiles, self.matmul_status = tiles, matmul_status
        self.handle = "handle"
        self.types: list[int] = []  # of the accumulator and of alpha and beta
        self.transposed: dict[int, int] = {}
        self.layouts: list[tuple[int, ...]] = []  # dtype, rows, columns, leading dimension
        self.matmuls: list[dict[str, Any]] = []

    def call(self, name: str, *arguments: Any) -> None:
        assert self.status(name, *arguments) == 0

    def status(self, name: str, *arguments: Any) -> int:
        if name == "MatmulDescCreate":
            self.types = [value.value for value in arguments[1:]]
        elif name == "MatmulDescSetAttribute":
            _, attribute, value, size = arguments
            assert size.value == 4
            self.transposed[attribute.value] = value._obj.value
        elif name == "MatrixLayoutCreate":
            self.layouts.append(tuple(value.value for value in arguments[1:]))
            arguments[0]._obj.value = len(self.layouts)
        elif name == "MatmulAlgoGetHeuristic":
            *_, requested, candidates, returned = arguments
            assert requested.value >= len(self.tiles)
            for index in range(len(self.tiles)):
                candidates[index].algorithm.data[0] = index
            returned._obj.value = len(self.tiles)
        elif name == "MatmulAlgoConfigGetAttribute":
            algorithm, attribute, tile, *_ = arguments
            assert attribute.value == 1
            tile._obj.value = self.tiles[algorithm._obj.data[0]]
        elif name == "Matmul":
            _, _, alpha, a, in_a, b, in_b, beta, c, in_c, d, in_d, algorithm, *_ = arguments
            self.matmuls.append({
                "factors": (alpha._obj.value, beta._obj.value),
                "tensors": [pointer.value for pointer in (a, b, c, d)],
                "layouts": [self.layouts[layout.value - 1] for layout in (in_a, in_b, in_c, in_d)],
                "candidate": algorithm._obj.data[0],
            })  # fmt: skip
            return self.matmul_status
        return 0


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are on the CPU, which has no stream."""
    stream = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)


@pytest.mark.usefixtures("no_stream")
@pytest.mark.parametrize("adds", [None, BF16, FP32])
@pytest.mark.parametrize("transposed", [False, True])
def test_cublaslt_receives_operands_layouts_and_algorithm(transposed: bool, adds: int | None) -> None:
    """cuBLAS is column-major: it computes the transposed result from the transposed weight and x."""
    library: Any = FakeLibrary([LARGE, 23, SMALL])
    plan = cublaslt_gemm._Plan(library, 7, 5, 3, transposed=transposed, adds=adds)
    x, weight = torch.zeros(7, 3), torch.zeros((5, 3) if transposed else (3, 5))
    total, out = torch.zeros(2, 7, 5)
    assert plan.run(x, weight.t() if transposed else weight, total, out)
    assert library.types == [68, 0], "accumulated in fp32"
    assert library.transposed == {3: int(transposed), 4: 0}
    (matmul,) = library.matmuls
    assert matmul["candidate"] == 2 and matmul["factors"] == (1.0, 0.0 if adds is None else 1.0)
    assert matmul["tensors"] == [t.data_ptr() for t in (weight, x, total, out)]
    matrices = [(3, 5) if transposed else (5, 3), (3, 7), (5, 7), (5, 7)]
    dtypes = [BF16, BF16, *[BF16 if adds is None else adds] * 2]
    assert matmul["layouts"] == [
        (dtype, rows, columns, rows) for dtype, (rows, columns) in zip(dtypes, matrices, strict=True)
    ]


@pytest.mark.usefixtures("no_stream")
def test_gemm_falls_back_to_torch_without_algorithm_or_on_failure() -> None:
    library: Any = FakeLibrary([LARGE, 23])
    assert cublaslt_gemm._Plan(library, 7, 5, 3, transposed=False, adds=None).algorithm is None
    rejecting: Any = FakeLibrary([SMALL], matmul_status=15)
    plan = cublaslt_gemm._Plan(rejecting, 7, 5, 3, transposed=False, adds=BF16)
    x, weight, out = torch.zeros(7, 3), torch.zeros(3, 5), torch.zeros(7, 5)
    with pytest.warns(UserWarning, match="status 15"):
        assert not plan.run(x, weight, out, out)
    assert not plan.run(x, weight, out, out) and len(rejecting.matmuls) == 1, "not tried again"


@pytest.mark.usefixtures("no_stream")
def test_gemm_add_returns_none_where_cublaslt_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rejecting: Any = FakeLibrary([SMALL], matmul_status=15)
    plan = cublaslt_gemm._Plan(rejecting, 7, 5, 3, transposed=False, adds=BF16)
    monkeypatch.setattr(cublaslt_gemm, "_plan_for", lambda *_: plan)
    x, weight, total = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((7, 3), (3, 5), (7, 5)))
    with pytest.warns(UserWarning, match="status 15"):
        assert cublaslt_gemm.gemm_add(x, weight, total) is None
    assert cublaslt_gemm.gemm_add(x, weight, total) is None and len(rejecting.matmuls) == 1


def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, device="cuda", dtype=dtype)


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == cublaslt_gemm.HOPPER


# Shapes of training: 65,536 tokens and matrices of d2, d3, d8, d12. For fewer tokens, cuBLASLt may not return
# such a tile.
SIZES = [(65_536, *sides) for sides in ((256, 768), (384, 1152), (1024, 384), (1024, 5632), (1536, 8192))]


@gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("adds", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), [*SIZES, (100, 72, 40), (33, 9, 7)])
def test_gemm_on_a_gpu_equals_fp32(
    transposed: bool, adds: torch.dtype | None, rows: int, inner: int, columns: int
) -> None:
    torch.manual_seed(0)
    x, weight = draw(rows, inner), draw(inner, columns)
    weight = weight.t().contiguous().t() if transposed else weight
    addend = None if adds is None else draw(rows, columns, dtype=adds)
    expected = x.float() @ weight.float() + (0 if addend is None else addend.float())
    given = gemm(x, weight, accumulate_into=addend)
    assert given.dtype == (adds or torch.bfloat16) and (given is addend) == (adds is not None)
    torch.testing.assert_close(given.float(), expected, rtol=2**-7, atol=2e-2 * inner**0.5)
    if adds == torch.float32:  # not rounded to bf16
        assert (given - expected).abs().max() < 1e-3 * inner**0.5
    elif is_hopper() and (rows, inner, columns) in SIZES:
        assert cublaslt_gemm.selected_tile(x, weight, accumulate_into=addend) is not None, (
            "torch chose the algorithm"
        )


@gpu
@pytest.mark.skipif(not is_hopper(), reason="algorithms are only selected on Hopper")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(65_536, 384, 384), (65_536, 1024, 1024)])
def test_gemm_add_leaves_the_addend_unchanged(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight, total = draw(rows, inner), draw(columns, inner).t(), draw(rows, columns)
    before = total.clone()
    given = cublaslt_gemm.gemm_add(x, weight, total)
    assert given is not None and torch.equal(total, before)
    expected = x.float() @ weight.float() + total.float()
    torch.testing.assert_close(given.float(), expected, rtol=2**-7, atol=2e-2 * inner**0.5)
    assert cublaslt_gemm.gemm_add(x, weight, total.float()) is None, "its epilogue is slower than the norm"


@gpu
@pytest.mark.skipif(not is_hopper(), reason="algorithms are only selected on Hopper")
def test_gemm_can_be_captured_in_a_cuda_graph() -> None:
    x, weight = draw(16_384, 384), draw(1152, 384)
    gemm(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(x, weight.t())
    x.copy_(draw(16_384, 384))
    graph.replay()
    assert cublaslt_gemm.selected_tile(x, weight.t()) is not None
    torch.testing.assert_close(out.float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.4)


@gpu
def test_mismatched_shapes_raise() -> None:
    with pytest.raises(RuntimeError):
        gemm(draw(512, 384), draw(256, 128))
    with pytest.raises(RuntimeError):
        gemm(draw(512, 384), draw(384, 128), accumulate_into=draw(1, 128))


@gpu
def test_unaligned_tensors_run_in_torch() -> None:
    x, weight = draw(2049 * 384)[8 : 8 + 2048 * 384].view(2048, 384), draw(1152, 384)
    assert cublaslt_gemm.selected_tile(x, weight.t()) is None
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(gemm(x, weight.t()).float(), expected, rtol=2**-7, atol=0.4)
