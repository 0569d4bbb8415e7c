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
from steepen.evaluation.core.prompt_encoding import (
    Example,
    TaskEncoder,
    common_prefix,
    draw_shots,
    shuffled,
)
from steepen.evaluation.core.suite import AUTHORS, NANOCHAT, Convention

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


def test_order_and_demonstrations_follow_the_conventions() -> None:
    items = list(range(40))
    random.Random(1337).shuffle(items)
    task = task_of("language_modeling", *(Item(n, ("x",), ("y",), 0) for n in range(40)))
    assert [item.line for item in shuffled(task)] == items
    for index, seed in ((0, 0), (7, 2), (39, 1234)):
        others = [place for place in range(40) if place != index]
        assert draw_shots(40, index, 10, seed) == random.Random(seed + index).sample(others, 10)


def test_other_seeds_draw_other_demonstrations_and_never_the_example_itself() -> None:
    draws = [[tuple(draw_shots(30, index, 5, seed)) for index in range(30)] for seed in (0, 1, 2)]
    assert draws[0] != draws[1] != draws[2]
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


def right_answer(example: Example) -> str:
    """The text that the answer NLL covers."""
    start = example.starts[example.gold] if example.answer_start is None else example.answer_start
    return GPT2.decode(example.sequences[example.gold][start:])


@pytest.mark.parametrize(
    ("kind", "contexts", "texts", "whole", "deciding"),
    [
        ("multiple_choice", ("He",), ("is here.", "is gone."), " is here.", " here."),
        ("multiple_choice", ("He",), (" is here.", "went"), " is here.", "  is here."),
        ("multiple_choice", ("A: ",), ("B", "C"), " B", " B"),
        ("schema", ("Ann saw Bob and he", "Ann saw Eve and he"), ("left.",), " left.", " and he left."),
        ("language_modeling", ("He",), ("left",), " left", " left"),
    ],
)
def test_answer_nll_covers_the_whole_answer_or_what_decides(
    kind: str, contexts: tuple[str, ...], texts: tuple[str, ...], whole: str, deciding: str
) -> None:
    task = task_of(kind, Item(1, contexts, texts, 0))
    assert right_answer(TaskEncoder(task, GPT2, 2048).example(0, 0)) == whole
    assert right_answer(TaskEncoder(task, GPT2, 2048, NANOCHAT).example(0, 0)) == deciding


def test_authors_strip_prompts_of_choices_and_schemas_only() -> None:
    choose = task_of("multiple_choice", Item(1, (" \nHe",), ("is here. ", "left"), 0))
    assert prompts(encode(choose)) == ["<|endoftext|>He is here.", "<|endoftext|>He left"]
    schema = task_of("schema", Item(1, (" He", "She"), ("left\n",), 0))
    assert prompts(encode(schema)) == ["<|endoftext|>He left", "<|endoftext|>She left"]
    complete = task_of("language_modeling", Item(1, ("He",), ("left ",), 0))
    assert prompts(encode(complete)) == ["<|endoftext|>He left "]
    as_nanochat = TaskEncoder(choose, GPT2, 2048, NANOCHAT).example(0, 0)
    assert prompts(as_nanochat) == ["<|endoftext|> \nHe is here. ", "<|endoftext|> \nHe left"]


def test_cropping_keeps_the_last_tokens_of_the_whole_answer() -> None:
    item = Item(3, ("one two three four",), ("five six seven", "five eight"), 0)
    example = encode(task_of("multiple_choice", item), context=5)
    assert right_answer(example) == " five six seven" and answers(example) == [" six seven", " eight"]
    assert prompts(example) == [" three four five six seven", " two three four five eight"]
    with pytest.raises(BadBundle, match="an answer of 3 tokens does not fit a context of 3"):
        encode(task_of("multiple_choice", item), context=3)


PIECES = st.text(alphabet=" \n\tab.1é'\x1c\u00a0", min_size=1, max_size=8)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(PIECES, PIECES, PIECES), min_size=4, max_size=6),
    st.sampled_from([" ", "\nAnswer: ", ":"]),
    st.sampled_from(["multiple_choice", "schema"]),
    st.integers(0, 3),
    st.sampled_from([AUTHORS, NANOCHAT]),
)
def test_segments_encode_as_the_whole_prompt_does(
    texts: list[tuple[str, str, str]], delimiter: str, kind: str, shots: int, convention: Convention
) -> None:
    texts = [(a, b if b.strip() else "b", c if c.strip() else "c") for a, b, c in texts]
    items = [
        Item(n, (a,), (b, c), n % 2) if kind == "multiple_choice" else Item(n, (a, b), (c,), n % 2)
        for n, (a, b, c) in enumerate(texts)
    ]
    task = task_of(kind, *items, shots=shots, delimiter=delimiter)
    encoder = TaskEncoder(task, GPT2, 4096, convention)
    whole = TaskEncoder(task, OTHER, 4096, convention)
    assert encoder.can_cut and not whole.can_cut
    for index in range(len(items)):
        a, b = encoder.example(index, 1), whole.example(index, 1)
        assert (a.starts, a.answer_start) == (b.starts, b.answer_start)
        assert all(np.array_equal(x, y) for x, y in zip(a.sequences, b.sequences, strict=True))


def test_segments_encode_as_the_whole_prompt_does_on_the_core_bundle(core_bundle: Bundle) -> None:
    cut = 0
    for task in core_bundle.tasks:
        encoder, whole = TaskEncoder(task, GPT2, 2048), TaskEncoder(task, OTHER, 2048)
        for index in range(8):
            a, b = encoder.example(index, 0), whole.example(index, 0)
            assert (a.starts, a.answer_start, a.gold, a.line) == (b.starts, b.answer_start, b.gold, b.line)
            assert all(np.array_equal(x, y) for x, y in zip(a.sequences, b.sequences, strict=True))
            cut += max(map(len, a.sequences)) == 2048
    assert cut, "no prompt was long enough to be cut"
