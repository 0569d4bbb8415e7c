"""Products with a weight in bf16, by cuBLAS as ever, but in tiles that suit a GPU at its power limit.

Where a product's sum is short, the tiles cuBLAS puts first are so large that a processor adds up and writes
out by turns. Smaller ones fit a processor twice, and one is written while the other is added up. On a GPU at
its power limit these are faster (docs/performance.md has the numbers; a cool one was not asked). cuBLAS
offers them too, after others. So it is asked here for what it has, and the smaller are taken. What comes out
is the same product, summed in fp32.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof

import torch
from torch import Tensor

# cuBLAS's numbers for tiles, and their rows and columns (of the transposed result). They have 18,432 to
# 22,528 sums, which is what fits a processor of Hopper's twice. The first that is offered is taken.
TILES = {29: (128, 160), 201: (176, 128), 197: (168, 128), 184: (144, 128)}
LONGEST = 4096  # terms in a sum: beyond, there is too little to write for tiles to matter
CANDIDATES = 16  # to ask for; cuBLAS 13 has offered 8
ALIGNED = 256  # bytes: what cuBLAS supposes of where tensors begin
HOPPER = (9, 0)

BF16, FP32, SUMS_IN_FP32 = 14, 0, 68  # cuBLAS's numbers for types
TURN_A, TURN_B = 3, 4  # … for a product's attributes
TILE = 1  # … for an attribute of a candidate


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def preferred(offered: Iterable[tuple[int, int]]) -> int | None:
    """Which of these candidates, by tile and bytes of scratch memory, to take; None: leave it to torch.

    One that needs scratch memory adds up its sums in parts; and there is none for it here.
    """
    found = {tile: place for place, (tile, scratch) in reversed(list(enumerate(offered))) if scratch == 0}
    return next((found[tile] for tile in TILES if tile in found), None)


def multiply(x: Tensor, weight: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """x times weight; with `onto`, added to it, in place."""
    plan = _plan_for(x, weight, onto)
    if plan is not None:
        out = x.new_empty(len(x), weight.shape[1]) if onto is None else onto
        if plan.run(x, weight, out, out):
            return out
    return x @ weight if onto is None else onto.addmm_(x, weight)


def multiply_and_add(x: Tensor, weight: Tensor, total: Tensor) -> Tensor | None:
    """x times weight plus the total, rounded once; None where torch would copy the total first."""
    plan = _plan_for(x, weight, total)
    if plan is None or plan.algorithm is None:
        return None
    out = torch.empty_like(total)
    return out if plan.run(x, weight, total, out) else None


def tile_of(x: Tensor, weight: Tensor, *, onto: Tensor | None = None) -> tuple[int, int] | None:
    """The tile such a product is made in, of the transposed result; None: which one is left to torch."""
    plan = _plan_for(x, weight, onto)
    return None if plan is None or plan.algorithm is None else TILES[plan.tile(plan.algorithm)]


def _plan_for(x: Tensor, weight: Tensor, onto: Tensor | None) -> _Plan | None:
    if not (x.is_cuda and x.ndim == weight.ndim == 2 and x.shape[1] == len(weight) <= LONGEST):
        return None
    turned = not weight.is_contiguous()
    tensors = [x, weight.t() if turned else weight]
    if onto is not None:
        if onto.shape != (len(x), weight.shape[1]):
            return None
        tensors.append(onto)
    fit = all(
        t.dtype == torch.bfloat16
        and t.device == x.device
        and t.is_contiguous()
        and t.data_ptr() % ALIGNED == 0
        for t in tensors
    )
    if not fit or x.device.index != torch.cuda.current_device():
        return None
    return _plan(x.device, len(x), weight.shape[1], len(weight), turned, onto is not None)


@functools.cache
def _plan(
    device: torch.device, rows: int, columns: int, inner: int, turned: bool, adds: bool
) -> _Plan | None:
    library = _library(device)
    if library is None:
        return None
    plan = _Plan(library, rows, columns, inner, turned=turned, adds=adds)
    return plan if plan.algorithm else None


@functools.cache
def _library(device: torch.device) -> _Library | None:
    """cuBLAS, by the name torch has it under, where tiles were measured to matter."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    try:
        return _Library(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), device)
    except (OSError, AttributeError, _Refused):
        return None


class _Refused(Exception):
    """A call of cuBLAS's that gave an error."""


class _Library:
    """cuBLAS on one GPU."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self.library, self.handle = library, c_void_p()
        with torch.cuda.device(device):
            self.call("Create", byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; any failure is raised."""
        if self.try_to(name, *arguments):
            raise _Refused(name)

    def try_to(self, name: str, *arguments: object) -> int:
        """Call a function and return its status: 0 for success."""
        return getattr(self.library, f"cublasLt{name}")(*arguments)


class _Plan:
    """One size of product. cuBLAS counts down columns: it sees all matrices, the product too, transposed."""

    def __init__(
        self, library: _Library, rows: int, columns: int, inner: int, *, turned: bool, adds: bool
    ) -> None:
        self.library = library
        self.algorithm: _Algorithm | None = None
        self.product = c_void_p()
        self.one, self.kept = c_float(1.0), c_float(1.0 if adds else 0.0)
        try:
            library.call("MatmulDescCreate", byref(self.product), c_int(SUMS_IN_FP32), c_int(FP32))
            for side, turn in ((TURN_A, turned), (TURN_B, False)):
                turn_it = c_int32(turn)
                library.call("MatmulDescSetAttribute", self.product, c_int(side), byref(turn_it), c_size_t(4))
            self.weight = self._layout(inner, columns) if turned else self._layout(columns, inner)
            self.x, self.out = self._layout(inner, rows), self._layout(columns, rows)
            self.algorithm = self._choose()
        except _Refused:  # a size that cuBLAS does not take, for one
            return

    def run(self, x: Tensor, weight: Tensor, total: Tensor, out: Tensor) -> bool:
        """Compute on torch's stream; False where cuBLAS refused, and nothing was done.

        `total` is what a plan that adds adds to, and may be `out` itself.
        """
        algorithm = self.algorithm
        if algorithm is None:
            return False
        status = self.library.try_to(
            "Matmul",
            self.library.handle,
            self.product,
            byref(self.one),
            c_void_p(weight.data_ptr()),
            self.weight,
            c_void_p(x.data_ptr()),
            self.x,
            byref(self.kept),
            c_void_p(total.data_ptr()),
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
                f"cuBLAS refused a product it had offered (status {status}); torch chooses from now on.",
                stacklevel=3,
            )
        return status == 0

    def _layout(self, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self.library.call(
            "MatrixLayoutCreate", byref(layout), c_int(BF16), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _choose(self) -> _Algorithm | None:
        preference, returned = c_void_p(), c_int()
        candidates = (_Candidate * CANDIDATES)()
        self.library.call("MatmulPreferenceCreate", byref(preference))
        try:
            self.library.call(
                "MatmulAlgoGetHeuristic",
                self.library.handle,
                self.product,
                self.weight,
                self.x,
                self.out,
                self.out,
                preference,
                c_int(CANDIDATES),
                candidates,
                byref(returned),
            )
        finally:
            self.library.call("MatmulPreferenceDestroy", preference)
        offered = [c for c in candidates[: returned.value] if c.status == 0]
        place = preferred((self.tile(c.algorithm), c.workspace) for c in offered)
        return None if place is None else _Algorithm.from_buffer_copy(offered[place].algorithm)

    def tile(self, algorithm: _Algorithm) -> int:
        """cuBLAS's number for the tile an algorithm works in."""
        tile, written = c_int32(), c_size_t()
        self.library.call(
            "MatmulAlgoConfigGetAttribute",
            byref(algorithm),
            c_int(TILE),
            byref(tile),
            c_size_t(sizeof(tile)),
            byref(written),
        )
        return tile.value
