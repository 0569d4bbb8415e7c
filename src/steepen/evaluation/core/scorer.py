"""Run batches through the network: the loss of every answer token, and whether it had the top logit."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steepen.errors import SteepenError
from steepen.evaluation.core.prefix_tree import Row, padded_length
from steepen.model.network import Network, TokenLayout

if TYPE_CHECKING:
    from steepen.evaluation.hf_model import HuggingFaceModel

IN_FLIGHT = 3  # batches submitted to the device before the oldest result is awaited
ScoredModel: TypeAlias = "Network | HuggingFaceModel"


@dataclass(frozen=True)
class SpanScores:
    """Per span of answer tokens: summed loss, token count, whether greedy decoding gives it."""

    loss: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    exact: npt.NDArray[np.bool_]

    def mean(self, span: int) -> float:
        """Mean loss per token; NaN for an answer without tokens of its own."""
        return float(self.loss[span] / self.tokens[span]) if self.tokens[span] else float("nan")


def supports_attention_mask(network: ScoredModel) -> bool:
    """Whether the model accepts the mask of a prefix tree; a custom block or another model may not."""
    return isinstance(network, Network) and all(
        "mask" in inspect.signature(type(block).forward).parameters for block in network.blocks()
    )


class Scorer:
    """Scores batches with one network at one number of passes."""

    def __init__(self, network: ScoredModel, passes: int | None = None) -> None:
        self.network = network
        self.passes = network.passes if passes is None else passes
        self.device = network.embedding.device
        # Logits are computed at answer tokens only, this many rows at a time.
        vocabulary = network.shape.vocabulary
        self.logit_rows = max(64, (1 << 28 if self.device.type == "cuda" else 1 << 24) // vocabulary)

    @torch.no_grad()
    def score(
        self, batches: Iterable[Sequence[Row]], spans: int, progress: Callable[[int], None] | None = None
    ) -> SpanScores:
        """Score all batches; `progress` receives the tokens of each finished batch."""
        loss, count, hits = np.zeros(spans), np.zeros(spans, np.int64), np.zeros(spans, np.int64)
        pending: deque[tuple[Sequence[Row], Tensor, Tensor]] = deque()

        def collect() -> None:
            rows, losses, top = pending.popleft()
            span_ids = np.concatenate([row.span_ids for row in rows])
            np.add.at(loss, span_ids, losses.cpu().numpy().astype(np.float64))
            np.add.at(hits, span_ids, top.cpu().numpy())
            np.add.at(count, span_ids, 1)
            if progress:
                progress(sum(map(len, rows)))

        # Reading a result waits for the GPU: a few batches are in flight, so that it always has work. Sums
        # are in fp64 and by span, so that a score does not depend on how examples were batched.
        for batch in batches:
            pending.extend(self._forward(batch))
            while len(pending) > IN_FLIGHT:
                collect()
        while pending:
            collect()
        if not np.isfinite(loss).all():
            raise SteepenError("the model gives losses that are not finite numbers: it has no scores.")
        return SpanScores(loss, count, hits == count)

    def _forward(self, rows: Sequence[Row]) -> list[tuple[Sequence[Row], Tensor, Tensor]]:
        """Losses and hits of a batch, which is split in halves when the device runs out of memory."""
        try:
            return [(rows, *self._score(rows))]
        except torch.cuda.OutOfMemoryError:
            if len(rows) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(rows) // 2
        return [*self._forward(rows[:half]), *self._forward(rows[half:])]

    def _score(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        shape = (len(rows), padded_length(rows))
        tokens, tree = np.zeros(shape, np.int64), np.zeros((2, *shape), np.int64)
        # Padding is a separate branch that no token attends to; it attends to the prefix, so that no row of
        # the mask is empty.
        tree[0] = -1
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row.tokens
            if row.tree is not None:
                tree[:, index, : len(row)] = row.tree
        layout = None
        if rows[0].tree is not None:
            layout = TokenLayout(self._send(tree[1]), tree_mask(self._send(tree[0])))
        # Most tokens of a prompt are not scored: only the hidden states that predict an answer's token go
        # through the head, whose logits would otherwise be the largest tensor by far.
        hidden = self.network.hidden_states(self._send(tokens), self.passes, layout=layout)
        row_of = np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows])
        predicting = np.concatenate([row.target_positions for row in rows]).astype(np.int64)
        answers = hidden[self._send(row_of), self._send(predicting)]
        targets = self._send(np.concatenate([row.targets for row in rows]).astype(np.int64))
        losses: list[Tensor] = []
        top: list[Tensor] = []
        for states, wanted in zip(
            answers.split(self.logit_rows), targets.split(self.logit_rows), strict=True
        ):
            logits = self.network.logits(states)
            chosen = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
            losses.append(logits.logsumexp(-1) - chosen)
            top.append(logits.argmax(-1) == wanted)
        return torch.cat(losses), torch.cat(top)

    def _send(self, values: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def tree_mask(branches: Tensor) -> Tensor:
    """Causal attention mask, bool (rows, 1, length, length), over the prefix and a token's own branch."""
    length = branches.shape[-1]
    key, query = branches.unsqueeze(-2), branches.unsqueeze(-1)
    order = torch.ones(length, length, dtype=torch.bool, device=branches.device).tril()
    return (((key == 0) | (key == query)) & order).unsqueeze(1)
