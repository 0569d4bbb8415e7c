"""YAML as people write it: 1e-3 is a number, as in JSON."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text for want of a dot; this loader does not."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_yaml(text: str) -> Any:
    """The value of a YAML or JSON text."""
    return yaml.load(text, Loader=_Loader)
