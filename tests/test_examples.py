"""The notebooks of examples/ run from top to bottom, in an empty directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fork_server import fork_workers
from steepen.data import Dataset
from training_fixtures import tiny_data

__all__ = ["tiny_data"]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_notebook(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute the code cells in order in one namespace; `parameters` follow the cell with that tag."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for number, cell in enumerate(json.loads((EXAMPLES / name).read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], f"{name}: clear the outputs of cell {number}"
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= parameters or {}
    return names


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    fork_workers(monkeypatch)


def test_judge_a_table() -> None:
    names = run_notebook("judge_a_table.ipynb")
    assert names["result"]["mine"].growth == "grows" and Path("laws.pdf").is_file()


def test_look_inside_a_run() -> None:
    names = run_notebook("look_inside_a_run.ipynb", {"TOKENS": 16_384})
    assert names["run"].status == "finished" and names["depth"].scores["kl_depth"]["curve"]


def test_your_arm_against_vanilla(tiny_data: Dataset) -> None:
    settings = {
        "rungs": [2, 3, 4, 5],
        "data": tiny_data.directory,
        "epochs": 10_000,
        "tpp": 0.1,
        "device": "cpu",
    }
    names = run_notebook(
        "your_arm_against_vanilla.ipynb", {"SETTINGS": {**settings, "device": "cpu", "jobs": 1}}
    )
    assert set(names["study"].verdicts) == {"squared-relu"} and Path("page/report.html").is_file()
    sys.modules.pop("my_blocks", None)


def test_every_notebook_has_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {
        "judge_a_table.ipynb", "look_inside_a_run.ipynb", "your_arm_against_vanilla.ipynb",
    }  # fmt: skip
