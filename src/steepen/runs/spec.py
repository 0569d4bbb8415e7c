"""A run's specification: everything that decides its result. Its content hash is its name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from steepen.errors import UsageError, nearest
from steepen.model.arm import Arm, PassSchedule
from steepen.model.config import ModelOptions
from steepen.model.shape import Shape
from steepen.optim.config import OptimizerConfig
from steepen.recipe.accounting import stage_fractions
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.recipe.recipe import Rung
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.source_digest import source_digest
from steepen.utils.validate import require, require_positive
from steepen.utils.yaml_io import load_yaml

SPEC_VERSION = 1
# What products are computed in; weights, optimizer and sums are fp32 in all. fp8 is bf16 with products in
# eight bits, but for the head's own gradient.
Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class DataConfig:
    """The data by content, not by place: the same spec means the same tokens on every machine."""

    identity: str  # the prepared data set's content hash
    pool_tokens: int | None = None  # only so many unique tokens
    epochs: int = 1  # how often the data, or the pool, may be seen

    def __post_init__(self) -> None:
        require(
            bool(self.identity), "data", "identity", self.identity, "the content hash of a prepared data set"
        )
        good = self.pool_tokens is None or self.pool_tokens >= 1
        require(good, "data", "pool_tokens", self.pool_tokens, "a positive count, or null for the whole set")
        require_positive(self, ("epochs",))


@dataclass(frozen=True)
class RunSpec:
    """One run: an arm at a size on some data, with every hyperparameter, for so many steps from a seed."""

    arm: Arm
    shape: Shape
    schedule: PassSchedule  # with every start known
    hyperparameters: Hyperparameters
    data: DataConfig
    steps: int
    batch_tokens: int
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    options: ModelOptions = field(default_factory=ModelOptions)
    precision: Precision = "fp32"
    validation_tokens: int = 1_048_576
    code: str | None = None  # digest of the user's own code behind the arm, where there is any
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        require_positive(self, ("steps", "batch_tokens", "validation_tokens"))
        require(
            isinstance(self.seed, int) and self.seed >= 0, "RunSpec", "seed", self.seed, "a whole number ≥ 0"
        )
        require(
            self.batch_tokens % self.shape.context == 0,
            "RunSpec",
            "batch_tokens",
            self.batch_tokens,
            f"a multiple of the context ({self.shape.context})",
        )
        known = self.precision in get_args(Precision)
        require(known, "RunSpec", "precision", self.precision, "fp32, bf16 or fp8")
        stage_fractions(self.schedule)  # refuses a schedule that still waits for a recipe
        require(self.version == SPEC_VERSION, "RunSpec", "version", self.version, f"{SPEC_VERSION}")

    @staticmethod
    def of(rung: Rung, data: DataConfig, **rest: Any) -> RunSpec:
        """The spec of a planned run."""
        return RunSpec(
            arm=rung.arm,
            shape=rung.shape,
            schedule=rung.schedule,
            hyperparameters=rung.hyperparameters,
            data=data,
            steps=rung.steps,
            batch_tokens=rung.batch_tokens,
            code=code_digest(rung.arm, rest.get("optimizer")),
            **rest,
        )

    @property
    def batch_sequences(self) -> int:
        """Sequences in one global batch."""
        return self.batch_tokens // self.shape.context

    @property
    def tokens(self) -> int:
        """Tokens the run trains on."""
        return self.steps * self.batch_tokens

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of the content's SHA-256: the run's name."""
        # Through the codec, so that 0 and 0.0 in a field of floats are one content, as they are one value.
        content = _content(from_builtins(RunSpec, to_builtins(self), "spec"))
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in spec.json."""
        return to_builtins(self)

    @staticmethod
    def from_dict(value: Any) -> RunSpec:
        """The spec of plain values; a wrong field is refused by name."""
        return from_builtins(RunSpec, value, "spec")


def code_digest(arm: Arm, optimizer: OptimizerConfig | None = None) -> str | None:
    """Digest of an arm's and an optimizer's custom source; None where everything is built in."""
    custom = [*arm.custom_code, *([optimizer.kind] if optimizer is not None and optimizer.is_custom else [])]
    return source_digest(custom)


def _content(spec: RunSpec) -> dict[str, Any]:
    """What the hash covers: all but the words that describe an arm to people."""
    plain = spec.to_dict()
    for words in ("title", "about", "recipe"):
        plain["arm"].pop(words)
    return plain


def read_spec(path: Path) -> RunSpec:
    """A spec from a JSON or YAML file."""
    try:
        value = load_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"the spec file {path} could not be read: {reason}.") from error
    return RunSpec.from_dict(value)


def override(spec: RunSpec, settings: list[str]) -> RunSpec:
    """The spec with `section.field=value` changes: optimizer.learning_rate=0.03, options.softcap=15, seed=2.

    The tuned hyperparameters may be named under `optimizer` or `hyperparameters`, or bare where unambiguous.
    """
    kind = spec.optimizer.kind
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r} is not valid: write it as section.field=value.")
        section, name = _locate(key.strip())
        try:
            value = load_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {setting!r} is not valid: its value cannot be read.") from error
        if section is None:
            spec = from_builtins(RunSpec, {**spec.to_dict(), name: value}, "spec")
        else:
            part = getattr(spec, section)
            plain = {**to_builtins(part), name: value}
            spec = replace(spec, **{section: from_builtins(type(part), plain, section)})
    if spec.optimizer.kind != kind:  # the digest covers a custom optimizer's source
        spec = replace(spec, code=code_digest(spec.arm, spec.optimizer))
    return spec


_SECTIONS: dict[str, type] = {
    "hyperparameters": Hyperparameters,
    "optimizer": OptimizerConfig,
    "options": ModelOptions,
    "data": DataConfig,
}
_PLAIN = ("steps", "batch_tokens", "seed", "precision", "validation_tokens")


def _locate(key: str) -> tuple[str | None, str]:
    """Where a dotted or bare key lives: its section (None for the spec itself) and field."""
    section, _, name = key.rpartition(".")
    name = full_name(name)
    homes = [home for home, kind in _SECTIONS.items() if name in {f.name for f in fields(kind)}]
    if not section and name in _PLAIN:
        return None, name
    if section in homes or (not section and len(homes) == 1):
        return section or homes[0], name
    if section == "optimizer" and "hyperparameters" in homes:
        return "hyperparameters", name
    # As they are written in the documentation: the tuned hyperparameters under `optimizer`.
    written = {"hyperparameters": "optimizer"}
    choices = list(_PLAIN)
    for home, kind in _SECTIONS.items():
        choices += [f"{written.get(home, home)}.{f.name}" for f in fields(kind)]
    raise UsageError(f"--set knows no {key!r}; the nearest are {nearest(key, choices)}.")
