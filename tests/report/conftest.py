"""Finished studies of simulated laws, in the directory layout that the study driver writes."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from steepen.report.load_studies import LoadedStudy, load_study
from steepen.report.page import render_page

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "report_simulated.py"


@pytest.fixture(scope="session")
def simulated() -> ModuleType:
    """The script that writes simulated studies."""
    spec = importlib.util.spec_from_file_location("report_simulated", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_simulated"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def simulated_studies(simulated: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with studies/ and runs/: two ladders (3 and 8 arms), vertices, slices and a hold-out."""
    folder = tmp_path_factory.mktemp("simulated_studies")
    simulated.main(folder, draws=100)
    return folder


@pytest.fixture(scope="session")
def finished(simulated_studies: Path) -> Callable[[str], LoadedStudy]:
    """A simulated study, loaded once."""
    return functools.cache(lambda name: load_study(name, simulated_studies / "studies"))


@pytest.fixture(scope="session")
def ladder_page(finished: Callable[[str], LoadedStudy]) -> str:
    """The page of the simulated ladder."""
    return render_page([finished("ladder")])
