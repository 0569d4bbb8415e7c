"""Which recipe each arm follows (`--recipe NAME|FILE` and `--tpp` of plan, train and study), and its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from steepen.errors import UsageError, require
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.recipe.paper_tables import AUTHORS_STORAGE, recipe_of, with_constant_rate
from steepen.recipe.recipe import Recipe
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.files import read_text, write_atomically
from steepen.utils.yaml_io import load_yaml

# Stage 3 of the paper recommends the tokens per parameter of the arm before growth, and one ρ for all sizes:
# the mean optimum (.271, .170, .544) to one decimal.
FIXED_RHO = {"untied-grow": 0.3, "loop-grow": 0.2, "deep-vanilla-grow": 0.5}
FIXED_RHO_TPP = 6.0


@dataclass(frozen=True)
class NamedRecipe:
    """A set of recipes for all arms, as a change to the paper's."""

    about: str
    change: Callable[[Arm, Recipe], Recipe]
    settings: tuple[str, ...] = AUTHORS_STORAGE  # of a run's spec, as `changes` takes them


def _fixed_rho(arm: Arm, recipe: Recipe) -> Recipe:
    if arm.recipe not in FIXED_RHO:
        return recipe
    return replace(
        recipe, tpp=FIXED_RHO_TPP, rho=FIXED_RHO[arm.recipe], listed_rho=(), growth_law=None, measured=None
    )


NAMED: dict[str, NamedRecipe] = {
    "paper": NamedRecipe("the paper's reported ladders, as its authors ran them", lambda _, recipe: recipe),
    "paper-fixed-rho": NamedRecipe(
        "growth as the paper recommends it: 6 tokens per parameter, one ρ for all sizes (untied-grow 0.3)",
        _fixed_rho,
    ),
    "paper-affine-rho": NamedRecipe(
        "ρ by the paper's affine law at every size, not as listed",
        lambda _, recipe: replace(recipe, listed_rho=()),
    ),
    "paper-constant-lr": NamedRecipe("the base learning rate at every size", with_constant_rate),
}


@dataclass(frozen=True)
class RecipeChoice:
    """What was chosen: a named set for all arms, recipe files for single arms, tokens per parameter."""

    name: str | None = None
    files: Mapping[str, Recipe] = field(default_factory=dict[str, Recipe])  # by the arm's name
    tpp: float | None = None
    # Names of the arms whose recipe a study has asked for, whether a file gives it or not.
    asked: set[str] = field(default_factory=set[str], compare=False)

    def __post_init__(self) -> None:
        if self.tpp is not None and not (math.isfinite(self.tpp) and self.tpp > 0):
            raise UsageError(f"`tpp` = {self.tpp} is not valid: it must be a positive number.")

    def of(self, arm: Arm) -> Recipe:
        """The recipe for an arm: its file's, else the named set's, else the paper's."""
        recipe = self.files.get(arm.name) or NAMED[self.name or "paper"].change(arm, recipe_of(arm))
        return self.at_tpp(recipe)

    def settings(self, arm: Arm) -> tuple[str, ...]:
        """What the named set changes in a run's spec besides hyperparameters; nothing for a file's recipe."""
        return () if arm.name in self.files else NAMED[self.name or "paper"].settings

    def at_tpp(self, recipe: Recipe) -> Recipe:
        """The recipe at the chosen tokens per parameter, if any were."""
        return recipe if self.tpp is None else recipe.with_tpp(self.tpp)

    def require_asked(self) -> None:
        """Raise UsageError if a recipe file is for an arm whose recipe the study did not ask for."""
        for name in self.files:
            if name not in self.asked:
                arms = ", ".join(sorted(self.asked))
                raise UsageError(f"the recipe given is for {name}, which is not among the arms: {arms}.")

    def require_file_for(self, arm: Arm) -> None:
        """Raise UsageError if files were given, but none of them is for this arm."""
        if self.files and arm.name not in self.files and self.name is None:
            raise UsageError(
                f"the recipe given is for {', '.join(sorted(self.files))}, not for {arm.name}; "
                f"give {arm.name}'s, or a named recipe ({', '.join(NAMED)})."
            )


def choose_recipes(words: Sequence[str] = (), tpp: float | None = None) -> RecipeChoice:
    """The choice that `--recipe` (names and files) and `--tpp` make."""
    names: list[str] = []
    files: dict[str, Recipe] = {}
    for word in words:
        if word in NAMED:
            names.append(word)
            continue
        if not Path(word).is_file() and Path(word).suffix not in (".yaml", ".yml", ".json"):
            raise UsageError(f"there is no recipe {word!r}: name a file, or one of {', '.join(NAMED)}.")
        content = read_recipe(Path(word))
        arm = _own_name(content.arm)
        if arm in files:
            raise UsageError(f"two recipe files are for {arm}; give one for each arm.")
        files[arm] = content.recipe
    if len(set(names)) > 1:
        raise UsageError(f"`recipe` names {' and '.join(names)}; give one name, and files for single arms.")
    return RecipeChoice(names[0] if names else None, files, tpp)


def _own_name(arm: str) -> str:
    """The name of an arm that is known here; any other may be the own name of a custom arm."""
    try:
        return find_arm(arm).name
    except UsageError:
        if ":" in arm:
            raise
        return arm


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
