"""Who owns which parameter: whole matrices, balanced by the cost of their orthogonalization.

The owner of a matrix holds its fp32 weight and optimizer state and is the only process that steps it. A
matrix is never split: Muon orthogonalizes whole logical matrices. The rows of the embedding and the head,
which AdamW steps element by element, are shared out among all processes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ROW_SHARDED = ("embedding", "head")


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of a parameter along its first dimension, and the rank that owns them.

    A parameter that is not shared out by rows has one piece with all of them; a scalar has first = last = 0.
    """

    name: str
    owner: int
    first: int
    last: int
    shape: tuple[int, ...]  # of the whole parameter

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole parameter."""
        return not self.shape or (self.first == 0 and self.last == self.shape[0])

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        return self.shape if self.whole else (self.last - self.first, *self.shape[1:])

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.piece_shape)


def orthogonalization_cost(shape: Sequence[int]) -> float:
    """FLOPs of one Newton–Schulz step of a stack of matrices (…, out, in), up to a common factor.

    With rows ≤ columns: the Gram matrix and the product with it take 2·rows²·columns each, its square
    2·rows³. A vector costs its elements.
    """
    if len(shape) < 2:
        return float(math.prod(shape))
    rows, columns = sorted(shape[-2:])
    return math.prod(shape[:-2]) * (4.0 * rows * rows * columns + 2.0 * rows**3)


def share_out_rows(rows: int, world_size: int) -> list[tuple[int, int]]:
    """Contiguous ranges of rows, one per rank, equal up to one row; empty if there are too few."""
    return [(rows * rank // world_size, rows * (rank + 1) // world_size) for rank in range(world_size)]


def assign_owners(shapes: Mapping[str, Sequence[int]], world_size: int) -> list[Piece]:
    """Pieces of all parameters, in the order of `shapes`: each element has exactly one owner.

    Greedy: the most expensive parameter goes to the rank with the least work so far. The result depends on
    names and shapes only, so that every process computes the same one.
    """
    owner_of: dict[str, int] = {}
    loads = [(0.0, rank) for rank in range(world_size)]
    whole = [name for name in shapes if name not in ROW_SHARDED]
    for name in sorted(whole, key=lambda name: (-orthogonalization_cost(shapes[name]), name)):
        load, rank = heapq.heappop(loads)
        owner_of[name] = rank
        heapq.heappush(loads, (load + orthogonalization_cost(shapes[name]), rank))
    pieces: list[Piece] = []
    for name, shape in shapes.items():
        size = tuple(shape)
        if name in owner_of:
            pieces.append(Piece(name, owner_of[name], 0, size[0] if size else 0, size))
            continue
        ranges = share_out_rows(size[0], world_size)
        pieces += [
            Piece(name, rank, first, last, size) for rank, (first, last) in enumerate(ranges) if last > first
        ]
    return pieces


def owned_by(pieces: Iterable[Piece], rank: int) -> dict[str, Piece]:
    """The pieces of one rank, by parameter name: at most one of each parameter."""
    return {piece.name: piece for piece in pieces if piece.owner == rank}
