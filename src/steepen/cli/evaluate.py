"""`steepen eval` and `steepen eval filter`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from steepen.errors import SteepenError, UsageError

if TYPE_CHECKING:
    from steepen.evaluation.measure import EvaluationRequest


class CheckpointFirst(TyperGroup):
    """`steepen eval PATH` is short for `steepen eval checkpoint PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name in where none is given."""
        if not args or args[0] not in self.commands:
            args = ["checkpoint", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=CheckpointFirst, help="Score a checkpoint: validation, CORE, depth used, passes.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


@app.command(
    "checkpoint", epilog="See also: steepen eval filter --help (choosing tasks), steepen forecast --help."
)
def checkpoint(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run directory (its newest checkpoint) or a checkpoint directory."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Prepared data with the run's tokenizer; its validation tokens are used.")
    ],
    core: Annotated[
        Path | None, typer.Option(help="A CORE bundle's folder (core.yaml, eval_meta_data.csv, eval_data/).")
    ] = None,
    depth_used: Annotated[bool, typer.Option("--depth-used", help="Measure KL effective depth.")] = False,
    passes: Annotated[
        str | None, typer.Option(help="Measure the loss at these core passes: 1..8, or 1,2,4.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="At most so many examples per task, always the same ones.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Draws of few-shot demonstrations to average over.")] = "0,1,2",
    tasks: Annotated[
        str | None,
        typer.Option(help="Only these tasks: labels with commas, or core17 for the paper's subset."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Nats within which a block's prediction is final.")] = 2.0,
    direction: Annotated[
        str, typer.Option(help="KL of final-to-block, or block-to-final.")
    ] = "final-to-block",
    depth_tokens: Annotated[
        int | None, typer.Option(help="Validation tokens for --depth-used; 16,384 by default.")
    ] = None,
    validation_tokens: Annotated[
        int | None, typer.Option(help="Validation tokens; as in training by default.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures of what was measured to this folder.")
    ] = None,
    join: Annotated[
        bool | None,
        typer.Option(
            help="Join the scores to the run's record (by default where the run has ended, and the data is "
            "known to have its tokenizer)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="auto (the run's own; bf16 of one trained in fp8), fp32 or bf16.")
    ] = "auto",
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens per CORE batch; less needs less memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint: validation loss always, CORE, depth used and passes at test time where asked.

    Every example's outcome is saved, task by task; the same command goes on where it was stopped.

    [bold]steepen eval runs/3f2a… --data fineweb --core eval_bundle --depth-used --passes 1..8[/bold]
    """
    from steepen.data import Dataset
    from steepen.evaluation.measure import LoadedCheckpoint, measure
    from steepen.evaluation.score_store import Elsewhere, has_tokenizer_of, keep_scores, somewhere

    wanted = make_wanted(
        core,
        depth_used=depth_used,
        passes=passes,
        examples=examples,
        seeds=seeds,
        tasks=tasks,
        token_budget=token_budget,
        threshold=threshold,
        direction=direction,
        depth_tokens=16_384 if depth_tokens is None else depth_tokens,
        validation_tokens=validation_tokens,
    )
    subject = LoadedCheckpoint.find(path)
    dataset = Dataset.open(data)
    context = subject.spec.shape.context
    if depth_used and depth_tokens is not None and depth_tokens < context:
        raise UsageError(
            f"--depth-tokens {depth_tokens:,} is not valid: give at least the run's context, {context:,}."
        )
    ours = has_tokenizer_of(subject, dataset, join)
    if not ours:
        typer.echo(
            f"{data} is not what the run was trained on, and the run does not know its tokenizer's hash; the "
            "scores mean something only if the tokenizer is the same, and will not join the run's record.",
            err=True,
        )
        # A place of their own: scores with two tokenizers must not meet in one file.
        subject = Elsewhere.of(subject, subject.results / "other-data" / dataset.identity[:12])
        join = False
    with somewhere(subject) as place:
        try:
            found = measure(place, dataset, wanted, device=device, precision=precision, quiet=as_json)
        except KeyboardInterrupt:
            if core is not None and place is subject:
                typer.echo("Finished tasks are saved; the same command goes on from there.", err=True)
            raise
        if ours:
            found["tokenizer"] = dataset.manifest.tokenizer.sha256
        if not as_json:  # before anything is saved: a full disk must not cost the score
            print_found(found)
        kept = keep_scores(place, found, join)
    used = found["depth_used"]["tokens"] if depth_used else None
    if depth_tokens is not None and used not in (None, depth_tokens):
        kept.notes.append(
            f"--depth-tokens {depth_tokens:,}: {used:,} were used, as many whole contexts as there are."
        )
    if figures is not None:
        from steepen.report.evaluation_figures import draw

        found = {**found, "figures": [str(file) for file in draw(found, figures, subject.spec.arm.title)]}
    for note in kept.notes:
        typer.echo(note, err=True)
    if as_json:
        saved = None if kept.saved is None else str(kept.saved)
        typer.echo(json.dumps({**found, "joined": kept.joined, "saved": saved}, indent=2))
    elif kept.saved is not None:
        typer.echo(f"saved in {kept.saved}")
    if join and not kept.joined:
        raise SteepenError(f"the scores were not joined to {subject.run / 'record.json'}.")


@app.command("filter")
def filter_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...", help="Stores, run directories or record.json files of the reference arm."
        ),
    ],
    arm: Annotated[
        str, typer.Option(help="Only runs of this arm; the paper's reference is vanilla.")
    ] = "vanilla",
    least_gap: Annotated[float, typer.Option(help="Accuracy above chance at the largest run.")] = 0.02,
    least_tau: Annotated[float, typer.Option(help="Kendall's τ_b of accuracy with training tokens.")] = 0.50,
    out: Annotated[Path | None, typer.Option(help="Write the kept labels to a file, one a line.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the tasks that carry signal, from reference checkpoints' saved CORE scores.

    A task is kept where the run with the most tokens is at least two points above chance, and Kendall's τ_b
    between training tokens and accuracy is at least 0.50: the paper's two criteria.
    """
    from dataclasses import asdict

    import numpy as np

    from steepen.evaluation.scored_runs import by_arm, read_scored
    from steepen.laws.fits.downstream import filter_tasks

    groups = by_arm(read_scored(paths))
    if arm not in groups:
        raise UsageError(f"there is no scored run of {arm!r}; scored arms are {', '.join(groups)}.")
    runs = groups[arm]
    if len(runs) < 3:
        raise UsageError(f"{arm} has {len(runs)} scored runs; an order needs at least 3.")
    labels = [label for label in runs[0].tasks if all(label in run.tasks for run in runs)]
    verdicts = filter_tasks(
        np.array([run.tokens for run in runs], float),
        {label: np.array([run.tasks[label]["accuracy"] for run in runs]) for label in labels},
        {label: float(runs[0].tasks[label]["baseline"]) for label in labels},
        min_gap=least_gap,
        min_tau=least_tau,
    )
    kept = [label for label, verdict in verdicts.items() if verdict.passed]
    if out is not None:
        out.write_text("".join(f"{label}\n" for label in kept))
    if as_json:
        plain = {label: asdict(verdict) for label, verdict in verdicts.items()}
        typer.echo(json.dumps({"arm": arm, "runs": len(runs), "kept": kept, "tasks": plain}, indent=2))
        return
    for label, verdict in verdicts.items():
        line = f"{label:<34} {100 * verdict.gap:+7.2f} points  τ_b {verdict.tau:+.3f}"
        typer.echo(f"{line}  {'kept' if verdict.passed else f'left out: {verdict.reason}'}")
    typer.echo(f"{len(kept)} of {len(labels)} tasks kept, from {len(runs)} runs of {arm}.")


def make_wanted(
    core: Path | None,
    *,
    passes: str | None = None,
    examples: int | None = None,
    seeds: str = "0,1,2",
    tasks: str | None = None,
    token_budget: int | None = None,
    depth_tokens: int = 16_384,
    validation_tokens: int | None = None,
    **rest: Any,
) -> EvaluationRequest:
    """What the options ask for, refused here where one is wrong, before any time is spent."""
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.evaluate import CoreOptions
    from steepen.evaluation.measure import EvaluationRequest

    for name, value in (("--depth-tokens", depth_tokens), ("--validation-tokens", validation_tokens)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is not valid: it must be at least 1.")
    options = CoreOptions(_counts(seeds, "--seeds", least=0), examples, _labels(tasks), token_budget)
    bundle = None if core is None else Bundle.open(core)
    if bundle is not None and options.tasks is not None:
        for label in options.tasks:
            bundle.task(label)
    return EvaluationRequest(
        core=bundle,
        core_options=options,
        passes=() if passes is None else _counts(passes, "--passes"),
        depth_tokens=depth_tokens,
        validation_tokens=validation_tokens,
        **rest,
    )


def _counts(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """1..8 or 1,2,4 as numbers."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise UsageError(f"{option} {text!r} is not valid: write a range like 1..8 or a list like 1,2,4.")
    numbers = [int(word) for word in words]
    found = tuple(range(numbers[0], numbers[1] + 1)) if dots else tuple(numbers)
    if not found or min(found) < least or max(found) > 10_000:
        raise UsageError(f"{option} {text!r} is not valid: give counts from {least} up, smallest first.")
    return found


def _labels(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    if text in ("core17", "core22"):
        from steepen.evaluation.core import suite

        return suite.CORE17 if text == "core17" else suite.CORE22
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def print_found(found: dict[str, Any]) -> None:
    """The results for a person."""
    validation = found["validation"]
    typer.echo(
        f"step {found['step']:,}, {found['passes']} core passes, {found['precision']}: validation loss "
        f"{validation['loss']:.4f} ({validation['bits_per_byte']:.4f} bits per byte, "
        f"{validation['tokens']:,} tokens)"
    )
    if depth := found.get("depth_used"):
        curve = " ".join(f"{value:.2f}" for value in depth["curve"])
        typer.echo(
            f"KL effective depth {depth['depth']} of {depth['executed']} executed blocks "
            f"(peak after block {depth['peak']}, {depth['tokens']:,} tokens); nats after each: {curve}"
        )
    if curve := found.get("passes_curve"):
        pairs = zip(curve["passes"], curve["differences"], strict=True)
        parts = ", ".join(f"{passes}: {difference:+.4f}" for passes, difference in pairs)
        if parts:
            typer.echo(f"loss at k passes minus loss at {curve['trained']}: {parts}")
        if left := curve["left_out"]:
            typer.echo(
                f"passes {', '.join(map(str, left))} do not exist: untied cores run only as many passes as "
                "there are cores, and a network without a core runs as trained."
            )
    if core := found.get("core"):
        _print_core(core)


def _print_core(core: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="CORE", title_justify="left")
    for name in ("task", "shots", "examples", "accuracy", "chance", "centred", "answer NLL"):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for label, task in core["tasks"].items():
        numbers = (f"{task[name]:.4f}" for name in ("accuracy", "baseline", "centered", "nll"))
        table.add_row(label, str(task["shots"]), f"{task['examples']:,}", *numbers)
    console = Console(highlight=False)
    console.width = max(console.width, 100)  # a label cut short names no task
    console.print(table)
    spread = "" if core["core22_seed_sd"] is None else f" ± {core['core22_seed_sd']:.4f} over seeds"
    subset = "" if core["examples"] is None else f", at most {core['examples']:,} examples per task"
    if core["core22"] is not None:
        typer.echo(
            f"CORE22 {core['core22']:.4f}{spread}, CORE17 {core['core17']:.4f}, "
            f"answer NLL {core['nll22']:.4f}{subset}"
        )
    else:
        typer.echo(
            f"mean of {len(core['tasks'])} tasks: centred {core['mean_centered']:.4f}, "
            f"answer NLL {core['mean_nll']:.4f}{subset}"
        )
