"""KV cache: keys and values of past tokens, one slot per executed block.

A block of a tied core is executed once per pass, on other hidden states each time, so every (pass, block) has
a slot of its own: cached and uncached logits are equal. With `share_passes`, all passes of a core share the
slots of one pass and a later pass overwrites an earlier one: less memory, other logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from steepen.model.network import Network, TokenLayout


def supports_cache(network: Network) -> bool:
    """Whether the network's blocks take a mask and a cache slot; a custom block may not."""

    def takes_both(block: type) -> bool:
        methods = [getattr(block, name, None) for name in ("forward", "forward_reference", "attention")]
        found = [inspect.signature(method).parameters for method in methods if method is not None]
        return all("mask" in names and "cache" in names for names in found)

    return all(takes_both(block) for block in {type(block) for block in network.blocks()})


class KVCache:
    """Keys and values of one batch, with room for `length` tokens per row.

    Rows are padded on the left, so that all of them have their newest token at the same index. `padding` is
    the number of padding tokens of each row.
    """

    def __init__(
        self,
        network: Network,
        passes: int,
        padding: Sequence[int],
        length: int,
        *,
        share_passes: bool = False,
    ) -> None:
        shape, device, options = network.shape, network.embedding.device, network.arm.block_options
        self.length, self.window = length, options.window
        self.padded = any(padding)
        self.padding = torch.tensor(padding, device=device)  # (batch)
        self.index = torch.zeros(1, dtype=torch.long, device=device)  # of the next token
        self.span = length  # a single new token attends to the first `span` keys, up to its own
        self.slot_numbers = _slot_numbers(network, passes, share_passes)
        size = (max(self.slot_numbers) + 1, 2, len(padding), options.heads(shape), length, shape.head_dim)
        self.storage = torch.zeros(size, dtype=network.branch_dtype, device=device)

    @property
    def slots(self) -> list[Slot]:
        """A slot for every executed block. The cache keeps none: in a cycle it would be freed late."""
        return [Slot(self, number) for number in self.slot_numbers]

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return self.storage.numel() * self.storage.element_size()

    def layout(self, time: int) -> TokenLayout:
        """Positions and mask of the next `time` tokens of every row: the prompts, or one token."""
        return self._token_layout() if time == 1 else self._prompt_layout(time)

    def _prompt_layout(self, time: int) -> TokenLayout:
        steps = torch.arange(time, device=self.padding.device)
        positions = (steps - self.padding.unsqueeze(1)).clamp(min=0)
        if not self.padded:
            return TokenLayout(positions, None)
        visible = steps >= self.padding.view(-1, 1, 1, 1)  # keys that are not padding
        causal = torch.ones(time, time, dtype=torch.bool, device=steps.device).tril()
        if self.window is not None:
            causal = causal.triu(1 - self.window)
        # Padding sees itself: a query without any key would be NaN.
        alone = torch.eye(time, dtype=torch.bool, device=steps.device)
        return TokenLayout(positions, (causal & visible) | alone)

    def _token_layout(self) -> TokenLayout:
        keys = torch.arange(self.span, device=self.padding.device)
        visible = (keys >= self.padding.unsqueeze(1)) & (keys <= self.index)
        if self.window is not None:
            visible = visible & (keys > self.index - self.window)
        return TokenLayout((self.index - self.padding).unsqueeze(1), visible[:, None, None, :])

    def advance(self, tokens: int) -> None:
        """Count new tokens, after all blocks have stored theirs."""
        self.index += tokens


class Slot:
    """Keys and values of one executed block."""

    def __init__(self, cache: KVCache, number: int) -> None:
        self.cache, self.number = cache, number

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens, (batch, heads, time, head_dim); return those to attend to.

        Several tokens are a prompt, the first of their rows; a single one may be at any index.
        """
        cache, time = self.cache, key.shape[2]
        keys, values = cache.storage[self.number]
        if time > 1:
            keys[:, :, :time], values[:, :, :time] = key, value
            return key, value
        keys.index_copy_(2, cache.index, key)
        values.index_copy_(2, cache.index, value)
        return keys[:, :, : cache.span], values[:, :, : cache.span]


def _slot_numbers(network: Network, passes: int, share_passes: bool) -> list[int]:
    """The slot of every executed block in order: prelude, core pass by pass, coda."""
    split = network.shape.allocation
    if not share_passes:
        return list(range(split.executed(passes)))
    core = list(range(split.prelude, split.prelude + split.core))
    coda = range(split.prelude + split.core, split.blocks)
    return [*range(split.prelude), *core * passes, *coda]
