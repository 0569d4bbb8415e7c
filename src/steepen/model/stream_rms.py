"""Size of the residual stream at the end of the prelude, of every core pass and of the coda."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from steepen.model.network import Network


@contextmanager
def watch_stream(network: Network, passes: int) -> Generator[dict[str, float]]:
    """Measure the root mean square of the residual stream in the first forward pass inside the block.

    The dictionary is filled on leaving, by section: prelude, core 1 … core K, coda. Nothing is computed
    twice, and the number of a block is known outside of compiled code.
    """
    sections = network.shape.allocation.sections(passes)
    ends = {index for index, name in enumerate(sections) if sections[index + 1 : index + 2] != (name,)}
    seen: list[Tensor | None] = []

    def visit(x: Tensor) -> None:
        last = len(seen) in ends
        seen.append(x.detach().to(torch.float32).square().mean().sqrt() if last else None)
        if len(seen) == len(sections):
            network.visit = None

    found: dict[str, float] = {}
    network.visit = visit
    try:
        yield found
    finally:
        network.visit = None
    found |= {name: float(x) for name, x in zip(sections, seen, strict=False) if x is not None}
