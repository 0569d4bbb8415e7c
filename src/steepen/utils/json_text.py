"""Results as JSON that every reader accepts: numbers JSON has no word for become null."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import numpy as np


def to_json(data: Any, indent: int | None = 2) -> str:
    """JSON text of plain data, arrays and numpy numbers; NaN and infinities are written as null."""
    return json.dumps(_plain(data), indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in cast(list[Any], value)]
    if isinstance(value, np.ndarray):
        return _plain(cast(Any, value).tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
