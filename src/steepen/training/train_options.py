"""How a run is executed: fields of `train` that do not change its result, and so are not in its spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from steepen.utils.codec import HelpPanel, Option, Range
from steepen.utils.values import Device

# Panels of --help.
EXECUTION = HelpPanel("Execution")
CHECKPOINTS = HelpPanel("Validation, checkpoints and tracking")

Steps: TypeAlias = Annotated[int, Range(1, 10**12)]
DeviceField: TypeAlias = Annotated[Device, Option("auto, cpu, cuda, cuda:N.", EXECUTION)]
ShardField: TypeAlias = Annotated[
    Literal["optimizer", "full"],
    Option(
        "With several GPUs: optimizer (state and fp32 weights, ZeRO-1), or full (weights and gradients too, "
        "FSDP2, without fused kernels).",
        EXECUTION,
    ),
]
TrackField: TypeAlias = Annotated[
    tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...],
    Option("Tracker: wandb, tensorboard, mlflow or trackio. Repeatable.", CHECKPOINTS),
]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Device, micro-batch, kernels, validation, checkpoints, samples, trackers and display.

    The request `train` has these fields and checks them.
    """

    device: DeviceField = "auto"
    micro_batch: int | Literal["auto"] = EXECUTION(
        "Sequences per micro-batch (fewer after growth, where needed); auto: what fits.",
        "auto",
        Range(1, 10**9),
    )
    recompute: bool | None = EXECUTION(
        "Keep only the inputs of blocks and compute them again in the backward: less memory, about a third "
        "more time. Default: if not even one sequence fits otherwise."
    )
    fused: bool | None = EXECUTION("Use fused kernels and CUDA graphs. Default: if the device supports them.")
    compile: bool | None = EXECUTION(
        "Use torch.compile. Default: on a GPU, for blocks without fused kernels."
    )
    shard: ShardField = "optimizer"
    rank_timeout: float = EXECUTION(
        "Seconds without progress after which a rank counts as hung.", 600.0, Range(0.001, 1e7)
    )
    wait: bool = EXECUTION("Wait while another process trains this run.", False)
    quiet: bool | None = EXECUTION("Print no progress (the default in Python).")
    validate_every: Steps | Literal["epoch"] | None = CHECKPOINTS(
        "Steps between validations, or epoch; the end is always validated."
    )
    log_every: Steps | None = CHECKPOINTS(
        "Steps between lines of metrics. Default: 1 on a CPU, 10 on a GPU, 50 with CUDA graphs."
    )
    checkpoint_every: Steps | None = CHECKPOINTS("Steps between checkpoints. Default: a tenth of the run.")
    checkpoint_minutes: float = CHECKPOINTS("Maximum minutes between checkpoints.", 10.0, Range(0.0001, 1e7))
    keep_last: int = CHECKPOINTS("Number of newest checkpoints to keep.", 2, Range(1, 10**6))
    keep_every: Steps | None = CHECKPOINTS("Also keep checkpoints at multiples of this step.")
    sample_every: Steps | None = CHECKPOINTS(
        "Generate sample text every so many steps, and at the end, into samples.jsonl. Default: none."
    )
    sample_prompt: tuple[str, ...] = CHECKPOINTS(
        "Prompt of the samples. Repeatable. Default: the start of a document.", ()
    )
    track: TrackField = ()
