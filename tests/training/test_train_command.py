"""What `steepen train` imports, its default precision, and its note on fewer tokens than a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import steepen
from steepen.data import Dataset
from steepen.requests.app import main
from steepen.runs.spec import read_spec

SIZE = ["--aspect", "16", "--head-dim", "16", "--mlp-multiple", "16", "--context", "32"]
RUN = ["--arm", "vanilla", "--depth", "1", "--tokens", "512", "--batch-tokens", "256", *SIZE]


def test_default_precision_is_one_in_python_and_on_the_command_line(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spec.json"
    words = ["train", "--device", "cpu", "--data", str(tiny_data.directory), *RUN, "--write-spec", str(file)]
    assert main(words) == 0
    size: Any = {"aspect": 16, "head_dim": 16, "mlp_multiple": 16, "context": 32}
    made = steepen.spec("vanilla", 1, tiny_data, tokens=512, batch_tokens=256, **size)
    assert made == read_spec(file) and made.precision == "bf16"
    assert capfd.readouterr().out.strip() == made.hash
    chosen = steepen.spec("vanilla", 1, tiny_data, tokens=512, precision="auto", **size).precision
    assert chosen == ("bf16" if torch.cuda.is_available() else "fp32")


def test_fewer_tokens_than_a_step_are_noted_before_training(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    assert main(["train", "--device", "cpu", *place, *RUN, "--tokens", "100"]) == 0
    said = capfd.readouterr().err
    assert 0 <= said.find("100 tokens are less than one step of 256") < said.index("step 1/1")


def test_run_within_its_warm_up_or_above_guessing_is_noted(
    tiny_data: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs"), "--precision", "fp32"]
    words = ["train", "--device", "cpu", *place, *RUN, "--tokens", "2560"]
    assert main([*words, "--set", "warmup_steps=40"]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "its 10 steps are no more than the 40 of its warm-up" in said and "ln V" not in said
    assert main([*words, "--set", "warmup_steps=2", "--set", "learning_rate=300"]) == 0
    captured = capfd.readouterr()
    said = " ".join(captured.err.split())
    assert "is above that of guessing, ln V = " in said and "warm-up" not in said
    run = Path(captured.out.splitlines()[-1]).name
    assert main(["runs", "--runs", str(tmp_path / "runs"), "show", run]) == 0
    assert "it has learnt nothing" in " ".join(capfd.readouterr().out.split())


def test_training_imports_neither_compiler_nor_sympy_nor_fsdp(tiny_data: Dataset, tmp_path: Path) -> None:
    """They take seconds to import, in every run; torch imports them for arithmetic on meta tensors, for
    `Module.to_empty` and for the classes of torch.optim. FSDP is a third of the time of all imports."""
    words = ["train", "--device", "cpu", "--data", str(tiny_data.directory), "--runs", str(tmp_path / "runs")]
    code = (
        "import sys, steepen.training.samples; from steepen.requests.app import main; "
        f"code = main({[*words, *RUN, '--arm', 'untied-grow']!r}); "
        "print(code, *{'sympy', 'torch._dynamo', 'torch.distributed.fsdp'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0", done.stdout
