"""Values that no file should hold, and copies of JSON values with one of them somewhere."""

from __future__ import annotations

import copy
import random
from typing import Any

VALUES = [
    None, True, -1, 0, 1, 2.5, 1e30, 1e308, -1e308, 10**40, float("inf"), float("nan"), "", "x" * 1000,
    "evil:arm", [], [[]], [1, 2], {}, {"a": 1}, {"a": {"b": [1]}}, "\x1b[2J", "[/red]", "1e9", "../../x", 0.5,
    "\ud800", "²",
]  # fmt: skip


def mutate(value: Any, choose: random.Random) -> Any:
    """A copy with one field replaced, removed or added somewhere."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            walk(child)

    walk(value)
    node, key = choose.choice(places)
    how = choose.random()
    if how < 0.7:
        node[key] = choose.choice(VALUES)
    elif how < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[choose.choice(["", "x", "__class__"])] = choose.choice(VALUES)
    else:
        node.append(choose.choice(VALUES))
    return value
