"""The kernels' plain twins: what each computes, in torch's own operations, in any precision.

Matrices are (tokens, width) with the last dimension contiguous. Names that end in an underscore overwrite
their first argument, as torch's do. Reductions are in fp32, or fp64 where the inputs are.
"""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Above the target's logit, what another's counts for at most in `odds`: e^60 times a batch's tokens and a
# vocabulary's is still a number, and so is one over it.
MOST_NATS = 60.0


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def quantise_activation(x: Tensor) -> Tensor:
    """x as a product takes it: as it is, in these precisions."""
    return x


def quantise_gradient(d: Tensor) -> Tensor:
    """d as the product that goes back takes it: as it is."""
    return d


def size_of(x: Tensor) -> Tensor | None:
    """What to keep of x, for `whole`, where only the matrix it was made from is kept: nothing."""
    del x
    return None


def whole(x: Tensor, size: Tensor | None) -> Tensor:
    """x as the product that makes a weight's gradient takes it: as it is."""
    del size
    return x


def normed(n: Tensor) -> Tensor:
    """The same for what came out of a norm: as it is."""
    return n


def rms_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x divided by its root mean square, row by row, and the reciprocal of that."""
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None]).to(x.dtype), rstd


def add_rms_norm(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, and its norm as `rms_norm` gives it."""
    total = x + y
    return (total, *rms_norm(total, eps))


def rms_norm_backward(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    skip: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of a norm's input from that of its output n; `skip` is what else flows into the input.

    A `factor` for each row of dn is multiplied first. `out` may be n.
    """
    d, y = _wide(dn), _wide(n)
    if factor is not None:
        d = d * factor[:, None]
    dx = rstd[:, None] * (d - y * (d * y).mean(-1, keepdim=True))
    dx = (dx if skip is None else dx + _wide(skip)).to(dn.dtype)
    return dx if out is None else out.copy_(dx)


def norm_inject(h: Tensor, e: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """Norm(h) + α·e, and the norm's reciprocal root mean square."""
    wide = _wide(h)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None] + alpha * _wide(e)).to(h.dtype), rstd


def norm_inject_backward(d: Tensor, h: Tensor, rstd: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The gradients of h and e."""
    n = (_wide(h) * rstd[:, None]).to(h.dtype)
    return rms_norm_backward(d, n, rstd), (alpha * _wide(d)).to(d.dtype)


def embed_norm(tokens: Tensor, table: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The normed rows of an embedding table, in `dtype`, and the reciprocals of their root mean squares."""
    return rms_norm(functional.embedding(tokens, table).to(dtype), eps)


def embed_norm_backward_(grad: Tensor, tokens: Tensor, dn: Tensor, n: Tensor, rstd: Tensor) -> None:
    """Add the rows' gradients to the table's."""
    grad.index_add_(0, tokens, rms_norm_backward(dn, n, rstd).to(grad.dtype))


def rotate_norm_(qkv: Tensor, table: Tensor, eps: float) -> Tensor:
    """Rotate (RoPE) and norm queries and keys of (batch, time, 3, heads, head_dim) where they stand.

    `table` is (2, time, head_dim/2), cosines and sines. Returns the norms' reciprocal root mean squares,
    (batch, time, 2, heads).
    """
    both = _wide(qkv[:, :, :2])
    cos, sin = _wide(table)[:, :, None, None].unbind()
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rstd = torch.rsqrt(turned.square().mean(-1) + eps)
    qkv[:, :, :2] = (turned * rstd[..., None]).to(qkv.dtype)
    return rstd


def rotate_norm_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """The gradient of what `rotate_norm_` was given, from those of query, key and value (batch, time, …).

    It is (tokens, 3 · heads · head_dim), as the product before it made them.
    """
    d, y = _wide(torch.stack([dq, dk], dim=2)), _wide(qkv[:, :, :2])
    d = rstd[..., None] * (d - y * (d * y).mean(-1, keepdim=True))
    cos, sin = _wide(table)[:, :, None, None].unbind()
    first, second = d.chunk(2, dim=-1)
    back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return torch.cat([back.to(qkv.dtype), dv[:, :, None]], dim=2).flatten(0, 1).flatten(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate)·up of the two halves of each row."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(_wide(gate)) * _wide(up)).to(gate_up.dtype)


def swiglu_backward_(gate_up: Tensor, dh: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, in their place, and the product swiglu made, in that of its gradient.

    Where that product was kept, as h, it is given back and not made again.
    """
    gate, up = (_wide(part) for part in gate_up.chunk(2, dim=-1))
    share, d = torch.sigmoid(gate), _wide(dh)
    silu = gate * share
    both = torch.cat([d * up * share * (1 + gate * (1 - share)), d * silu], dim=-1)
    activated = dh.copy_(silu * up) if h is None else h  # before `up` is overwritten
    return gate_up.copy_(both), activated


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy, and the logits, which have become their own gradient times `scale`."""
    raw = _wide(logits)
    x = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    losses = functional.cross_entropy(x, targets, reduction="none")
    gradient = torch.softmax(x, dim=-1)
    gradient[torch.arange(len(x), device=x.device), targets] -= 1
    if softcap is not None:
        gradient = gradient * (1 - (x / softcap).square())
    return losses, logits.copy_(gradient * scale)


def has_odds(n: Tensor, weight: Tensor) -> bool:
    """Whether `odds` takes these."""
    del n, weight
    return True


def odds(
    n: Tensor, weight: Tensor, targets: Tensor, scale: float, softcap: float | None, *, gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Each row's cross-entropy with logits n @ weight.T, and what their gradient times `scale` is made of.

    That is: a matrix, a factor for each of its rows, and n with its rows times their factors. A target that
    another logit exceeds by more than `MOST_NATS` has the loss of one exceeded by that.
    """
    x = _wide(n) @ _wide(weight).t()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    right = targets[:, None]
    raised = torch.exp((x - x.gather(1, right)).clamp(max=MOST_NATS)).scatter(1, right, 0.0)
    others = raised.sum(-1)
    losses = torch.log1p(others)
    if not gradient:
        return losses, None
    raised = raised.scatter(1, right, -others[:, None])
    if softcap is not None:
        raised = raised * (1 - (x / softcap).square())
    factor = scale / (1 + others)
    return losses, (raised.to(n.dtype), factor, (_wide(n) * factor[:, None]).to(n.dtype))


def gram(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ x.mT for each matrix of a (count, m, n) stack; sums in fp32, result in x's precision."""
    return torch.bmm(x, x.mT, out=out)


def symmetric_polynomial(
    gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """a·I + b·G + c·G @ G for each symmetric matrix G of a (count, m, m) stack, in G's precision."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    if a:
        result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def momentum_into(
    out: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], beta: float, nesterov: bool
) -> None:
    """Let each momentum follow its gradient, and write where it points (Nesterov's way or not) into `out`."""
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    directions = torch._foreach_lerp(gradients, momenta, beta) if nesterov else momenta
    torch._foreach_copy_(out, directions)


def normalised(matrices: Tensor, factor: float, least: float) -> Tensor:
    """Each matrix of a (count, m, n) stack over factor·norm + least."""
    exact = torch.promote_types(matrices.dtype, torch.float32)
    size = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=exact)
    return torch.div(matrices, size * factor + least, out=torch.empty_like(matrices))


def decay_and_add(
    parameters: list[Tensor],
    updates: list[Tensor],
    scales: list[float],
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """p ← (1 − lr·wd)·p − lr·scale·update for each parameter, in its own precision."""
    steps = [u.to(p.dtype) * (lr * -scale) for p, u, scale in zip(parameters, updates, scales, strict=True)]
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, steps)
