"""A series of runs is (arm, corpus, recipe): runs that differ in one of them follow different laws."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steepen.utils.json_io import canonical_json

# Hyperparameters that a recipe may scale with size: they differ along one ladder.
SCALED_WITH_SIZE = frozenset(
    ("learning_rate", "output_multiplier", "residual_multiplier", "weight_decay", "warmdown_fraction")
)
DIGITS = 8


@dataclass(frozen=True)
class SeriesRun:
    """What decides a run's series: arm, corpus, recipe, and which run of a ladder it is."""

    arm: str
    corpus: str
    recipe: str
    depth: int
    seed: int


def corpus_name(data: Mapping[str, Any]) -> str:
    """The corpus of a spec's `data` in JSON: its content hash, and the pool where it is not the default."""
    name = str(data["identity"])[:DIGITS]
    pool = data.get("pool_tokens")
    return name if pool is None else f"{name}/{pool}"


def recipe_name(spec: Mapping[str, Any]) -> str:
    """Digest of a spec's recipe (JSON values) in two parts, `COARSE.FINE`.

    The first part leaves out what may scale with size; the second has it, the learning rate apart, and tells
    apart two recipes that were run at the same size.
    """
    values: Mapping[str, Any] = spec["hyperparameters"]
    other = {name: spec.get(name) for name in ("optimizer", "lr_schedule", "options", "precision")}
    fixed = {name: value for name, value in values.items() if name not in SCALED_WITH_SIZE}
    scaled = {n: v for n, v in values.items() if n in SCALED_WITH_SIZE and n != "learning_rate"}
    return f"{_digest([fixed, other, spec['batch_tokens']])}.{_digest(scaled)[:4]}"


def split_recipes(runs: Sequence[SeriesRun]) -> list[str]:
    """The recipe of every run: one for a whole ladder, two where the same size was run with different values.

    A ladder whose values scale with size differs in the second part of its digests, but has every size and
    seed once.
    """
    coarse = [run.recipe.partition(".")[0] for run in runs]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault((run.arm, run.corpus, coarse[i]), []).append(i)
    found = list(coarse)
    for members in groups.values():
        sizes: dict[tuple[int, int], set[str]] = {}
        for i in members:
            sizes.setdefault((runs[i].depth, runs[i].seed), set()).add(runs[i].recipe)
        if any(len(recipes) > 1 for recipes in sizes.values()):
            for i in members:
                found[i] = runs[i].recipe
    return found


def series_labels(arms: Sequence[str], corpora: Sequence[str] = (), recipes: Sequence[str] = ()) -> list[str]:
    """A name for the series of every run: its arm, with corpus and recipe where the arm has several."""
    count = len(arms)
    corpora, recipes = list(corpora) or [""] * count, list(recipes) or [""] * count
    several_corpora = len(set(corpora)) > 1
    labels: list[str] = []
    for arm, corpus, recipe in zip(arms, corpora, recipes, strict=True):
        words = [f"corpus {corpus or 'not named'}"] if several_corpora else []
        own = {r for a, c, r in zip(arms, corpora, recipes, strict=True) if (a, c) == (arm, corpus)}
        words += [f"recipe {recipe or 'not named'}"] if len(own) > 1 else []
        labels.append(f"{arm} ({', '.join(words)})" if words else arm)
    return labels


def repeated(runs: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The (series, depth, seed) that occur more than once."""
    return [key for key, count in Counter(runs).items() if count > 1]


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()[:DIGITS]
