"""A run as one flat row: every hyperparameter, size, cost and score under its own name.

These are the columns of `steepen runs --columns`, `--sort`, `--where` and `--csv`, and of
`steepen.open_runs(...).to_frame()`. `varied_settings` says what tells some runs apart: "learning rate 0.04".
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from steepen.errors import UsageError
from steepen.recipe.hyperparameters import PAPER_CODES, full_name
from steepen.runs.disk import directory_bytes
from steepen.runs.row import RunRow
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.utils.expression import Condition, parse_condition
from steepen.utils.formatting import format_value
from steepen.utils.series import SeriesRun, split_recipes

# Other names that people use for a field; the paper's codes (GLR, WD, …) are known too.
ALIASES = {
    "lr": "learning_rate",
    "hash": "run",
    "speed": "tokens_per_second",
    "params": "parameters",
    "n": "parameters",
    "compute": "flops",
    "c": "flops",
    "val_loss": "loss",
    "validation_loss": "loss",
    "seconds": "seconds_training",
    "bytes": "disk_bytes",
    "size": "parameters",
}
# What a run measured or where it was; all other fields are settings, or follow from them.
_MEASURED = frozenset({
    "status", "cause", "failure_kind", "loss", "step", "tokens_per_second", "finished", "bits_per_byte",
    "train_loss", "seconds_training", "seconds_total", "mfu", "peak_memory_bytes", "device", "host",
    "resumed", "disk_bytes", "kl_depth", "trunk", "trunk_steps", "spent_flops",
})  # fmt: skip


def field_name(name: str) -> str:
    """The name of a field from one of its other names: GLR, lr → learning_rate."""
    known = ALIASES.get(name.strip().lower(), name.strip())
    return full_name(known)


def all_run_fields(store: RunStore, rows: Iterable[RunRow]) -> list[dict[str, Any]]:
    """The fields of some runs; all have the same names in the same order."""
    rows = list(rows)
    recipes = split_recipes([SeriesRun(r.arm, r.corpus, r.recipe, r.depth, r.seed) for r in rows])
    found: list[dict[str, Any]] = []
    for row, recipe in zip(rows, recipes, strict=True):
        fields = {**vars(row), **row.more, "flops": row.flops or None, "recipe": recipe}
        del fields["more"]
        fields["disk_bytes"] = directory_bytes(store.root / row.run)
        found.append(fields)
    names = list(dict.fromkeys(name for fields in found for name in fields))
    return [{name: fields.get(name) for name in names} for fields in found]


def parse_where(text: str, known: Collection[str]) -> Condition:
    """A condition on fields of runs."""
    return parse_condition(text, known, field_name)


def is_setting(name: str) -> bool:
    """Whether a field is part of a run's spec or follows from it; the others were measured."""
    return name not in _MEASURED and not name.startswith(("core", "nll", "loss_at_", "loss."))


def check_field(name: str, known: Collection[str], setting: str) -> str:
    """The field that a setting names; UsageError with the nearest ones if there is none."""
    field = field_name(name)
    if field in known:
        return field
    other_names = [alias for alias in (*ALIASES, *PAPER_CODES) if field_name(alias) in known]
    close = difflib.get_close_matches(name.lower()[:100], [*known, *other_names], n=5, cutoff=0.5)
    fields = list(dict.fromkeys(map(field_name, close)))
    hint = (
        f"the nearest are {', '.join(fields)} (`steepen runs --fields` lists all)"
        if fields
        else ("`steepen runs --fields` lists them")
    )
    raise UsageError(f"{setting} {name!r} is not a field of a run; {hint}.")


def sort_by_field(rows: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Rows sorted by a field, descending with a leading "-"; rows without a value come last."""
    if not rows:
        return []
    name = check_field(key.removeprefix("-"), rows[0], "`sort`")
    rows = sorted(rows, key=lambda row: (row["arm"], row["depth"], row["seed"], row["run"]))
    present = [row for row in rows if row[name] is not None]
    absent = [row for row in rows if row[name] is None]

    def value(row: Mapping[str, Any]) -> Any:
        found = row[name]
        return found if isinstance(found, int | float | str) else json.dumps(found)

    try:
        present.sort(key=value, reverse=key.startswith("-"))
    except TypeError:  # numbers and words in one field
        present.sort(key=lambda row: str(value(row)), reverse=key.startswith("-"))
    return present + absent


def format_field(name: str, value: Any) -> str:
    """A field's value for people: short hashes, and times to the minute."""
    if isinstance(value, str):
        if name == "finished":
            return f"{value[:16].replace('T', ' ')} UTC"
        if name in ("data", "validation_data"):
            return f"{value[:16]}…"
    return format_value(value, 6)


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
