"""Runs that grow along every axis: kills in every stage, ranks, logged jumps, FLOPs, trunks, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import steepen.training.train_step as accumulation
from ranks import on_ranks
from steepen.data import Dataset
from steepen.distributed.world import World
from steepen.evaluation.load import load
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.runs.spec import RunSpec, code_digest, expected_flops
from steepen.runs.store import RunStore, read_metrics
from steepen.runs.trunk import share
from steepen.training.run import train
from steepen.training.run_state import StateLoader
from steepen.training.train_options import TrainOptions
from training_fixtures import QUIET, assert_same_result

MakeSpec = Callable[..., RunSpec]
WholeRun = Callable[[RunSpec], RunStore]
GROWTH = {  # steps 0 to 11; the data's rows have 32 tokens
    "passes": "untied-2+passes=2-3-4@0.25-0.6",
    "blocks": "vanilla+blocks=0-1-all@0.25-0.6",
    "copies": "operator-1+blocks=2-all@0.5+new_blocks=copy+block_order=interleaved",
    "width": "vanilla+kv_heads=2+width=0.5-1@0.5",
    "zero width": "untied-2+width=0.25-0.5-1@0.25-0.6+new_width=zero",
    "context": "vanilla+context=0.25-0.5-1@0.25-0.6",
    "experts": "vanilla+kv_heads=2+experts=1-8@0.25+active_experts=4",
    "copies of experts": "untied-2+experts=1-2-4@0.25-0.6+balance=loss+shared_experts=1",
    "all": "untied-2+passes=2-4@0.6+blocks=2-all@0.25+width=0.5-1@0.25+context=0.5-1@0.4+experts=1-4@0.4",
}
KEEPS = ("blocks", "width", "zero width", "experts")  # what the network computes


class Killed(Exception):
    """Stands for a process that ends."""


def make(make_spec: MakeSpec, case: str, **changes: Any) -> RunSpec:
    return make_spec(GROWTH[case], depth=4, **changes)


@pytest.mark.parametrize("case", GROWTH)
def test_a_run_killed_across_every_stage_ends_with_the_same_weights(
    case: str, make_spec: MakeSpec, whole_run: WholeRun, tiny_data: Dataset, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spec = make(make_spec, case)
    if case in ("width", "experts", "copies of experts", "all"):
        spec = replace(spec, optimizer=replace(spec.optimizer, growth_state="copy"))
    broken = RunStore(tmp_path / "broken")
    starts = [start for start, _ in spec.networks[1:]]
    left = sorted({step for start in starts for step in (start - 1, start, start + 2)})

    def deadly(
        self: Optimizer, factor: float, step: int | None = None, original: Any = Optimizer.step
    ) -> Tensor:
        if left and step == left[0]:
            del left[0]
            raise Killed
        return original(self, factor, step)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", deadly)
        while left:
            with pytest.raises(Killed):
                train(spec, tiny_data, broken, QUIET)
    train(spec, tiny_data, broken, QUIET)
    assert_same_result(whole_run(spec), broken, spec)


class LearntMix(torch.nn.Module):
    """A custom boundary that learns how much of e it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.ones(1))

    def forward(self, h: Tensor, e: Tensor, alpha: float, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(h) + self.share * e


MIX = LearntMix()


def test_a_parameter_of_a_custom_boundary_is_kept_when_a_run_grows(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_spec("untied-grow")
    mine = replace(plain.arm, name="mine", core_boundary=f"{__name__}:MIX")
    spec = replace(plain, arm=mine, code=code_digest(mine))
    shares: list[tuple[float, float]] = []

    def grow(self: StateLoader, *words: Any, original: Any = StateLoader.grow) -> Any:
        before = MIX.share.item()
        network, optimizer = original(self, *words)
        shares.append((before, network.get_parameter("core_boundary.share").item()))
        return network, optimizer

    monkeypatch.setattr(StateLoader, "grow", grow)
    train(spec, tiny_data, RunStore(tmp_path), QUIET)
    ((before, after),) = shares
    assert before == after


@pytest.mark.parametrize("case", GROWTH)
def test_the_jump_of_the_loss_is_logged(case: str, make_spec: MakeSpec, whole_run: WholeRun) -> None:
    spec = make(make_spec, case)
    store = whole_run(spec)
    lines = [line for line in read_metrics(store.run(spec).metrics_file) if "growth_loss_after" in line]
    assert [line["step"] for line in lines] == [start for start, _ in spec.networks[1:]]
    jumps = [line["growth_loss_after"] - line["growth_loss_before"] for line in lines]
    if case in KEEPS:
        assert max(map(abs, jumps)) < 1e-5  # fp32
    else:  # small in a run of so few steps
        assert any(jumps)


def train_all(world: World, specs: list[RunSpec], data: Dataset, store: Path, options: TrainOptions) -> None:
    for spec in specs:
        train(spec, data, RunStore(store), options, world=world)


def test_two_ranks_grow_as_one(make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path) -> None:
    copied = OptimizerConfig(growth_state="copy")
    cases = ["blocks", "width", "context", "experts", "copies of experts", "all"]
    specs = [make(make_spec, case, steps=8, optimizer=copied) for case in cases]
    options = TrainOptions(device="cpu", quiet=True, micro_batch=2, fused=False)
    train_all(World(), specs, tiny_data, tmp_path / "one", options)
    shards: list[Literal["optimizer", "full"]] = ["optimizer", "full"]
    for shard in shards:
        on_ranks(2, train_all, specs, tiny_data, tmp_path / shard, replace(options, shard=shard))
    for spec in specs:
        found: dict[str, list[float]] = {}
        for name in ("one", *shards):
            lines = read_metrics(RunStore(tmp_path / name).run(spec).metrics_file)
            keys = ("loss", "growth_loss_before", "growth_loss_after")
            found[name] = [line[key] for line in lines for key in keys if key in line]
        assert len(found["one"]) == 8 + 2 * (len(spec.networks) - 1)
        for shard in shards:
            assert found[shard] == pytest.approx(found["one"], abs=1e-6), (spec.arm.name, shard)


def test_fully_sharded_ranks_with_unequal_validation_grow_as_one(
    make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    """Three windows for two ranks: the rank with one takes part in all forwards, with the passes of each."""
    spec = make_spec("untied-grow", steps=4, validation_tokens=96)
    options = TrainOptions(device="cpu", quiet=True, micro_batch=1, fused=False, shard="full")
    train_all(World(), [spec], tiny_data, tmp_path / "one", options)
    on_ranks(2, train_all, [spec], tiny_data, tmp_path / "full", options)
    one, full = (
        [
            (line["growth_loss_before"], line["growth_loss_after"])
            for line in read_metrics(RunStore(tmp_path / name).run(spec).metrics_file)
            if "growth_loss_after" in line
        ]
        for name in ("one", "full")
    )
    assert len(one) == 1 and full[0] == pytest.approx(one[0], abs=1e-6)


@pytest.mark.parametrize("case", GROWTH)
def test_the_flops_of_a_plan_are_those_of_the_gemms_that_are_executed(
    case: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make(make_spec, case, steps=8)
    executed = 0

    def counted(*words: Any, original: Any = accumulation.accumulate, **options: Any) -> Tensor:
        nonlocal executed
        with FlopCounterMode(display=False) as counter:
            result = original(*words, **options)
        of_all = counter.get_flop_counts()["Global"]
        executed += sum(flops for operation, flops in of_all.items() if "attention" not in str(operation))
        return result

    monkeypatch.setattr(accumulation, "accumulate", counted)
    record = train(spec, tiny_data, RunStore(tmp_path), replace(QUIET, fused=False))
    assert executed == expected_flops(spec, "matrix")
    assert record.flops == expected_flops(spec)


@pytest.mark.parametrize("case", ["blocks", "context", "experts"])
def test_a_branch_at_growth_equals_the_run_trained_alone(
    case: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    data = replace(make(make_spec, case).data, pool_tokens=7_000)
    first = replace(make(make_spec, case, steps=16), data=data)
    schedule = first.schedule
    earlier = tuple(
        replace(stage, start=0.8 * (stage.start or 0.0)) for stage in schedule.stages
    )  # grows before the other
    second = replace(first, schedule=replace(schedule, stages=earlier))
    assert first.trunk == second.trunk and (first.branch_point, second.branch_point) == (4, 3)
    together, alone = RunStore(tmp_path / "together"), RunStore(tmp_path / "alone")
    assert share(together, [first, second]) == [second]
    for spec in (first, second):
        train(spec, tiny_data, together, QUIET)
        train(spec, tiny_data, alone, QUIET)
        assert_same_result(together, alone, spec)
    record = together.record(second)
    assert record is not None and record.trunk_steps == 3


@pytest.mark.parametrize("case", ["width", "all"])
def test_checkpoints_of_every_stage_are_loaded_as_they_are(
    case: str, make_spec: MakeSpec, tiny_data: Dataset, tmp_path: Path
) -> None:
    spec, store = make(make_spec, case), RunStore(tmp_path)
    record = train(spec, tiny_data, store, replace(QUIET, keep_every=1))
    last = load(store.run(spec).path, device="cpu")
    assert last.network.shape == spec.shape
    assert record.parameters.stored == sum(p.numel() for p in last.network.parameters())
    start, network = spec.networks[1]
    before = load(store.run(spec).checkpoints / f"{start:08d}", device="cpu").network
    _, first = spec.networks[0]
    assert before.shape == first.shape != network.shape
    assert torch.isfinite(before(torch.zeros(1, first.shape.context, dtype=torch.long))).all()
