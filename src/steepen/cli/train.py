"""`steepen train`: one run, from the command line or from a spec file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.runs.spec import RunSpec


# What decides the result: with --spec the file does.
DECIDING = (
    "arm", "depth", "tokens", "flops", "seed", "rho", "context", "batch_tokens", "aspect", "head_dim",
    "mlp_multiple", "base_depth", "pool_tokens", "epochs", "precision", "validation_tokens",
)  # fmt: skip


def train(
    context_: typer.Context,
    data: Annotated[Path, typer.Option(help="A folder made by `steepen data prepare`.")],
    arm: Annotated[str | None, typer.Option(help="An arm of `steepen arms`.")] = None,
    depth: Annotated[int | None, typer.Option(help="Nominal depth ℓ.")] = None,
    spec: Annotated[Path | None, typer.Option(help="A spec file (JSON or YAML) instead of --arm.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Train on this many; the recipe's by default.")] = None,
    flops: Annotated[float | None, typer.Option(help="Or spend this much compute.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and random passes.")] = 0,
    rho: Annotated[float | None, typer.Option(help="Share of tokens after growth.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per sequence (2048).")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens per step (524,288).")] = None,
    aspect: Annotated[int, typer.Option(help="Width per unit of depth.")] = 128,
    head_dim: Annotated[int, typer.Option(help="Width of an attention head.")] = 128,
    mlp_multiple: Annotated[int, typer.Option(help="The MLP's width is a multiple of this.")] = 256,
    base_depth: Annotated[
        int | None, typer.Option(help="Depth at which the learning rate is anchored (8).")
    ] = None,
    pool_tokens: Annotated[int | None, typer.Option(help="Use only this many unique tokens.")] = None,
    epochs: Annotated[int, typer.Option(help="How often the data may be repeated.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a hyperparameter or option: --set optimizer.learning_rate=0.03 (repeatable).",
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where run directories live.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="Of the GEMMs: bf16, fp32, fp8 (a GPU with fp8 tensor cores; validated and evaluated in "
            "bf16), or auto (bf16 on a GPU, fp32 on a CPU)."
        ),
    ] = "bf16",
    micro_batch: Annotated[str, typer.Option(help="Sequences at a time; auto finds what fits.")] = "auto",
    fused: Annotated[
        bool | None,
        typer.Option(help="Use fused kernels and CUDA graphs (default: wherever the device has them)."),
    ] = None,
    fast: Annotated[bool | None, typer.Option(hidden=True, help="Former name of --fused.")] = None,
    compile: Annotated[
        bool | None,
        typer.Option(help="Use torch.compile instead (default: on a GPU, for what has no fused kernels)."),
    ] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    validation_tokens: Annotated[
        int | None, typer.Option(help="Size of the validation set (10,485,760, or what the data has).")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints (a tenth).")] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="And at least this often.")] = 10.0,
    keep_last: Annotated[int, typer.Option(help="Checkpoints to keep while running.")] = 2,
    keep_every: Annotated[int | None, typer.Option(help="Also keep those at multiples of this step.")] = None,
    track: Annotated[list[str] | None, typer.Option(help="wandb or tensorboard (repeatable).")] = None,
    wait: Annotated[bool, typer.Option(help="Wait where another process trains this run.")] = False,
    write_spec: Annotated[
        Path | None, typer.Option(help="Write the spec to a file and train nothing.")
    ] = None,
    core: Annotated[
        Path | None, typer.Option(help="When done, score the run on this CORE bundle, into its record.")
    ] = None,
    core_examples: Annotated[int | None, typer.Option(help="At most so many examples per CORE task.")] = None,
    depth_used: Annotated[bool, typer.Option("--depth-used", help="And measure KL effective depth.")] = False,
    passes: Annotated[str | None, typer.Option(help="And the loss at these core passes, as 1..8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON when done.")] = False,
) -> None:
    """Train one run; the same command takes an interrupted run up again, and never repeats a finished one.

    Example: steepen train --arm untied-grow --depth 8 --data fineweb --set optimizer.learning_rate=0.03
    """
    from steepen.data import Dataset
    from steepen.training.train_options import TrainOptions

    options = TrainOptions(
        device=device,
        micro_batch=_micro_batch(micro_batch),
        fused=fast if fused is None else fused,
        compile=compile,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        keep_last=keep_last,
        keep_every=keep_every,
        wait=wait,
        trackers=tuple(track or ()),
    )
    dataset = Dataset.open(data)
    if spec is not None:
        given = [name for name in DECIDING if _was_given(context_, name)]
        if given:
            option = given[0].replace("_", "-")
            raise UsageError(f"--{option} is decided by the spec file; change the file, or use --set.")
        from steepen.runs.spec import override, read_spec

        run, notes = override(read_spec(spec), settings or []), ()
    else:
        if arm is None or depth is None:
            raise UsageError("say what to train: --arm and --depth, or --spec FILE.")
        run, notes = _spec(
            dataset,
            arm,
            depth,
            scale={
                "aspect": aspect,
                "head_dim": head_dim,
                "mlp_multiple": mlp_multiple,
                **({} if context is None else {"context": context}),
            },
            recipe={"batch_tokens": batch_tokens, "base_depth": base_depth},
            budget={"tokens": tokens, "flops": flops, "rho": rho},
            data={"pool_tokens": pool_tokens, "epochs": epochs},
            rest={"seed": seed, "precision": _precision(precision, device)},
            validation_tokens=validation_tokens,
            settings=settings or [],
        )
    if write_spec is not None:
        from steepen.utils.json_io import write_json

        write_json(write_spec, run.to_dict())
        print(run.hash)
        return
    wanted = None
    if core is not None or depth_used or passes is not None:
        from steepen.cli.evaluate import make_request

        wanted = make_request(core, depth_used=depth_used, passes=passes, examples=core_examples)
    from steepen.runs.store import RunStore
    from steepen.training.device import find_device
    from steepen.training.trainer import train as train_run

    find_device(device)  # a wrong name is refused before anything is said
    for note in notes:
        print(f"note: {note}", file=sys.stderr)

    record = train_run(
        run,
        dataset,
        RunStore(runs),
        options,
    )
    if wanted is not None:
        from steepen.cli.evaluate import print_scores
        from steepen.evaluation.evaluate_run import evaluate

        on_scores = None if as_json else print_scores
        found = evaluate(
            runs / run.hash, dataset, wanted, join=True, device=device, quiet=as_json, on_scores=on_scores
        )
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
        record = RunStore(runs).record(run) or record
    if as_json:
        print(json.dumps(record.to_dict(), indent=2))
        return
    mfu = "" if record.mfu is None else f", MFU {record.mfu:.1%}"
    bits = (
        ""
        if record.validation_bits_per_byte is None
        else f" ({record.validation_bits_per_byte:.4f} bits per byte)"
    )
    print(
        f"{run.arm.title} d{run.shape.depth}: validation loss {record.validation_loss:.4f}{bits} after "
        f"{record.tokens:,} tokens and {record.flops:.3e} FLOPs; {record.seconds_training:.1f} s of "
        f"training, {record.tokens_per_second:,.0f} tokens/s{mfu}.\n{runs / run.hash}"
    )


def _spec(
    dataset: Dataset,
    arm: str,
    depth: int,
    *,
    scale: dict[str, int],
    recipe: dict[str, int | None],
    budget: dict[str, float | None],
    data: dict[str, Any],
    rest: dict[str, Any],
    validation_tokens: int | None,
    settings: list[str],
) -> tuple[RunSpec, tuple[str, ...]]:
    from dataclasses import replace

    from steepen.model.arms import find_arm
    from steepen.model.shape import SizeRule
    from steepen.recipe.paper_tables import recipe_of
    from steepen.recipe.planner import make_plan
    from steepen.runs.spec import DataConfig, RunSpec, override
    from steepen.studies.context import whole_validation_tokens
    from steepen.studies.preset import load_preset

    found = find_arm(arm)
    size = SizeRule(vocabulary=dataset.padded_vocabulary, **scale)
    changed = replace(
        recipe_of(found), **{name: value for name, value in recipe.items() if value is not None}
    )
    plan = make_plan(
        found,
        depth=depth,
        scale=size,
        recipe=changed,
        tokens=budget["tokens"],
        flops=budget["flops"],
        rho=budget["rho"],
    )
    if validation_tokens is None:
        wanted = load_preset("paper").validation_tokens
        validation_tokens = whole_validation_tokens(wanted, len(dataset.tokens("val")), size.context)
    choice = DataConfig(dataset.identity, **data)
    run = RunSpec.of(plan.rung, choice, validation_tokens=validation_tokens, **rest)
    return override(run, settings), plan.warnings


def _precision(asked: str, device: str) -> str:
    if asked != "auto":
        return asked
    if device == "auto":
        from steepen.training.device import find_device

        device = find_device("auto").type
    return "bf16" if device.startswith("cuda") else "fp32"


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _micro_batch(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--micro-batch {text!r} is not valid: give a number of sequences, or auto.")
    return int(text)
