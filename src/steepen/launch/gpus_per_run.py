"""How many GPUs each run of a study gets: a number, or the fewest on which the planner says it fits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from steepen.errors import SteepenError, UsageError, shorten
from steepen.recipe.hardware import Accelerator, find_accelerator
from steepen.recipe.memory import largest_micro_batch
from steepen.recipe.recipe import PlannedRun
from steepen.recipe.sharding import SHARDS, Shard
from steepen.runs.spec import RunSpec, expected_flops

MAX_HOURS = 24.0  # `auto` takes more GPUs for a run that would train for longer
MFU = 0.4  # assumed for that
MAX_GPUS = 1024


@dataclass(frozen=True)
class GpusPerRun:
    """A number of GPUs, or "auto" for the fewest that suffice: powers of two that divide the batch."""

    count: int | Literal["auto"] = 1
    gpu: Accelerator | None = None  # whose memory and speed `auto` assumes; None: an H100
    shard: Shard = "optimizer"  # what several GPUs divide among them

    @staticmethod
    def parse(text: str, gpu: str | None = None, shard: str = "optimizer") -> GpusPerRun:
        """From the options --gpus-per-run, --gpu and --shard."""
        if shard not in SHARDS:
            raise UsageError(f"`shard` = {shorten(shard)!r} is not known: use optimizer or full.")
        found = None if gpu is None else find_accelerator(gpu)
        if text == "auto":
            return GpusPerRun("auto", found, shard)
        if not (text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_GPUS):
            raise UsageError(
                f"`gpus_per_run` = {shorten(text)!r} is not valid: give a number from 1 to {MAX_GPUS:,}, "
                "or auto."
            )
        return GpusPerRun(int(text), found, shard)

    @property
    def single(self) -> bool:
        """Whether every run has one GPU."""
        return self.count == 1

    def of(self, spec: RunSpec) -> int:
        """GPUs for a run; raises SteepenError if no number suffices."""
        if self.count != "auto":
            if spec.batch_sequences % self.count:
                raise UsageError(
                    f"`gpus_per_run` = {self.count} is not possible: a batch of {spec.batch_sequences:,} "
                    "sequences cannot be divided evenly."
                )
            return self.count
        return _fewest(spec, self.gpu or find_accelerator("h100"), self.shard)


@functools.lru_cache(maxsize=4096)  # asked again whenever a launcher or its display looks at what waits
def _fewest(spec: RunSpec, gpu: Accelerator, shard: Shard) -> int:
    """The fewest GPUs on which a run fits in memory and time."""
    planned = PlannedRun(
        spec.arm, spec.shape, spec.schedule, None, spec.hyperparameters, spec.batch_tokens, spec.steps
    )
    for recompute in (False, True):  # more GPUs cost less than computing blocks again in the backward
        gpus, fits = 1, 0
        while gpus <= min(MAX_GPUS, spec.batch_sequences) and spec.batch_sequences % gpus == 0:
            most = largest_micro_batch(
                planned,
                gpus,
                gpu,
                shard=shard,
                optimizer=spec.optimizer,
                options=spec.options,
                recompute=recompute,
            )
            if most >= 1:
                fits = gpus
                if expected_flops(spec) / (gpus * gpu.peak_flops * MFU) <= 3600 * MAX_HOURS:
                    return gpus
            gpus *= 2
        if fits:  # too long on any number of GPUs: as many as the batch allows
            return fits
    other = "`shard` full, " if shard == "optimizer" else ""
    raise SteepenError(
        f"{spec.arm.name} d{spec.shape.depth} does not fit on any number of {gpu.name} GPUs by the "
        f"planner; use {other}`gpu` with more memory, or give `gpus_per_run` a number."
    )
