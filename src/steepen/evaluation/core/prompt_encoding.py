"""Encode prompts from cached segments, with the same ids as encoding each prompt as one text.

Under GPT-2's splitting pattern no token spans a visible character and a following blank, nor a line break and
a following visible character, so a text can be cut there and its segments encoded separately. An item occurs
in many prompts, as the question or as a demonstration; its segments are encoded once. Where a cut would not
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
from steepen.evaluation.core.prompts import DEMONSTRATION_SEPARATOR, demonstration, draw_shots, shuffled

Ids = npt.NDArray[np.int32]
BLANKS = (" ", "\n", "\t", "\r")  # white space both to Python and to the pattern


@dataclass(frozen=True)
class Example:
    """One example as token sequences, one per candidate; the answer of each begins at its start."""

    index: int  # in the shuffled order
    line: int  # in the task's file
    gold: int
    sequences: tuple[Ids, ...]
    starts: tuple[int, ...]


def common_prefix(sequences: Sequence[Ids]) -> int:
    """Length of the longest prefix that all sequences share."""
    length = min(len(sequence) for sequence in sequences)
    first = sequences[0][:length]
    for other in sequences[1:]:
        differs = first[:length] != other[:length]
        if differs.any():
            length = int(differs.argmax())
    return length


class TaskEncoder:
    """Encodes the examples of one task for any seed; repeated texts are encoded once."""

    def __init__(self, task: Task, tokenizer: Tokenizer, context: int) -> None:
        self.task, self.tokenizer, self.context = task, tokenizer, context
        self.items = shuffled(task)
        self.start = np.array([tokenizer.end_of_text], np.int32)
        self.can_cut = tokenizer.pattern == SPLIT_PATTERN
        self._separator = np.concatenate([self._encode("\n")] * len(DEMONSTRATION_SEPARATOR))
        self._cuts: dict[int, list[tuple[Ids, Ids]] | None] = {}

    def example(self, index: int, seed: int) -> Example:
        """The example at `index` of the shuffled order, with its demonstrations, cropped to the context."""
        item = self.items[index]
        shots = draw_shots(len(self.items), index, self.task.shots, seed)
        prompts = self._from_segments(index, shots) or self._whole(item, shots)
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
        if self.task.kind == "multiple_choice":  # after the common prefix of the choices
            return [common_prefix(sequences)] * len(ends)
        shared = common_prefix(
            [sequence[::-1] for sequence in sequences]
        )  # the common suffix of the contexts
        return [max(1, end - shared) for end in ends]

    def _fit(self, index: int, item: Item, sequences: tuple[Ids, ...], starts: list[int]) -> Example:
        """Crop every sequence from the left to the context."""
        cropped: list[Ids] = []
        for position, sequence in enumerate(sequences):
            excess = max(0, len(sequence) - self.context)
            cropped.append(sequence[excess:])
            starts[position] -= excess
            if starts[position] < 1:
                raise BadBundle(
                    self.task.file,
                    item.line,
                    f"an answer of {len(cropped[-1]) - starts[position]:,} tokens does not fit a context of "
                    f"{self.context:,} with a token before it; leave {self.task.label} out (--tasks), or "
                    "evaluate a network with a longer context.",
                )
        return Example(index, item.line, item.gold, tuple(cropped), tuple(starts))

    # `_whole` and `_from_segments` return, per candidate, the ids of the prompt without its answer and those
    # that the answer adds.

    def _whole(self, item: Item, shots: list[int]) -> list[tuple[Ids, Ids]]:
        head = "".join(
            demonstration(self.task, self.items[position]) + DEMONSTRATION_SEPARATOR for position in shots
        )
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
                        "the tokens of its prompt are not a prefix of the tokens with the answer; "
                        "the delimiter must end in a blank.",
                    )
                prompts.append((without, full[len(without) :]))
            else:
                prompts.append((full, full[:0]))
        return prompts

    def _from_segments(self, index: int, shots: list[int]) -> list[tuple[Ids, Ids]] | None:
        """The same ids from cached segments; None where a cut would not be exact."""
        if not self.can_cut:
            return None
        segments = [self.start]
        for position in shots:
            item, cut = self.items[position], self._cut(position)
            # The separator follows the answer: an answer that ends in a blank would be encoded with it.
            if cut is None or item.candidate(item.gold)[1][-1].isspace():
                return None
            segments += [*cut[item.gold], self._separator]
        question = self._cut(index)
        if question is None:
            return None
        joined = {id(stem): np.concatenate([*segments, stem]) for stem, _ in question}  # one per shared stem
        return [(joined[id(stem)], answer) for stem, answer in question]

    def _cut(self, position: int) -> list[tuple[Ids, Ids]] | None:
        """Ids of each candidate as (stem, blanks + answer); None where that cut would not be exact."""
        if position not in self._cuts:
            self._cuts[position] = self._make_cut(self.items[position])
        return self._cuts[position]

    def _make_cut(self, item: Item) -> list[tuple[Ids, Ids]] | None:
        stems: dict[str, Ids] = {}
        pairs: list[tuple[Ids, Ids]] = []
        for candidate in range(item.candidates):
            context, answer = item.candidate(candidate)
            text = context + self.task.delimiter
            stem = text.rstrip()
            # Exact cuts need a stem that begins with a visible character and is followed by blanks.
            if not stem or stem[0].isspace() or not text[len(stem) :].startswith(BLANKS):
                return None
            if stem not in stems:
                stems[stem] = self._encode(stem)
            pairs.append((stems[stem], self._encode(text[len(stem) :] + answer)))
        return pairs

    def encode_all(self) -> None:
        """Encode the segments of every item, on several threads (the tokenizer releases the GIL)."""
        threads = min(8, os.cpu_count() or 1)

        def encode_some(first: int) -> None:
            for position in range(first, len(self.items), threads):
                self._cut(position)

        with ThreadPoolExecutor(threads, thread_name_prefix="steepen-encode") as pool:
            for done in [pool.submit(encode_some, first) for first in range(threads)]:
                done.result()

    def _encode(self, text: str) -> Ids:
        return self.tokenizer.encode_array(text).astype(np.int32)
