"""Size of a network: nominal depth → blocks, width, heads and matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from steepen.errors import UsageError, require
from steepen.utils.codec import Checked, Range

GPT2_PADDING = {50_304: 50_257}  # padded → real vocabulary


MAX_SIZE = 10**8  # of widths, context and vocabulary
MAX_BLOCKS = 100_000
MAX_MATRIX = 10**13  # entries of one matrix
Size: TypeAlias = Annotated[int, Range(1, MAX_SIZE)]
Blocks: TypeAlias = Annotated[int, Range(0, MAX_BLOCKS)]


@dataclass(frozen=True)
class BlockAllocation(Checked):
    """Blocks in the prelude, the core (one pass of it) and the coda; written prelude/core/coda, as 2/3/3."""

    prelude: Blocks
    core: Blocks
    coda: Blocks

    def __str__(self) -> str:
        return f"{self.prelude}/{self.core}/{self.coda}"

    @property
    def blocks(self) -> int:
        """Blocks stored when there is one core."""
        return self.prelude + self.core + self.coda

    def executed(self, passes: int) -> int:
        """Blocks a token passes through with this many core passes."""
        return self.prelude + passes * self.core + self.coda

    def reduced_to(self, blocks: int) -> BlockAllocation:
        """Fewer blocks (or none) in the same proportion: a stack, an even split, or a smaller core."""
        if blocks > self.blocks:
            raise UsageError(f"a network of {self.blocks} blocks cannot start with {blocks}.")
        if self.prelude == self.blocks:
            return BlockAllocation(blocks, 0, 0)
        if self == BlockAllocation.even(self.blocks):
            return BlockAllocation.even(blocks)
        core = blocks - self.prelude - self.coda
        if core < 0:
            raise UsageError(f"the allocation {self} cannot start with {blocks} blocks: only its core grows.")
        return replace(self, core=core)

    def sections(self, passes: int) -> tuple[str, ...]:
        """The section of each executed block: prelude, core 1, …, coda."""
        cores = [f"core {number}" for number in range(1, passes + 1) for _ in range(self.core)]
        return (*["prelude"] * self.prelude, *cores, *["coda"] * self.coda)

    @staticmethod
    def even(blocks: int) -> BlockAllocation:
        """As even as possible, remainder first to the core, then to the coda (Table "Model depths…")."""
        third, rest = divmod(blocks, 3)
        return BlockAllocation(third, third + (rest >= 1), third + (rest == 2))


@dataclass(frozen=True)
class SizeRule(Checked):
    """Nominal depth → width, heads and MLP width; by default the paper's (Table "Fixed architecture…")."""

    aspect: Size = 128  # width per unit of nominal depth
    head_dim: Size = 128
    mlp_multiple: Size = 256  # the hidden width is 8w/3 rounded up to a multiple of this
    context: Size = 2048
    vocabulary: Size = 50_304  # GPT-2's 50,257 padded to a multiple of 128
    real_vocabulary: int | None = None  # ids of the tokenizer; None: 50,257 of 50,304, else all

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_dim % 2 == 0, "SizeRule", "head_dim", self.head_dim, "even (RoPE rotates pairs)")

    def width(self, depth: int) -> int:
        """The width at a nominal depth."""
        return self.aspect * depth

    def mlp_width(self, width: int) -> int:
        """The SwiGLU hidden width: rounding to 256 is the only rule that fits the paper's size table."""
        return self.mlp_multiple * math.ceil(8 * width / 3 / self.mlp_multiple)


@dataclass(frozen=True)
class Shape(Checked):
    """Everything about a network's size. `depth` is the nominal depth, the ℓ of "dℓ"."""

    depth: Size
    width: Size
    heads: Size
    mlp_width: Size
    context: Size
    vocabulary: Size
    allocation: BlockAllocation
    real_vocabulary: int | None = None  # ids of the tokenizer; the others pad the matrices. None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        real = self.real_vocabulary
        valid = real is None or 1 <= real <= self.vocabulary
        require(valid, "Shape", "real_vocabulary", real, f"from 1 to the vocabulary ({self.vocabulary})")
        if real == self.vocabulary:  # one way to say that nothing is padding
            object.__setattr__(self, "real_vocabulary", None)
        accepted = f"a divisor of width {self.width} with an even quotient"
        require(self.width % (2 * self.heads) == 0, "Shape", "heads", self.heads, accepted)
        accepted = f"such that no matrix has over {MAX_MATRIX:.0e} entries"
        matrix = self.width * max(self.vocabulary, self.mlp_width)
        require(matrix <= MAX_MATRIX, "Shape", "width", self.width, accepted)

    @property
    def token_ids(self) -> int:
        """Ids that occur: the vocabulary without its padding."""
        return self.vocabulary if self.real_vocabulary is None else self.real_vocabulary

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @staticmethod
    def at(depth: int, allocation: BlockAllocation, size_rule: SizeRule | None = None) -> Shape:
        """The shape at nominal depth `depth` by a size rule."""
        size_rule = size_rule or SizeRule()
        width, head_dim = size_rule.width(depth), size_rule.head_dim
        accepted = f"a divisor of the width ({width} at depth {depth})"
        require(width % head_dim == 0, "SizeRule", "head_dim", head_dim, accepted)
        return Shape(
            depth=depth,
            width=width,
            heads=width // head_dim,
            mlp_width=size_rule.mlp_width(width),
            context=size_rule.context,
            vocabulary=size_rule.vocabulary,
            allocation=allocation,
            real_vocabulary=size_rule.real_vocabulary or GPT2_PADDING.get(size_rule.vocabulary),
        )
