"""How much each difference from the authors' code changes a result, one at a time.

    python benchmarks/author_differences.py

The network of `tests/model/authors_network.py` and the step of `tests/optim/authors_step.py`, both fp64 and
without code of this package, are computed exactly and with one rounding of the authors' or of ours. Sizes are
relative root mean squares unless a unit is given. The table is in docs/architectures.md. CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("model", "optim")]

import authors_network  # noqa: E402
import authors_step  # noqa: E402

from steepen.recipe.paper_tables import BASE  # noqa: E402

WIDTH, HIDDEN, HEADS, VOCABULARY, REAL, ROWS, TIME, CORES = 256, 768, 2, 2048, 2000, 4, 64, 4


def bf16(x: Tensor) -> Tensor:
    """Rounded to bf16."""
    return x.bfloat16().double()


def relative(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of the exact value."""
    return float((found - exact).norm() / exact.norm())


def weights() -> dict[str, Any]:
    """A loop of four passes over two blocks, with a prelude and a coda of two; trained-like sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, columns, generator=generator).double() / columns**0.5

    def block() -> authors_network.Block:
        q, k, v, o = (draw(WIDTH, WIDTH) for _ in range(4))
        gate, up, down = draw(HIDDEN, WIDTH), draw(HIDDEN, WIDTH), draw(WIDTH, HIDDEN)
        return authors_network.Block(q, k, v, o, gate, up, down)

    prelude, core, coda = ([block(), block()] for _ in range(3))
    return {
        "embedding": draw(VOCABULARY, WIDTH, 4.0), "prelude": prelude, "cores": [core] * CORES, "coda": coda,
        "head": draw(VOCABULARY, WIDTH),
    }  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets."""
    tokens = torch.randint(0, REAL, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def logits(own: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits of the authors' network with Loop-2's multipliers."""
    operator = authors_network.Operator(BASE["loop-2"].injection_weight)
    return authors_network.logits(
        tokens, own["embedding"], own["prelude"], own["cores"], own["coda"], own["head"], heads=HEADS,
        residual=0.25, output=1.0, operator=operator, real_vocabulary=REAL,
    )  # fmt: skip


@contextmanager
def patched(name: str, make: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]):
    """The authors' network with one of its functions changed."""
    with mock.patch.object(authors_network, name, make(getattr(authors_network, name))):
        yield


def rounded_rope(products: bool) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """RoPE with tables in bf16, and with rounded products."""

    def make(_: Any) -> Callable[[Tensor], Tensor]:
        keep = bf16 if products else (lambda x: x)

        def rope(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            angle = torch.arange(x.shape[-2]).double()[:, None] / 10_000 ** (
                torch.arange(half).double() / half
            )
            cos, sin = bf16(angle.cos()), bf16(angle.sin())
            a, b = keep(x[..., :half]), keep(x[..., half:])
            parts = (keep(a * cos) + keep(b * sin), keep(b * cos) - keep(a * sin))
            return torch.cat(tuple(map(keep, parts)), -1)

        return rope

    return make


def network_rows() -> list[tuple[str, str]]:
    """Differences in the network, in logits and in the loss."""
    own, (tokens, targets) = weights(), batch(1)
    exact = logits(own, tokens)
    loss = authors_network.loss(exact, targets)
    rows: list[tuple[str, str]] = []

    def add(name: str, found: Tensor) -> None:
        change = float(authors_network.loss(found, targets) - loss)
        rows.append((name, f"logits {relative(found, exact):.1e}, loss {change:+.1e}"))

    with patched("rope", rounded_rope(False)):
        add("RoPE tables in bf16", logits(own, tokens))
    with patched("rope", rounded_rope(True)):
        add("RoPE tables, queries, keys and products in bf16", logits(own, tokens))
    add("logits rounded to bf16", bf16(exact))
    normed = authors_network.norm(own["embedding"])
    add("normed embedding rounded to bf16", logits({**own, "embedding": bf16(normed)}, tokens))
    add("embedding stored in bf16 (one lookup)", logits({**own, "embedding": bf16(own["embedding"])}, tokens))
    return rows


def gradient_row() -> tuple[str, str]:
    """Weight gradients rounded to bf16 after every micro-batch, and then summed."""
    own = weights()
    matrix = own["cores"][0][0].up.requires_grad_()
    gradients: list[Tensor] = []
    for seed in range(8):
        tokens, targets = batch(seed)
        gradients += torch.autograd.grad(authors_network.loss(logits(own, tokens), targets), matrix)
    exact = torch.stack(gradients).sum(0)
    found = torch.stack([bf16(one) for one in gradients]).sum(0)
    return (
        "weight gradient rounded to bf16 per micro-batch, 8 of them",
        f"gradient {relative(found, exact):.1e}",
    )


def polar_row() -> tuple[str, str]:
    """a·I added to the polynomial before the last product in bf16, or a·X after it."""
    update = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    x = y = bf16(update / (1.02 * update.norm() + 1e-6))
    for a, b, c in authors_step.POLAR_EXPRESS:
        gram = bf16(x @ x.T)
        x = bf16(a * x + bf16(bf16(b * gram + c * bf16(gram @ gram)) @ x))
        gram = bf16(y @ y.T)
        folded = bf16(a * torch.eye(WIDTH).double() + b * gram + c * bf16(gram @ gram))
        y = bf16(folded @ y)
    exact = authors_step.polar_express(update)
    return (
        "a·I folded into Polar Express's polynomial (bf16)",
        f"update {relative(y, x):.1e}; either from exact {relative(x, exact):.1e}, {relative(y, exact):.1e}",
    )


def rate_row() -> tuple[str, str]:
    """Learning rate and decay of Muon's update rounded to bf16, over a schedule."""
    steps, hyper = 1962, BASE["vanilla"]
    rates = torch.tensor([
        hyper.learning_rate * authors_step.learning_rate_factor(step, steps, hyper.warmup_steps,
                                                                hyper.warmdown_fraction)
        for step in range(steps - 1)
    ]).double()  # fmt: skip
    off = bf16(rates) / rates - 1
    return (
        "learning rate of Muon's update in bf16",
        f"rate {float(off.abs().max()):.1e} at most, mean {float(off.mean()):+.1e}",
    )


def main() -> None:
    """Print every difference with its size."""
    torch.manual_seed(0)
    for name, size in [*network_rows(), gradient_row(), polar_row(), rate_row()]:
        print(f"{name:<58} {size}")


if __name__ == "__main__":
    main()
