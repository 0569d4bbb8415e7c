"""Pools, epochs and validation tokens of run specs, against the loaders that serve them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from steepen.data import windows as data_windows
from steepen.data.windows import FixedWindows, RecutWindows
from steepen.errors import UsageError
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import recipe_of
from steepen.requests.app import main
from steepen.runs import spec as specs
from steepen.runs.spec import DataConfig, RunSpec
from steepen.studies.context import whole_validation_tokens

DATA = DataConfig("d" * 64)


def paper_spec(arm: str = "vanilla", depth: int = 8, **changes: Any) -> RunSpec:
    found = find_arm(arm)
    return RunSpec.from_plan(recipe_of(found).at(found, depth), **{"data": DATA, **changes})


def test_loader_and_spec_accept_the_same_names() -> None:
    assert get_args(data_windows.Pool) == get_args(specs.Pool)
    assert get_args(data_windows.Windows) == get_args(specs.Windows)


def test_runs_use_the_first_tokens_of_the_data_and_smaller_ones_a_prefix_of_them() -> None:
    small, large = paper_spec(depth=6), paper_spec(depth=8)
    assert small.pool_size(10**11) == math.ceil(1.01 * small.steps * 524_288)
    assert large.pool_size(10**11) == math.ceil(1.01 * large.steps * 524_288)
    assert large.pool_size(10**9) == 10**9  # all there is
    for depth, steps in ((6, 1826), (8, 3341)):  # the authors round down for Untied Grow only
        grown = paper_spec("untied-grow", depth)
        assert grown.pool_size(10**11) == math.floor(1.01 * steps * 524_288)
    assert paper_spec("loop-grow").pool_size(10**11) == math.ceil(1.01 * 2563 * 524_288)


def test_pool_size_can_be_named_and_a_sample_without_a_number_is_all_of_the_data() -> None:
    assert paper_spec(data=replace(DATA, pool_tokens=10**8, epochs=10)).pool_size(10**11) == 10**8
    assert paper_spec(data=replace(DATA, pool_tokens=10**8, pool="sample")).pool_size(10**11) == 10**8
    assert paper_spec(data=replace(DATA, pool="sample")).pool_size(10**11) is None


@pytest.mark.parametrize("context", [8, 64, 2048])
@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_default_pool_suffices_at_any_context(context: int, rows: int, steps: int) -> None:
    spec = paper_spec()
    shape = replace(spec.shape, context=context)
    spec = replace(spec, shape=shape, steps=steps, batch_tokens=rows * context)
    pool = spec.pool_size(10**12)
    assert pool is not None
    assert replace(DATA, pool_tokens=pool).max_steps(10**12, context, rows * context) >= steps


@pytest.mark.parametrize("pool_tokens", [None, 3_000, 4_999])
@pytest.mark.parametrize("epochs", [1, 7])
def test_spec_counts_the_steps_that_the_loader_gives(pool_tokens: int | None, epochs: int) -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(2, 90, 200))
    total, context, rows = int(ends[-1]), 31, 6
    options: Any = {"seed": 0, "epochs": epochs, "pool": "prefix", "pool_tokens": pool_tokens}
    recut = RecutWindows(ends, context + 1, rows, **options)
    fixed = FixedWindows(total, context + 1, rows, **options)
    data = DataConfig("d" * 64, pool_tokens=pool_tokens, epochs=epochs)
    assert data.max_steps(total, context, rows * context) == recut.steps
    assert data.steps_per_epoch(total, context, rows * context) == recut.steps_per_epoch
    assert replace(data, windows="fixed").max_steps(total, context, rows * context) == fixed.steps
    assert fixed.steps >= recut.steps


@pytest.mark.parametrize("available", [10_000_000, 10_000_700, 10_200_000])
def test_validation_windows_fill_whole_batches_as_the_papers(available: int) -> None:
    assert available // 2_049 in (4_880, 4_978)
    assert whole_validation_tokens(10_000_000, available, 2_048, 524_288) == 4_864 * 2_048 == 9_961_472


def test_validation_smaller_than_a_batch_is_whole_windows() -> None:
    assert whole_validation_tokens(10_000_000, 300_000, 2_048, 524_288) == 146 * 2_048
    assert whole_validation_tokens(100, 300_000, 2_048, 524_288) == 2_048


class FakeDataset:
    """Prepared data of the paper's sizes, without its files."""

    identity, vocabulary, padded_vocabulary = "d" * 64, 50_257, 50_304
    validation_tokens = 10_000_321

    def tokens(self, split: str) -> range:
        return range({"train": 30_000_000_000, "val": 10_000_321}[split])


@pytest.fixture
def write_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `steepen train … --write-spec` on the paper's data and returns the spec."""
    monkeypatch.setattr("steepen.data.Dataset.open", lambda folder: FakeDataset())

    def run(*words: str) -> RunSpec:
        file = tmp_path / "spec.json"
        start = ["train", "--arm", "operator-1", "--depth", "8", "--data", str(tmp_path)]
        assert main([*start, *words, "--write-spec", str(file)]) == 0, capsys.readouterr().err
        return RunSpec.from_dict(json.loads(file.read_text()))

    return run


def test_ten_epochs_of_a_hundred_million_tokens_are_1900_steps(write_spec: Any) -> None:
    spec = write_spec("--pool-tokens", "100M", "--epochs", "10")
    assert (spec.steps, spec.batch_tokens) == (1_900, 524_288)
    assert spec.data == DataConfig("d" * 64, pool_tokens=100_000_000, epochs=10)
    assert spec.data.steps_per_epoch(30_000_000_000, 2_048, 524_288) == 190
    assert spec.validation_tokens == 9_961_472


def test_tokens_of_a_run_take_precedence_over_its_epochs(write_spec: Any) -> None:
    spec = write_spec("--pool-tokens", "1e8", "--epochs", "10", "--tokens", "5e8")
    assert spec.steps == round(5e8 / 524_288)


def test_pool_and_windows_are_options_of_a_run(write_spec: Any) -> None:
    plain, other = write_spec(), write_spec("--pool", "sample", "--windows", "fixed")
    assert plain.data == DATA
    assert other.data == replace(DATA, pool="sample", windows="fixed")
    assert plain.hash != other.hash
    assert plain.steps == other.steps == 2_355


@pytest.mark.parametrize("field", ["pool", "windows"])
def test_unknown_names_are_rejected(field: str) -> None:
    with pytest.raises(UsageError, match=rf"{field}.*'else'"):
        DataConfig("d" * 64, **{field: "else"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("text", ["many", "1.5", "", "1e400", "M"])
def test_token_count_that_is_no_whole_number_is_rejected(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--arm", "vanilla", "--depth", "6", "--data", str(tmp_path), "--pool-tokens", text]
    assert main(["train", *words]) == 2
    assert "must be a whole number" in capsys.readouterr().err
