"""Short types of options in `--help`: nothing for a flag, `<float>` for a number with bounds.

typer prints `<bool>`, `<float range> [1<=x<=1e+60]` and `<list[str]>`, which leave little of 80 columns to
the text. A value out of its range is an error that states the range.
"""

from __future__ import annotations

import re
from typing import Any


def shorten_types(command: Any) -> Any:
    """Make a command and its subcommands print short types; returns the command."""
    plain = command.get_params

    def get_params(context: Any) -> list[Any]:
        found = plain(context)
        for option in found:
            if option.param_type_name == "option" and option.metavar is None:
                option.metavar = _short_type(option, context)
                option.min = option.max = None  # printed only: the range is checked elsewhere
        return found

    command.get_params = get_params
    for one in getattr(command, "commands", {}).values():
        shorten_types(one)
    return command


def _short_type(option: Any, context: Any) -> str | None:
    if getattr(option, "is_flag", False):
        return ""
    if not hasattr(option, "display_type"):  # typer before 0.20 has no such types
        return None
    name = option.display_type(context).lower()
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", r"<\1>", name)
