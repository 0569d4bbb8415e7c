"""Which options a command line has, apart from defaults and environment variables."""

from __future__ import annotations

import typer


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the parameter `name` is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
