"""YAML loader that parses 1e-3 as a float, as JSON does."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1 parses 1e-3, which has no dot, as a string; this loader parses it as a float."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


MAX_CHARACTERS = 1_000_000  # which take some seconds
MAX_DEPTH = 100
MAX_NODES = 1_000_000  # with every alias counted as often as it is used


def load_yaml(text: str) -> Any:
    """Parse YAML or JSON text; raises yaml.YAMLError also for what would take absurd time or memory."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    loader = _Loader(text)
    try:
        node: Any = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, 0)
        return loader.construct_document(node)
    except (RecursionError, ValueError, OverflowError, TypeError) as error:
        # ValueError: an impossible date, an integer of too many digits; TypeError: a list as a key.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise yaml.YAMLError(reason or "a value cannot be read") from error
    finally:
        loader.dispose()


def _count(node: Any, known: dict[int, int], depth: int) -> int:
    """Values under a node, aliases followed; raises if there are too many or they are nested too deeply."""
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if id(node) in known:
        return known[id(node)]
    total = 1
    if isinstance(node, yaml.MappingNode):
        children: list[Any] = [child for pair in node.value for child in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    for child in children:
        total += _count(child, known, depth + 1)
        if total > MAX_NODES:
            raise yaml.YAMLError(f"it has more than {MAX_NODES:,} values")
    known[id(node)] = total
    return total
