"""Recipes as files: what fit-recipe and growth-timing write, and `--recipe` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from steepen.errors import UsageError, require
from steepen.recipe.recipe import Recipe
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.files import read_text, write_atomically
from steepen.utils.yaml_io import load_yaml

RECIPE_VERSION = 1


@dataclass(frozen=True)
class RecipeFile:
    """A fitted recipe, for which arm, at which preset, and what it rests on."""

    arm: str
    recipe: Recipe
    preset: str = ""
    fitted: dict[str, Any] = field(default_factory=dict[str, Any])  # the four stages' numbers
    version: int = RECIPE_VERSION

    def __post_init__(self) -> None:
        require(bool(self.arm), "recipe file", "arm", self.arm, "the name of an arm")
        require(self.version == RECIPE_VERSION, "recipe file", "version", self.version, f"{RECIPE_VERSION}")


def write_recipe(path: Path, content: RecipeFile) -> None:
    """Write a recipe file, whole or not at all."""
    write_atomically(path, yaml.safe_dump(to_builtins(content), sort_keys=False, allow_unicode=True))


def read_recipe(path: Path) -> RecipeFile:
    """Read a recipe file (YAML or JSON); a wrong field is rejected by name."""
    try:
        value: Any = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"the recipe file {path} could not be read: {reason}.") from error
    return from_builtins(RecipeFile, value, f"recipe file {path.name}")
