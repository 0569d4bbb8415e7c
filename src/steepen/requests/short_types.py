"""Short types of options and arguments in `--help`: nothing for a flag, `<float>` for a number with bounds.

typer prints `<bool>`, `<float range> [1<=x<=1e+60]` and `<list[str]>`, which leave little of 80 columns to
the text. A value out of its range is an error that states the range.
"""

from __future__ import annotations

import functools
import re
from typing import Any


def shorten_types(command: Any) -> Any:
    """Make a command and its subcommands print short types; returns the command."""
    plain = command.get_params

    def get_params(context: Any) -> list[Any]:
        found = plain(context)
        for one in found:
            if one.param_type_name == "argument":
                # The metavar of an argument is its name, so its type is replaced where it is printed.
                one.display_type_rich = functools.partial(_short_type, one)
            elif one.metavar is None:
                one.metavar = _short_type(one, context)
                one.min = one.max = None  # printed only: the range is checked elsewhere
        return found

    command.get_params = get_params
    for one in getattr(command, "commands", {}).values():
        shorten_types(one)
    return command


def _short_type(parameter: Any, ctx: Any) -> str | None:
    if getattr(parameter, "is_flag", False):
        return ""
    if not hasattr(parameter, "display_type"):  # typer before 0.20 has no such types
        return None
    name = parameter.display_type(ctx).lower()
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", r"<\1>", name)
