"""A missing device is rejected before data is prepared or a run is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.cli import launch_options as launching
from steepen.cli import main
from steepen.errors import UsageError


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cuda", "--device cuda is not available: this machine has 0 GPUs."),
        ("cuda:1", "--device cuda:1 is not available: this machine has 0 GPUs."),
        ("gpu", "--device 'gpu' is not known: use auto, cpu, cuda or cuda:N."),
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
    place: dict[str, Any] = {"data": tmp_path, "runs": tmp_path / "runs", "studies": tmp_path / "studies"}

    def never() -> Any:
        raise AssertionError("the study was begun")

    with pytest.raises(UsageError, match="this machine has 0 GPUs"):
        launching.launch_study(never, name="s", options={}, device="cuda", **place)
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
    for on in ("slurm", "ray"):
        launching.check_device("cuda", on)  # what the nodes have is not known here
        with pytest.raises(UsageError, match="cuda:N"):
            launching.check_device("tpu", on)
