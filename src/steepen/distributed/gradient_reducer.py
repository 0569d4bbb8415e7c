"""Gradients reduced to the owners of their parameters, in buckets, while the backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steepen.distributed.owners import Piece
from steepen.distributed.world import World

# Small gradients of one owner are reduced together, up to this size. In larger buckets more waits for the end
# of the backward: with 64 MiB a model of the transfer left 1.1 to 3.2 times as much exposed as with 16 (d12
# to d26, 16 ranks, benchmarks/rank_work.py).
BUCKET_BYTES = 2**24
MAX_BYTES_IN_FLIGHT = 2**30  # beyond, the oldest bucket is waited for, so that its memory can be reused


@dataclass
class _Bucket:
    """Gradients that go to one owner."""

    owner: int
    pieces: list[Piece] = field(default_factory=list[Piece])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    bytes: int = 0


@dataclass
class _InFlight:
    bucket: _Bucket
    flat: Tensor
    work: Any


class GradientReducer:
    """Sums gradients over ranks into their owners.

    Give each finished local gradient to `add`, in the same order on every rank, then call `finish`. A
    gradient given to `add` may be overwritten: the caller drops it.
    """

    def __init__(self, world: World, pieces: Iterable[Piece]) -> None:
        self.world = world
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.name, []).append(piece)
        self.added: set[str] = set()  # in this step
        self.bytes_reduced = 0  # since the start, over all owners
        self._filling: dict[int, _Bucket] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._bytes_in_flight = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, of its whole shape, and reduce it once a bucket is full."""
        assert name not in self.added, f"the gradient of {name} was given twice"
        self.added.add(name)
        gradient = gradient.contiguous()
        for piece in self.pieces[name]:
            part = gradient if piece.whole else gradient[piece.first : piece.last]
            bucket = self._filling.setdefault(piece.owner, _Bucket(piece.owner))
            bucket.pieces.append(piece)
            bucket.tensors.append(part.view(-1))
            bucket.bytes += part.numel() * part.element_size()
            if bucket.bytes >= BUCKET_BYTES:
                self._launch(self._filling.pop(piece.owner))

    def finish(self) -> dict[str, Tensor]:
        """Reduce what is left, wait, and return the summed gradients of this rank's pieces by name."""
        # In one order on all ranks, as everything here: the n-th collective of one rank meets the n-th of the
        # others, whatever it holds.
        for owner in sorted(self._filling):
            self._launch(self._filling.pop(owner))
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        sums, self._sums = self._sums, {}
        self.added.clear()
        return sums

    def _launch(self, bucket: _Bucket) -> None:
        flat = flatten(bucket.tensors)
        bucket.tensors.clear()
        self.bytes_reduced += flat.numel() * flat.element_size()
        self._in_flight.append(_InFlight(bucket, flat, self.world.reduce_(flat, bucket.owner)))
        # Buckets are filled by bytes, and so alike on every rank: what is waited for is the same everywhere.
        self._bytes_in_flight += bucket.bytes
        while self._bytes_in_flight > MAX_BYTES_IN_FLIGHT:
            self._complete(self._in_flight.popleft())

    def _complete(self, item: _InFlight) -> None:
        self._bytes_in_flight -= item.bucket.bytes
        item.work.wait()
        if item.bucket.owner != self.world.rank:
            return
        parts = item.flat.split([piece.elements for piece in item.bucket.pieces])
        for piece, part in zip(item.bucket.pieces, parts, strict=True):
            self._sums[piece.name] = part.view(piece.piece_shape)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
