"""The package gives the authors' numbers: logits, gradients, 60 steps, schedule rows, windows and prompts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grown_networks import grow
from steepen.data import Tokenizer, ValidationSet
from steepen.data.prepare import PrepareRequest, prepare
from steepen.evaluation.core.bundle import Item, Task
from steepen.evaluation.core.prompt_encoding import TaskEncoder
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.model.stages import StageSchedule
from steepen.optim.config import LRScheduleConfig, OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.training.step_schedule import build_schedule

from ..optim.logical_weights import SINGLE, STACKS, logical
from . import authors_numbers as authors

FILE = Path(__file__).with_suffix(".json").with_name("authors_numbers.json")
SCALE = SizeRule(8, 8, 8, context=16, vocabulary=authors.PADDED, real_vocabulary=authors.REAL)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """The numbers in the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def assert_close(found: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_close(found[key], value, f"{place} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for i, value in enumerate(expected):
            assert_close(found[i], value, f"{place} {i}")
    else:
        same = (
            found == expected
            if isinstance(expected, str)
            else math.isclose(found, expected, rel_tol=1e-8, abs_tol=1e-9)
        )
        assert same, f"{place}: {found} is not {expected}"


def test_the_file_holds_what_the_description_gives() -> None:
    made = authors.numbers()
    if os.environ.get("STEEPEN_WRITE_AUTHORS_NUMBERS"):
        FILE.write_text(json.dumps(made, ensure_ascii=False) + "\n", encoding="utf-8")
    assert_close(made, json.loads(FILE.read_text(encoding="utf-8")))


def make_spec(arm: str) -> RunSpec:
    """The run of `authors_numbers.settings` as a spec."""
    own = find_arm(arm)
    rung = recipe_of(own).at(own, 6, SCALE)
    spec = RunSpec.from_plan(rung, DataConfig("d" * 64), optimizer=OptimizerConfig(momentum_warmup_steps=20))
    staged = StageSchedule.staged((0, 2), (authors.GROWTH / authors.STEPS, 4))
    return replace(
        spec,
        hyperparameters=replace(rung.hyperparameters, learning_rate=0.04),
        schedule=staged if own.passes.grows else rung.schedule,
        steps=authors.STEPS,
        lr_schedule=LRScheduleConfig(rewarm_steps=authors.REWARM),
    )


@pytest.mark.parametrize("arm", authors.ARMS)
def test_sixty_steps_of_training(arm: str, stored: dict[str, Any]) -> None:
    spec, expected = make_spec(arm), stored["training"][arm]
    meta = build_on_meta(spec.shape, spec.arm, spec.hyperparameters.multipliers)
    network = materialize(meta, dtype=torch.float64)
    start, heads = authors.start(arm), authors.HEADS
    half = network.shape.head_dim // 2
    sign = torch.tensor([1.0] * half + [-1.0] * half).double().repeat(heads)[:, None]
    for name, parameter in network.named_parameters():
        block, _, key = name.rpartition(".")
        if not block:
            parameter.data.copy_(start[name])
        elif key in STACKS:  # their RoPE turns the other way
            parts = [(sign if part in "qk" else 1) * start[f"{block}.{part}"] for part in STACKS[key]]
            parameter.data.copy_(torch.stack(parts))
        else:
            parameter.data.copy_(start[f"{block}.{SINGLE[key]}"])
    network.refresh()
    schedule = build_schedule(spec)
    optimizer = Optimizer(network.named_parameters(), spec.hyperparameters, spec.optimizer, network.refresh)
    for step in range(authors.STEPS):
        passes = schedule.networks[schedule.network[step]].passes
        if passes > network.passes:
            optimizer.grow(network.named_parameters(), grow(network, passes))
        if (logits := expected.get(f"logits at {step}")) is not None:
            with torch.no_grad():
                own = network(authors.batch(step)[0], passes=int(schedule.passes[step]))
            assert_close([*authors.probe(own), *own[0, -1, :5].tolist()], logits, f"logits at {step}")
        optimizer.zero_grad()
        network(*authors.batch(step), passes=int(schedule.passes[step])).backward()
        if step == 0:
            gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
            found = {name: authors.probe(value) for name, value in logical(gradients, heads).items()}
            assert_close(found, expected["gradients"], "gradients")
        optimizer.step(float(schedule.lr_factor[step]), step)
        if (weights := expected.get(f"weights after {step + 1}")) is not None:
            own = logical({name: p.detach().clone() for name, p in network.named_parameters()}, heads)
            assert_close({name: authors.probe(value) for name, value in own.items()}, weights, f"step {step}")


@pytest.mark.parametrize("run", authors.RUNS)
def test_rows_of_the_schedule_of_published_runs(run: str, stored: dict[str, Any]) -> None:
    arm, depth = run.split(" d")
    own = find_arm(arm)
    spec = RunSpec.from_plan(recipe_of(own).at(own, int(depth)), DataConfig("d" * 64))
    schedule = build_schedule(spec)
    assert spec.steps == authors.RUNS[run][0]
    for step, factor, momentum in stored["schedule"][run]:
        assert schedule.lr_factor[step] == pytest.approx(factor, rel=1e-12, abs=1e-15)
        assert spec.optimizer.momentum_at(step) == pytest.approx(momentum, rel=1e-12)


def test_packed_validation_windows(stored: dict[str, Any], gpt2: Tokenizer, tmp_path: Path) -> None:
    assert stored["windows"][0] == [50256, 1, 2, 3, 4, 50256, 5]
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in authors.DOCUMENTS)
    )
    (tmp_path / "train.txt").write_text("Some text to train on. " * 20)
    data = prepare(
        PrepareRequest((str(tmp_path / "train.txt"),), val_source=(str(tmp_path / "documents.jsonl"),)),
        tmp_path / "data",
    )
    expected = authors.windows([gpt2.encode(text) for text in authors.DOCUMENTS], 50256)
    batches = ValidationSet(data, authors.CONTEXT).batches(2)
    inputs, targets = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert np.concatenate([inputs, targets[:, -1:]], axis=1).tolist() == expected
    assert len(expected) == 4


@pytest.mark.parametrize("kind", authors.TASKS)
def test_prompts_of_core(kind: Any, stored: dict[str, Any], gpt2: Tokenizer) -> None:
    task = authors.TASKS[kind]
    items = tuple(
        Item(
            line,
            tuple(item.get("context_options") or [item.get("query") or item["context"].strip()]),
            tuple(item.get("choices") or [item["continuation"]]),
            item.get("gold", 0),
        )
        for line, item in enumerate(task["items"], 1)
    )
    made = Task("made", kind, Path("made.jsonl"), task["shots"], task["delimiter"], 0.0, items)
    encoder = TaskEncoder(made, gpt2, 2048)
    for index, expected in enumerate(stored["prompts"][kind]):
        example = encoder.example(index, 0)
        texts = [gpt2.decode_bytes(np.asarray(ids[1:])).decode() for ids in example.sequences]
        assert all(ids[0] == 50256 for ids in example.sequences)
        assert texts == expected[-len(texts) :]
        if kind == "language_modeling":  # the answer begins where the prompt without it ends
            before = gpt2.decode_bytes(np.asarray(example.sequences[0][1 : example.starts[0]])).decode()
            assert before == expected[0]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    """GPT-2's tokenizer."""
    return Tokenizer.gpt2()
