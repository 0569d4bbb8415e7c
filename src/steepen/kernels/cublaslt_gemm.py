"""bf16 GEMMs through cuBLASLt with explicit algorithm selection, for Hopper GPUs at their power limit.

For a short contraction, cuBLAS's first choice is a tile so large that a multiprocessor alternates between
accumulating and storing. Of smaller tiles two fit on a multiprocessor, and one is stored while the other
accumulates, which is faster on a GPU at its power limit (docs/performance.md; a cool GPU was not measured).
cuBLASLt's heuristic returns such algorithms too, further down its list; this module requests the list and
selects them. The result is the same product, accumulated in fp32. Everywhere else torch runs the GEMM.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof

import torch
from torch import Tensor

# cublasLtMatmulTile_t → rows and columns of the (transposed) result, in order of preference. They hold 18,432
# to 22,528 accumulators, of which a Hopper multiprocessor's registers hold two tiles.
PREFERRED_TILES = {29: (128, 160), 201: (176, 128), 197: (168, 128), 184: (144, 128)}
MAX_CONTRACTION = 4096  # beyond, a tile accumulates for so long that storing it does not matter
MAX_CANDIDATES = 16  # to request from the heuristic; cuBLAS 13 returned 8
ALIGNMENT = 256  # bytes: the alignment cuBLASLt assumes of its operands
HOPPER = (9, 0)

# Enumeration values of cublasLt.h and library_types.h.
CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F = 14, 0, 68
CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB = 3, 4
CUBLASLT_ALGO_CONFIG_TILE_ID = 1


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def select_algorithm(candidates: Iterable[tuple[int, int]]) -> int | None:
    """Index of the candidate (tile id, workspace bytes) to use, or None to leave the choice to torch.

    Candidates that need workspace (split-K) are skipped: no workspace is allocated here.
    """
    without_workspace = {
        tile: index for index, (tile, workspace) in reversed(list(enumerate(candidates))) if workspace == 0
    }
    return next((without_workspace[tile] for tile in PREFERRED_TILES if tile in without_workspace), None)


def gemm(x: Tensor, weight: Tensor, *, accumulate_into: Tensor | None = None) -> Tensor:
    """x @ weight; with `accumulate_into`, added to that tensor in place."""
    plan = _plan_for(x, weight, accumulate_into)
    if plan is not None:
        out = x.new_empty(len(x), weight.shape[1]) if accumulate_into is None else accumulate_into
        if plan.run(x, weight, out, out):
            return out
    if accumulate_into is None:
        return x @ weight
    accumulate_gemm_(accumulate_into, x, weight, 1.0)
    return accumulate_into


def gemm_add(x: Tensor, weight: Tensor, addend: Tensor) -> Tensor | None:
    """x @ weight + addend in bf16, rounded once; None if torch would have to copy the addend first, or for an
    fp32 addend: that epilogue costs more than it saves the norm (docs/log.md).
    """
    plan = None if addend.dtype == torch.float32 else _plan_for(x, weight, addend)
    if plan is None or plan.algorithm is None:
        return None
    out = torch.empty_like(addend)
    return out if plan.run(x, weight, addend, out) else None


def accumulate_gemm_(total: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float = 1.0) -> None:
    """total ← beta·total + alpha·(a @ b), accumulated in total's dtype whatever that of a and b.

    With beta = 0 the old total is ignored, even if it is NaN.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta, alpha=alpha)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:  # a GEMM with mixed dtypes exists only on a GPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha)


def selected_tile(
    x: Tensor, weight: Tensor, *, accumulate_into: Tensor | None = None
) -> tuple[int, int] | None:
    """Tile (of the transposed result) that `gemm` uses for these operands; None if torch chooses."""
    plan = _plan_for(x, weight, accumulate_into)
    return None if plan is None or plan.algorithm is None else PREFERRED_TILES[plan.tile(plan.algorithm)]


def _plan_for(x: Tensor, weight: Tensor, addend: Tensor | None) -> _Plan | None:
    if not (x.is_cuda and x.ndim == weight.ndim == 2 and x.shape[1] == len(weight) <= MAX_CONTRACTION):
        return None
    transposed = not weight.is_contiguous()
    tensors = [x, weight.t() if transposed else weight]
    if addend is not None:
        if addend.shape != (len(x), weight.shape[1]):
            return None
        tensors.append(addend)
    wide = addend is not None and addend.dtype == torch.float32
    supported = all(
        (t.dtype == torch.bfloat16 or (wide and t is addend))
        and t.device == x.device
        and t.is_contiguous()
        and t.data_ptr() % ALIGNMENT == 0
        for t in tensors
    )
    if not supported or x.device.index != torch.cuda.current_device():
        return None
    adds = None if addend is None else CUDA_R_32F if wide else CUDA_R_16BF
    return _plan(x.device, len(x), weight.shape[1], len(weight), transposed, adds)


@functools.cache
def _plan(
    device: torch.device, rows: int, columns: int, inner: int, transposed: bool, adds: int | None
) -> _Plan | None:
    library = _library(device)
    if library is None:
        return None
    plan = _Plan(library, rows, columns, inner, transposed=transposed, adds=adds)
    return plan if plan.algorithm else None


@functools.cache
def _library(device: torch.device) -> _Library | None:
    """The cuBLASLt that torch has loaded, on Hopper, where the tiles were measured; None elsewhere."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    try:
        return _Library(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), device)
    except (OSError, AttributeError, _CublasError):
        return None


class _CublasError(Exception):
    """A cuBLASLt call that returned an error status."""


class _Library:
    """cuBLASLt with a handle for one GPU."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self.library, self.handle = library, c_void_p()
        with torch.cuda.device(device):
            self.call("Create", byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        """Call cublasLt`name`; raises _CublasError on failure."""
        if self.status(name, *arguments):
            raise _CublasError(name)

    def status(self, name: str, *arguments: object) -> int:
        """Call cublasLt`name` and return its status: 0 for success."""
        return getattr(self.library, f"cublasLt{name}")(*arguments)


class _Plan:
    """A GEMM of one shape. cuBLAS is column-major, so it sees every matrix, the result too, transposed.

    `adds` is the dtype of a matrix that is added, and of the result with it; without one the result is bf16.
    """

    def __init__(
        self, library: _Library, rows: int, columns: int, inner: int, *, transposed: bool, adds: int | None
    ) -> None:
        self.library = library
        self.algorithm: _Algorithm | None = None
        self.descriptor = c_void_p()
        self.alpha, self.beta = c_float(1.0), c_float(0.0 if adds is None else 1.0)
        try:
            library.call(
                "MatmulDescCreate", byref(self.descriptor), c_int(CUBLAS_COMPUTE_32F), c_int(CUDA_R_32F)
            )
            for attribute, value in (
                (CUBLASLT_MATMUL_DESC_TRANSA, c_int32(transposed)),
                (CUBLASLT_MATMUL_DESC_TRANSB, c_int32(False)),
            ):
                library.call(
                    "MatmulDescSetAttribute", self.descriptor, c_int(attribute), byref(value), c_size_t(4)
                )
            self.weight = self._layout(inner, columns) if transposed else self._layout(columns, inner)
            self.x = self._layout(inner, rows)
            self.out = self._layout(columns, rows, CUDA_R_16BF if adds is None else adds)
            self.algorithm = self._choose()
        except _CublasError:  # for example a shape that cuBLASLt does not support
            return

    def run(self, x: Tensor, weight: Tensor, addend: Tensor, out: Tensor) -> bool:
        """Launch on torch's current stream; False where cuBLAS rejected and nothing was computed.

        `addend` is only read by a plan that adds, and may be `out` itself.
        """
        algorithm = self.algorithm
        if algorithm is None:
            return False
        status = self.library.status(
            "Matmul",
            self.library.handle,
            self.descriptor,
            byref(self.alpha),
            c_void_p(weight.data_ptr()),
            self.weight,
            c_void_p(x.data_ptr()),
            self.x,
            byref(self.beta),
            c_void_p(addend.data_ptr()),
            self.out,
            c_void_p(out.data_ptr()),
            self.out,
            byref(algorithm),
            None,
            c_size_t(0),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        if status:
            self.algorithm = None
            warnings.warn(
                f"cuBLASLt failed to run an algorithm of its own heuristic (status {status}); "
                "torch chooses the algorithm from now on.",
                stacklevel=3,
            )
        return status == 0

    def _layout(self, rows: int, columns: int, dtype: int = CUDA_R_16BF) -> c_void_p:
        layout = c_void_p()
        self.library.call(
            "MatrixLayoutCreate",
            byref(layout),
            c_int(dtype),
            c_uint64(rows),
            c_uint64(columns),
            c_int64(rows),
        )
        return layout

    def _choose(self) -> _Algorithm | None:
        preference, returned = c_void_p(), c_int()
        results = (_HeuristicResult * MAX_CANDIDATES)()
        self.library.call("MatmulPreferenceCreate", byref(preference))
        try:
            self.library.call(
                "MatmulAlgoGetHeuristic",
                self.library.handle,
                self.descriptor,
                self.weight,
                self.x,
                self.out,
                self.out,
                preference,
                c_int(MAX_CANDIDATES),
                results,
                byref(returned),
            )
        finally:
            self.library.call("MatmulPreferenceDestroy", preference)
        candidates = [c for c in results[: returned.value] if c.status == 0]
        index = select_algorithm((self.tile(c.algorithm), c.workspace) for c in candidates)
        return None if index is None else _Algorithm.from_buffer_copy(candidates[index].algorithm)

    def tile(self, algorithm: _Algorithm) -> int:
        """The cublasLtMatmulTile_t of an algorithm."""
        tile, written = c_int32(), c_size_t()
        self.library.call(
            "MatmulAlgoConfigGetAttribute",
            byref(algorithm),
            c_int(CUBLASLT_ALGO_CONFIG_TILE_ID),
            byref(tile),
            c_size_t(sizeof(tile)),
            byref(written),
        )
        return tile.value
