"""Pack the candidates of an example into one row that shares their prefix, and rows into batches.

The candidates of an example have a common prefix. A row holds it once, followed by one branch per candidate
(a tree): every token keeps the position it has in its candidate's text and attends to that text alone. The
last token of an answer predicts nothing that is scored, so it is never an input; candidates of one token then
need no branch, and their row is an ordinary causal one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steepen.evaluation.core.prompt_encoding import Example, Ids, common_prefix

LENGTH_MULTIPLE = 8  # row lengths are padded to it
MIN_SAVING = 0.1  # fraction of tokens a tree must save: masked attention is slower than causal


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
