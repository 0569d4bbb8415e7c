"""The batched scorer equals the reference scorer for every task type, arm and batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from grown_networks import grow
from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import Bundle, Item, Task
from steepen.evaluation.core.prompt_encoding import Example, TaskEncoder
from steepen.evaluation.core.results import Outcome, SuiteScores, TaskScore, make_outcome
from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core
from steepen.evaluation.core.scorer import (
    Row,
    Scorer,
    make_batches,
    make_rows,
    padded_length,
    supports_attention_mask,
)
from steepen.evaluation.core.suite import CORE17, CORE22
from steepen.model.arms import find_arm
from steepen.model.block import TransformerBlock
from steepen.model.network import Network

from .core_reference import score_one

Make = Callable[..., Network]


def outcomes(folder: Path, label: str, seed: int = 0) -> list[Outcome]:
    lines = (folder / f"{label}.seed{seed}.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    fields = [{name: value[name] for name in value if name != "checksum"} for value in values]
    return [Outcome(**{**value, "losses": tuple(value["losses"])}) for value in fields]


def assert_same(fast: Outcome, slow: Outcome) -> None:
    assert (fast.index, fast.line, fast.correct) == (slow.index, slow.line, slow.correct)
    assert (fast.chosen, fast.gold) == (slow.chosen, slow.gold)
    numbers = [(one.nll, one.bits_per_byte, *one.losses) for one in (fast, slow)]
    for a, b in zip(*numbers, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a == pytest.approx(b, abs=2e-5)


def assert_equals_reference(
    network: Network,
    tokenizer: Tokenizer,
    bundle: Bundle,
    folder: Path,
    options: CoreOptions,
    passes: int | None = None,
) -> None:
    evaluate_core(network, tokenizer, bundle, options, folder=folder, passes=passes)
    for task in bundle.tasks:
        for seed in options.chosen_seeds if task.shots else options.chosen_seeds[:1]:
            for fast in outcomes(folder, task.label, seed):
                slow = score_one(network, tokenizer, task, fast.index, seed, passes, options.convention)
                assert_same(fast, slow)


BOTH = pytest.mark.parametrize("convention", ["authors", "nanochat"])


@BOTH
@pytest.mark.parametrize("arm", ["vanilla", "loop-2", "untied-2", "deep-vanilla", "vanilla+window=9"])
def test_every_arm_scores_equal_the_reference(
    arm: str, convention: str, make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    options = CoreOptions((0, 2), convention=convention)
    assert_equals_reference(make_network(arm, context=200), tokenizer, bundle, tmp_path, options)


def test_conventions_differ_where_they_should(
    make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    network = make_network()
    for name in ("authors", "nanochat"):
        options = CoreOptions((5,), convention=name)
        evaluate_core(network, tokenizer, bundle, options, folder=tmp_path / name)
    for task in bundle.tasks:
        a = outcomes(tmp_path / "authors", task.label, 5)
        b = outcomes(tmp_path / "nanochat", task.label, 5)
        assert [one.correct for one in a] == [one.correct for one in b]
        assert [one.losses for one in a] == [
            tuple(None if x is None else pytest.approx(x, abs=2e-5) for x in one.losses) for one in b
        ]
        differing = sum(x.nll != pytest.approx(y.nll, abs=2e-5) for x, y in zip(a, b, strict=True))
        assert (differing > 0) is (task.kind != "language_modeling")
    assert CoreOptions().chosen_seeds == (0, 1, 2)
    assert CoreOptions(convention="nanochat").chosen_seeds == (1234,)


def test_grown_network_and_other_passes_equal_the_reference(
    make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    network = make_network("untied-grow")
    grow(network, 4)
    assert_equals_reference(network, tokenizer, bundle, tmp_path / "a", CoreOptions((0,), 5))
    assert_equals_reference(
        make_network("loop-2"), tokenizer, bundle, tmp_path / "b", CoreOptions((0,), 5), 5
    )


@pytest.mark.parametrize(
    "options",
    [
        CoreOptions((1,), token_budget=1),
        CoreOptions((1,), share_prefixes=False),
        CoreOptions(token_budget=1, convention="nanochat"),
    ],
)
def test_batching_does_not_change_a_score(
    options: CoreOptions, make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    assert_equals_reference(make_network(), tokenizer, bundle, tmp_path, options)


@BOTH
def test_cropped_prompts_equal_the_reference(
    convention: str, make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    network = make_network(context=40)
    encoder = TaskEncoder(bundle.task("choose_shots"), tokenizer, 40)
    assert any(len(sequence) == 40 for i in range(14) for sequence in encoder.example(i, 0).sequences)
    options = CoreOptions((0,), convention=convention)
    assert_equals_reference(network, tokenizer, bundle, tmp_path, options)


@BOTH
def test_core_bundle_scores_equal_the_reference(
    convention: str, make_network: Make, tokenizer: Tokenizer, core_bundle: Bundle, tmp_path: Path
) -> None:
    options = CoreOptions((1,), 2, convention=convention)
    assert_equals_reference(make_network(context=384), tokenizer, core_bundle, tmp_path, options)


class PlainBlock(TransformerBlock):
    """A custom block without a `mask` argument."""

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, rotary) * 0.9


def test_block_without_a_mask_is_scored_without_sharing(
    make_network: Make, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr("steepen.model.block.PlainBlock", PlainBlock, raising=False)
    network = make_network(replace(find_arm("loop-2"), block="steepen.model.block:PlainBlock"))
    assert not supports_attention_mask(network) and supports_attention_mask(make_network())
    assert_equals_reference(network, tokenizer, bundle, tmp_path, CoreOptions((0,), 4))


def unigram(make_network: Make, tokenizer: Tokenizer, favourites: dict[str, float]) -> Network:
    """A network with the same logits at every position, so its answers are known."""
    network = make_network("vanilla")
    for parameter in network.parameters():
        parameter.data.zero_()
    network.embedding.data.fill_(1.0)
    for text, logit in favourites.items():
        (token,) = tokenizer.encode(text)
        network.head.data[token] = logit / network.shape.width
    return network


def test_scores_equal_hand_computed_values(make_network: Make) -> None:
    tokenizer = Tokenizer.train(["a b c d"] * 3, 258)  # bytes, and " a" or the like merged first
    network = unigram(make_network, tokenizer, {"x": 3.0, "y": 1.0})
    norm = math.log(382 + math.exp(3.0) + math.exp(1.0))
    x, y, other = norm - 3.0, norm - 1.0, norm
    choose = Task("choose", "multiple_choice", Path("a"), 0, " ", 0.5, (Item(1, ("q",), ("yy", "xxzz"), 1),))
    ending = Task("ending", "schema", Path("b"), 0, " ", 0.5, (Item(1, ("q", "r"), ("xy",), 1),))
    right = Task("right", "language_modeling", Path("c"), 0, " ", 0.0, (Item(1, ("q",), ("xx",), 0),))
    found = evaluate_core(network, tokenizer, Bundle(Path(), (choose, ending, right)))
    scores = {task.label: task for task in found.tasks}
    # Both choices begin with the blank, which the prompt without its answer ends in.
    assert scores["choose"].nll == pytest.approx((2 * x + 2 * other) / 4, abs=1e-5)
    assert scores["choose"].accuracy == float((2 * x + 2 * other) / 4 < y)
    # Four bytes, one token each; the blank before them is not counted.
    assert scores["choose"].bits_per_byte == pytest.approx((2 * x + 2 * other) / 4 / math.log(2), abs=1e-5)
    # Nothing tells the contexts apart: the first of equals is chosen, and the second was right.
    assert scores["ending"].nll == pytest.approx((x + y) / 2, abs=1e-5)
    assert (scores["ending"].accuracy, scores["ending"].centered) == (0.0, -1.0)
    # The answer is " xx": the blank is not the likeliest token, so not every token came first.
    assert scores["right"].nll == pytest.approx((other + 2 * x) / 3, abs=1e-5)
    assert scores["right"].bits_per_byte == pytest.approx((other + 2 * x) / 2 / math.log(2), abs=1e-5)
    assert scores["right"].accuracy == 0.0
    found = evaluate_core(
        network, tokenizer, Bundle(Path(), (choose, ending)), CoreOptions(convention="nanochat")
    )
    # The tokens that decide: after the common prefix, and the common suffix with its blank.
    assert found.tasks[0].nll == pytest.approx((2 * x + 2 * other) / 4, abs=1e-5)
    assert found.tasks[1].nll == pytest.approx((other + x + y) / 3, abs=1e-5)
    assert found.tasks[0].bits_per_byte is None  # a part of the answer has no bits per byte of the answer


def test_answer_nll_covers_what_the_choices_share(make_network: Make) -> None:
    tokenizer = Tokenizer.train(["a b c d"] * 3, 258)
    network = unigram(make_network, tokenizer, {"x": 3.0, "y": 1.0})
    norm = math.log(382 + math.exp(3.0) + math.exp(1.0))
    items = (Item(1, ("q",), ("xy", "xz"), 0),)
    task = Task("t", "multiple_choice", Path("a"), 0, " ", 0.5, items)
    for convention, nll in {"authors": norm - 2.0, "nanochat": norm - 1.0}.items():
        options = CoreOptions(convention=convention)
        found = evaluate_core(network, tokenizer, Bundle(Path(), (task,)), options)
        assert found.tasks[0].nll == pytest.approx(nll, abs=1e-5)


def test_language_modelling_is_right_only_when_every_token_is(make_network: Make) -> None:
    tokenizer = Tokenizer.train(["a b c d"] * 3, 258)
    task = Task("t", "language_modeling", Path("c"), 0, " ", 0.0, (Item(1, ("q",), ("  ",), 0),))
    network = unigram(make_network, tokenizer, {" ": 3.0})
    assert evaluate_core(network, tokenizer, Bundle(Path(), (task,))).tasks[0].accuracy == 1.0


def test_candidate_without_own_tokens_is_treated_as_in_both_conventions() -> None:
    nan = float("nan")

    def outcome(*means: float) -> Outcome:
        return make_outcome("multiple_choice", Example(0, 1, 1, (), ()), means, False, None, None)

    assert outcome(nan, 0.5).chosen == 0
    assert outcome(0.5, nan).chosen == 0
    assert outcome(0.5, nan, 0.2).chosen == 2
    assert outcome(0.5, nan).nll is None
    assert outcome(0.5, 0.5).chosen == 0


def score(label: str, *accuracies: float, baseline: float = 0.0, nll: float = 2.0) -> TaskScore:
    task = Task(label, "language_modeling", Path("x"), 1, " ", baseline, ())
    right = [[Outcome(i, i, i < round(10 * a), nll) for i in range(10)] for a in accuracies]
    return TaskScore.of(task, dict(enumerate(right)))


def test_seeds_are_averaged_within_a_task_before_tasks() -> None:
    tasks = [score(label, 0.1, 0.3) for label in CORE22[1:]]
    tasks.append(score(CORE22[0], 0.6, baseline=0.2, nll=3.0))  # zero-shot: one seed stands for all
    found = SuiteScores(tuple(tasks), (0, 1), "authors").to_dict()
    assert found["core22"] == pytest.approx((21 * 0.2 + 0.5) / 22)
    assert found["core22_by_seed"] == pytest.approx([(21 * 0.1 + 0.5) / 22, (21 * 0.3 + 0.5) / 22])
    # The population's deviation of two values is half their distance.
    assert found["core22_seed_sd"] == pytest.approx(21 * 0.2 / 22 / 2)
    assert found["core17_seed_sd"] == pytest.approx(16 * 0.2 / 17 / 2)
    assert found["convention"] == "authors"
    assert found["nll22"] == pytest.approx((21 * 2.0 + 3.0) / 22)
    assert found["core17"] == pytest.approx((16 * 0.2 + 0.5) / 17)
    assert CORE22[0] in CORE17


def test_average_over_missing_tasks_is_none() -> None:
    found = SuiteScores((score("copa", 0.5),), (0,), "authors").to_dict()
    assert found["core22"] is None and found["core17"] is None and found["core22_by_seed"] is None
    assert found["mean_centered"] == 0.5


def test_answer_without_tokens_is_left_out_of_the_nll() -> None:
    task = Task("t", "multiple_choice", Path("x"), 0, " ", 0.0, ())
    found = TaskScore.of(task, {0: [Outcome(0, 1, True, 2.0), Outcome(1, 2, False, None)]})
    assert (found.nll, found.accuracy) == (2.0, 0.5)


def test_shared_prefix_is_computed_once(tokenizer: Tokenizer, bundle: Bundle) -> None:
    encoder = TaskEncoder(bundle.task("choose_shots"), tokenizer, 200)
    shared = apart = 0
    for index in range(14):
        example = encoder.example(index, 0)
        rows = make_rows(example, 0)
        shared += sum(map(len, rows))
        apart += sum(map(len, make_rows(example, 0, share_prefixes=False)))
        asked = sum(len(example.sequences[candidate]) - start for candidate, start in example.spans)
        assert sum(len(row.targets) for row in rows) == asked
    assert shared < 0.6 * apart


def test_answers_of_one_token_need_no_branch(tokenizer: Tokenizer) -> None:
    items = (Item(1, ("the cat sat on the",), ("mat", "tree"), 0),)
    assert len(tokenizer.encode(" mat")) == len(tokenizer.encode(" tree")) == 1
    task = Task("t", "multiple_choice", Path("x"), 0, " ", 0.5, items)
    (row,) = make_rows(TaskEncoder(task, tokenizer, 96).example(0, 0), 0)
    assert row.tree is None and len(row) == 1 + len(tokenizer.encode("the cat sat on the"))


def batches_of(tokenizer: Tokenizer, bundle: Bundle, budget: int) -> list[list[Row]]:
    encoder = TaskEncoder(bundle.task("choose"), tokenizer, 96)
    rows = [row for index in range(14) for row in make_rows(encoder.example(index, 0), 6 * index)]
    return list(make_batches(rows, budget, 1 << 20))


def test_batches_stay_within_the_budget_and_contain_every_row(tokenizer: Tokenizer, bundle: Bundle) -> None:
    batches = batches_of(tokenizer, bundle, 120)
    assert len(batches) > 3
    assert all(len(batch) * padded_length(batch) <= 120 or len(batch) == 1 for batch in batches)
    slots = np.concatenate([row.span_ids for batch in batches for row in batch])
    together = batches_of(tokenizer, bundle, 1 << 20)
    whole = np.concatenate([row.span_ids for batch in together for row in batch])
    assert np.array_equal(np.sort(slots), np.sort(whole))


def test_batch_too_large_for_the_device_is_scored_in_halves(
    make_network: Make, tokenizer: Tokenizer, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network()
    batches = batches_of(tokenizer, bundle, 1 << 20)
    expected = Scorer(network).score(batches, 84)
    real, most = Network.hidden_states, 3

    def small(self: Network, tokens: Tensor, *rest: object, **named: object) -> Tensor:
        if len(tokens) > most:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(self, tokens, *rest, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Network, "hidden_states", small)
    found = Scorer(network).score(batches, 84)
    assert np.allclose(found.loss, expected.loss, atol=1e-4)
    assert np.array_equal(found.tokens, expected.tokens)
    most = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Scorer(network).score(batches, 84)
