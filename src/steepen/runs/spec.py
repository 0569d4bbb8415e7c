"""The specification of a run: everything that decides its result. Its hash is the run's name.

The hash is stable: it covers only fields that differ from their defaults, recursively, so a field that is
added later with a default leaves every existing hash as it was. A changed default would silently give an old
hash another meaning: bump SPEC_VERSION instead (tests/runs/test_run_identity.py pins the defaults).
Device, world size and micro-batch do not decide the result and are not part of a spec.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from steepen.errors import UsageError, nearest, require
from steepen.model.arm import OWN_CODE, Arm, StageNetwork
from steepen.model.block_options import BlockOptions
from steepen.model.config import ModelOptions
from steepen.model.shape import Shape
from steepen.model.stages import StageSchedule
from steepen.optim.config import LRScheduleConfig, OptimizerConfig
from steepen.recipe.flops import FlopCount, run_flops, stage_fractions, stage_starts
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.recipe.recipe import PlannedRun
from steepen.utils.codec import Checked, from_builtins, to_builtins
from steepen.utils.files import read_text
from steepen.utils.imports import source_digest
from steepen.utils.json_io import canonical_json
from steepen.utils.values import Count, Seed, Tokens
from steepen.utils.yaml_io import load_yaml

SPEC_VERSION = 3  # part of every hash
# Precision of the GEMMs; weights, optimizer state and sums are fp32 in all. fp8 is bf16 with fp8 GEMMs.
Precision = Literal["fp32", "bf16", "fp8"]
# The same as in `data/windows.py`, which `runs` may not import; the type checker compares them where the
# trainer passes one to the other.
Pool = Literal["prefix", "sample"]
Windows = Literal["recut", "fixed"]
UNKNOWN_DATA = "0" * 64  # identity of data that is not prepared yet, in a dry run
MAX_EXECUTED = 10_000  # blocks that a token passes through
PREFIX_FACTOR = Fraction(101, 100)  # tokens of the default pool over tokens of the run


@dataclass(frozen=True)
class DataConfig(Checked):
    """Training data by content hash, not by path: a spec means the same tokens on every machine."""

    identity: str  # content hash of the prepared data set
    # Unique tokens to use; None: what the run needs (prefix), or all (sample).
    pool_tokens: Tokens | None = None
    epochs: Count = 1  # max epochs over the pool, or over all data where it has no size
    pool: Pool = "prefix"  # the data's first tokens, or a pseudo-random sample of it
    windows: Windows = "recut"  # documents shuffled and cut anew every epoch, or windows cut once

    def __post_init__(self) -> None:
        super().__post_init__()
        known = bool(self.identity)
        require(known, "data", "identity", self.identity, "the content hash of a prepared data set")

    def steps_per_epoch(self, train_tokens: int, context: int, batch_tokens: int) -> int:
        """Batches in one epoch of data of `train_tokens` tokens, or of the pool where its size is given."""
        tokens = train_tokens if self.pool_tokens is None else self.pool_tokens
        return tokens // (context + 1) // (batch_tokens // context)

    def max_steps(self, train_tokens: int, context: int, batch_tokens: int) -> int:
        """Batches in all epochs; batches of fixed windows may span two epochs, so there may be a few more."""
        if self.windows == "recut":
            return self.epochs * self.steps_per_epoch(train_tokens, context, batch_tokens)
        tokens = train_tokens if self.pool_tokens is None else self.pool_tokens
        return tokens // (context + 1) * self.epochs // (batch_tokens // context)


@dataclass(frozen=True)
class RunSpec(Checked):
    """One training run: arm, shape, data, hyperparameters, number of steps and seed."""

    arm: Arm
    shape: Shape
    schedule: StageSchedule  # resolved: every stage has a start
    hyperparameters: Hyperparameters
    data: DataConfig
    steps: Count
    batch_tokens: Tokens
    seed: Seed = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    options: ModelOptions = field(default_factory=ModelOptions)
    precision: Precision = "fp32"
    validation_tokens: Tokens = 1_048_576
    code: str | None = None  # digest of the custom code of arm and optimizer, if any
    # Steps of the schedules of learning rate and growth, and of the pool; None: those of the run. A run that
    # stops earlier takes the first steps of the longer one.
    schedule_steps: Count | None = None
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.batch_tokens % self.shape.context == 0,
            "RunSpec",
            "batch_tokens",
            self.batch_tokens,
            f"a multiple of the context ({self.shape.context})",
        )
        longer = self.schedule_steps is None or self.schedule_steps > self.steps
        require(longer, "RunSpec", "schedule_steps", self.schedule_steps, f"more than its {self.steps} steps")
        if self.precision == "fp32":  # the residual stream is fp32 whatever the option says: one hash
            plain = replace(self.options, residual_stream=ModelOptions.residual_stream)
            object.__setattr__(self, "options", plain)
        executed = self.shape.allocation.executed(self.schedule.max_passes)
        require(
            executed <= MAX_EXECUTED,
            "RunSpec",
            "schedule",
            self.schedule.max_passes,
            f"such that a token passes through at most {MAX_EXECUTED:,} blocks, not {executed:,}",
        )
        stage_fractions(self.schedule)  # raises if a stage has no start
        blocks = self.shape.allocation.blocks
        require(blocks >= 1, "RunSpec", "blocks", blocks, "at least one at the end of the run")
        self.arm.networks(self.shape, self.schedule)  # raises if one cannot grow to the next
        require(self.version == SPEC_VERSION, "RunSpec", "version", self.version, f"{SPEC_VERSION}")

    @staticmethod
    def from_plan(planned: PlannedRun, data: DataConfig, **rest: Any) -> RunSpec:
        """The spec of a planned run on some data."""
        return RunSpec(
            arm=planned.arm,
            shape=planned.shape,
            schedule=planned.schedule,
            hyperparameters=planned.hyperparameters,
            data=data,
            steps=planned.steps,
            batch_tokens=planned.batch_tokens,
            code=code_digest(planned.arm, rest.get("optimizer")),
            **rest,
        )

    @property
    def planned_run(self) -> PlannedRun:
        """The sizes of the run, as the planner takes them."""
        size = (self.arm, self.shape, self.schedule, None, self.hyperparameters)
        return PlannedRun(*size, self.batch_tokens, self.steps)

    @property
    def batch_sequences(self) -> int:
        """Sequences in one global batch."""
        return self.batch_tokens // self.shape.context

    @property
    def tokens(self) -> int:
        """Tokens the run trains on."""
        return self.steps * self.batch_tokens

    @property
    def planned_steps(self) -> int:
        """Length of the schedules: the run's own, or of the longer run whose first steps it takes."""
        return self.schedule_steps or self.steps

    @functools.cached_property
    def networks(self) -> tuple[tuple[int, StageNetwork], ...]:
        """The networks of the run, each with its first step; a stage of no step has none.

        The first is that of the first stage: a run whose second stage begins at step 0 grows before it.
        """
        found: list[tuple[int, StageNetwork]] = []
        starts = stage_starts(self.schedule, self.planned_steps)
        for start, network in zip(starts, self.arm.networks(self.shape, self.schedule), strict=True):
            if found and found[-1][0] == start and start > 0:
                found.pop()
            if not found or found[-1][1] != network:
                found.append((start, network))
        return tuple(found)

    def network_after(self, steps: int) -> int:
        """Which of `networks` there is after so many steps: it grows only before the next one."""
        return max((index for index, (start, _) in enumerate(self.networks) if start < steps), default=0)

    @property
    def branch_point(self) -> int:
        """Steps before the learning rate begins to fall or the network grows: those of the run's trunk."""
        steps, named = self.planned_steps, self.lr_schedule
        wsd = named.name == "wsd"
        stable = steps - round(self.hyperparameters.warmdown_fraction * steps) if wsd else 0
        if named.decay_to_zero:  # the warm-down begins after the warm-up
            stable = max(stable, int(self.hyperparameters.warmup_steps))
        return min(self.steps, stable, *stage_starts(self.schedule, steps)[1:2])

    @functools.cached_property
    def trunk(self) -> str | None:
        """Name of the steps before the branch point: runs of one name take the same steps there.

        None where the length of the run decides on its data (a pool without a size) or its passes (drawn at
        random).
        """
        data, first = self.data, self.schedule.stages[0]
        if (data.pool == "prefix" and data.pool_tokens is None) or len(first.passes) > 1:
            return None
        passes = StageSchedule((first,))
        alike = replace(
            self,
            arm=replace(self.arm, name="", passes=passes),
            schedule=passes,
            hyperparameters=replace(self.hyperparameters, warmdown_fraction=0.0),
            data=replace(data, epochs=1),
            steps=1,
            schedule_steps=None,
            lr_schedule=LRScheduleConfig(),
            validation_tokens=RunSpec.validation_tokens,
        )
        return alike.hash

    def pool_size(self, train_tokens: int) -> int | None:
        """Unique tokens the run uses of data of `train_tokens` tokens; None is all of them.

        Where the spec names no number, a prefix has 1.01 times the run's tokens, as in the authors' code, and
        at least its windows of context+1 tokens: smaller runs see a prefix of what larger ones see. The
        authors round up, for untied cores that grow down.
        """
        if self.data.pool_tokens is not None or self.data.pool == "sample":
            return self.data.pool_tokens
        windows = self.planned_steps * self.batch_sequences * (self.shape.context + 1)
        to_whole = math.floor if self.schedule.grows and not self.arm.tied else math.ceil
        factor = PREFIX_FACTOR * self.planned_steps * self.batch_tokens
        return min(train_tokens, max(to_whole(factor), windows))

    @functools.cached_property
    def hash(self) -> str:
        """The run's name: the first 16 hex digits of the SHA-256 over the fields that are not defaults."""
        content = {**_non_default_fields(self), "version": self.version}
        return hashlib.sha256(canonical_json(content)).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as written to spec.json."""
        return to_builtins(self)

    @staticmethod
    def from_dict(value: Any) -> RunSpec:
        """Inverse of `to_dict`; raises UsageError with the path of a wrong field."""
        return from_builtins(RunSpec, value, "spec")


def code_digest(arm: Arm, optimizer: OptimizerConfig | None = None) -> str | None:
    """Digest of an arm's and an optimizer's custom source; None if everything is built in."""
    custom = [*arm.custom_code, *([optimizer.kind] if optimizer is not None and optimizer.is_custom else [])]
    return source_digest(custom, own=OWN_CODE)


_NOT_HASHED = {"title", "about", "recipe"}  # of an arm: texts for people, and where its recipe came from


def _non_default_fields(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as JSON values; required fields always."""
    content: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if isinstance(config, Arm) and entry.name in _NOT_HASHED:
            continue
        if entry.default_factory is not MISSING:
            default: Any = entry.default_factory()
        else:
            default = entry.default
        if default is MISSING or value != default:
            content[entry.name] = hash_content(value)
    return content


def hash_content(value: Any) -> Any:
    """What the hash covers of a field's value, as JSON."""
    if is_dataclass(value):
        return _non_default_fields(value)
    if isinstance(value, tuple | list):
        return [hash_content(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1 and 1.0 are equal, and must hash alike
    return value


def expected_flops(spec: RunSpec, count: FlopCount = "total", stop: int | None = None) -> float:
    """FLOPs of the whole run, or of its first `stop` steps.

    Exact, except for random recurrence, where it is the mean over the draws.
    """
    size = (spec.arm, spec.shape, spec.schedule, spec.planned_steps, spec.batch_tokens)
    return run_flops(*size, stop=spec.steps if stop is None else stop).counted(count)


# FLOPs of a step below which runs train together. Four runs at once took 2.9 times as long as one at 8e10
# (1.4 runs in the time of one), 3.5 times at 4e11, measured on an H200 (docs/log.md, "Several runs at once").
_LIGHT_STEP = 1e12


def is_light(spec: RunSpec) -> bool:
    """Whether the steps of a run leave so much of a GPU idle that several runs should share it."""
    return expected_flops(spec) / spec.steps <= _LIGHT_STEP


def whole_validation_tokens(wanted: int, available: int, context: int, batch_tokens: int) -> int:
    """`wanted` validation tokens, or those of `available` if fewer, in whole training batches.

    If they do not fill one batch, in whole windows of context+1 tokens, at least one.
    """
    tokens = min(wanted // context, available // (context + 1)) * context
    return max(context, tokens // batch_tokens * batch_tokens or tokens)


def read_spec(path: Path) -> RunSpec:
    """Read a spec from a JSON or YAML file."""
    try:
        value = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"the spec file {path} could not be read: {reason}.") from error
    return RunSpec.from_dict(value)


def override(spec: RunSpec, settings: Iterable[str]) -> RunSpec:
    """Apply `field=value` or `section.field=value` settings: learning_rate=0.03, model.softcap=15, seed=2.

    `optimizer=NAME` chooses one of `OptimizerConfig.named`; later settings may change its fields.
    `stop_after=N` takes the first N steps only and leaves the schedules as they are. The tuned
    hyperparameters may be named under `optimizer` or `hyperparameters`, the options of model and block under
    `model` (`options` and `block` too), and all of them bare where unambiguous.
    """
    kind = spec.optimizer.kind
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"`changes` = {setting!r} is not valid: write it as section.field=value.")
        if key.strip() == "optimizer":
            spec = replace(spec, optimizer=OptimizerConfig.named(text.strip()))
            continue
        try:
            value = load_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"`changes` = {setting!r} is not valid: its value cannot be read.") from error
        if key.strip() == "stop_after":
            shortened = {"steps": value, "schedule_steps": spec.planned_steps}
            spec = from_builtins(RunSpec, {**spec.to_dict(), **shortened}, "spec")
            continue
        section, name = _locate(key.strip())
        if section == "block":
            block = from_builtins(BlockOptions, {**to_builtins(spec.arm.block_options), name: value}, "block")
            spec = replace(spec, arm=replace(spec.arm, block_options=block))
        elif section is None:
            spec = from_builtins(RunSpec, {**spec.to_dict(), name: value}, "spec")
        else:
            part = getattr(spec, section)
            changed = {**to_builtins(part), name: value}
            spec = replace(spec, **{section: from_builtins(type(part), changed, section)})
    if spec.optimizer.kind != kind:  # the digest covers a custom optimizer's source
        spec = replace(spec, code=code_digest(spec.arm, spec.optimizer))
    return spec


_SECTIONS: dict[str, type] = {
    "hyperparameters": Hyperparameters,
    "optimizer": OptimizerConfig,
    "lr_schedule": LRScheduleConfig,
    "options": ModelOptions,
    "data": DataConfig,
    "block": BlockOptions,
}
_TOP_LEVEL = ("steps", "batch_tokens", "seed", "precision", "validation_tokens")


def _locate(key: str) -> tuple[str | None, str]:
    """The section (None for the spec itself) and field that a dotted or bare key names."""
    section, _, name = key.rpartition(".")
    name = full_name(name)
    names = {other: [entry.name for entry in fields(kind)] for other, kind in _SECTIONS.items()}
    sections = [other for other, known in names.items() if name in known]
    if section == "model":
        section = "block" if "block" in sections else "options"
    if not section and name in _TOP_LEVEL:
        return None, name
    if section in sections or (not section and len(sections) == 1):
        return section or sections[0], name
    if section == "optimizer" and "hyperparameters" in sections:
        return "hyperparameters", name
    choices = list(_TOP_LEVEL)
    for other, known in names.items():  # suggest hyperparameters under `optimizer`, the shorter prefix
        prefix = {"hyperparameters": "optimizer", "options": "model", "block": "model"}.get(other, other)
        choices += [f"{prefix}.{field}" for field in known]
    raise UsageError(f"`changes` = {key!r} is not known; the nearest are {nearest(key, choices)}.")
