"""The project files agree with the code: declared dependencies, pinned versions, CI and README commands."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import steepen

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Import names that differ from the name of the distribution.
DISTRIBUTIONS = {"yaml": "pyyaml"}


def distribution_name(requirement: str) -> str:
    """The normalized distribution name of a requirement such as `Jinja2>=3.1`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match.group().lower().replace("_", "-")


def third_party_imports(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and name != "steepen"}


def test_every_imported_library_is_declared_and_every_declared_one_is_imported() -> None:
    imported = {
        distribution_name(DISTRIBUTIONS.get(name, name))
        for name in third_party_imports(REPOSITORY / "src" / "steepen")
    }
    required = {distribution_name(each) for each in PROJECT["dependencies"]}
    extras = {
        distribution_name(each) for group in PROJECT["optional-dependencies"].values() for each in group
    }
    assert imported - required - extras == set()
    assert required - imported == set()


def test_every_dependency_has_an_exact_version_in_constraints() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {distribution_name(line) for line in lines if line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    assert {distribution_name(each) for each in [*PROJECT["dependencies"], *extras["dev"]]} <= pinned


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands == ["make test", "make docs", "make quickstart"]
    assert all(re.search(rf"^{command}\b", readme, re.MULTILINE) for command in commands)


def test_the_citation_names_the_paper_and_the_software() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["type"] == "software" and citation["title"].startswith("steepen")
    assert citation["license"] == PROJECT["license"]
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Chen", "Vegesna", "Dahal", "Wilson"]


def test_version_is_read_from_the_source_tree_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = steepen.__version__
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert steepen.__version__ == installed


def test_every_pin_but_torch_has_hashes_and_nothing_else_is_installed() -> None:
    hashed: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (REPOSITORY / name).read_text().replace(" \\\n", "")
        for line in text.splitlines():
            if not line.startswith(("#", "-r ")):
                pin = re.fullmatch(
                    r"([\w-]+)==([\w.]+)(?: ; [^#]+?)?(?:    --hash=sha256:[0-9a-f]{64})+", line
                )
                assert pin and pin[1] not in hashed, line
                hashed[pin[1]] = pin[2]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = {distribution_name(line): line.split("==")[1] for line in lines if not line.startswith("#")}
    assert hashed == {name: version for name, version in pins.items() if name != "torch"}


def test_bill_of_materials_names_every_dependency_once() -> None:
    script = REPOSITORY / "tools" / "sbom.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    found = json.loads(made)
    names = [distribution_name(part["name"]) for part in found["components"]]
    assert len(set(names)) == len(names)
    assert {distribution_name(each) for each in PROJECT["dependencies"]} <= {*names}
    known = {part["bom-ref"] for part in found["components"]}
    assert all(known.issuperset(each["dependsOn"]) for each in found["dependencies"])
    assert all(importlib.metadata.version(part["name"]) == part["version"] for part in found["components"])


def test_lowest_versions_are_those_of_pyproject() -> None:
    script = REPOSITORY / "tools" / "lowest_versions.py"
    printed = subprocess.run(
        [sys.executable, script, "--torch", "2.13.0"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"numpy==1.26", "torch==2.13.0", "typer==0.15.4", "pandas==2"} <= {*printed}
    assert {distribution_name(each) for each in PROJECT["dependencies"]} <= {*map(distribution_name, printed)}


def test_tests_that_the_makefile_names_exist() -> None:
    named = re.findall(r"\btests/\S+", (REPOSITORY / "Makefile").read_text())
    assert len(named) > 10 and all((REPOSITORY / name).exists() for name in named)
