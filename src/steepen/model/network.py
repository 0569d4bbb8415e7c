"""The network of every arm: prelude, a core applied K times, coda (Equation "looped-general").

The flow: `hidden_states` embeds the tokens, runs the prelude to e, then for each pass the boundary and that
pass's core, then the coda's boundary and the coda; `logits` or `loss` apply the final norm and the head.

The number of passes is an argument and no part of the module, so that growth and evaluation at other passes
need no other network. `execution` installs faster forms (`fused`, compiled blocks) into the same network:
the reference here says what they must compute.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.block import CacheSlot, call_custom_block, linear, rotary_table
from steepen.model.block_variant import VariantBlock, make_block
from steepen.model.boundary import Boundary, find_boundary, normalize_and_inject
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.loss import linear_cross_entropy, sum_of_losses
from steepen.model.shape import Shape


class FusedForward(Protocol):
    """Faster implementations of parts of `Network`, installed by the `execution` package."""

    def refresh(self) -> None:
        """Recompute everything derived from the weights; called after the weights have changed."""
        ...

    @property
    def signal(self) -> Any:
        """Notifies a listener that a gradient is complete (`execution.linear.GradientSignal`)."""
        ...

    def requantize(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Recompute what is derived from the compute copies (of these parameters); they have changed."""
        ...

    def compute_copies(self) -> Mapping[nn.Parameter, Any]:
        """Copies of parameters that forward and backward read instead of them, by parameter."""
        ...

    def install_in_new_blocks(self) -> None:
        """Install the faster implementation in blocks that growth has added."""
        ...

    def run(
        self, blocks: nn.ModuleList, x: Tensor, rotary: Tensor, e: Tensor | None = None, alpha: float = 0.0
    ) -> Tensor | None:
        """The blocks one after the other, with e from `boundary.normalize_and_inject` of x and e on; None
        where this has no faster implementation.
        """
        ...

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """`Network.embed`."""
        ...

    def loss(self, hidden: Tensor, targets: Tensor, loss_weight: float) -> Tensor:
        """`Network.loss`."""
        ...

    def norm_inject(self, h: Tensor, e: Tensor, alpha: float) -> Tensor:
        """`boundary.normalize_and_inject`."""
        ...


@dataclass(frozen=True)
class TokenLayout:
    """RoPE positions and attention mask of rows that are not one text from its start: rows that pack a prefix
    tree (continuations share their prefix), padded rows, and new tokens of cached texts.
    """

    positions: Tensor  # (batch, time)
    mask: Tensor | None  # (batch, 1, time, keys), True where the query sees the key; None: causal


class Network(nn.Module):
    """A prelude-core-coda transformer.

    `passes` is given per call (default: the arm's count in the stage the network was built for), so growth,
    random recurrence and test-time passes need no other class. `init.build_on_meta` builds it without memory,
    `init.materialize` gives it weights.
    """

    def __init__(
        self,
        shape: Shape,
        arm: Arm,
        multipliers: Multipliers | None = None,
        options: ModelOptions | None = None,
        *,
        passes: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.arm = shape, arm
        self.multipliers, self.options = multipliers or Multipliers(), options or ModelOptions()
        self.passes = passes or arm.passes.initial
        self.compute_dtype: torch.dtype | None = None  # None: the dtype of the weights
        self.fused: FusedForward | None = None  # set by execution.gpu_fused.install_fused_gpu
        self.visit: Callable[[Tensor], None] | None = None  # gets the hidden states after every block
        # Activation checkpointing: a block keeps only its input and is computed again in the backward.
        self.recompute = False
        self.core_boundary = find_boundary(arm.core_boundary)
        self.coda_boundary = find_boundary(arm.coda_boundary)

        allocation = shape.allocation
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.prelude = self.new_blocks(allocation.prelude)
        self.cores = nn.ModuleList(
            self.new_blocks(allocation.core) for _ in range(arm.stored_cores(self.passes))
        )
        self.coda = self.new_blocks(allocation.coda)
        self.head = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.rotary: Tensor
        self.register_buffer("rotary", rotary_table(shape, self.options), persistent=False)

    @torch.no_grad()
    def reset_rotary(self) -> None:
        """Recompute the RoPE table, after the network has been allocated on a device."""
        exact = self.embedding.dtype == torch.float64
        table = rotary_table(self.shape, self.options).to(self.embedding.device)
        self.rotary = table if exact else table.float()

    @property
    def token_ids(self) -> int:
        """Ids that have a logit: those of the tokenizer. The head's other rows are padding and stay zero."""
        return self.shape.vocabulary if self.options.padded_softmax else self.shape.token_ids

    @property
    def branch_dtype(self) -> torch.dtype:
        """Dtype of the GEMMs, and so of the attention and MLP branches."""
        return self.compute_dtype or self.embedding.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the residual stream (the hidden states): that of the branches, or fp32 if it is wider."""
        in_fp32 = self.options.residual_stream == "fp32"
        return torch.promote_types(self.branch_dtype, torch.float32) if in_fp32 else self.branch_dtype

    def refresh(self) -> None:
        """Update the fused path's copies of the weights; call it whenever the weights have changed."""
        if self.fused is not None:
            self.fused.refresh()

    def new_blocks(self, blocks: int) -> nn.ModuleList:
        """Build a list of blocks of this arm's class."""
        made = nn.ModuleList(
            make_block(self.arm, self.shape, self.multipliers, self.options) for _ in range(blocks)
        )
        buffers = [name for name, _ in made.named_buffers()]
        if buffers:  # empty after building on the meta device, and checkpoints hold parameters only
            raise UsageError(
                f"the block {self.arm.block!r} has a buffer ({buffers[0].split('.')[-1]}), which is not "
                "supported: compute it in forward, or make it a parameter."
            )
        return made

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        passes: int | None = None,
        loss_weight: float = 1.0,
        apart: int | None = None,
    ) -> Tensor:
        """Logits (batch, time, `token_ids`) in fp32 or wider; with targets, the scaled mean loss.

        `loss_weight` multiplies the mean cross-entropy: a micro-batch's fraction of the global batch. With
        `apart` two losses are returned, (2,): the mean, and the sum over targets that are this token.
        """
        for block in self.blocks() if self.arm.block_options.experts else ():
            if isinstance(block, VariantBlock):
                block.loss_weight = loss_weight
        hidden = self.hidden_states(tokens, passes)
        if targets is None:
            return self.logits(hidden)
        loss = self.loss(hidden, targets, loss_weight)
        return (
            loss
            if apart is None
            else torch.stack((loss, sum_of_losses(self, hidden, targets == apart, apart)))
        )

    def hidden_states(
        self,
        tokens: Tensor,
        passes: int | None = None,
        visit: Callable[[Tensor], None] | None = None,
        layout: TokenLayout | None = None,
        cache: Sequence[CacheSlot] | None = None,
    ) -> Tensor:
        """Hidden states (batch, time, width) after the last block; `visit` gets those after every block.

        `layout` gives positions and mask of rows that are not one text from its start. `cache` has one slot
        per executed block, so each pass of a tied core has its own keys and values; it needs a `layout`.
        """
        passes = self.passes if passes is None else passes
        visit = visit or self.visit
        self._check(tokens, passes, in_order=layout is None)
        rotary, *mask = self._positions(tokens, layout, cached=cache is not None)
        call, slots = self._call_block(), None if cache is None else iter(cache)

        fused = self.fused if layout is None and visit is None and not self.recompute else None

        def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
            chained = None if fused is None else fused.run(blocks, x, rotary)
            if chained is not None:
                return chained
            for block in blocks:
                slot = () if slots is None else (next(slots),)
                x = call(block, x, rotary, *mask, *slot)
                if visit is not None:
                    visit(self._one_stream(x))
            return x

        def run_after(boundary: Boundary, blocks: nn.ModuleList, h: Tensor, e: Tensor) -> Tensor | None:
            if fused is None or boundary is not normalize_and_inject:
                return None
            return fused.run(blocks, h, rotary, e, self.multipliers.injection)

        x, streams = self.embed(tokens, self.stream_dtype), self.arm.block_options.streams
        if streams is not None:
            x = x.unsqueeze(-2).expand(*x.shape[:-1], streams, -1)
        e = run(self.prelude, x)
        e = self.norm(e) if self.arm.norm_prelude else e
        h: Tensor | None = None
        skipped = self.arm.passes_without_gradient(passes)
        for index, core in enumerate(self.applied_cores(passes)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index >= skipped):
                after = None if h is None else run_after(self.core_boundary, core, h, e)
                h = run(core, self._core_input(h, e)) if after is None else after
        after = None if h is None else run_after(self.coda_boundary, self.coda, h, e)
        if after is None:
            after = run(self.coda, self._apply_boundary(self.coda_boundary, h, e))
        return self._one_stream(after)

    def _positions(
        self, tokens: Tensor, layout: TokenLayout | None, *, cached: bool
    ) -> tuple[Tensor] | tuple[Tensor, Tensor | None]:
        """What every block gets beside the hidden states: the RoPE table and, with a layout, the mask."""
        if layout is None:
            # The fused path applies RoPE in fp32 whatever the compute dtype.
            exact = self.fused is not None and self.arm.fused_block
            table = self.rotary[:, : tokens.shape[-1]].contiguous()
            return (table if exact else table.to(self.branch_dtype),)
        mask, window = layout.mask, self.arm.block_options.window
        if mask is not None and window is not None and not cached:  # a cache knows its keys' positions
            distance = layout.positions[:, None, :, None] - layout.positions[:, None, None, :]
            mask = mask & (distance < window)
        return self.rotary[:, layout.positions].to(self.branch_dtype), mask

    def _call_block(self) -> Callable[..., Tensor]:
        """How blocks are called: custom ones named in errors; with `recompute` again in the backward."""
        custom = ":" in self.arm.block
        call = call_custom_block(self.arm.block) if custom else nn.Module.__call__
        if not self.recompute:
            return call
        # Only custom blocks may draw random numbers, and a CUDA graph cannot save the generator's state.
        again = contextlib.nullcontext if self.fused is None else self.fused.signal.recomputing
        return functools.partial(
            checkpoint,
            call,
            use_reentrant=False,
            preserve_rng_state=custom,
            early_stop=not custom,  # it is an exception, which a failing custom block would be blamed for
            context_fn=lambda: (contextlib.nullcontext(), again()),
        )

    def _one_stream(self, x: Tensor) -> Tensor:
        """The mean of the copies of the residual stream that hyper-connections have; else x."""
        return x if self.arm.block_options.streams is None else x.mean(-2)

    def _core_input(self, h: Tensor | None, e: Tensor) -> Tensor:
        """Input of the next core pass; the caller keeps no reference to it, so it can be freed early."""
        as_is = h is None and self.options.first_pass == "prelude"
        x = e if as_is else self._apply_boundary(self.core_boundary, h, e)
        if x is e and self.fused is None:
            # An autograd node of its own, as FSDP2 inserts before every block: the core's gradient of e
            # is complete before those of the injections are added, with and without FSDP2.
            return e.view_as(e)
        return x

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Normed token embeddings (batch, time, width) in `dtype`: the input of the first block."""
        if self.fused is not None:
            return self.fused.embed(tokens, dtype)
        return self.norm(functional.embedding(tokens, self.embedding).to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: final norm, head and output multiplier (also the logit lens)."""
        raw = linear(self.norm(hidden).to(self.branch_dtype), self.head)[..., : self.token_ids]
        raw = self.multipliers.output * (raw if raw.dtype == torch.float64 else raw.float())
        cap = self.options.softcap
        return raw if cap is None else cap * torch.tanh(raw / cap)

    def loss(self, hidden: Tensor, targets: Tensor, loss_weight: float = 1.0) -> Tensor:
        """`loss_weight` times the mean cross-entropy of the targets, in fp32 or wider."""
        if self.fused is not None:
            return self.fused.loss(hidden, targets, loss_weight)
        if hidden.is_cpu and not torch.compiler.is_compiling():
            scale, cap = self.multipliers.output, self.options.softcap
            normed = self.norm(hidden).to(self.branch_dtype)
            return loss_weight * linear_cross_entropy(
                normed, self.head, targets, scale=scale, softcap=cap, vocabulary=self.token_ids
            )
        return loss_weight * functional.cross_entropy(self.logits(hidden).flatten(0, -2), targets.flatten())

    def norm(self, x: Tensor) -> Tensor:
        """RMSNorm without gain."""
        return functional.rms_norm(x, x.shape[-1:], eps=self.options.norm_eps)

    def applied_cores(self, passes: int) -> Iterator[nn.ModuleList]:
        """The core of each pass: the tied core `passes` times, or each untied core once."""
        for index in range(passes):
            core = self.cores[0 if self.arm.tied else index]
            assert isinstance(core, nn.ModuleList)
            yield core

    def blocks(self) -> Iterator[nn.Module]:
        """Every stored block, once."""
        yield from self.prelude
        for core in self.cores:
            assert isinstance(core, nn.ModuleList)
            yield from core
        yield from self.coda

    def _apply_boundary(self, boundary: Boundary, h: Tensor | None, e: Tensor) -> Tensor:
        alpha = self.multipliers.injection
        if self.fused is not None and h is not None and boundary is normalize_and_inject:
            return self.fused.norm_inject(h, e, alpha)
        return boundary(h, e, alpha, self.norm)

    def _check(self, tokens: Tensor, passes: int, in_order: bool) -> None:
        if passes < 1:
            raise UsageError(f"passes = {passes} is not valid: the core is applied at least once.")
        if not self.arm.tied and passes > len(self.cores):
            raise UsageError(
                f"passes = {passes} is not valid: this untied network has {len(self.cores)} cores "
                "(grow it first, or ask for fewer passes)."
            )
        if in_order and tokens.shape[-1] > self.rotary.shape[1]:
            raise UsageError(
                f"a sequence of {tokens.shape[-1]} tokens is longer than the network's context of "
                f"{self.rotary.shape[1]}."
            )
