"""The benchmark that needs a GPU still runs to its end without one, at a size that says nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def test_the_throughput_table_can_be_made() -> None:
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
