"""Launchers by name: local, slurm, ray, or "module:attribute" of a custom launcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from steepen.errors import UsageError, nearest
from steepen.launch.base import LaunchContext, Launcher
from steepen.utils.imports import import_object, object_name
from steepen.utils.yaml_io import load_yaml

MAX_JOBS = 10_000
LAUNCHERS = {
    "local": "steepen.launch.local:LocalLauncher",
    "slurm": "steepen.launch.slurm:SlurmLauncher",
    "ray": "steepen.launch.ray:RayLauncher",
}


def make_launcher(
    launcher: str | Callable[..., Launcher],
    context: LaunchContext,
    jobs: int | None = None,
    options: Sequence[str] = (),
) -> Launcher:
    """Make a launcher from its name or class, called as `launcher(context, jobs, **options)`.

    `jobs` is the max number of runs at a time, None for the launcher's default. `options` are KEY=VALUE
    texts: threads=4, partition=gpu, num_gpus=0.5.
    """
    factory, settings = find_launcher(launcher, jobs, options)
    return factory(context, jobs, **settings)


def find_launcher(
    launcher: str | Callable[..., Launcher], jobs: int | None = None, options: Sequence[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class of a launcher and its options; raises UsageError for a name, jobs or option that is wrong."""
    name = launcher if isinstance(launcher, str) else object_name(launcher, "launcher")
    if name not in LAUNCHERS and ":" not in name:
        raise UsageError(
            f"`launcher` = {name!r} is not known: use {', '.join(LAUNCHERS)} or, for a custom launcher, "
            '"module:attribute".'
        )
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        limit = "at least 1" if jobs < 1 else f"at most {MAX_JOBS:,}"
        raise UsageError(f"`jobs` = {jobs} is not valid: it must be {limit}.")
    factory = import_object(LAUNCHERS.get(name, name), "launcher", own=LAUNCHERS.values())
    if not callable(factory):
        raise UsageError(f"the launcher {name!r} is not valid: it must be a class or a function.")
    settings = dict(_parse_option(option) for option in options)
    _check_options(name, factory, settings)
    return factory, settings


def _check_options(name: str, factory: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Reject an option that the launcher does not have; one with **options accepts any."""
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in settings:
        if option not in known:
            choices = f"use {nearest(option, known)}" if known else "it has none"
            raise UsageError(f"`launcher_options` = {option} is not an option of {name}: {choices}.")


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"`launcher_options` = {text!r} is not valid: write KEY=VALUE, e.g. threads=4.")
    try:
        found = load_yaml(value)
    except yaml.YAMLError as error:
        raise UsageError(f"`launcher_options` = {text!r} is not valid: its value cannot be read.") from error
    if isinstance(found, dict | list):
        raise UsageError(f"`launcher_options` = {text!r} is not valid: its value must be a number or text.")
    return name.strip().replace("-", "_"), found
