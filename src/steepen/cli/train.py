"""`steepen train`: one run, from the command line or from a spec file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.cli.given_options import was_given
from steepen.cli.token_count import parse_token_count
from steepen.errors import UsageError, shorten
from steepen.utils.formatting import wrap_to_terminal

if TYPE_CHECKING:
    from steepen.distributed.processes import NodeGroup
    from steepen.runs.spec import RunSpec
    from steepen.training.train_options import TrainOptions


# Options that are part of a spec, and so rejected beside --spec.
SPEC_OPTIONS = (
    "arm", "depth", "tokens", "flops", "tpp", "recipe", "seed", "rho", "context", "batch_tokens", "aspect",
    "head_dim", "mlp_multiple", "base_depth", "pool_tokens", "pool", "windows", "epochs", "precision",
    "validation_tokens",
)  # fmt: skip


# Measured on one core; the table is in docs/training.md.
BF16_ON_CPU = (
    "this run uses bf16, the default, which is about 10 times slower than fp32 on a CPU without bf16 "
    "instructions; --precision fp32 trains another run (its own hash)."
)

SMALL_RUN_FLOPS = 1e14  # some minutes on one core

# Panels of --help.
RUN = "Run"
SIZE = "Size and budget"
DATA = "Data"
EXECUTION = "Execution"
CHECKPOINTS = "Validation, checkpoints and tracking"
EVALUATION = "Evaluation of the finished run"
OUTPUT = "Output"


def train(
    context_: typer.Context,
    data: Annotated[
        Path, typer.Option(help="Data directory made by `steepen data prepare`.", rich_help_panel=RUN)
    ],
    arm: Annotated[
        str | None,
        typer.Option(
            help="Arm: listed by `steepen arms`, loop-K, untied-K, or module:attribute.", rich_help_panel=RUN
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="Nominal depth ℓ; the width is aspect·ℓ.", rich_help_panel=RUN, min=1, max=10_000),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="Spec file (JSON or YAML), instead of --arm and --depth.", rich_help_panel=RUN),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens to train on (default: the recipe's).",
            rich_help_panel=SIZE,
            min=1,
            max=1000000000000000.0,
        ),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="Compute budget, instead of --tokens.", rich_help_panel=SIZE, min=1, max=1e40),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of weights, data order and random passes.", rich_help_panel=RUN, min=0, max=2**63 - 1
        ),
    ] = 0,
    stop_after: Annotated[
        int | None,
        typer.Option(
            help="Train only the first so many steps; learning rate and growth follow the whole schedule.",
            rich_help_panel=SIZE,
            min=1,
            max=10**12,
        ),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(
            help="Fraction of tokens after growth (default: the recipe's).",
            rich_help_panel=SIZE,
            min=0,
            max=1,
        ),
    ] = None,
    tpp: Annotated[
        float | None,
        typer.Option(
            help="Tokens per initial stored parameter (default: the recipe's).",
            rich_help_panel=SIZE,
            min=1e-06,
            max=1000000000.0,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipe: paper (the default), paper-fixed-rho, paper-affine-rho, paper-constant-lr, or a "
            "recipe file (repeatable).",
            rich_help_panel=RUN,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Context length in tokens (default: 2048).", rich_help_panel=SIZE, min=1, max=10**8
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per step (default: 524,288).", rich_help_panel=SIZE, min=1, max=10**15),
    ] = None,
    aspect: Annotated[
        int, typer.Option(help="Width per unit of depth.", rich_help_panel=SIZE, min=1, max=10**8)
    ] = 128,
    head_dim: Annotated[
        int, typer.Option(help="Width of an attention head.", rich_help_panel=SIZE, min=2, max=10**8)
    ] = 128,
    mlp_multiple: Annotated[
        int,
        typer.Option(
            help="Round the MLP width up to a multiple of this.", rich_help_panel=SIZE, min=1, max=10**8
        ),
    ] = 256,
    base_depth: Annotated[
        int | None,
        typer.Option(
            help="Depth at which the base learning rate applies (default: 8).",
            rich_help_panel=SIZE,
            min=1,
            max=10**8,
        ),
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            help="Use only this many unique tokens, as 100M. With --epochs and without --tokens, --flops or "
            "--tpp, the run is that many epochs long.",
            show_default="1.01 times the run's tokens",
            parser=parse_token_count,
            metavar="COUNT≤1e15",
            rich_help_panel=DATA,
        ),
    ] = None,
    pool: Annotated[
        str,
        typer.Option(
            help="prefix: the first tokens of the data; sample: --pool-tokens of it at random, else all.",
            rich_help_panel=DATA,
        ),
    ] = "prefix",
    windows: Annotated[
        str,
        typer.Option(
            help="recut: every epoch shuffles the documents and cuts them into windows anew; fixed: the "
            "windows are cut once and shuffled every epoch.",
            rich_help_panel=DATA,
        ),
    ] = "recut",
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of epochs.", show_default="1", rich_help_panel=DATA, min=1, max=10**6
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a hyperparameter or option, by name or the paper's code: --set learning_rate=0.03, "
            "--set GLR=0.03, --set optimizer=adamw (repeatable).",
            rich_help_panel=RUN,
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Directory of all runs.", rich_help_panel=RUN)] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.", rich_help_panel=EXECUTION)] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the GEMMs: bf16, fp32, fp8 (a GPU with fp8 tensor cores; evaluated "
            "in bf16), or auto (bf16 on a GPU, fp32 on a CPU).",
            rich_help_panel=EXECUTION,
        ),
    ] = "bf16",
    micro_batch: Annotated[
        str,
        typer.Option(
            help="Sequences per micro-batch (fewer after growth, where needed); auto: what fits.",
            rich_help_panel=EXECUTION,
        ),
    ] = "auto",
    fused: Annotated[
        bool | None,
        typer.Option(
            help="Use fused kernels and CUDA graphs (default: if the device supports them).",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    fast: Annotated[bool | None, typer.Option(hidden=True, help="Former name of --fused.")] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            help="Use torch.compile (default: on a GPU, for blocks without fused kernels).",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Train on this many GPUs of this machine (with --device cpu: processes); torchrun and srun "
            "start ranks on several machines.",
            min=1,
            rich_help_panel=EXECUTION,
            max=10_000,
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            help="With several GPUs: optimizer (state and fp32 weights, ZeRO-1), or full (weights and "
            "gradients too, FSDP2, without fused kernels).",
            rich_help_panel=EXECUTION,
        ),
    ] = "optimizer",
    max_restarts: Annotated[
        int,
        typer.Option(
            help="With --gpus: how often to restart from the last checkpoint when a rank is lost.",
            min=0,
            rich_help_panel=EXECUTION,
            max=10**6,
        ),
    ] = 0,
    rank_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without progress after which a rank counts as hung.",
            rich_help_panel=EXECUTION,
            min=0.001,
            max=10000000.0,
        ),
    ] = 600.0,
    validate_every: Annotated[
        str | None,
        typer.Option(
            help="Steps between validations, or epoch.", metavar="STEPS|epoch", rich_help_panel=CHECKPOINTS
        ),
    ] = None,
    validation_tokens: Annotated[
        int | None,
        typer.Option(
            help="Validation tokens (default: 10,000,000 or what the data has, in whole batches).",
            rich_help_panel=DATA,
            min=1,
            max=10**15,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between checkpoints (default: a tenth of the run).",
            rich_help_panel=CHECKPOINTS,
            min=1,
            max=10**12,
        ),
    ] = None,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(
            help="Maximum minutes between checkpoints.",
            rich_help_panel=CHECKPOINTS,
            min=0.0001,
            max=10000000.0,
        ),
    ] = 10.0,
    keep_last: Annotated[
        int,
        typer.Option(
            help="Number of newest checkpoints to keep.", rich_help_panel=CHECKPOINTS, min=1, max=10**6
        ),
    ] = 2,
    keep_every: Annotated[
        int | None,
        typer.Option(
            help="Also keep checkpoints at multiples of this step.",
            rich_help_panel=CHECKPOINTS,
            min=1,
            max=10**12,
        ),
    ] = None,
    sample_every: Annotated[
        int | None,
        typer.Option(
            help="Generate sample text every so many steps, and at the end, into samples.jsonl.",
            show_default="none",
            rich_help_panel=CHECKPOINTS,
            min=1,
            max=10**12,
        ),
    ] = None,
    sample_prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt of the samples (repeatable).",
            show_default="the start of a document",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Tracker: wandb, tensorboard, mlflow or trackio (repeatable).", rich_help_panel=CHECKPOINTS
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option(help="Wait while another process trains this run.", rich_help_panel=EXECUTION)
    ] = False,
    write_spec: Annotated[
        Path | None, typer.Option(help="Write the spec to this file and do not train.", rich_help_panel=RUN)
    ] = None,
    core: Annotated[
        Path | None,
        typer.Option(help="CORE evaluation bundle to score the finished run on.", rich_help_panel=EVALUATION),
    ] = None,
    core_examples: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of examples per CORE task.", rich_help_panel=EVALUATION, min=1, max=10**9
        ),
    ] = None,
    kl_depth: Annotated[
        bool, typer.Option("--kl-depth", help="Measure KL effective depth.", rich_help_panel=EVALUATION)
    ] = False,
    passes: Annotated[
        str | None,
        typer.Option(help="Measure the loss at these core passes, e.g. 1-8.", rich_help_panel=EVALUATION),
    ] = None,
    ranks_only: Annotated[bool, typer.Option(hidden=True, help="Print no result: --gpus does.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON when done.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train one run, or resume it.

    The same command resumes an interrupted run; for a finished run it prints
    the result without training.

    [bold]steepen train --arm untied-grow --depth 8 --data data/edu[/bold]
    """
    from steepen.data import Dataset
    from steepen.distributed.environment import process_environment
    from steepen.training.trackers import check_trackers
    from steepen.training.train_options import TrainOptions

    settings = [*(settings or []), *([] if stop_after is None else [f"stop_after={stop_after}"])]
    options = TrainOptions(
        shard=shard,  # pyright: ignore[reportArgumentType]
        rank_timeout=rank_timeout,
        device=device,
        micro_batch=_whole(micro_batch, "micro-batch", "auto"),
        fused=fast if fused is None else fused,
        compile=compile,
        validate_every=_whole(validate_every, "validate-every", "epoch"),
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        keep_last=keep_last,
        keep_every=keep_every,
        wait=wait,
        track=check_trackers(track or (), installed=True),  # pyright: ignore[reportArgumentType]
        sample_every=sample_every,
        sample_prompt=tuple(sample_prompt or ()),
    )
    if sample_prompt and sample_every is None:
        raise UsageError("--sample-prompt needs --sample-every.")
    dataset = Dataset.open(data)
    if spec is not None:
        given = [name for name in SPEC_OPTIONS if was_given(context_, name)]
        if given:
            option = given[0].replace("_", "-")
            raise UsageError(f"--{option} is set by the spec file; change the file, or use --set.")
        from steepen.runs.spec import override, read_spec

        run, notes = override(read_spec(spec), settings), ()
    else:
        from steepen.api.make_spec import choose_precision, make_spec

        if arm is None or depth is None:
            raise UsageError("nothing to train: give --arm and --depth, or --spec FILE.")
        run, notes = make_spec(
            dataset,
            arm,
            depth,
            scale={
                "aspect": aspect,
                "head_dim": head_dim,
                "mlp_multiple": mlp_multiple,
                **({} if context is None else {"context": context}),
            },
            recipe=recipe or [],
            tpp=tpp,
            recipe_changes={"batch_tokens": batch_tokens, "base_depth": base_depth},
            budget={"tokens": tokens, "flops": flops, "rho": rho},
            data={"pool_tokens": pool_tokens, "pool": pool, "windows": windows, "epochs": epochs},
            rest={"seed": seed, "precision": choose_precision(precision, device)},
            validation_tokens=validation_tokens,
            settings=settings,
        )
    if write_spec is not None:
        from steepen.utils.json_io import write_json

        write_json(write_spec, run.to_dict())
        print(run.hash)
        return
    wanted = None
    if core is not None or kl_depth or passes is not None:
        from steepen.evaluation.score_options import ScoreOptions
        from steepen.utils.values import parse_integers

        chosen = None if passes is None else parse_integers(passes)
        wanted = ScoreOptions(core=core, kl_depth=kl_depth, passes=chosen, core_examples=core_examples)
        wanted.check_scores()
    from steepen.runs.spec import expected_flops
    from steepen.runs.store import RunStore
    from steepen.training.device import find_device
    from steepen.training.trainer import train as train_run

    on_cpu = find_device(device).type == "cpu"  # reject a wrong name before printing notes
    place = process_environment()
    if gpus is not None and place.size > 1:
        raise UsageError("--gpus starts the processes itself: leave it out under torchrun or srun.")
    # Done in a moment: its result comes first. A single step may be far more tokens than were asked for.
    small = expected_flops(run) < SMALL_RUN_FLOPS and run.steps > 1
    if place.is_main and not small:
        _print_notes(notes)
    store = RunStore(runs)
    if on_cpu and place.is_main and run.precision == "bf16" and store.record(run) is None:
        given = was_given(context_, "precision") or any("precision" in text for text in settings or ())
        if spec is None and not given:
            print(wrap_to_terminal(f"note: {BF16_ON_CPU}", sys.stderr), file=sys.stderr)

    nodes = _node_group() if place.size == 1 else None
    if ((gpus or 1) > 1 or nodes is not None) and store.record(run) is None:
        _check_gpus(gpus or 1, 1 if nodes is None else nodes.count, device, run.batch_sequences)
        _train_on_ranks(run, gpus or 1, max_restarts, data, runs, options, nodes)
        if nodes is not None:  # the record may not be visible here yet
            return
    record = train_run(run, dataset, store, options)
    if ranks_only or not place.is_main:
        return
    if wanted is not None:
        from steepen.evaluation.evaluate_run import evaluate
        from steepen.results.evaluate import score_blocks
        from steepen.results.text import print_blocks

        found = evaluate(
            runs / run.hash,
            dataset,
            wanted,
            update_record=True,
            device=device,
            quiet=as_json,
        )
        if not as_json:
            print_blocks(lambda _: score_blocks(found.scores))
        for note in found.notes:
            print(wrap_to_terminal(f"note: {note}", sys.stderr), file=sys.stderr)
        record = store.record(run) or record
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
    if small:
        _print_notes(notes)


def _print_notes(notes: Sequence[str]) -> None:
    sys.stdout.flush()
    for note in notes:
        print(wrap_to_terminal(f"note: {note}", sys.stderr), file=sys.stderr)


def _node_group() -> NodeGroup | None:
    """The nodes of this run, as a launcher has set them for this process; None: this one only."""
    import os

    from steepen.distributed.processes import NodeGroup
    from steepen.launch.worker import NODES_VARIABLE

    text = os.environ.get(NODES_VARIABLE)
    return None if text is None else NodeGroup.parse(text)


def _check_gpus(gpus: int, nodes: int, device: str, sequences: int) -> None:
    """Reject ranks that cannot share the batch, or more than GPUs, unless they share one that was named."""
    import torch

    from steepen.training.device import find_device

    if sequences % (gpus * nodes):
        raise UsageError(
            f"--gpus {gpus * nodes} is not possible: a batch of {sequences:,} sequences cannot be divided "
            "evenly."
        )
    found = find_device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.device_count() < gpus:
        raise UsageError(
            f"--gpus {gpus} is not possible: this machine has {torch.cuda.device_count()} GPUs; start ranks "
            "on several machines with torchrun or srun (docs/distributed.md)."
        )


def _train_on_ranks(
    run: RunSpec,
    gpus: int,
    max_restarts: int,
    data: Path,
    runs: Path,
    options: TrainOptions,
    nodes: NodeGroup | None,
) -> None:
    """Train a run in `gpus` processes of this machine (and of others); raises SystemExit if it fails."""
    import os
    import tempfile

    from steepen.distributed.processes import start_processes
    from steepen.launch.subprocess_entry import PARENT_PID_VARIABLE
    from steepen.launch.worker import python_path
    from steepen.runs.spec import code_digest
    from steepen.utils.json_io import write_json

    words = [
        "--device",
        options.device,
        "--shard",
        options.shard,
        "--rank-timeout",
        str(options.rank_timeout),
    ]
    words += ["--checkpoint-minutes", str(options.checkpoint_minutes), "--keep-last", str(options.keep_last)]
    for name in ("micro_batch", "validate_every", "checkpoint_every", "keep_every", "sample_every"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("fused", "compile"):
        if (value := getattr(options, name)) is not None:
            words.append(f"--{name}" if value else f"--no-{name}")
    words += ["--wait"] if options.wait else []
    if run.code is not None:
        code_digest(run.arm, run.optimizer)  # rejects code that is not trusted
        words.append("--trust-code")
    words += [word for tracker in options.track for word in ("--track", tracker)]
    if options.sample_every is not None:
        words += [f"--sample-prompt={prompt}" for prompt in options.sample_prompt]
    with tempfile.TemporaryDirectory(prefix="steepen-") as folder:
        spec_file = Path(folder) / "spec.json"
        write_json(spec_file, run.to_dict())
        command = [sys.executable, "-m", "steepen.launch.subprocess_entry", "train", "--ranks-only"]
        command += ["--spec", str(spec_file), "--data", str(data), "--runs", str(runs), *words]
        code = start_processes(
            gpus,
            command,
            max_restarts=max_restarts,
            print_message=lambda sentence: print(
                wrap_to_terminal(f"steepen: {sentence}", sys.stderr), file=sys.stderr
            ),
            environment={
                PARENT_PID_VARIABLE: str(os.getpid()),
                "PYTHONPATH": python_path(),
                "PYTHONSAFEPATH": "1",
            },
            nodes=nodes,
        )
    if code:
        raise SystemExit(code)


def _whole(text: str | None, option: str, word: str) -> Any:
    """A whole number of an option that takes a word too."""
    if text is None or text == word:
        return text
    if not (text.isdecimal() and len(text) < 10 and int(text) >= 1):
        raise UsageError(
            f"--{option} {shorten(text)!r} is not valid: give a number from 1 to 1e9, or {word}."
        )
    return int(text)
