"""Fixtures of runs and of tiny training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from run_fixtures import spec, store, trainer
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "spec", "store", "tiny_data", "trainer"]

LAUNCHER = '''
from fake_trainer import record_of
from steepen.launch.base import Outcome
from steepen.utils.json_io import write_json

class InstantLauncher:
    """Writes a synthetic record for every run: a law with an exponent of 0.1."""

    slots = 1

    def __init__(self, context, jobs=None):
        self.store = context.store

    def launch(self, specs):
        for spec in specs:
            flops = record_of(spec).flops
            loss = 1.5 + 2 * (flops / 1e9) ** -0.1 + 1e-3 * (spec.shape.depth % 2)
            record = record_of(spec, loss=loss, seconds_training=flops / 1e9)
            run = self.store.run(spec)
            write_json(run.spec_file, spec.to_dict())
            write_json(run.record_file, record.to_dict())
            yield Outcome(spec, record=record)
'''


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    (tmp_path / "instant_launcher.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return __import__("instant_launcher").InstantLauncher
