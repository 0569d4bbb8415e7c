"""A launcher by name, from what a command line says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.launch.base import LaunchContext, Launcher
from steepen.utils.yaml_io import load_yaml

LAUNCHERS = ("local", "slurm", "ray")


def make_launcher(
    on: str, place: LaunchContext, jobs: int | None = None, options: Sequence[str] = ()
) -> Launcher:
    """The launcher `--on` names; options are KEY=VALUE, e.g. threads=4, partition=gpu, num_gpus=0.5."""
    if on not in LAUNCHERS:
        raise UsageError(f"--on {on!r} is not known: use {', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]}.")
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs} is not valid: it must be at least 1.")
    settings = dict(_setting(option) for option in options)
    if on == "slurm":
        from steepen.launch.slurm import SlurmLauncher

        return SlurmLauncher(place, jobs, **settings)
    from steepen.launch.local import LocalLauncher
    from steepen.launch.ray import RayLauncher

    kind = LocalLauncher if on == "local" else RayLauncher
    known = [p.name for p in inspect.signature(kind.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in settings:
        if name not in known:
            raise UsageError(f"--with {name} is not an option of {on}; it knows {nearest(name, known)}.")
    return kind(place, jobs, **settings)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--with {text!r} is not valid: write it as KEY=VALUE, e.g. threads=4.")
    return name.strip().replace("-", "_"), load_yaml(value)
