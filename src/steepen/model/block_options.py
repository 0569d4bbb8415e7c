"""Options of the built-in block: grouped-query attention, window, other MLPs, experts, hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Annotated, Literal

from steepen.errors import UsageError, nearest, require, show
from steepen.model.shape import MAX_SIZE, Shape
from steepen.utils.codec import Checked, Range, from_builtins

Activation = Literal["swiglu", "relu2"]
Balance = Literal["bias", "loss", "none"]
MAX_EXPERTS = 10_000
MAX_STREAMS = 64


@dataclass(frozen=True)
class BlockOptions(Checked):
    """What an arm changes in the transformer block; the defaults are the paper's block.

    The width of an expert is that of the dense MLP divided by the experts that a token uses (routed and
    shared), so that a block of experts costs the FLOPs of the dense one and of its router.
    """

    # Heads of keys and values (GQA); None: as many as of queries.
    kv_heads: Annotated[int, Range(1, MAX_SIZE)] | None = None
    # Newest tokens that a query sees, itself included; None: all.
    window: Annotated[int, Range(1, MAX_SIZE)] | None = None
    activation: Activation = "swiglu"  # relu2: max(0, x)² without a gate, 3/2 as wide: as many parameters
    parallel: bool = False  # attention and MLP read the same normed input, and are added together
    # Hyper-connections: copies of the residual stream, of which every branch reads a learned mixture, and
    # which are mixed with learned weights where a branch is added to them. None: the residual connection.
    streams: Annotated[int, Range(1, MAX_STREAMS)] | None = None
    # MLPs of which the router chooses `active_experts` per token; None: one MLP.
    experts: Annotated[int, Range(1, MAX_EXPERTS)] | None = None
    active_experts: Annotated[int, Range(1, MAX_EXPERTS)] = 2
    shared_experts: Annotated[int, Range(0, MAX_EXPERTS)] = 0  # experts that every token uses besides
    # What keeps the load of the experts even: a bias on the choice that follows the load and is not in the
    # loss, or a term of the loss, or nothing.
    balance: Balance = "bias"

    def __post_init__(self) -> None:
        super().__post_init__()
        active, most = self.active_experts, MAX_EXPERTS if self.experts is None else self.experts
        if active == BlockOptions.active_experts:
            object.__setattr__(self, "active_experts", active := min(active, most))
        require(
            active <= most, "BlockOptions", "active_experts", active, f"a whole number from 1 to {most:,}"
        )

    @property
    def standard(self) -> bool:
        """Whether this is the paper's block."""
        return self == BlockOptions()

    @property
    def only_grouped(self) -> bool:
        """Whether this is the paper's block, but for its heads of keys and values."""
        return self == BlockOptions(kv_heads=self.kv_heads)

    def heads(self, shape: Shape) -> int:
        """Heads of keys and values."""
        found = shape.heads if self.kv_heads is None else self.kv_heads
        divides = shape.heads % found == 0
        require(divides, "BlockOptions", "kv_heads", found, f"a divisor of the {shape.heads} heads")
        return found

    def mlp_width(self, shape: Shape) -> int:
        """Hidden width of the MLP, or of one expert."""
        wider = 3 * shape.mlp_width // 2 if self.activation == "relu2" else shape.mlp_width
        used = 1 if self.experts is None else self.active_experts + self.shared_experts
        return -(-wider // used)

    @property
    def connection_weights(self) -> int:
        """Weights of the hyper-connections of a block: to read, to add to, and to mix its streams."""
        streams, branches = self.streams or 0, 1 if self.parallel else 2
        return branches * streams * (streams + 2)

    def visible_keys(self, context: int) -> Fraction:
        """Keys that a query sees, averaged over the positions of a context."""
        window = context if self.window is None else min(self.window, context)
        return Fraction(window * (window + 1) // 2 + (context - window) * window, context)


def parse_block_options(settings: list[str]) -> BlockOptions:
    """Read NAME=VALUE settings, as in the arm vanilla+kv_heads=4+window=256."""
    import yaml

    from steepen.utils.yaml_io import load_yaml

    names = [field.name for field in fields(BlockOptions)]
    values: dict[str, object] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in names:
            raise UsageError(f"a block has no option {name!r}; the nearest are {nearest(name, names)}.")
        try:
            values[name] = load_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"the value of the block's {name} cannot be read: {show(text)}.") from error
    return from_builtins(BlockOptions, values, "block")
