"""Texts generated during training: at the right steps, once, and without any effect on the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import steepen
from fork_server import fork_ranks
from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.errors import UsageError
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore, read_metrics, read_samples
from steepen.training.run import train
from steepen.training.stopping import Interrupted
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import Trainer
from steepen.utils.json_io import write_json

MakeSpec = Callable[..., RunSpec]
PLAIN = TrainOptions(device="cpu", quiet=True, micro_batch=2, checkpoint_every=3)
SAMPLING = replace(PLAIN, sample_every=5, sample_prompt=("the law", ""))


def losses(store: Path, spec: RunSpec) -> list[float]:
    return [line["loss"] for line in read_metrics(RunStore(store).run(spec).metrics_file) if "loss" in line]


def samples(store: Path, spec: RunSpec) -> list[dict[str, Any]]:
    return read_samples(RunStore(store).run(spec).samples_file)


def test_samples_are_those_of_generate_and_do_not_change_the_run(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("untied-grow")
    without = train(spec, tiny_data, RunStore(tmp_path / "without"), PLAIN)
    state = torch.get_rng_state()
    with_samples = train(spec, tiny_data, RunStore(tmp_path / "with"), SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)
    assert losses(tmp_path / "with", spec) == losses(tmp_path / "without", spec)
    assert with_samples.validation_loss == without.validation_loss
    found = samples(tmp_path / "with", spec)
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (5, 10, 12) for prompt in ("the law", "")
    ]
    last = steepen.generate(
        tmp_path / "with" / spec.hash, ["the law", ""], max_tokens=spec.shape.context - 1, device="cpu"
    )
    assert [line["text"] for line in found[-2:]] == list(last) and all(last)
    assert not RunStore(tmp_path / "without").run(spec).samples_file.exists()


@pytest.mark.parametrize("stop", [4, 5, 6, 11])
def test_no_sample_is_doubled_or_lost_by_a_kill(
    stop: int, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("vanilla")
    train(spec, tiny_data, RunStore(tmp_path / "whole"), SAMPLING)

    def die(self: Trainer, *arguments: Any, original: Any = Trainer._between_steps) -> None:
        if self.step == stop + 1:  # after the step, before its samples and checkpoint
            raise Interrupted(9, self.step)
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", die)
        with pytest.raises(Interrupted):
            train(spec, tiny_data, RunStore(tmp_path / "killed"), SAMPLING)
    file = RunStore(tmp_path / "killed").run(spec).samples_file
    with file.open("a") as damaged:
        damaged.write('{"step": 12, "prompt": "", "te')
    train(spec, tiny_data, RunStore(tmp_path / "killed"), SAMPLING)
    assert samples(tmp_path / "killed", spec) == samples(tmp_path / "whole", spec)
    assert losses(tmp_path / "killed", spec) == losses(tmp_path / "whole", spec)


def run_on_ranks(world: World, spec: RunSpec, data: Dataset, store: Path, options: TrainOptions) -> None:
    train(spec, data, RunStore(store), options, world=world)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_two_ranks_write_the_samples_of_one(
    shard: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec = make_spec("untied-grow")
    options = replace(SAMPLING, fused=None if shard == "optimizer" else False, shard=shard)
    run_on_ranks(World(), spec, tiny_data, tmp_path / "1", options)
    on_ranks(2, run_on_ranks, spec, tiny_data, tmp_path / "2", options)
    assert len(samples(tmp_path / "1", spec)) == 6
    assert samples(tmp_path / "2", spec) == samples(tmp_path / "1", spec)


def test_prompt_that_fills_the_context_is_refused(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    options = replace(SAMPLING, sample_prompt=("law " * 99,))
    spec = make_spec("vanilla")
    with pytest.raises(UsageError, match="leaves no room in the context of 32"):
        train(spec, tiny_data, RunStore(tmp_path), options)
    assert not (tmp_path / spec.hash).exists()


def test_command_line_samples_and_shows_them(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fork_ranks(monkeypatch, tmp_path / "log")
    spec = make_spec("vanilla", steps=4)
    write_json(tmp_path / "spec.json", spec.to_dict())
    words = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    train_words = ["train", "--spec", str(tmp_path / "spec.json"), *words]
    assert main([*train_words, "--sample-prompt", "the"]) == 2
    assert "--sample-prompt needs --sample-every" in capsys.readouterr().err
    assert main([*train_words, "--sample-every", "2", "--sample-prompt", "the", "--gpus", "2"]) == 0
    assert main(["runs", "show", spec.hash, "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "samples at step 2\n" in shown and "samples at step 4" in shown and "“the” " in shown
