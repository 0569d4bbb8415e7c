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


def load_yaml(text: str) -> Any:
    """Parse YAML or JSON text."""
    return yaml.load(text, Loader=_Loader)
