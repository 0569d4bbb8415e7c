"""Which package may import which: the layout described in CONTRIBUTING.md, checked against the code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "steepen"
# Modules that describe a network without torch.
MODEL_CONFIG = {
    *("model.shape", "model.stages", "model.arm", "model.arms", "model.block_options", "model.config"),
}
OPTIM_CONFIG = {"optim.config"}
# The place of a process and the owners of parameters, without torch.
DISTRIBUTED_CONFIG = {"distributed.environment", "distributed.owners"}

# What each package may import, at the top of a file or inside a function. A dotted name allows one module.
# Every package may import `errors`.
ALLOWED: dict[str, set[str]] = {
    "utils": set(),
    "data": {"utils"},
    "kernels": {"utils"},
    "model": {"utils"},
    "execution": {"kernels", "model", "utils"},
    "optim": {"kernels", "execution.cuda_graphs", "utils"},
    "distributed": {"optim", "utils"},
    "recipe": {*MODEL_CONFIG, *OPTIM_CONFIG, "distributed.owners", "model.block_variant", "utils"},
    "runs": {*MODEL_CONFIG, *OPTIM_CONFIG, "recipe", "utils"},
    "launch": {*MODEL_CONFIG, *OPTIM_CONFIG, "recipe", "runs", "utils"},
    "training": {
        *("data", "model", "kernels", "execution", "optim", "distributed", "recipe", "runs", "utils"),
        "inference.decoding",  # samples during training
    },
    "evaluation": {"data", "distributed", "model", "training", "runs", "laws", "tables", "utils"},
    "inference": {"data", "evaluation", "execution", "model", "recipe", "runs", "training", "utils"},
    "tables": {"utils"},
    "laws": {"tables", "utils"},
    "studies": {
        *(*MODEL_CONFIG, *OPTIM_CONFIG, "recipe", "runs", "launch", "laws", "tables", "utils"),
        "results.panel",
        *("results.table", "results.dry_run", "evaluation.core.suite", "evaluation.forecast"),
        *("evaluation.scored_runs", "data"),
    },
    "report": {
        *("laws", "tables", "model.arms", "runs", "studies", "evaluation.core.suite", "evaluation.forecast"),
        "utils",
        *("evaluation.scored_runs", "results.panel", "results.table", "results.text"),
        *("requests.report", "requests.request"),  # `steepen.report` is this package, called
    },
    # The paper's figures and claims from its authors' measurements.
    "reproduction": {
        *(*MODEL_CONFIG, *OPTIM_CONFIG, "recipe", "runs", "laws", "tables", "studies", "utils"),
        *("evaluation.core.suite", "evaluation.scored_runs", "results.arms"),
    },
    # Rows and how they are shown. `report` draws the panels of a result.
    "results": {
        *("data", "laws", "tables", "launch.cost_estimate", "recipe", "report", "runs", "studies", "utils"),
        *("evaluation.evaluate_many", "evaluation.forecast", "evaluation.scored_runs", *MODEL_CONFIG),
    },
    # What can be asked: the command line and the Python functions.
    "requests": {
        *("data", "model", "recipe", "runs", "launch", "training", "evaluation", "studies", "laws", "report"),
        *("distributed", "inference", "reproduction", "results", "tables", "utils"),
    },
}
PACKAGES = set(ALLOWED)

TORCH_FREE = [
    "laws",
    "tables",
    "runs",
    "launch",
    "studies",
    "report",
    "reproduction",
    "recipe",
    "requests",
    "results",
    "utils",
    *sorted(MODEL_CONFIG | OPTIM_CONFIG | DISTRIBUTED_CONFIG),
]


def imports_of(file: Path) -> set[str]:
    """Return the steepen modules that a file imports, at the top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("steepen.") for name in found if name.startswith("steepen.")}


def violations(package: str, names: set[str]) -> set[str]:
    allowed = ALLOWED[package] | {package}
    return {
        name
        for name in names
        if name.split(".")[0] in PACKAGES
        and not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)
    }


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_allowed_packages(package: str) -> None:
    bad = {
        str(file.relative_to(SOURCE)): wrong
        for file in (SOURCE / package).rglob("*.py")
        if (wrong := violations(package, imports_of(file)))
    }
    assert not bad


def test_every_package_is_listed() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == PACKAGES


def test_violations_are_detected() -> None:
    assert violations("laws", {"requests.app.main"}) == {"requests.app.main"}
    assert violations("laws", {"model.shape.Shape"}) == {"model.shape.Shape"}
    assert violations("runs", {"model.network.Network", "model.shape.Shape"}) == {"model.network.Network"}


def test_torch_free_packages_import_without_torch() -> None:
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
    # Import from this checkout, whichever one is installed.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
