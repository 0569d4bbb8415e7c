"""How a run is executed: fields of `train` that do not change its result, and so are not in its spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from steepen.utils.codec import Option, Range
from steepen.utils.values import Device

# Panels of --help.
EXECUTION = "Execution"
CHECKPOINTS = "Validation, checkpoints and tracking"

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
    micro_batch: Annotated[
        int | Literal["auto"],
        Range(1, 10**9),
        Option("Sequences per micro-batch (fewer after growth, where needed); auto: what fits.", EXECUTION),
    ] = "auto"
    recompute: Annotated[
        bool | None,
        Option(
            "Keep only the inputs of blocks and compute them again in the backward: less memory, about a "
            "third more time. Default: if not even one sequence fits otherwise.",
            EXECUTION,
        ),
    ] = None
    fused: Annotated[
        bool | None,
        Option("Use fused kernels and CUDA graphs. Default: if the device supports them.", EXECUTION),
    ] = None
    compile: Annotated[
        bool | None,
        Option("Use torch.compile. Default: on a GPU, for blocks without fused kernels.", EXECUTION),
    ] = None
    shard: ShardField = "optimizer"
    rank_timeout: Annotated[
        float,
        Range(0.001, 1e7),
        Option("Seconds without progress after which a rank counts as hung.", EXECUTION),
    ] = 600.0
    wait: Annotated[bool, Option("Wait while another process trains this run.", EXECUTION)] = False
    quiet: Annotated[bool | None, Option("Print no progress (the default in Python).", EXECUTION)] = None
    validate_every: Annotated[
        Steps | Literal["epoch"] | None,
        Option("Steps between validations, or epoch; the end is always validated.", CHECKPOINTS),
    ] = None
    log_every: Annotated[
        Steps | None,
        Option(
            "Steps between lines of metrics. Default: 1 on a CPU, 10 on a GPU, 50 with CUDA graphs.",
            CHECKPOINTS,
        ),
    ] = None
    checkpoint_every: Annotated[
        Steps | None, Option("Steps between checkpoints. Default: a tenth of the run.", CHECKPOINTS)
    ] = None
    checkpoint_minutes: Annotated[
        float, Range(0.0001, 1e7), Option("Maximum minutes between checkpoints.", CHECKPOINTS)
    ] = 10.0
    keep_last: Annotated[
        int, Range(1, 10**6), Option("Number of newest checkpoints to keep.", CHECKPOINTS)
    ] = 2
    keep_every: Annotated[
        Steps | None, Option("Also keep checkpoints at multiples of this step.", CHECKPOINTS)
    ] = None
    sample_every: Annotated[
        Steps | None,
        Option(
            "Generate sample text every so many steps, and at the end, into samples.jsonl. Default: none.",
            CHECKPOINTS,
        ),
    ] = None
    sample_prompt: Annotated[
        tuple[str, ...],
        Option("Prompt of the samples. Repeatable. Default: the start of a document.", CHECKPOINTS),
    ] = ()
    track: TrackField = ()
