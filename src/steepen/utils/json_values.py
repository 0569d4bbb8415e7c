"""Values as JSON knows them: what an answer may hold."""

from __future__ import annotations

import json
from typing import Any

from steepen.utils.json_text import to_json


def plain(value: Any) -> Any:
    """Arrays and numpy numbers as lists and numbers; NaN and infinities as None."""
    return json.loads(to_json(value, indent=None))
