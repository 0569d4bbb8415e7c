"""Score the candidates of examples: pack them into rows, and run batches of rows through the network.

The candidates of an example have a common prefix. A row holds it once, followed by one branch per candidate
(a tree): every token keeps the position it has in its candidate's text and attends to that text alone. The
last token of an answer predicts nothing that is scored, so it is never an input; candidates of one token then
need no branch, and their row is an ordinary causal one.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steepen.errors import SteepenError
from steepen.evaluation.core.prompt_encoding import Example, Ids, common_prefix
from steepen.model.network import Network, TokenLayout

if TYPE_CHECKING:
    from steepen.evaluation.hf_model import HuggingFaceModel

LENGTH_MULTIPLE = 8  # row lengths are padded to it
MIN_SAVING = 0.1  # fraction of tokens a tree must save: masked attention is slower than causal
IN_FLIGHT = 3  # batches submitted to the device before the oldest result is awaited
ScoredModel: TypeAlias = "Network | HuggingFaceModel"


@dataclass(frozen=True)
class Row:
    """Input tokens, and the answer tokens to score (`targets`) with the positions that predict them."""

    tokens: Ids
    target_positions: Ids  # index in `tokens` whose logits predict each target
    targets: Ids
    span_ids: Ids  # the span (a candidate's answer, or the right answer for its NLL) of each target
    # (2, length): of each token its branch, 0 in the shared prefix, and its position; None: causal.
    tree: Ids | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def make_rows(example: Example, first_span: int, share_prefixes: bool = True) -> list[Row]:
    """The rows of an example; its spans are numbered from `first_span` on."""
    candidates = range(len(example.sequences))
    if share_prefixes and len(candidates) > 1:
        tree = _row(example, candidates, first_span)
        separate = sum(len(sequence) - 1 for sequence in example.sequences)
        if len(tree) <= (1 - MIN_SAVING) * separate:
            return [tree]
    return [_row(example, [candidate], first_span) for candidate in candidates]


def _row(example: Example, candidates: Sequence[int], first_span: int) -> Row:
    """The row of some candidates: what they share, then a branch of each."""
    texts = [example.sequences[candidate] for candidate in candidates]
    shared = common_prefix(texts) if len(texts) > 1 else len(texts[0]) - 1
    tokens, places = [texts[0][:shared]], [np.stack([np.zeros(shared), np.arange(shared)])]
    moved: dict[int, int] = {}  # how far a candidate's branch is from its place in the candidate's own text
    length = shared
    for branch, (candidate, text) in enumerate(zip(candidates, texts, strict=True), start=1):
        own = text[shared:-1]
        tokens.append(own)
        places.append(np.stack([np.full(len(own), branch), shared + np.arange(len(own))]))
        moved[candidate] = length - shared
        length += len(own)
    positions: list[Ids] = []
    targets: list[Ids] = []
    span_ids: list[Ids] = []
    for number, (candidate, start) in enumerate(example.spans, start=first_span):
        if candidate in moved:
            sequence = example.sequences[candidate]
            predicting = np.arange(start - 1, len(sequence) - 1, dtype=np.int32)
            positions.append(np.where(predicting < shared, predicting, predicting + moved[candidate]))
            targets.append(sequence[start:])
            span_ids.append(np.full(len(sequence) - start, number, np.int32))
    return Row(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate(targets),
        np.concatenate(span_ids),
        np.concatenate(places, axis=1).astype(np.int32) if length > shared else None,
    )


def make_batches(rows: Sequence[Row], token_budget: int, mask_budget: int) -> Iterator[list[Row]]:
    """Batches of causal rows, then of trees, longest first, so that there is little padding.

    A batch has at most `token_budget` padded tokens; the mask of a batch of trees at most `mask_budget`
    entries.
    """
    # The longest first: if a batch does not fit in memory, it fails at the start and not after hours.
    for trees in (False, True):
        chosen = sorted((row for row in rows if (row.tree is not None) == trees), key=len, reverse=True)
        while chosen:
            length = padded_length(chosen)
            fitting = min(token_budget // length, mask_budget // length**2 if trees else len(chosen))
            count = max(1, fitting)
            yield chosen[:count]
            chosen = chosen[count:]


def padded_length(rows: Sequence[Row]) -> int:
    """Tokens per row of a batch, of which the first row is the longest."""
    return -(-len(rows[0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


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
        """Score all batches; `progress` receives the tokens scored so far."""
        loss, count, hits = np.zeros(spans), np.zeros(spans, np.int64), np.zeros(spans, np.int64)
        pending: deque[tuple[Sequence[Row], Tensor, Tensor]] = deque()
        done = 0

        def collect() -> None:
            nonlocal done
            rows, losses, top = pending.popleft()
            span_ids = np.concatenate([row.span_ids for row in rows])
            np.add.at(loss, span_ids, losses.cpu().numpy().astype(np.float64))
            np.add.at(hits, span_ids, top.cpu().numpy())
            np.add.at(count, span_ids, 1)
            done += sum(map(len, rows))
            if progress:
                progress(done)

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
