"""Boundary operators mix the hidden state h with the prelude output e after each core pass.

A boundary is a function (h, e, alpha, norm) → hidden states, all (batch, time, width). Any such function can
be an arm's boundary. The first core pass receives e itself and no boundary is applied. Only with
`ModelOptions.first_pass` "boundary" is it applied there too, with h None: an injecting boundary then returns
α·e (h₀ = 0, and RMSNorm(0) = 0), one that does not inject starts from e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from steepen.errors import UsageError
from steepen.model.arm import OWN_CODE
from steepen.utils.imports import import_object

Norm = Callable[[Tensor], Tensor]
Boundary = Callable[[Tensor | None, Tensor, float, Norm], Tensor]


def identity(h: Tensor | None, e: Tensor, alpha: float, norm: Norm) -> Tensor:
    """Return h, or e before the first pass."""
    return e if h is None else h


def normalize(h: Tensor | None, e: Tensor, alpha: float, norm: Norm) -> Tensor:
    """Norm(h)."""
    return norm(e if h is None else h)


def inject(h: Tensor | None, e: Tensor, alpha: float, norm: Norm) -> Tensor:
    """h + α·e."""
    return _injected(e, alpha) if h is None else h + alpha * e


def normalize_and_inject(h: Tensor | None, e: Tensor, alpha: float, norm: Norm) -> Tensor:
    """BO(h, e) = Norm(h) + α·e (Equation "boundary-operator")."""
    return _injected(e, alpha) if h is None else norm(h) + alpha * e


def _injected(e: Tensor, alpha: float) -> Tensor:
    return e if alpha == 1.0 else alpha * e  # saves one pass over memory


_BUILT_IN: dict[str, Boundary] = {
    "identity": identity,
    "norm": normalize,
    "inject": inject,
    "norm+inject": normalize_and_inject,
}


def find_boundary(name: str) -> Boundary:
    """Find a boundary: a built-in name, or the function that "module:attribute" names."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = import_object(name, "boundary", own=OWN_CODE)
    if not callable(found):
        raise UsageError(
            f"the boundary {name!r} is a {type(found).__name__}, not a function (h, e, alpha, norm)."
        )
    return cast("Boundary", found)
