"""The authors' numbers on small inputs, made from a description of their code and without this package.

`numbers()` computes logits, gradients and weights of 60 steps in fp64 with the references of
`tests/model/authors_network.py` and `tests/optim/authors_training.py`, rows of their learning-rate schedule,
packed windows and CORE prompts. `authors_numbers.json` holds them; `test_authors_numbers.py` compares this
module and the package with the file, which therefore changes only with the description. It is written by
`STEEPEN_WRITE_AUTHORS_NUMBERS=1 python -m pytest tests/authors`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..model.authors_network import Operator
from ..optim.authors_step import learning_rate_factor, muon_momentum
from ..optim.authors_training import MATRICES, AuthorsTraining, Settings

WIDTH, HIDDEN, HEADS, PADDED, REAL, STEPS, GROWTH, REWARM = 48, 128, 6, 40, 37, 60, 36, 8
# arm: prelude, core, coda, tied, passes, grown passes, operator's α, residual, output, ELRM, HLRM, WD, betas,
# ε, warm-up, warm-down, at learning rate 0.04.
ARMS: dict[str, tuple[Any, ...]] = {
    "vanilla": (6, 0, 0, True, 1, 1, None, 0.25, 0.5, 0.452548339959, 0.11313708499, 0.0707106781187,
                (0.8, 0.95), 1e-10, 40, 0.6),
    "operator-1": (2, 2, 2, True, 1, 1, 1.0, 0.5, 1.0, 0.905096679919, 0.08, 0.05, (0.8, 0.98), 1e-10,
                   0, 0.8),
    "loop-grow": (2, 2, 2, True, 2, 4, 0.707106781187, 0.25, 1.0, 0.32, 0.11313708499, 0.05, (0.8, 0.95),
                  1e-10, 40, 1.0),
    "untied-grow": (2, 2, 2, False, 2, 4, 1.0, 0.25, 1.0, 0.16, 0.16, 0.0707106781187, (0.8, 0.99), 1e-8, 40,
                    1.0),
}  # fmt: skip
# steps, warm-up, warm-down and first grown step of published runs.
RUNS = {
    "vanilla d6": (1142, 40, 0.6, None), "operator-1 d8": (2355, 0, 0.8, None),
    "loop-2 d18": (15775, 40, 1.0, None),
    "untied-grow d6": (1826, 40, 1.0, 1095), "untied-grow d26": (68699, 40, 1.0, 52898),
}  # fmt: skip
DOCUMENTS = (
    "A short text.",
    "Another one, a little longer than it.",
    "Third.",
    "And a last document, at the end.",
)
CONTEXT = 6
TASKS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "delimiter": "\nAnswer: ", "shots": 1,
        "items": [
            {"query": "Sky?", "choices": ["blue", "green"], "gold": 0},
            {"query": "Grass?", "choices": ["dark red", "dark green"], "gold": 1},
            {"query": "Snow?", "choices": ["white", "black"], "gold": 0},
        ],
    },
    "schema": {
        "delimiter": " ", "shots": 1,
        "items": [
            {"context_options": ["The cup broke because the cup", "The cup broke because the floor"],
             "continuation": "was thin.", "gold": 0},
            {"context_options": ["Ann thanked Bob, since Ann", "Ann thanked Bob, since Bob"],
             "continuation": "had helped.", "gold": 1},
        ],
    },
    "language_modeling": {
        "delimiter": " ", "shots": 2,
        "items": [
            {"context": " one two three ", "continuation": "four"},
            {"context": "a b c", "continuation": "d e"},
            {"context": "red green", "continuation": "blue"},
        ],
    },
}  # fmt: skip


def settings(arm: str) -> Settings:
    """A run of 60 steps of an arm."""
    p, c, d, tied, first, last, alpha, residual, output, elrm, hlrm, decay, betas, eps, warmup, down = ARMS[
        arm
    ]
    return Settings(
        p, c, d, tied, first, last, GROWTH if last > first else None, HEADS, REAL,
        None if alpha is None else Operator(alpha), residual, output, 0.04, elrm, hlrm, decay, betas, eps,
        STEPS, warmup, down, rewarm=REWARM, momentum_warmup=20,
    )  # fmt: skip


def start(arm: str) -> dict[str, Tensor]:
    """The first weights; numpy's frozen generator gives the same on every machine."""
    run, source = settings(arm), np.random.RandomState(7)
    shapes = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), **dict.fromkeys(("gate", "up"), (HIDDEN, WIDTH)),
              "down": (WIDTH, HIDDEN)}  # fmt: skip
    places = [f"prelude.{i}" for i in range(run.prelude)]
    places += [f"cores.{k}.{i}" for k in range(1 if run.tied else run.passes) for i in range(run.core)]
    places += [f"coda.{i}" for i in range(run.coda)]
    found = {name: 0.3 * source.standard_normal((PADDED, WIDTH)) for name in ("embedding", "head")}
    found["head"][REAL:] = 0
    for place in places:
        for key in MATRICES:
            shape = shapes["qkvo"[0] if key in "qkvo" else key]
            found[f"{place}.{key}"] = source.standard_normal(shape) / shape[1] ** 0.5
    return {name: torch.from_numpy(value) for name, value in found.items()}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Four windows of twelve targets."""
    tokens = torch.from_numpy(np.random.RandomState(1000 + step).randint(0, REAL, (4, 13)))
    return tokens[:, :-1], tokens[:, 1:]


def probe(values: Tensor) -> list[float]:
    """Norm, and a projection that tells rows from columns and signs."""
    flat = values.detach().double().flatten()
    return [float(flat.norm()), float(flat @ torch.cos(torch.arange(len(flat)).double()))]


def training(arm: str) -> dict[str, Any]:
    """Logits at the first and the growth step, gradients of the first, weights after 1, 35 and 60 steps."""
    run = settings(arm)
    weights = start(arm)
    waiting = {
        f"cores.{core}.{block}.{key}": torch.ones_like(weights[f"cores.0.{block}.{key}"])
        for core in range(run.passes, run.cores)
        for block in range(run.core)
        for key in MATRICES
    }
    reference = AuthorsTraining(run, {**weights, **waiting})
    found: dict[str, Any] = {}
    for step in range(STEPS):
        if step == run.growth_step:
            reference.grow()
        gradients = reference.gradients(step, *batch(step))
        if step in (0, GROWTH):
            logits = reference.logits(step, batch(step)[0])
            found[f"logits at {step}"] = [*probe(logits), *logits[0, -1, :5].tolist()]
        if step == 0:
            found["gradients"] = {name: probe(gradients[name]) for name in weights}
        reference.step(step, gradients)
        if step + 1 in (1, 35, STEPS):
            hidden = reference.waiting(step)
            found[f"weights after {step + 1}"] = {
                name: probe(weight) for name, weight in reference.weights.items() if name not in hidden
            }
    return found


def schedule() -> dict[str, Any]:
    """Learning-rate factor and momentum at chosen steps of published runs."""
    found: dict[str, Any] = {}
    for name, (steps, warmup, down, growth) in RUNS.items():
        grown = [] if growth is None else [growth - 1, growth, growth + 1, growth + 39, growth + 40]
        chosen = sorted({0, 1, 38, 39, 40, 41, 299, 300, steps // 2, steps - 2, steps - 1, *grown})
        found[name] = [
            [step, learning_rate_factor(step, steps, warmup, down, growth), muon_momentum(step)]
            for step in chosen
        ]
    return found


def windows(documents: list[list[int]], end_of_text: int) -> list[list[int]]:
    """Validation windows: every document after <|endoftext|>, joined in order, cut every context + 1."""
    stream = [token for ids in documents for token in (end_of_text, *ids)]
    count = len(stream) // (CONTEXT + 1)
    return [stream[i * (CONTEXT + 1) : (i + 1) * (CONTEXT + 1)] for i in range(count)]


def candidate_texts(kind: str, task: dict[str, Any], item: dict[str, Any]) -> list[str]:
    """An example with each of its candidates."""
    middle = task["delimiter"]
    if kind == "multiple_choice":
        return [f"{item['query']}{middle}{choice}" for choice in item["choices"]]
    if kind == "schema":
        return [f"{context}{middle}{item['continuation']}" for context in item["context_options"]]
    return [f"{item['context'].strip()}{middle}{item['continuation']}"]


def prompts() -> dict[str, list[list[str]]]:
    """The prompts of every example with seed 0, of each candidate; language modelling also without answer."""
    found: dict[str, list[list[str]]] = {}
    for kind, task in TASKS.items():
        items = list(task["items"])
        random.Random(1337).shuffle(items)
        found[kind] = []
        for index, item in enumerate(items):
            others = [place for place in range(len(items)) if place != index]
            shots = random.Random(0 + index).sample(others, task["shots"])
            shown = [candidate_texts(kind, task, items[i])[items[i].get("gold", 0)] for i in shots]
            own = ["\n\n".join([*shown, text]) for text in candidate_texts(kind, task, item)]
            if kind == "language_modeling":
                own.insert(0, "\n\n".join([*shown, item["context"].strip() + task["delimiter"]]).rstrip())
            else:
                own = [text.strip() for text in own]
            found[kind].append(own)
    return found


def numbers() -> dict[str, Any]:
    """Everything that the file holds."""
    return {
        "training": {arm: training(arm) for arm in ARMS},
        "schedule": schedule(),
        "windows": windows([[1, 2, 3, 4], [5] * 9, [6, 7], [8, 9, 10, 11, 12, 13]], 50256),
        "prompts": prompts(),
    }
