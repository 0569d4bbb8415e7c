"""A missing device is rejected before data is prepared or a run is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import steepen
from steepen.errors import UsageError
from steepen.requests.app import main


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cuda", "--device cuda is not available: this machine has 0 GPUs."),
        ("cuda:1", "--device cuda:1 is not available: this machine has 0 GPUs."),
        ("gpu", "--device 'gpu' is not valid: it must be auto, cpu, cuda or cuda:N."),
    ],
)
def test_missing_device_is_rejected_once_before_any_run_starts(
    device: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["study", "ladder", "--preset", "tiny", "--device", device]) == 2
    assert capsys.readouterr().err == f"steepen: {told}\n"
    assert not list(tmp_path.iterdir()), "data were prepared, or a journal begun"


def test_missing_device_is_rejected_from_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="this machine has 0 GPUs"):
        steepen.ladder(device="cuda")
    assert not list(tmp_path.iterdir())


def test_dry_runs_and_clusters_need_no_local_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = [
        "study",
        "ladder",
        "--preset",
        "tiny",
        "--device",
        "cuda",
        "--dry-run",
        "--gpu",
        "h100",
        "--json",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["runs"]
