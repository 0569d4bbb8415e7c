"""`steepen train` prints a note when a run on a CPU uses bf16 by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from steepen.cli import main
from steepen.cli.train import BF16_ON_CPU
from steepen.data import Dataset

SIZE = ["--aspect", "16", "--head-dim", "16", "--mlp-multiple", "16", "--context", "32"]
RUN = ["--arm", "vanilla", "--depth", "1", "--tokens", "512", "--batch-tokens", "256", *SIZE]


def notes(capfd: pytest.CaptureFixture[str], *words: str) -> int:
    """Train, and count the notes about bf16."""
    assert main(["train", "--device", "cpu", *words]) == 0
    return capfd.readouterr().err.count(f"note: {BF16_ON_CPU}\n")


def test_bf16_by_default_on_a_cpu_prints_one_note(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    assert notes(capfd, *place, *RUN) == 1
    assert notes(capfd, *place, *RUN) == 0, "the run has finished: nothing is trained"


@pytest.mark.parametrize(
    "words", [["--precision", "bf16"], ["--precision", "fp32"], ["--set", "precision=bf16"]]
)
def test_a_given_precision_prints_no_note(
    words: list[str], tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    assert notes(capfd, *place, *RUN, *words) == 0
