"""The few-shot prompts of a task, encoded from cached segments with the ids of encoding each as one text.

Under GPT-2's splitting pattern no token spans a visible character and a following blank, nor a line break and
a following visible character, so a text can be cut there and its segments encoded separately. An item occurs
in many prompts, as the question or as a demonstration; its segments are encoded once. Where a cut would not
be exact, the whole prompt is encoded.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from steepen.data.tokenizer import SPLIT_PATTERN
from steepen.evaluation.core.bundle import BadBundle, Item, Task
from steepen.evaluation.core.suite import AUTHORS, Convention

if TYPE_CHECKING:
    from steepen.data import Tokenizer
    from steepen.evaluation.hf_model import HuggingFaceTokenizer

TextEncoder: TypeAlias = "Tokenizer | HuggingFaceTokenizer"
Ids = npt.NDArray[np.int32]
ORDER_SEED = 1337  # shuffles the examples of every task, in both conventions
DEMONSTRATION_SEPARATOR = "\n\n"  # after each demonstration
BLANKS = (" ", "\n", "\t", "\r")  # white space both to Python and to the pattern


def shuffled(task: Task) -> tuple[Item, ...]:
    """The task's items in a fixed shuffled order; a subset is the first n of them."""
    items = list(task.items)
    random.Random(ORDER_SEED).shuffle(items)
    return tuple(items)


def draw_shots(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Indices (in shuffled order) of the demonstrations for the example at `index`, itself excluded.

    They are drawn from the whole task even if only a subset is evaluated, by a generator seeded seed + index.
    """
    drawn = random.Random(seed + index).sample(range(count - 1), shots)
    return [other + (other >= index) for other in drawn]


@dataclass(frozen=True)
class Example:
    """One example as token sequences, one per candidate; the answer of each begins at its start."""

    index: int  # in the shuffled order
    line: int  # in the task's file
    gold: int
    sequences: tuple[Ids, ...]
    starts: tuple[int, ...]
    answer_start: int | None = None  # in the right candidate: where its answer NLL begins; None: its start
    answer_bytes: int | None = None  # of the right answer, UTF-8; None where only a part of it is scored

    @property
    def spans(self) -> list[tuple[int, int]]:
        """What is scored, as (candidate, first token): each answer, then the right one for its NLL."""
        spans = list(enumerate(self.starts))
        return spans if self.answer_start is None else [*spans, (self.gold, self.answer_start)]


# The ids of a prompt with its answer, and how many of them are those of the prompt without it.
Prompt: TypeAlias = tuple[Ids, int]
# Ids of one candidate: its stem (context and delimiter up to the last visible character), the blanks after it
# with the answer, and how many of the latter are those of the blanks alone.
Cut: TypeAlias = tuple[Ids, Ids, int]


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

    def __init__(
        self, task: Task, tokenizer: TextEncoder, context: int, convention: Convention = AUTHORS
    ) -> None:
        self.task, self.tokenizer, self.context = task, tokenizer, context
        self.choosing = task.kind != "language_modeling"  # between candidates
        self.strip = convention.strip_prompts and self.choosing
        self.whole_answer = convention.whole_answer and self.choosing
        self.items = shuffled(task)
        self.start = np.array([tokenizer.end_of_text], np.int32)
        self.can_cut = tokenizer.pattern == SPLIT_PATTERN
        self._separator = np.concatenate([self._encode("\n")] * len(DEMONSTRATION_SEPARATOR))
        self._cuts: dict[int, list[Cut] | None] = {}

    def example(self, index: int, seed: int) -> Example:
        """The example at `index` of the shuffled order, with its demonstrations, cropped to the context."""
        item = self.items[index]
        shots = draw_shots(len(self.items), index, self.task.shots, seed)
        prompts = self._from_segments(index, shots) or self._whole(item, shots)
        sequences = [ids for ids, _ in prompts]
        if self.task.kind == "language_modeling":  # the answer begins after the prompt without it
            starts = [prompts[0][1]]
            if starts[0] == len(sequences[0]):
                raise BadBundle(self.task.file, item.line, "its answer adds no token to its prompt.")
        elif self.task.kind == "multiple_choice":  # after the common prefix of the choices
            starts = [common_prefix(sequences)] * len(sequences)
        else:  # with the common suffix of the contexts
            shared = common_prefix([sequence[::-1] for sequence in sequences])
            starts = [max(1, len(sequence) - shared) for sequence in sequences]
        # Every sequence is cropped to its last tokens, as many as the context has.
        excess = [max(0, len(sequence) - self.context) for sequence in sequences]
        cropped = tuple(sequence[cut:] for sequence, cut in zip(sequences, excess, strict=True))
        answer_start = prompts[item.gold][1] - excess[item.gold] if self.whole_answer else None
        whole = self.whole_answer or not self.choosing
        size = len(item.candidate(item.gold)[1].strip().encode()) if whole else None
        begins = tuple(start - cut for start, cut in zip(starts, excess, strict=True))
        example = Example(index, item.line, item.gold, cropped, begins, answer_start, size)
        for candidate, start in example.spans:
            if start < 1:
                raise BadBundle(
                    self.task.file,
                    item.line,
                    f"an answer of {len(cropped[candidate]) - start:,} tokens does not fit a context of "
                    f"{self.context:,} with a token before it; leave {self.task.label} out (`tasks`), or "
                    "evaluate a network with a longer context.",
                )
        return example

    # `_whole` and `_from_segments` return the prompts of the candidates.

    def _whole(self, item: Item, shots: list[int]) -> list[Prompt]:
        head = ""
        for context, answer in (self.items[shot].candidate(self.items[shot].gold) for shot in shots):
            head += context + self.task.delimiter + answer + DEMONSTRATION_SEPARATOR
        prompts: list[Prompt] = []
        for candidate in range(item.candidates):
            context, answer = item.candidate(candidate)
            stem = head + context + self.task.delimiter
            if self.strip:
                stem, answer = stem.lstrip(), answer.rstrip()
                # With nothing visible before it, the answer's own leading blanks are stripped too.
                answer = answer if stem else answer.lstrip()
            full = self._with_start(stem + answer)
            without = full
            if not self.choosing:
                without = self._with_start(stem.strip())
            elif self.whole_answer and candidate == item.gold:
                without = self._with_start(stem)
            shared = common_prefix([full, without])
            # Another tokenizer than ours may merge the end of the prompt with the answer.
            if not self.choosing and self.can_cut and shared < len(without):
                raise BadBundle(
                    self.task.file,
                    item.line,
                    "the tokens of its prompt are not a prefix of the tokens with the answer; "
                    "the delimiter must end in a blank.",
                )
            prompts.append((full, shared))
        return prompts

    def _from_segments(self, index: int, shots: list[int]) -> list[Prompt] | None:
        """The same ids from cached segments; None if a cut would not be exact."""
        segments, question = [self.start], self._cut(index)
        for position in shots:
            item, cuts = self.items[position], self._cut(position)
            # The separator follows the answer: an answer that ends in a blank would be encoded with it.
            if cuts is None or item.candidate(item.gold)[1][-1].isspace():
                return None
            segments += [*cuts[item.gold][:2], self._separator]
        if question is None or (
            self.strip and any(answer[-1].isspace() for answer in self.items[index].answers)
        ):
            return None
        # One head per shared stem.
        heads = {id(stem): np.concatenate([*segments, stem]) for stem, _, _ in question}
        return [
            (np.concatenate([heads[id(stem)], rest]), len(heads[id(stem)]) + shared)
            for stem, rest, shared in question
        ]

    def _cut(self, position: int) -> list[Cut] | None:
        """Each candidate of an item, cut after its stem; None if that cut would not be exact."""
        if position not in self._cuts:
            self._cuts[position] = self._make_cut(self.items[position]) if self.can_cut else None
        return self._cuts[position]

    def _make_cut(self, item: Item) -> list[Cut] | None:
        stems: dict[str, Ids] = {}
        cuts: list[Cut] = []
        for candidate in range(item.candidates):
            context, answer = item.candidate(candidate)
            text = context + self.task.delimiter
            stem = text.rstrip()
            blanks = text[len(stem) :]
            # Exact cuts need a stem that begins with a visible character and is followed by blanks.
            if not stem or stem[0].isspace() or not blanks.startswith(BLANKS):
                return None
            if stem not in stems:
                stems[stem] = self._encode(stem)
            rest = self._encode(blanks + answer)
            shared = common_prefix([rest, self._encode(blanks)]) if self.whole_answer else 0
            cuts.append((stems[stem], rest, shared))
        return cuts

    def encode_all(self) -> None:
        """Encode the segments of every item, on several threads (the tokenizer releases the GIL)."""
        threads = min(8, os.cpu_count() or 1)

        def encode_some(first: int) -> None:
            for position in range(first, len(self.items), threads):
                self._cut(position)

        with ThreadPoolExecutor(threads, thread_name_prefix="steepen-encode") as pool:
            list(pool.map(encode_some, range(threads)))

    def _with_start(self, text: str) -> Ids:
        return np.concatenate([self.start, self._encode(text)])

    def _encode(self, text: str) -> Ids:
        return self.tokenizer.encode_array(text).astype(np.int32)
