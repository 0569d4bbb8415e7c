"""What tells some runs from one another, in words: "learning rate 0.04", "growth at 0.7"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from steepen.runs.spec import RunSpec
from steepen.utils.formatting import format_value


def varied_settings(specs: Iterable[RunSpec]) -> dict[str, str]:
    """By hash, the settings in which a run differs from others of its arm, depth and seed; "" for none."""
    groups: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for spec in specs:
        key = (spec.arm.name, spec.shape.depth, spec.seed)
        groups.setdefault(key, {})[spec.hash] = _settings(spec)
    found: dict[str, str] = {}
    for own in groups.values():
        for run, settings in own.items():
            words: list[str] = []
            for name, value in settings.items():
                usual, count = Counter(one[name] for one in own.values()).most_common(1)[0]
                # One setting at a time is varied around usual values, or one takes many values.
                if count < len(own) and (value != usual or count <= len(own) / 2):
                    words.append(f"{name} {format_value(value)}")
            # Tokens follow from other settings where a budget is fixed, and have a column of their own.
            found[run] = ", ".join(words[:-1] if words[1:] and words[-1].startswith("tokens") else words)
    return found


def _settings(spec: RunSpec) -> dict[str, Any]:
    """What studies vary, by its words."""
    stages = spec.schedule.stages
    return {
        **{name.replace("_", " "): value for name, value in spec.hyperparameters.to_dict().items()},
        "optimizer": spec.optimizer.kind,
        "passes": max(stages[-1].passes),
        "growth at": stages[1].start if len(stages) > 1 else None,
        "pool tokens": spec.data.pool_tokens,
        "epochs": spec.data.epochs,
        "core blocks": spec.shape.allocation.core,
        "width": spec.shape.width,
        "tokens": spec.tokens,
    }
