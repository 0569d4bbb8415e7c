"""Options of a training process that do not change what a run computes, and so are not in its spec."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steepen.errors import UsageError
from steepen.training.trackers import check_trackers


@dataclass(frozen=True)
class TrainOptions:
    """Device, micro-batch, kernels, validation, checkpoints, display and trackers."""

    device: str = "auto"
    micro_batch: int | None = None  # sequences; None: the largest that fits
    fused: bool | None = None  # fused kernels; None: wherever the device has them
    compile: bool | None = None  # torch.compile; None: on a GPU what has no fused form, on a CPU nothing
    validate_every: int | None = None  # steps; the end of the run is always validated
    log_every: int | None = None  # steps; None: 1 on a CPU, 10 on a GPU, 50 with CUDA graphs
    checkpoint_every: int | None = None  # steps; None: a tenth of the run
    checkpoint_minutes: float = 10.0  # and at least every so many minutes
    keep_last: int = 2
    keep_every: int | None = None  # also keep every checkpoint whose step is a multiple of this
    wait: bool = False  # while another process trains the same run
    quiet: bool = False
    trackers: tuple[str, ...] = ()  # "wandb", "tensorboard", "mlflow", "trackio"
    sample_every: int | None = None  # steps between texts that are generated to samples.jsonl; None: none
    sample_prompts: tuple[str, ...] = ("",)  # what they continue; "": the start of a document
    shard: str = "optimizer"  # with several ranks: "optimizer" (ZeRO-1) or "full" (FSDP2)
    rank_timeout: float = 600.0  # seconds without progress after which a rank counts as hung

    def __post_init__(self) -> None:
        for name in (
            "micro_batch",
            "validate_every",
            "log_every",
            "checkpoint_every",
            "keep_last",
            "keep_every",
            "sample_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value} is not valid: it must be at least 1.")
        if not (math.isfinite(self.checkpoint_minutes) and self.checkpoint_minutes > 0):
            raise UsageError(
                f"--checkpoint-minutes {self.checkpoint_minutes} is not valid: it must be positive."
            )
        if self.shard not in ("optimizer", "full"):
            raise UsageError(f"--shard {self.shard!r} is not known: use optimizer or full.")
        if not (math.isfinite(self.rank_timeout) and self.rank_timeout > 0):
            raise UsageError(f"--rank-timeout {self.rank_timeout} is not valid: it must be positive.")
        check_trackers(self.trackers)
