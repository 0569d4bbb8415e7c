"""The GPU benchmarks run to completion on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkedProcess, become
from steepen.data import Dataset
from training_fixtures import tiny_data

__all__ = ["tiny_data"]

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a script of benchmarks/ in a forked process, without importing torch anew: its code and output."""
    log, output = tmp_path / "log.txt", tmp_path / "output.txt"

    def run(words: list[str]) -> int:
        sys.argv = words
        sys.path.insert(0, str(SCRIPTS))
        with output.open("w") as sys.stdout:
            try:
                runpy.run_path(words[0], run_name="__main__")
            except Exception:
                traceback.print_exc()
                return 1
        return 0

    def start(name: str, *words: str, fails: bool = False) -> tuple[int, str]:
        process = ForkedProcess(os.fork())
        if not process.pid:
            become([str(SCRIPTS / name), *words], {}, str(log), run)
        code = process.wait(600)
        assert fails or code == 0, log.read_text()
        return code, output.read_text()

    return start


Script = Callable[..., tuple[int, str]]


def test_generation_is_timed_against_its_floor(script: Script) -> None:
    words = ["--tiny", "--no-transformers", "--depths", "2", "--arms", "loop-2", "--batches", "2"]
    words += ["--tokens", "20", "--prompt", "4", "--repeats", "1", "--precision", "fp32"]
    row = json.loads(script("generate_speed.py", *words)[1])
    assert row["equal_to_reference_of_20"] == 20
    assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row["step_us"], abs=0.01)
    assert row["step_us"] == pytest.approx(2e6 / row["steepen_decoding_tokens_per_second"], rel=0.01)
    assert row["weights_fraction"] <= row["floor_fraction"]


def test_throughput_prints_a_row_per_arm(script: Script) -> None:
    words = ["--tiny", "--no-reference", "--arms", "vanilla", "untied-2", "--seconds", "0.01", "--json"]
    rows = json.loads(script("throughput.py", *words)[1])
    assert [row["arm"] for row in rows] == ["vanilla", "untied-2"]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert abs(sum(row["shares"].values()) - 1) < 1e-6


def test_nanochat_speed_prints_the_fraction_of_the_limit(script: Script) -> None:
    (row,) = json.loads(script("nanochat_speed.py", "--tiny", "--rounds", "1", "--warm-up", "0", "--json")[1])
    assert row["fraction"] == pytest.approx(row["tokens_per_second"] / row["limit"]) and row["ratio"] is None


def test_block_speed_prints_a_row_per_arm(script: Script) -> None:
    words = ["--tiny", "--depth", "2", "--seconds", "0.01", "--json", "--arms", "vanilla+kv_heads=1"]
    rows = json.loads(script("block_speed.py", *words, "vanilla+experts=4")[1])
    assert [row["arm"] for row in rows] == ["vanilla+kv_heads=1", "vanilla+experts=4"]
    assert all(row["steepen_ms"] > 0 and row["plain_ms"] > 0 for row in rows)


def test_start_up_prints_the_phases_of_a_run(script: Script, tiny_data: Dataset) -> None:
    size = ["--aspect", "16", "--head-dim", "16", "--mlp-multiple", "16", "--context", "32"]
    words = ["--depth", "1", "--tokens", "512", "--times", "1", "--", *size, "--batch-tokens", "256"]
    _, printed = script("start_up.py", "--data", str(tiny_data.directory), *words)
    phases = ["import torch", "Trainer._prepare_steps", "Trainer._loop", "Trainer._finish", "process ended"]
    places = [printed.index(name) for name in phases]
    assert places == sorted(places) and "empty kernel cache: wall" in printed


def test_rank_work_prints_a_row_per_number_of_ranks(script: Script) -> None:
    words = ["--tiny", "--ranks", "2", "4", "--seconds", "0", "--warm-up", "0", "--json"]
    rows = json.loads(script("rank_work.py", *words)[1])
    assert [row["ranks"] for row in rows] == [2, 4]
    for row in rows:
        assert 0 < row["efficiency"] <= 2 and 0 < row["muon_share"] < 1
        (sent,) = row["transfers"]
        assert sent["gradient_gib"] > sent["weight_gib"] > 0 and sent["exposed_ms_modelled"] > 0


def test_rank_work_adds_up_what_transfers_leave_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = runpy.run_path(str(SCRIPTS / "rank_work.py"))
    timeline: list[Any] = []
    first, second = (script["Transfer"](timeline, size) for size in (100, 200))
    # At 100 bytes/s: the first arrives in time, at 1 s; the second at 3.5, where 2 was wanted.
    timeline += [(first, "start", 0.0), (first, "wait", 1.2), (second, "start", 1.5), (second, "wait", 2.0)]
    exposed = script["exposed_seconds"]
    assert exposed(timeline, 0.0, rate=100.0) == pytest.approx(1.5 + script["LATENCY"])
    assert exposed(timeline, 2.0, rate=100.0) == 0.0


QUICK = ["--tiny", "--seconds", "0.002", "--sustained", "0.002"]


def test_every_section_of_ceilings_is_measured_or_skipped_with_a_reason(
    script: Script, tmp_path: Path
) -> None:
    _, printed = script("ceilings.py", *QUICK, "--json", str(tmp_path / "found.json"))
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert list(sections) == [
        "gemms", "tiles", "limit", "attention", "streams", "cross-entropy", "head", "splits", "profile"
    ]  # fmt: skip
    for name, section in sections.items():
        assert name in printed
        if "rows" in section:
            times = [value for row in section["rows"] for key, value in row.items() if key == "ms"]
            assert all(value > 0 for value in times)
        else:
            assert name in ("attention", "streams") and "GPU" in section["skipped"]
    assert len(sections["gemms"]["rows"]) == 5 * 3 + 1
    assert len(sections["tiles"]["rows"]) == 5 * 2
    whole, *parts = sections["limit"]["rows"]
    assert whole["TFLOP/s"] * whole["ms"] == pytest.approx(sum(r["TFLOP/s"] * r["ms"] for r in parts))
    profile = {row["kernels, per micro-batch"]: row for row in sections["profile"]["rows"]}
    assert profile["GEMMs"]["hot ms"] > 0
    assert profile["total"]["hot fraction"] == 1


def test_a_failing_section_does_not_stop_the_others(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("steepen.kernels.cublaslt_gemm.selected_tile", failing)  # what `tiles` calls first
    words = [*QUICK, "--only", "tiles", "--only", "cross-entropy", "--json", str(tmp_path / "found.json")]
    code, printed = script("ceilings.py", *words, fails=True)
    assert code == 1
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert sections["tiles"] == {"error": "ZeroDivisionError: division by zero"}
    assert "ZeroDivisionError" in printed
    assert len(sections["cross-entropy"]["rows"]) == 4


def test_paired_loss_compares_settings_seed_by_seed_and_resumes(
    script: Script, tiny_data: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    columns = ["fp32", "bf16=optimizer.embedding_precision=bf16,model.rope_table=bf16", "again"]
    words = ["--preset", "tiny", "--depths", "1", "--tokens", "4096", "--seeds", "2", "--device", "cpu"]
    words = [str(tiny_data.directory), str(out), "--columns", *columns, *words]
    (_, first), (_, second) = (script("paired_loss.py", *words) for _ in range(2))
    rows = [json.loads(line) for line in out.read_text().splitlines()]  # the second run added none
    assert [(row["seed"], row["column"]) for row in rows] == [
        (seed, column) for seed in (0, 1) for column in ("fp32", "bf16", "again")
    ]
    assert rows[0]["loss"] == rows[2]["loss"] != rows[1]["loss"]
    difference = "minus fp32: +0.00000 ± 0.00000 (+0.00000 +0.00000)"
    assert difference in first and difference in second
