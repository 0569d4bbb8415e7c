"""Launchers by name: unknown names and options, missing packages, custom launchers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steepen.errors import UsageError
from steepen.launch.base import LaunchContext, make_launcher
from steepen.runs.spec import RunSpec

Spec = Callable[..., RunSpec]


@pytest.mark.parametrize(
    ("on", "options", "says"),
    [
        ("cloud", [], "local, slurm, ray or"),
        ("local", ["threds=2"], "threads"),
        ("local", ["threads"], "KEY=VALUE"),
        ("local", ["threads=0"], "from 1 to 10,000"),
        ("slurm", ["cluster=local", "partion=gpu"], "partion"),
        ("slurm", ["cluster=local", "timeout_min=soon"], "timeout_min"),
        ("ray", ["gpus=1"], "num_gpus"),
    ],
)
def test_an_unknown_launcher_or_option_is_rejected_by_name(
    on: str, options: list[str], says: str, context: LaunchContext
) -> None:
    if on == "slurm":
        pytest.importorskip("submitit")
    with pytest.raises(UsageError) as error:
        make_launcher(on, context, 2, options)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("on", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_the_error_for_a_missing_package_names_the_extra(
    on: str, package: str, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Exception, match=f"pip install 'steepen\\[{on}\\]'"):
        make_launcher(on, context)


def test_the_documented_custom_launcher_runs_by_name_and_as_a_class(
    context: LaunchContext, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    (example,) = [part for part in page.split("```python\n") if "class SerialLauncher" in part[:400]]
    (tmp_path / "mylab_launcher.py").write_text(example.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    launcher = make_launcher("mylab_launcher:SerialLauncher", context, None, ["threads=2"])
    (outcome,) = launcher.launch([spec(1)])
    assert outcome.record is not None and outcome.record.spec == spec(1)
    same = make_launcher(type(launcher), context)
    assert isinstance(same, type(launcher))
    with pytest.raises(UsageError, match="threads"):
        make_launcher("mylab_launcher:SerialLauncher", context, None, ["nicer=5"])
