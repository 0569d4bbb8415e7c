"""The hash of a run spec is a contract: what it covers, what it leaves out, and literal hashes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import MISSING, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from steepen.model.arm import Arm
from steepen.model.arms import ARMS, find_arm
from steepen.model.config import ModelOptions
from steepen.model.shape import Shape
from steepen.optim.config import LRScheduleConfig, OptimizerConfig
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.paper_tables import recipe_of
from steepen.requests.app import main
from steepen.runs.spec import DataConfig, RunSpec, hash_content
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset

DATA = DataConfig("d" * 64)


def paper_spec(arm: str, depth: int = 8, **changes: Any) -> RunSpec:
    found = find_arm(arm)
    return RunSpec.from_plan(
        recipe_of(found).at(found, depth), **{"data": DATA, "precision": "bf16", **changes}
    )


def pinned() -> dict[str, RunSpec]:
    custom = OptimizerConfig(momentum=0.9, variance_reduction="row", growth_state="copy")
    return {
        "vanilla d8": paper_spec("vanilla"),
        "untied-grow d8": paper_spec("untied-grow"),
        "ablation": paper_spec("loop-2-2-c-3", 12),
        "custom optimizer config": paper_spec("operator-1", optimizer=custom),
        "pooled data": paper_spec("loop-2", data=DataConfig("d" * 64, pool_tokens=10**8, epochs=4)),
        "options and seed": paper_spec("vanilla", 6, seed=3, options=ModelOptions(softcap=15.0)),
    }


# Runs on disk are found under these names. If one of them changes, so does the name of every finished run.
# `PYTHONPATH=src .venv/bin/python tests/runs/test_run_identity.py` prints HASHES and DEFAULTS as of now.
HASHES: dict[str, str] = {
    "vanilla d8": "5dbe1e4b36f96e01",
    "untied-grow d8": "5c5f5251f4023edc",
    "ablation": "85f29b79ebfc369f",
    "custom optimizer config": "3c2706d681878b81",
    "pooled data": "6efa85053c414d4e",
    "options and seed": "93a39cf2615d7667",
}

# The hash leaves out fields that have their default, so a changed default would give an existing hash another
# meaning. If a default here must change, bump SPEC_VERSION in steepen/runs/spec.py and update the hashes.
DEFAULTS: dict[str, Any] = {
    "RunSpec.seed": 0,
    "RunSpec.optimizer": {},
    "RunSpec.lr_schedule": {},
    "RunSpec.options": {},
    "RunSpec.precision": "fp32",
    "RunSpec.validation_tokens": 1048576,
    "RunSpec.code": None,
    "RunSpec.schedule_steps": None,
    "RunSpec.version": 3,
    "Arm.title": "",
    "Arm.core_boundary": "identity",
    "Arm.coda_boundary": "identity",
    "Arm.tied": True,
    "Arm.passes": {},
    "Arm.allocation": {},
    "Arm.block": "transformer",
    "Arm.recipe": "vanilla",
    "Arm.about": "",
    "Arm.norm_prelude": False,
    "Arm.backprop_passes": None,
    "StageSchedule.stages": [{"passes": [1]}],
    "StageSchedule.new_blocks": "identity",
    "StageSchedule.block_order": "stacked",
    "StageSchedule.new_width": "copy",
    "Stage.start": 0,
    "Stage.blocks": None,
    "Stage.width": None,
    "Stage.context": None,
    "Stage.experts": None,
    "AllocationRule.per_depth": 1,
    "AllocationRule.blocks": None,
    "AllocationRule.prelude": None,
    "AllocationRule.coda": None,
    "AllocationRule.unsplit": False,
    "Shape.real_vocabulary": None,
    "DataConfig.pool_tokens": None,
    "DataConfig.epochs": 1,
    "DataConfig.pool": "prefix",
    "DataConfig.windows": "recut",
    "OptimizerConfig.kind": "muon",
    "OptimizerConfig.momentum": 0.95,
    "OptimizerConfig.momentum_start": 0.85,
    "OptimizerConfig.momentum_warmup_steps": 300,
    "OptimizerConfig.nesterov": True,
    "OptimizerConfig.row_normalize": True,
    "OptimizerConfig.orthogonalization": "polar-express",
    "OptimizerConfig.orthogonalization_steps": 5,
    "OptimizerConfig.variance_reduction": "row-or-column",
    "OptimizerConfig.variance_beta2": 0.95,
    "OptimizerConfig.cautious_decay": "matrices",
    "OptimizerConfig.shape_scaled_decay": True,
    "OptimizerConfig.clip": None,
    "OptimizerConfig.growth_state": "fresh",
    "OptimizerConfig.embedding_precision": "fp32",
    "LRScheduleConfig.decay_to_zero": True,
    "LRScheduleConfig.rewarm_steps": 40,
    "LRScheduleConfig.name": "wsd",
    "Arm.block_options": {},
    "BlockOptions.kv_heads": None,
    "BlockOptions.window": None,
    "BlockOptions.activation": "swiglu",
    "BlockOptions.parallel": False,
    "BlockOptions.experts": None,
    "BlockOptions.active_experts": 2,
    "BlockOptions.shared_experts": 0,
    "BlockOptions.streams": None,
    "BlockOptions.balance": "bias",
    "ModelOptions.norm_eps": 1.1920929e-07,
    "ModelOptions.rope_base": 10000,
    "ModelOptions.qk_scale": 1,
    "ModelOptions.softcap": None,
    "ModelOptions.residual_stream": "fp32",
    "ModelOptions.first_pass": "prelude",
    "ModelOptions.padded_softmax": False,
    "ModelOptions.init_bound": "width",
    "ModelOptions.rope_table": "fp32",
}


@pytest.mark.parametrize("name", list(pinned()))
def test_hashes_of_specs_never_change(name: str) -> None:
    assert pinned()[name].hash == HASHES[name]


def config_types(kind: Any) -> Iterator[type]:
    """A dataclass and every dataclass that its field types name."""
    import typing

    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from config_types(hint)
    for argument in typing.get_args(kind):
        yield from config_types(argument)


def current_defaults() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in config_types(RunSpec):
        for entry in dataclasses.fields(kind):
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            if default is not MISSING:
                found[f"{kind.__name__}.{entry.name}"] = hash_content(default)
    return found


def test_defaults_that_the_hash_leaves_out_never_change() -> None:
    assert current_defaults() == DEFAULTS, (
        "a new field: add its default above; a changed default: bump SPEC_VERSION in steepen/runs/spec.py, "
        "so that no old hash gets a new meaning"
    )


def extended(kind: type) -> Any:
    """The dataclass with one more field that has a default, as a later version would have it."""
    return make_dataclass(
        kind.__name__, [("added_later", float, field(default=0.5))], bases=(kind,), frozen=True
    )


def copy_as(kind: Any, value: Any, **more: Any) -> Any:
    return kind(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, **more)


@pytest.mark.parametrize("name", ["optimizer", "options", "hyperparameters", "arm", "shape", "data"])
@pytest.mark.parametrize("spec", list(pinned().values()), ids=list(pinned()))
def test_a_field_added_later_with_its_default_leaves_hashes_unchanged(name: str, spec: RunSpec) -> None:
    kinds: dict[str, type] = {
        "optimizer": OptimizerConfig, "options": ModelOptions, "hyperparameters": Hyperparameters,
        "arm": Arm, "shape": Shape, "data": DataConfig,
    }  # fmt: skip
    later = extended(kinds[name])
    factory = RunSpec.__dataclass_fields__[name].default_factory
    default = field() if factory is MISSING else field(default_factory=later)
    later_spec = make_dataclass("RunSpec", [(name, later, default)], bases=(RunSpec,), frozen=True)
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    old = copy_as(later, values[name])
    assert later_spec(**{**values, name: old}).hash == spec.hash
    new = copy_as(later, values[name], added_later=0.25)
    assert later_spec(**{**values, name: new}).hash != spec.hash


def test_a_field_added_later_to_the_spec_itself_leaves_hashes_unchanged() -> None:
    spec = paper_spec("untied-grow")
    later = extended(RunSpec)
    assert copy_as(later, spec).hash == spec.hash
    assert copy_as(later, spec, added_later=0.25).hash != spec.hash


def test_a_spec_file_without_a_field_added_later_reads_as_the_default() -> None:
    spec = paper_spec("vanilla")
    value = spec.to_dict()
    for section, name in (("optimizer", "clip"), ("options", "softcap"), ("data", "epochs")):
        del value[section][name]
    assert RunSpec.from_dict(json.loads(json.dumps(value))).hash == spec.hash


def test_every_field_that_decides_the_result_changes_the_hash() -> None:
    spec = paper_spec("untied-grow")
    changes: dict[str, Any] = {
        "arm": find_arm("untied-2"), "shape": replace(spec.shape, mlp_width=spec.shape.mlp_width + 256),
        "schedule": find_arm("untied-grow").passes.resolve(0.31), "data": DataConfig("e" * 64),
        "hyperparameters": replace(spec.hyperparameters, beta1=0.77), "steps": spec.steps + 1,
        "batch_tokens": 2 * spec.batch_tokens, "seed": 1, "optimizer": OptimizerConfig("adamw"),
        "lr_schedule": LRScheduleConfig(rewarm_steps=7),
        "options": ModelOptions(rope_base=1e5), "precision": "fp32", "validation_tokens": 4096,
        "code": "c" * 64, "schedule_steps": spec.steps + 1,
    }  # fmt: skip
    assert changes.keys() | {"version"} == {f.name for f in dataclasses.fields(RunSpec)}
    hashes = [replace(spec, **{name: value}).hash for name, value in changes.items()]
    assert len({spec.hash, *hashes}) == len(changes) + 1


def test_texts_of_an_arm_and_equal_numbers_do_not_change_the_hash() -> None:
    spec = paper_spec("untied-grow")
    words = replace(spec.arm, title="Another title", about="other words", recipe="vanilla")
    assert replace(spec, arm=words).hash == spec.hash
    decay = replace(spec.hyperparameters, weight_decay=1.0, warmup_steps=7)
    same = replace(spec.hyperparameters, weight_decay=1, warmup_steps=7)
    assert replace(spec, hyperparameters=decay).hash == replace(spec, hyperparameters=same).hash


def test_residual_stream_changes_the_hash_only_where_it_changes_the_run() -> None:
    streams = [ModelOptions(residual_stream=stream) for stream in ("bf16", "fp32")]
    for precision, hashes in (("fp32", 1), ("bf16", 2), ("fp8", 2)):
        specs = [paper_spec("vanilla", precision=precision, options=options) for options in streams]
        assert len({spec.hash for spec in specs}) == hashes
        assert [RunSpec.from_dict(spec.to_dict()) for spec in specs] == specs


def test_device_world_size_and_micro_batch_are_not_part_of_a_spec() -> None:
    names = {entry.name for kind in config_types(RunSpec) for entry in dataclasses.fields(kind)}
    assert not names & {"device", "world_size", "gpus", "micro_batch", "threads", "fused", "compile", "host"}


class FakeDataset:
    """Prepared data of a given size, without its files."""

    identity, vocabulary, padded_vocabulary = "d" * 64, 50_257, 50_304

    def __init__(self, validation_tokens: int) -> None:
        self.sizes = {"train": 10**12, "val": validation_tokens}
        self.validation_tokens = validation_tokens

    def tokens(self, split: str) -> range:
        return range(self.sizes[split])


@pytest.mark.parametrize("validation_tokens", [20_000_000, 3_000_000])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_train_and_the_paper_preset_give_a_rung_one_hash(
    validation_tokens: int,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = FakeDataset(validation_tokens)
    monkeypatch.setattr("steepen.data.Dataset.open", lambda folder: dataset)
    preset = load_preset("paper")
    context = StudyContext(preset, DatasetInfo("d" * 64, 50_304, 10**12, validation_tokens))
    for name in [*preset.arms, "loop-2-2-c-3"]:
        arm = ARMS[name]
        depth = preset.depths(arm)[-1]
        study = context.spec(context.recipe(arm).at(arm, depth, context.size_rule))
        words = ["--arm", name, "--depth", str(depth), "--device", device, "--data", str(tmp_path)]
        assert main(["train", *words, "--write-spec", str(tmp_path / "spec.json")]) == 0
        assert capsys.readouterr().out.strip() == study.hash
        assert RunSpec.from_dict(json.loads((tmp_path / "spec.json").read_text())) == study


if __name__ == "__main__":
    for title, kind, values in (
        ("HASHES", "str", {name: spec.hash for name, spec in pinned().items()}),
        ("DEFAULTS", "Any", current_defaults()),
    ):
        print(f"{title}: dict[str, {kind}] = {{")
        print(*(f"    {name!r}: {value!r}," for name, value in values.items()), sep="\n")
        print("}")
