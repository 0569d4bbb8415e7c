"""Who may import whom: the architecture a reader sees in the folders is the one the code has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "steepen"
ROOMS = {"data", "kernels", "model", "recipe", "training", "evaluation", "runs", "studies", "laws", "report"}

# A room, and what of the house it may import, lazily or not. A dotted name admits only that module.
ALLOWED: dict[str, set[str]] = {
    "data": set(),
    "kernels": set(),
    "model": {"kernels"},
    "laws": set(),
    "recipe": {"model"},
    "runs": {"model.shape", "model.arm", "model.arms", "model.options", "recipe"},
    "training": {
        "data",
        "kernels",
        "model",
        "recipe",
        "runs.spec",
        "runs.record",
        "runs.store",
        "runs.codec",
    },
    "evaluation": {"data", "model"},
    "studies": {"recipe", "runs", "laws", "model.shape", "model.arm", "model.arms"},
    "report": {"laws", "runs.record", "runs.store", "runs.spec", "runs.journal", "studies.answer"},
}

TORCH_FREE = [
    "laws",
    "runs",
    "studies",
    "report",
    "recipe",
    "model.shape",
    "model.arm",
    "model.arms",
    "model.options",
]


def imports_of(file: Path) -> set[str]:
    """Every module of the house that a file names in an import, at any level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("steepen.") for name in found if name.startswith("steepen.")}


def violations(room: str, names: set[str]) -> set[str]:
    allowed = ALLOWED[room] | {room}
    return {
        name
        for name in names
        if name.split(".")[0] in ROOMS and not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)
    }


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_its_neighbours(room: str) -> None:
    bad = {
        str(file.relative_to(SOURCE)): wrong
        for file in (SOURCE / room).rglob("*.py")
        if (wrong := violations(room, imports_of(file)))
    }
    assert not bad


def test_the_rule_can_fail() -> None:
    assert violations("laws", {"model.shape.Shape"}) == {"model.shape.Shape"}
    assert violations("runs", {"model.network.Network", "model.shape.Shape"}) == {"model.network.Network"}


def test_rooms_that_only_reason_never_import_torch() -> None:
    modules = [
        ".".join(["steepen", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        for part in TORCH_FREE
        for target in [SOURCE / part.replace(".", "/")]
        for file in (target.rglob("*.py") if target.is_dir() else [target.with_suffix(".py")])
        if file.exists()
    ]
    code = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; "
        "sys.exit('torch' in sys.modules)"
    )
    # The checkout under test, wherever the package may be installed from.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
