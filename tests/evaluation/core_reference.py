"""Reference scorer of CORE: one example at a time, every prompt encoded as one text, every logit computed.

Slow on purpose. Tests compare the batched scorer with it, and benchmarks/evaluation_speed.py its speed.
"""

from __future__ import annotations

import random

import torch

from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import Item, Task
from steepen.evaluation.core.prompts import ORDER_SEED, SEED_STRIDE, SHOT_SEED
from steepen.evaluation.core.results import Outcome, make_outcome
from steepen.model.network import Network


@torch.no_grad()
def score_one(
    network: Network, tokenizer: Tokenizer, task: Task, index: int, seed: int = 0, passes: int | None = None
) -> Outcome:
    """The outcome of the example at `index` of the shuffled order."""
    items = list(task.items)
    random.Random(ORDER_SEED).shuffle(items)
    item = items[index]
    others = [place for place in range(len(items)) if place != index]
    shots = random.Random(SHOT_SEED + index + SEED_STRIDE * seed).sample(others, task.shots)
    head = "".join(_text(task, items[place], items[place].gold) + "\n\n" for place in shots)
    prompts = [head + _text(task, item, candidate) for candidate in range(item.candidates)]

    start_token = tokenizer.end_of_text
    sequences = [[start_token, *tokenizer.encode(prompt)] for prompt in prompts]
    if task.kind == "language_modeling":
        without = [start_token, *tokenizer.encode((head + item.contexts[0] + task.delimiter).strip())]
        assert sequences[0][: len(without)] == without
        starts = [len(without)]
    elif task.kind == "multiple_choice":
        shared = _common_prefix(sequences)
        starts = [shared] * len(sequences)
    else:
        shared = _common_prefix([sequence[::-1] for sequence in sequences])
        starts = [max(1, len(sequence) - shared) for sequence in sequences]

    context = network.shape.context
    excess = [max(0, len(sequence) - context) for sequence in sequences]
    sequences = [sequence[cut:] for sequence, cut in zip(sequences, excess, strict=True)]
    starts = [start - cut for start, cut in zip(starts, excess, strict=True)]

    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [start_token] * (longest - len(sequence)) for sequence in sequences])
    tokens = tokens.to(network.embedding.device)
    logits = network(tokens, passes=passes)
    losses = logits[:, :-1].logsumexp(-1) - logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    top = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    spans = [slice(start - 1, len(sequence) - 1) for start, sequence in zip(starts, sequences, strict=True)]
    means = [float(losses[row, span].double().mean()) for row, span in enumerate(spans)]
    return make_outcome(task.kind, index, item.line, item.gold, means, bool(top[0, spans[0]].all()))


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
