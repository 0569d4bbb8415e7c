"""Former names of options, which commands still accept and their help does not show."""

from __future__ import annotations

from typing import Any


def former_options(names: dict[str, str]) -> dict[str, Any]:
    """Settings of a command that reads an option's former name as its present one, both without dashes."""

    def present_name(name: str) -> str:
        return names.get(name, name)

    return {"token_normalize_func": present_name}
