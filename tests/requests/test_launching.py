"""The options of verbs that make runs: checked before any run starts, and passed on to every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from steepen.errors import UsageError
from steepen.launch.base import LauncherBase
from steepen.launch.local import LocalLauncher
from steepen.requests.launching import Launching
from steepen.requests.request import Request


@dataclass(frozen=True)
class Make(Launching, Request[None]):
    """Make runs."""

    def check(self) -> None:
        self.check_launching()

    def run(self) -> None: ...


def fields(request: Make) -> dict[str, Any]:
    """The fields of `train` that every run gets, besides its own."""
    launcher: Any = request.make_launcher(Path("data"))
    assert isinstance(launcher, LauncherBase)
    return dict(launcher.context.options)


def test_every_run_gets_the_options_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = {"device": "auto", "shard": "optimizer", "track": (), "sample_every": None, "sample_prompt": ()}
    assert fields(Make()) == default
    monkeypatch.setattr("steepen.training.trackers.find_spec", lambda name: name)
    other = {
        "device": "cpu",
        "shard": "full",
        "track": ("wandb",),
        "sample_every": 5,
        "sample_prompt": ("b",),
    }
    assert fields(Make(**other)) == other


def mistakes() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"device": "tpu"}, "`device` = 'tpu' is not valid: it must be auto, cpu, cuda or cuda:N"
    yield {"gpus_per_run": 0}, "`gpus_per_run` = 0 is not valid"
    yield {"gpus_per_run": "some"}, "a whole number or one of 'auto'"
    yield {"jobs": 0}, "`jobs` = 0 is not valid"
    yield {"budget": "lots"}, "'lots' is not valid: give FLOPs"
    yield {"gpu": "abacus"}, "there is no accelerator 'abacus'"
    yield {"mfu": 0}, "`mfu` = 0 is not valid"
    yield {"track": "carrier-pigeon"}, "it must be one of 'wandb'"


@pytest.mark.parametrize(("given", "message"), list(mistakes()))
def test_wrong_option_is_rejected_before_anything_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Make(**given)
    assert message in str(caught.value)


def test_launcher_is_a_name_or_a_class() -> None:
    assert Make(launcher=LocalLauncher).launcher_name == "steepen.launch.local:LocalLauncher"
    with pytest.raises(UsageError, match="'cloud' is not known"):
        Make(launcher="cloud").make_launcher(Path("data"))


def test_device_that_a_cluster_may_have_is_not_looked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Make(device="cuda", launcher="slurm").check_device()
    with pytest.raises(UsageError, match="this machine has 0 GPUs"):
        Make(device="cuda").check_device()
