"""Prompts to token ids, exactly as if each prompt were rendered and encoded whole, but piece by piece.

GPT-2's splitting pattern never lets a token run from a visible character into a following blank, nor from a
line break into a following visible character, so a text may be cut there and its pieces encoded apart. An
item recurs in many prompts, asked or as a demonstration; its pieces are encoded once. Where a cut would not
be exact, the whole prompt is encoded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steepen.data import Tokenizer
from steepen.data.tokenizer import SPLIT_PATTERN
from steepen.evaluation.core.bundle import BadBundle, Item, Task
from steepen.evaluation.core.prompts import BETWEEN, draw_shots, shuffled, solved

Ids = npt.NDArray[np.int32]
BLANKS = (" ", "\n", "\t", "\r")  # blanks to Python and to the pattern alike


@dataclass(frozen=True)
class Example:
    """One example as token sequences, one per candidate; the answer of each is [start, its end)."""

    index: int  # place in the shuffled order
    line: int  # in the task's file
    gold: int
    sequences: tuple[Ids, ...]
    starts: tuple[int, ...]


def common_prefix(sequences: Sequence[Ids]) -> int:
    """Length of the longest beginning all sequences share."""
    length = min(len(sequence) for sequence in sequences)
    first = sequences[0][:length]
    for other in sequences[1:]:
        differs = first[:length] != other[:length]
        if differs.any():
            length = int(differs.argmax())
    return length


class TaskEncoder:
    """Encodes the examples of one task, for any seed; what recurs is encoded once."""

    def __init__(self, task: Task, tokenizer: Tokenizer, context: int) -> None:
        self.task, self.tokenizer, self.context = task, tokenizer, context
        self.items = shuffled(task)
        self.start = np.array([tokenizer.end_of_text], np.int32)
        self.cuts_hold = tokenizer.pattern == SPLIT_PATTERN
        self._between = np.concatenate([self._encode("\n")] * len(BETWEEN))
        self._cuts: dict[int, list[tuple[Ids, Ids]] | None] = {}

    def example(self, index: int, seed: int) -> Example:
        """The example at a place of the shuffled order, with its demonstrations, cut to fit the context."""
        item = self.items[index]
        shots = draw_shots(len(self.items), index, self.task.shots, seed)
        prompts = self._by_pieces(index, shots) or self._whole(item, shots)
        sequences = tuple(np.concatenate([without, rest]) for without, rest in prompts)
        return self._fit(index, item, sequences, self._starts(item, prompts, sequences))

    def _starts(self, item: Item, prompts: list[tuple[Ids, Ids]], sequences: tuple[Ids, ...]) -> list[int]:
        """Where each candidate's answer begins."""
        ends = [len(sequence) for sequence in sequences]
        if self.task.kind == "language_modeling":  # after the prompt without its answer
            without, rest = prompts[0]
            if not len(rest):
                raise BadBundle(self.task.file, item.line, "its answer adds no token to its prompt.")
            return [len(without)]
        if self.task.kind == "multiple_choice":  # where the choices part
            return [common_prefix(sequences)] * len(ends)
        shared = common_prefix(
            [sequence[::-1] for sequence in sequences]
        )  # where the contexts have met again
        return [max(1, end - shared) for end in ends]

    def _fit(self, index: int, item: Item, sequences: tuple[Ids, ...], starts: list[int]) -> Example:
        """Every sequence by itself loses what the context cannot hold, from the left."""
        cropped: list[Ids] = []
        for place, sequence in enumerate(sequences):
            excess = max(0, len(sequence) - self.context)
            cropped.append(sequence[excess:])
            starts[place] -= excess
            if starts[place] < 1:
                raise BadBundle(
                    self.task.file,
                    item.line,
                    f"an answer of {len(cropped[-1]) - starts[place]:,} tokens does not fit a context of "
                    f"{self.context:,} with a token before it; leave {self.task.label} out (--tasks), or "
                    "evaluate a network with a longer context.",
                )
        return Example(index, item.line, item.gold, tuple(cropped), tuple(starts))

    # --- the two ways to encode ---------------------------------------------------------------------------
    # Both give, per candidate, the ids of the prompt without its answer and the ids the answer adds.

    def _whole(self, item: Item, shots: list[int]) -> list[tuple[Ids, Ids]]:
        head = "".join(solved(self.task, self.items[place]) + BETWEEN for place in shots)
        prompts: list[tuple[Ids, Ids]] = []
        for candidate in range(item.candidates):
            context, answer = item.candidate(candidate)
            stem = head + context + self.task.delimiter
            full = np.concatenate([self.start, self._encode(stem + answer)])
            if self.task.kind == "language_modeling":
                without = np.concatenate([self.start, self._encode(stem.strip())])
                if not np.array_equal(without, full[: len(without)]):
                    raise BadBundle(
                        self.task.file,
                        item.line,
                        "its prompt's tokens are not the beginning of its prompt-with-answer's; "
                        "the delimiter must end in a blank.",
                    )
                prompts.append((without, full[len(without) :]))
            else:
                prompts.append((full, full[:0]))
        return prompts

    def _by_pieces(self, index: int, shots: list[int]) -> list[tuple[Ids, Ids]] | None:
        """The same ids from recurring pieces, or None where a cut would not be exact."""
        if not self.cuts_hold:
            return None
        pieces = [self.start]
        for place in shots:
            item, cut = self.items[place], self._cut(place)
            if cut is None or item.candidate(item.gold)[1][-1].isspace():  # BETWEEN follows the answer
                return None
            pieces += [*cut[item.gold], self._between]
        asked = self._cut(index)
        if asked is None:
            return None
        joined = {id(stem): np.concatenate([*pieces, stem]) for stem, _ in asked}  # choices share their stem
        return [(joined[id(stem)], answer) for stem, answer in asked]

    def _cut(self, place: int) -> list[tuple[Ids, Ids]] | None:
        """Each candidate of an item, cut before the blanks that end its stem; None where it cannot be cut."""
        if place not in self._cuts:
            self._cuts[place] = self._make_cut(self.items[place])
        return self._cuts[place]

    def _make_cut(self, item: Item) -> list[tuple[Ids, Ids]] | None:
        stems: dict[str, Ids] = {}
        pairs: list[tuple[Ids, Ids]] = []
        for candidate in range(item.candidates):
            context, answer = item.candidate(candidate)
            text = context + self.task.delimiter
            stem = text.rstrip()
            # A visible character first, so that BETWEEN may stand before it; blanks to cut before.
            if not stem or stem[0].isspace() or not text[len(stem) :].startswith(BLANKS):
                return None
            if stem not in stems:
                stems[stem] = self._encode(stem)
            pairs.append((stems[stem], self._encode(text[len(stem) :] + answer)))
        return pairs

    def cut_all(self) -> None:
        """Cut and encode every item now, on several threads: the tokenizer lets them run side by side."""
        threads = min(8, os.cpu_count() or 1)

        def some(first: int) -> None:
            for place in range(first, len(self.items), threads):
                self._cut(place)

        with ThreadPoolExecutor(threads, thread_name_prefix="steepen-encode") as pool:
            for done in [pool.submit(some, first) for first in range(threads)]:
                done.result()

    def _encode(self, text: str) -> Ids:
        return self.tokenizer.encode_array(text).astype(np.int32)
