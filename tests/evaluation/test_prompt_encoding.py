"""Prompts, their tokens and the start of the answer; segments encode as whole prompts do."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import BadBundle, Bundle, Item, Task
from steepen.evaluation.core.prompt_encoding import Example, TaskEncoder, common_prefix
from steepen.evaluation.core.prompts import draw_shots, shuffled

GPT2 = Tokenizer.gpt2()
OTHER = replace(GPT2, pattern=GPT2.pattern + "|(?!)")  # the same cuts, under a pattern not known to hold


def task_of(kind: str, *items: Item, shots: int = 0, delimiter: str = " ") -> Task:
    return Task("made", kind, Path("made.jsonl"), shots, delimiter, 0.25, items)  # pyright: ignore[reportArgumentType]


def encode(task: Task, index: int = 0, context: int = 2048, seed: int = 0) -> Example:
    return TaskEncoder(task, GPT2, context).example(index, seed)


def prompts(example: Example) -> list[str]:
    return [GPT2.decode_bytes(sequence).decode() for sequence in example.sequences]


def answers(example: Example) -> list[str]:
    pairs = zip(example.sequences, example.starts, strict=True)
    return [GPT2.decode(sequence[start:]) for sequence, start in pairs]


def test_multiple_choice_prompts_are_as_written_out() -> None:
    item = Item(1, ("The man was cold, so",), ("the fire grew.", "water froze."), 1)
    example = encode(task_of("multiple_choice", item))
    assert prompts(example) == [
        "<|endoftext|>The man was cold, so the fire grew.",
        "<|endoftext|>The man was cold, so water froze.",
    ]
    assert answers(example) == [" the fire grew.", " water froze."]
    # <|endoftext|>The| man| was| cold|,| so: the choices part at place 7.
    assert example.starts == (7, 7)
    assert example.sequences[0][0] == GPT2.end_of_text


def test_common_prefix_of_choices_belongs_to_the_prompt() -> None:
    item = Item(1, ("He",), ("is using a wrap.", "is holding a cube.", "is here."), 0)
    assert answers(encode(task_of("multiple_choice", item))) == [
        " using a wrap.",
        " holding a cube.",
        " here.",
    ]


def test_schema_prompts_are_as_written_out() -> None:
    stem = "The city councilmen refused the demonstrators a permit because the"
    item = Item(1, (f"{stem} city councilmen", f"{stem} demonstrators"), ("feared violence.",), 0)
    example = encode(task_of("schema", item))
    assert prompts(example)[1] == f"<|endoftext|>{stem} demonstrators feared violence."
    assert answers(example) == [" feared violence.", " feared violence."]


def test_schema_answer_includes_the_common_suffix_of_contexts() -> None:
    item = Item(1, ("Ann saw Bob and he", "Ann saw Eve and he"), ("left.",), 0)
    assert answers(encode(task_of("schema", item))) == [" and he left.", " and he left."]


def test_language_modelling_prompts_are_as_written_out() -> None:
    item = Item(1, ("I don't care about",), ("signs",), 0)
    example = encode(task_of("language_modeling", item))
    assert prompts(example) == ["<|endoftext|>I don't care about signs"]
    assert answers(example) == [" signs"]


def test_demonstrations_are_as_written_out() -> None:
    items = [Item(n, (f"Question: {n}+{n}?",), (f"is {2 * n}", "unknown"), 0) for n in range(1, 5)]
    task = task_of("multiple_choice", *items, shots=2, delimiter="\nAnswer: ")
    order = shuffled(task)
    first, second = draw_shots(4, 0, 2, seed=0)
    a, b, asked = order[first], order[second], order[0]
    text = "".join(f"{one.contexts[0]}\nAnswer: {one.answers[0]}\n\n" for one in (a, b))
    assert prompts(encode(task)) == [
        f"<|endoftext|>{text}{asked.contexts[0]}\nAnswer: {asked.answers[0]}",
        f"<|endoftext|>{text}{asked.contexts[0]}\nAnswer: unknown",
    ]


def test_order_and_seed_0_equal_nanochat() -> None:
    items = list(range(40))
    random.Random(1337).shuffle(items)
    task = task_of("language_modeling", *(Item(n, ("x",), ("y",), 0) for n in range(40)))
    assert [item.line for item in shuffled(task)] == items
    for index in (0, 7, 39):
        others = [place for place in range(40) if place != index]
        assert draw_shots(40, index, 10, seed=0) == random.Random(1234 + index).sample(others, 10)


def test_other_seeds_draw_other_demonstrations_and_never_the_example_itself() -> None:
    draws = [[tuple(draw_shots(30, index, 5, seed)) for index in range(30)] for seed in (0, 1, 2)]
    assert draws[0] != draws[1] != draws[2]
    assert not set(draws[0][1:]) & set(draws[1][:-1]), "a seed is no shift of another"
    assert all(index not in shots for seed in draws for index, shots in enumerate(seed))


def test_long_prompts_are_cropped_individually_from_the_left() -> None:
    item = Item(3, ("one two three four five six seven eight",), ("nine", "ten eleven twelve"), 0)
    whole = encode(task_of("multiple_choice", item))
    short = encode(task_of("multiple_choice", item), context=6)
    for full, cut in zip(whole.sequences, short.sequences, strict=True):
        assert np.array_equal(full[-6:], cut)
    assert answers(short) == [" nine", " ten eleven twelve"]
    assert short.starts == (5, 3)


def test_answer_longer_than_the_context_is_named_by_file_and_line() -> None:
    item = Item(3, ("one",), ("two three four five", "six"), 0)
    encode(task_of("multiple_choice", item), context=5)
    with pytest.raises(BadBundle, match=r"made\.jsonl, line 3: an answer of 4 tokens .* context of 4"):
        encode(task_of("multiple_choice", item), context=4)


def test_prompt_that_is_not_a_prefix_of_prompt_with_answer_is_named() -> None:
    item = Item(6, ("I walk",), ("ing home",), 0)
    with pytest.raises(BadBundle, match=r"line 6: .*delimiter must end in a blank"):
        encode(task_of("language_modeling", item, delimiter=""))


def test_common_prefix_is_what_all_share() -> None:
    rows = [np.array(row, np.int32) for row in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 9, 4])]
    assert common_prefix(rows) == 2
    assert common_prefix(rows[:2]) == 3
    assert common_prefix([rows[0], np.array([5], np.int32)]) == 0


PIECES = st.text(alphabet=" \n\tab.1é'\x1c\u00a0", min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(PIECES, PIECES, PIECES), min_size=4, max_size=6),
    st.sampled_from([" ", "\nAnswer: ", ":"]),
    st.sampled_from(["multiple_choice", "schema"]),
    st.integers(0, 3),
)
def test_segments_encode_as_the_whole_prompt_does(
    texts: list[tuple[str, str, str]], delimiter: str, kind: str, shots: int
) -> None:
    items = [
        Item(n, (a,), (b, c), n % 2) if kind == "multiple_choice" else Item(n, (a, b), (c,), n % 2)
        for n, (a, b, c) in enumerate(texts)
    ]
    task = task_of(kind, *items, shots=shots, delimiter=delimiter)
    encoder = TaskEncoder(task, GPT2, 4096)
    whole = TaskEncoder(task, OTHER, 4096)
    assert encoder.can_cut and not whole.can_cut
    for index in range(len(items)):
        a, b = encoder.example(index, 1), whole.example(index, 1)
        assert a.starts == b.starts
        assert all(np.array_equal(x, y) for x, y in zip(a.sequences, b.sequences, strict=True))


def test_segments_encode_as_the_whole_prompt_does_on_the_core_bundle(core_bundle: Bundle) -> None:
    cut = 0
    for task in core_bundle.tasks:
        encoder, whole = TaskEncoder(task, GPT2, 2048), TaskEncoder(task, OTHER, 2048)
        for index in range(8):
            a, b = encoder.example(index, 0), whole.example(index, 0)
            assert (a.starts, a.gold, a.line) == (b.starts, b.gold, b.line)
            assert all(np.array_equal(x, y) for x, y in zip(a.sequences, b.sequences, strict=True))
            cut += max(map(len, a.sequences)) == 2048
    assert cut, "no prompt was long enough to be cut"
