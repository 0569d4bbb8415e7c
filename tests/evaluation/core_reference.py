"""Reference scorer of CORE: one example at a time, every prompt encoded as one text, every logit computed.

Slow on purpose, and written from the description of both conventions in docs/evaluation.md without the
package's prompts, encoding or results. Tests compare the batched scorer with it, and
benchmarks/evaluation_speed.py its speed.
"""

from __future__ import annotations

import math
import random

import torch

from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import Item, Task
from steepen.evaluation.core.results import Outcome
from steepen.model.network import Network


@torch.no_grad()
def score_one(
    network: Network,
    tokenizer: Tokenizer,
    task: Task,
    index: int,
    seed: int = 0,
    passes: int | None = None,
    convention: str = "authors",
) -> Outcome:
    """The outcome of the example at `index` of the shuffled order."""
    authors = {"authors": True, "nanochat": False}[convention]
    items = list(task.items)
    random.Random(1337).shuffle(items)
    item = items[index]
    others = [place for place in range(len(items)) if place != index]
    shots = random.Random(seed + index).sample(others, task.shots)
    shown = [_text(task, items[place], items[place].gold) for place in shots]
    prompts = ["\n\n".join([*shown, _text(task, item, candidate)]) for candidate in range(item.candidates)]
    chooses = task.kind != "language_modeling"
    if authors and chooses:
        prompts = [prompt.strip() for prompt in prompts]

    start_token = tokenizer.end_of_text

    def encode(text: str) -> list[int]:
        return [start_token, *tokenizer.encode(text)]

    sequences = [encode(prompt) for prompt in prompts]
    if task.kind == "language_modeling":
        without = encode("\n\n".join([*shown, item.contexts[0] + task.delimiter]).strip())
        assert sequences[0][: len(without)] == without
        starts = [len(without)]
    elif task.kind == "multiple_choice":
        starts = [_common_prefix(sequences)] * len(sequences)
    else:
        shared = _common_prefix([sequence[::-1] for sequence in sequences])
        starts = [max(1, len(sequence) - shared) for sequence in sequences]
    answer_start = starts[item.gold]
    if authors and chooses:  # the whole right answer
        right = item.candidate(item.gold)[1].rstrip()
        assert prompts[item.gold].endswith(right.lstrip())
        before = prompts[item.gold].removesuffix(right) if prompts[item.gold].endswith(right) else ""
        answer_start = _common_prefix([sequences[item.gold], encode(before)])

    context = network.shape.context
    excess = [max(0, len(sequence) - context) for sequence in sequences]
    sequences = [sequence[-context:] for sequence in sequences]
    starts = [start - cut for start, cut in zip(starts, excess, strict=True)]
    answer_start -= excess[item.gold]

    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [start_token] * (longest - len(sequence)) for sequence in sequences])
    tokens = tokens.to(network.embedding.device)
    logits = network(tokens, passes=passes)
    losses = logits[:, :-1].logsumexp(-1) - logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    top = logits[:, :-1].argmax(-1) == tokens[:, 1:]

    def mean(row: int, start: int) -> float:
        return float(losses[row, start - 1 : len(sequences[row]) - 1].double().mean())

    nll = mean(item.gold, answer_start)
    bits = None
    if authors or not chooses:  # the whole right answer, over its bytes
        size = len(item.candidate(item.gold)[1].strip().encode("utf-8"))
        bits = nll * (len(sequences[item.gold]) - answer_start) / math.log(2) / size
    if not chooses:
        greedy = bool(top[0, starts[0] - 1 : len(sequences[0]) - 1].all())
        return Outcome(index, item.line, greedy, nll, bits_per_byte=bits)
    means = [mean(row, start) for row, start in enumerate(starts)]
    chosen = means.index(min(means))  # the first on ties, and the first if its mean is over no token
    return Outcome(
        index,
        item.line,
        chosen == item.gold,
        None if math.isnan(nll) else nll,
        chosen,
        item.gold,
        tuple(None if math.isnan(value) else value for value in means),
        bits,
    )


def _text(task: Task, item: Item, candidate: int) -> str:
    context, answer = item.candidate(candidate)
    return f"{context}{task.delimiter}{answer}"


def _common_prefix(sequences: list[list[int]]) -> int:
    """Length of the common prefix of all sequences."""
    count = 0
    while all(len(sequence) > count for sequence in sequences):
        if len({sequence[count] for sequence in sequences}) > 1:
            break
        count += 1
    return count
