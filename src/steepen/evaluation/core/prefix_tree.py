"""Pack the candidates of an example into one row that shares their prefix, and rows into padded batches.

The candidates of an example have a common prefix. A row holds it once, followed by one branch per candidate
(a tree): every token keeps the position it has in its candidate's text and attends to that text alone. The
last token of an answer predicts nothing that is scored, so it is never an input; candidates of one token then
need no branch, and their row is an ordinary causal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    branch_ids: Ids | None = None  # 0 in the shared prefix, i in the branch of candidate i; None: causal
    positions: Ids | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """Rows padded to one length, all causal or all trees."""

    tokens: npt.NDArray[np.int64]  # (rows, length)
    rows: npt.NDArray[np.int64]  # per target: its row,
    target_positions: npt.NDArray[np.int64]  # the index in that row where it is predicted,
    targets: npt.NDArray[np.int64]  # its token id,
    span_ids: npt.NDArray[np.int64]  # and its span
    branch_ids: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64] | None
    real_tokens: int


def make_rows(example: Example, first_span: int, share_prefixes: bool = True) -> list[Row]:
    """The rows of an example; its spans are numbered from `first_span` on."""
    if share_prefixes and len(example.sequences) > 1:
        tree = _tree(example, first_span)
        separate = sum(len(sequence) - 1 for sequence in example.sequences)
        if len(tree) <= (1 - MIN_SAVING) * separate:
            return [tree]
    return [_row(example, candidate, first_span) for candidate in range(len(example.sequences))]


def _row(example: Example, candidate: int, first_span: int) -> Row:
    sequence = example.sequences[candidate]
    return Row(sequence[:-1], *_targets(example, first_span, [candidate], lambda _, positions: positions))


def _tree(example: Example, first_span: int) -> Row:
    shared = common_prefix(example.sequences)
    tokens, branch_ids = [example.sequences[0][:shared]], [np.zeros(shared, np.int32)]
    positions = [np.arange(shared, dtype=np.int32)]
    begins: list[int] = []  # of each candidate's branch in the row
    length = shared
    for index, sequence in enumerate(example.sequences):
        own = sequence[shared:-1]
        tokens.append(own)
        branch_ids.append(np.full(len(own), index + 1, np.int32))
        positions.append(np.arange(shared, shared + len(own), dtype=np.int32))
        begins.append(length)
        length += len(own)

    def in_row(candidate: int, own_positions: Ids) -> Ids:
        """Where positions in a candidate's own text are in the row."""
        moved = own_positions - shared + begins[candidate]
        return np.where(own_positions < shared, own_positions, moved).astype(np.int32)

    branching = length > shared
    return Row(
        np.concatenate(tokens),
        *_targets(example, first_span, range(len(example.sequences)), in_row),
        np.concatenate(branch_ids) if branching else None,
        np.concatenate(positions) if branching else None,
    )


def _targets(
    example: Example, first_span: int, candidates: Sequence[int], in_row: Callable[[int, Ids], Ids]
) -> tuple[Ids, Ids, Ids]:
    """Positions, ids and spans of the targets of some candidates; `in_row` places positions in the row."""
    positions: list[Ids] = []
    targets: list[Ids] = []
    span_ids: list[Ids] = []
    for number, (candidate, start) in enumerate(example.spans, start=first_span):
        if candidate in candidates:
            sequence = example.sequences[candidate]
            positions.append(in_row(candidate, np.arange(start - 1, len(sequence) - 1, dtype=np.int32)))
            targets.append(sequence[start:])
            span_ids.append(np.full(len(sequence) - start, number, np.int32))
    return np.concatenate(positions), np.concatenate(targets), np.concatenate(span_ids)


def make_batches(rows: Sequence[Row], token_budget: int, mask_budget: int) -> Iterator[Batch]:
    """Batches of causal rows, then of trees, longest first, so that there is little padding.

    A batch has at most `token_budget` padded tokens; the mask of a batch of trees at most `mask_budget`
    entries.
    """
    # The longest first: if a batch does not fit in memory, it fails at the start and not after hours.
    for branching in (False, True):
        chosen = sorted(
            (row for row in rows if (row.branch_ids is not None) == branching), key=len, reverse=True
        )
        while chosen:
            length = -(-len(chosen[0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            count = token_budget // length
            if branching:
                count = min(count, mask_budget // length**2)
            count = max(1, count)
            yield _pad(chosen[:count], length, branching)
            chosen = chosen[count:]


def _pad(rows: Sequence[Row], length: int, branching: bool) -> Batch:
    shape = (len(rows), length)
    tokens = np.zeros(shape, np.int64)
    # Padding is a separate branch that no token attends to; it attends to the prefix, so that no row of the
    # mask is empty.
    branch_ids = np.full(shape, -1, np.int64) if branching else None
    positions = np.zeros(shape, np.int64) if branching else None
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row.tokens
        if branch_ids is not None and row.branch_ids is not None:
            branch_ids[index, : len(row)] = row.branch_ids
        if positions is not None and row.positions is not None:
            positions[index, : len(row)] = row.positions
    return Batch(
        tokens,
        np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows]),
        np.concatenate([row.target_positions for row in rows]).astype(np.int64),
        np.concatenate([row.targets for row in rows]).astype(np.int64),
        np.concatenate([row.span_ids for row in rows]).astype(np.int64),
        branch_ids,
        positions,
        sum(len(row) for row in rows),
    )


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of two rows or more into halves."""
    half = len(batch.tokens) // 2

    def part(first: int, last: int) -> Batch:
        inside = (batch.rows >= first) & (batch.rows < last)
        fraction = (last - first) / len(batch.tokens)
        return Batch(
            batch.tokens[first:last],
            batch.rows[inside] - first,
            batch.target_positions[inside],
            batch.targets[inside],
            batch.span_ids[inside],
            None if batch.branch_ids is None else batch.branch_ids[first:last],
            None if batch.positions is None else batch.positions[first:last],
            round(batch.real_tokens * fraction),
        )

    return part(0, half), part(half, len(batch.tokens))
