"""The tiny data set, specs of runs that take a second, and one of everything that steepen reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clean_place import Place, make_place
from steepen.data import Dataset
from steepen.runs.spec import RunSpec
from training_fixtures import make_spec, tiny_data

__all__ = ["make_spec", "tiny_data"]


@pytest.fixture(scope="session")
def place(
    make_spec: Callable[..., RunSpec], tiny_data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    spec = make_spec("untied-grow", depth=2, steps=6)
    return make_place(tmp_path_factory.mktemp("clean"), spec, tiny_data.directory)
