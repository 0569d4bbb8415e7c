"""What `steepen train` imports, and its notes: bf16 by default on a CPU, fewer tokens than a step."""

from __future__ import annotations

import subprocess
import sys
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


def test_fewer_tokens_than_a_step_are_noted_before_training(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    assert main(["train", "--device", "cpu", *place, *RUN, "--tokens", "100"]) == 0
    said = capfd.readouterr().err
    assert 0 <= said.find("--tokens 100 is less than one step of 256 tokens") < said.index("step 1/1")


def test_training_imports_neither_compiler_nor_sympy(tiny_data: Dataset, tmp_path: Path) -> None:
    """They take seconds to import, in every run; torch imports them for arithmetic on meta tensors, for
    `Module.to_empty` and for the classes of torch.optim."""
    words = ["train", "--device", "cpu", "--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    code = (
        f"import sys; from steepen.cli import main; code = main({[*words, *RUN, '--arm', 'untied-grow']!r}); "
        "print(code, *{'sympy', 'torch._dynamo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0", done.stdout
