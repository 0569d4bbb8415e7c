"""The GPU benchmarks run to completion on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steepen.data.prepare import PrepareRequest, prepare

REPOSITORY = Path(__file__).resolve().parents[1]


def test_throughput_prints_a_row_per_arm() -> None:
    words = ["--tiny", "--no-reference", "--arms", "vanilla", "untied-2", "--seconds", "0.1", "--json"]
    script = REPOSITORY / "benchmarks" / "throughput.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [sys.executable, str(script), *words], env=environment, check=True, capture_output=True, text=True
    )
    rows = json.loads(done.stdout)
    assert [row["arm"] for row in rows] == ["vanilla", "untied-2"]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert abs(sum(row["shares"].values()) - 1) < 1e-6


def test_block_speed_prints_a_row_per_arm() -> None:
    words = ["--tiny", "--depth", "2", "--seconds", "0.01", "--json", "--arms", "vanilla+kv_heads=1"]
    script = REPOSITORY / "benchmarks" / "block_speed.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [sys.executable, str(script), *words, "vanilla+experts=4"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    rows = json.loads(done.stdout)
    assert [row["arm"] for row in rows] == ["vanilla+kv_heads=1", "vanilla+experts=4"]
    assert all(row["steepen_ms"] > 0 and row["plain_ms"] > 0 for row in rows)


def test_rank_work_prints_a_row_per_number_of_ranks() -> None:
    words = ["--tiny", "--ranks", "2", "4", "--rounds", "1", "--warm-up", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "rank_work.py"), *words],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    assert [row["ranks"] for row in rows] == [2, 4]
    assert all(0 < row["efficiency"] <= 1.5 and row["gradient_gib"] > row["weight_gib"] > 0 for row in rows)


def ceilings(*words: str, program: str = "ceilings.main()") -> subprocess.CompletedProcess[str]:
    """Run benchmarks/ceilings.py in a new process; `program` is executed after its import."""
    folders = [str(REPOSITORY / "src"), str(REPOSITORY / "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    quick = ["--tiny", "--seconds", "0.02", "--sustained", "0.02"]
    command = [sys.executable, "-c", f"import ceilings; {program}", *quick, *words]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_every_section_of_ceilings_is_measured_or_skipped_with_a_reason(tmp_path: Path) -> None:
    done = ceilings("--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert list(sections) == [
        "gemms", "tiles", "limit", "attention", "streams", "cross-entropy", "head", "splits", "profile"
    ]  # fmt: skip
    for name, section in sections.items():
        assert name in done.stdout
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


def test_a_failing_section_does_not_stop_the_others(tmp_path: Path) -> None:
    words = ["--only", "limit", "--only", "cross-entropy", "--json", str(tmp_path / "found.json")]
    done = ceilings(*words, program="ceilings.SECTIONS['limit'] = lambda args: 1 / 0; ceilings.main()")
    assert done.returncode == 1
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert sections["limit"] == {"error": "ZeroDivisionError: division by zero"}
    assert "ZeroDivisionError" in done.stdout
    assert len(sections["cross-entropy"]["rows"]) == 4


def test_paired_loss_compares_settings_seed_by_seed_and_resumes(tmp_path: Path) -> None:
    prepare(PrepareRequest(("builtin",), tokenizer="bpe:512", max_tokens=60_000), tmp_path / "data")
    out = tmp_path / "out.jsonl"
    columns = ["fp32", "bf16=optimizer.embedding_precision=bf16,model.rope_table=bf16", "again"]
    words = ["--preset", "tiny", "--depths", "1", "--tokens", "4096", "--seeds", "2", "--device", "cpu"]
    script = REPOSITORY / "benchmarks" / "paired_loss.py"
    command = [sys.executable, str(script), str(tmp_path / "data"), str(out), "--columns", *columns, *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]  # the second run added none
    assert [(row["seed"], row["column"]) for row in rows] == [
        (seed, column) for seed in (0, 1) for column in ("fp32", "bf16", "again")
    ]
    assert rows[0]["loss"] == rows[2]["loss"] != rows[1]["loss"]
    difference = "minus fp32: +0.00000 ± 0.00000 (+0.00000 +0.00000)"
    assert difference in first and difference in second
