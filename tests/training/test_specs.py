"""Specs and records survive a JSON round trip, and errors name the wrong field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steepen.data import Dataset
from steepen.errors import UsageError
from steepen.model.arms import ARMS
from steepen.requests.app import main
from steepen.runs.spec import RunSpec, override, read_spec

MakeSpec = Callable[..., RunSpec]


@pytest.mark.parametrize("arm", ARMS)
def test_spec_of_every_arm_survives_json(arm: str, make_spec: MakeSpec) -> None:
    spec = make_spec(arm, depth=6)
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and again.hash == spec.hash


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.floats(1e-4, 1.0), st.integers(0, 2**31), st.integers(1, 10**6))
def test_spec_hash_changes_with_its_content(make_spec: MakeSpec, glr: float, seed: int, steps: int) -> None:
    spec = make_spec("vanilla")
    hyper = replace(spec.hyperparameters, learning_rate=glr)
    changed = replace(spec, hyperparameters=hyper, seed=seed, steps=steps)
    assert (changed.hash == spec.hash) == (changed == spec)
    assert RunSpec.from_dict(changed.to_dict()).hash == changed.hash


def test_int_in_a_float_field_gives_the_same_hash(make_spec: MakeSpec) -> None:
    spec = make_spec("vanilla")
    whole = replace(spec, hyperparameters=replace(spec.hyperparameters, weight_decay=0, warmup_steps=20.0))  # type: ignore[arg-type]
    again = RunSpec.from_dict(json.loads(json.dumps(whole.to_dict())))
    assert again == whole and again.hash == whole.hash


def test_settings_change_any_field(make_spec: MakeSpec) -> None:
    spec = override(
        make_spec("vanilla"),
        ["optimizer.learning_rate=0.03", "hyperparameters.wd=1e-3", "model.softcap=15", "seed=4", "wu=3",
         "cautious_decay=all", "optimizer.orthogonalization=polar-express", "options.softcap=null"],
    )  # fmt: skip
    assert (spec.hyperparameters.learning_rate, spec.hyperparameters.weight_decay, spec.seed) == (
        0.03,
        1e-3,
        4,
    )
    assert spec.hyperparameters.warmup_steps == 3 and spec.options.softcap is None
    assert spec.optimizer.cautious_decay == "all" and spec.optimizer.orthogonalization == "polar-express"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("optimizer.learnin_rate=1", "the nearest are optimizer.learning_rate,"),
        ("optimiser.learning_rate=1", "the nearest are optimizer.learning_rate,"),
        ("learning_rate", "section.field=value"),
        ("learning_rate=fast", "hyperparameters.learning_rate"),
        ("optimizer.kind=sgd", "use muon, adamw"),
        ("optimizer.momentum=1.5", "momentum"),
        ("seed=1.5", "seed"),
        ("batch_tokens=33", "multiple of the context"),
    ],
)
def test_wrong_setting_is_named(setting: str, named: str, make_spec: MakeSpec) -> None:
    with pytest.raises(UsageError) as error:
        override(make_spec("vanilla"), [setting])
    assert "\n" not in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: plain.pop("steps"),
        lambda plain: plain.update({1: 2}),
        lambda plain: plain["hyperparameters"].update(learning_rate=10**400),
        lambda plain: plain.update(seed=-1),
        lambda plain: plain.update(sead=1),
        lambda plain: plain["shape"].update(width="wide"),
        lambda plain: plain["shape"].update(heads=5),
        lambda plain: plain["hyperparameters"].pop("learning_rate"),
        lambda plain: plain["schedule"].update(stages=[]),
        lambda plain: plain.update(precision="fp16"),
        lambda plain: plain.update(arm=None),
        lambda plain: plain.update(version=99),
    ],
)
def test_error_for_a_wrong_spec_file_is_one_sentence(
    spoil: Callable[[Any], Any], make_spec: MakeSpec, tmp_path: Path
) -> None:
    plain = make_spec().to_dict()
    spoil(plain)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(UsageError) as error:
        read_spec(tmp_path / "spec.yaml")
    assert "\n" not in str(error.value)


def test_train_command_trains_writes_specs_and_rejects_bad_options(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = [
        "--aspect",
        "16",
        "--head-dim",
        "16",
        "--mlp-multiple",
        "16",
        "--context",
        "32",
        "--batch-tokens",
        "256",
    ]
    start = ["train", "--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    words = [
        *start,
        "--arm",
        "loop-2",
        "--depth",
        "3",
        "--tokens",
        "1024",
        "--set",
        "optimizer.learning_rate=0.03",
        *size,
    ]
    assert main([*words, "--write-spec", str(tmp_path / "spec.json")]) == 0
    name = capfd.readouterr().out.strip()
    assert main([*words, "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["run"] == name and record["spec"]["hyperparameters"]["learning_rate"] == 0.03
    assert (tmp_path / "runs" / name / "record.json").exists()
    assert main([*start, "--spec", str(tmp_path / "spec.json"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == record
    for wrong in (
        [*words, "--set", "learning_rate=-1"],
        [*words, "--micro-batch", "none"],
        [*words, "--device", "tpu9"],
        [*words, "--spec", str(tmp_path / "spec.json")],
        [*start, "--arm", "loop-2"],
        [*start, "--spec", str(tmp_path / "absent.json")],
        [*words, "--track", "no-such-tracker"],
        [*words, "--seed", "-1"],
        [*words, "--device", "meta"],
        [*words, "--micro-batch", "²"],
        [*words, "--checkpoint-minutes", "nan"],
        [*words, "--set", "options.norm_eps=.inf"],
        [*start, "--spec", str(tmp_path / "spec.json"), "--seed", "3"],
        [*start, "--spec", str(tmp_path / "spec.json"), "--tokens", "512"],
        [*words, "--precision", "fp7"],
    ):
        assert main(wrong) == 2, wrong
        said = capfd.readouterr()
        assert (
            said.out == "" and "Traceback" not in said.err and said.err.startswith(("steepen: ", "Usage: "))
        )
    assert main(["train", "--data", str(tmp_path / "nowhere"), "--arm", "loop-2", "--depth", "3"]) != 0
