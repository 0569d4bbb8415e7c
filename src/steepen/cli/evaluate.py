"""`steepen eval`: evaluate checkpoints and models of transformers, select tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from steepen.cli.given_options import was_given
from steepen.cli.score_options import make_request
from steepen.cli.score_tables import print_core, print_scores
from steepen.errors import SteepenError, UsageError

if TYPE_CHECKING:
    from steepen.evaluation.evaluate_run import EvaluationRequest


class CheckpointFirst(TyperGroup):
    """`steepen eval PATH` is short for `steepen eval checkpoint PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command's name where none is given."""
        if not args or args[0] not in self.commands:
            args = ["checkpoint", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=CheckpointFirst, help="Evaluate a checkpoint: validation loss, CORE, KL depth, passes.")

# Panels of --help.
CORE = "CORE"
DEPTH = "KL effective depth"
MANY = "Many runs"
OUTPUT = "Output"


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    "checkpoint",
    epilog="The word checkpoint may be left out. Other commands of eval: filter (selects tasks), fetch-core"
    " (downloads the CORE bundle). See also: steepen forecast --help.",
)
def checkpoint(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS",
            help="Runs (their newest checkpoints), checkpoint directories, or a directory of runs.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prepared data with the run's tokenizer; its validation tokens are used. With --hf, any "
            "prepared data: its validation text is encoded with the model's tokenizer."
        ),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            "--hf",
            metavar="DIR_OR_NAME",
            help="Score a causal language model of transformers instead of a run: a folder, or a name on the "
            "Hugging Face Hub.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --hf: run modeling code that comes with it.")
    ] = False,
    study: Annotated[
        str | None, typer.Option(help="Evaluate the runs of this study.", rich_help_panel=MANY)
    ] = None,
    studies: Annotated[Path, typer.Option(help="Directory of the studies.", rich_help_panel=MANY)] = Path(
        "studies"
    ),
    split_runs: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Evaluate part I of N of the runs, with I from 0 to N − 1: one job each.",
            rich_help_panel=MANY,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            help="Evaluate each run as a job: local, slurm, ray or module:attribute. Default: one after "
            "another in this process, or local with --jobs.",
            rich_help_panel=MANY,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", help="Max runs at a time.", min=1, max=10_000, rich_help_panel=MANY),
    ] = None,
    launcher_options: Annotated[
        list[str] | None,
        typer.Option(
            "--launcher-option",
            metavar="KEY=VALUE",
            help="Option of the launcher, as in steepen study (repeatable).",
            rich_help_panel=MANY,
        ),
    ] = None,
    core: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a CORE bundle (core.yaml, eval_meta_data.csv, eval_data/).",
            rich_help_panel=CORE,
        ),
    ] = None,
    kl_depth: Annotated[
        bool, typer.Option("--kl-depth", help="Measure KL effective depth.", rich_help_panel=DEPTH)
    ] = False,
    passes: Annotated[
        str | None, typer.Option(help="Measure the loss at these core passes: 1-8 or 1,2,4.")
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="Maximum examples per task (a fixed subset).", rich_help_panel=CORE, min=1, max=10**9
        ),
    ] = None,
    convention: Annotated[
        str,
        typer.Option(
            help="How CORE is scored: authors (of the paper) or nanochat; they differ in seeds and NLL.",
            rich_help_panel=CORE,
        ),
    ] = "authors",
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds of the few-shot demonstrations; scores are averaged over them. Default: 0,1,2 "
            "(authors) or 1234 (nanochat).",
            rich_help_panel=CORE,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Only these tasks: comma-separated labels, or core17 for the paper's subset.",
            rich_help_panel=CORE,
        ),
    ] = None,
    kl_threshold: Annotated[
        float, typer.Option(help="KL threshold in nats.", rich_help_panel=DEPTH, min=0, max=1000000.0)
    ] = 2.0,
    kl_direction: Annotated[
        str, typer.Option(help="KL direction: final-to-block or block-to-final.", rich_help_panel=DEPTH)
    ] = "final-to-block",
    kl_depth_tokens: Annotated[
        int | None,
        typer.Option(
            help="Validation tokens for --kl-depth; default 16,384.", rich_help_panel=DEPTH, min=1, max=10**15
        ),
    ] = None,
    validation_tokens: Annotated[
        int | None, typer.Option(help="Validation tokens; default: as in training.", min=1, max=10**15)
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(
            envvar="STEEPEN_PUBLISHED",
            help="Folder of the paper's published scores (core_scores.csv, …), printed beside those of a "
            "single run where arm, depth and corpus match.",
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Directory to write figures to.", rich_help_panel=OUTPUT)
    ] = None,
    update_record: Annotated[
        bool | None,
        typer.Option(
            help="Add the scores to the run's record (default: for a finished run, if the data is known to "
            "have its tokenizer).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="auto (the run's own; bf16 for fp8 runs), fp32 or bf16.")
    ] = "auto",
    token_budget: Annotated[
        int | None,
        typer.Option(
            help="Padded tokens per CORE batch; lower it to save memory.",
            rich_help_panel=CORE,
            min=1,
            max=10**12,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint: validation loss and, on request, other scores.

    The others are CORE, KL effective depth and the loss at other numbers of
    passes. CORE outcomes are saved task by task, so an interrupted evaluation
    resumes. Of many runs, those that have the scores already are skipped.

    [bold]steepen eval runs/HASH --data data/edu --kl-depth --passes 1-8[/bold]

    [bold]steepen eval --hf gpt2 --data data/edu --core eval_bundle[/bold]
    """
    from steepen.distributed.environment import process_environment
    from steepen.evaluation.evaluate_run import evaluate

    request = make_request(
        core,
        kl_depth=kl_depth,
        passes=passes,
        examples=examples,
        convention=convention,
        seeds=seeds,
        tasks=tasks,
        token_budget=token_budget,
        kl_threshold=kl_threshold,
        kl_direction=kl_direction,
        kl_depth_tokens=kl_depth_tokens,
        validation_tokens=validation_tokens,
        published=published,
    )
    # Only a single run is compared with published scores: elsewhere their environment variable is ignored.
    published_given = was_given(context, "published")
    if hf is not None:
        if paths or study is not None:
            raise UsageError("give a run or --hf, not both.")
        request = request if published_given else replace(request, published=None)
        _evaluate_hugging_face(hf, data, request, device, precision, trust_remote_code, as_json)
        return
    if not (paths or study) or data is None:
        raise UsageError(
            "give a run directory and --data, or --hf with a model of transformers (or a study: --study)."
        )
    runs = _runs(paths or [], study, studies)
    launched = launcher is not None or jobs is not None or bool(launcher_options)
    if len(runs) != 1 or study is not None or split_runs is not None or launched:
        if figures is not None:
            raise UsageError("--figures draws one run; evaluate the runs first, then draw each.")
        if published_given:
            raise UsageError(
                "--published compares a single run, without --launcher and --jobs; evaluate the runs first, "
                "then compare each."
            )
        request = replace(request, published=None)
        where = {"launcher": launcher or "local", "jobs": jobs, "launcher_options": launcher_options or ()}
        _evaluate_many(
            runs, data, request, split_runs, as_json=as_json, update_record=update_record, device=device,
            precision=precision, where=where if launched else None,
        )  # fmt: skip
        return
    try:
        found = evaluate(
            runs[0],
            data,
            request,
            update_record=update_record,
            device=device,
            precision=precision,
            quiet=as_json,
            on_scores=None if as_json else print_scores,
        )
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            typer.echo(note, err=True)
        raise
    if not process_environment().is_main:
        return
    for note in found.notes:
        typer.echo(note, err=True)
    extra: dict[str, Any] = {}
    if figures is not None:
        from steepen.report.score_panels import draw_scores

        title = found.checkpoint.spec.arm.title
        extra = {"figures": [str(file) for file in draw_scores(found.scores, figures, title)]}
    if as_json:
        saved = None if found.saved is None else str(found.saved)
        typer.echo(
            json.dumps({**found.scores, **extra, "in_record": found.in_record, "saved": saved}, indent=2)
        )
    elif found.saved is not None:
        typer.echo(f"saved in {found.saved}")
    if update_record and not found.in_record:
        raise SteepenError(f"the scores were not added to {found.checkpoint.run / 'record.json'}.")


def _evaluate_hugging_face(
    name: str,
    data: Path | None,
    request: EvaluationRequest,
    device: str,
    precision: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    from steepen.evaluation.hf_model import evaluate_hugging_face

    scores = evaluate_hugging_face(
        name,
        data,
        request,
        device=device,
        precision=precision,
        trust_remote_code=trust_remote_code,
        quiet=as_json,
    )
    if as_json:
        typer.echo(json.dumps(scores, indent=2))
        return
    typer.echo(
        f"{name}: {scores['parameters']:,} parameters, {scores['precision']}, context {scores['context']:,}"
    )
    if text := scores.get("validation"):
        typer.echo(
            f"validation text: {text['bits_per_byte']:.4f} bits per byte ({text['loss']:.4f} nats per token, "
            f"{text['tokens']:,} tokens, {text['bytes']:,} bytes)"
        )
    if core := scores.get("core"):
        print_core(core, {})


@app.command("fetch-core")
def fetch_core(
    out: Annotated[Path, typer.Option(help="Directory to write.")] = Path("eval_bundle"),
    address: Annotated[
        str | None, typer.Option(help="Download the archive from here instead of the public address.")
    ] = None,
) -> None:
    """Download the CORE bundle (22 tasks, 91,037 examples) and verify its content.

    An interrupted download continues when the command is run again. Without a
    connection, download and unpack it elsewhere.

    [bold]steepen eval fetch-core --out eval_bundle[/bold]
    """
    from steepen.evaluation.core.fetch import ADDRESS
    from steepen.evaluation.core.fetch import fetch_core as fetch
    from steepen.utils.progress import stage_progress

    with stage_progress(quiet=False) as progress:
        bundle = fetch(
            out,
            address or ADDRESS,
            progress=lambda done, total: progress("download", done, total or done),
        )
    examples = sum(len(task.items) for task in bundle.tasks)
    typer.echo(f"{bundle.directory}: {len(bundle.tasks)} tasks, {examples:,} examples, verified.")


def _runs(paths: list[Path], study: str | None, studies: Path) -> list[Path]:
    """The run directories that were named, and those of a study."""
    from steepen.evaluation.evaluate_many import find_runs

    if study is not None:
        from steepen.studies.driver.journal import Journal, find_study_folder

        entry = Journal.read(find_study_folder(study, studies)).entry
        paths = [*paths, *(Path(entry.runs_directory) / run.run for run in entry.runs)]
    if not paths:
        raise UsageError("name the runs to evaluate, or a study with --study.")
    # A single path may also be a checkpoint, or wrong in a way that its evaluation names.
    return paths if len(paths) == 1 and not any(paths[0].glob("*/record.json")) else find_runs(paths)


def _evaluate_many(
    runs: list[Path],
    data: Path,
    request: EvaluationRequest,
    split: str | None,
    *,
    as_json: bool,
    where: dict[str, Any] | None,
    **options: Any,
) -> None:
    from steepen.api.launched_scores import evaluate_on_launcher
    from steepen.evaluation.evaluate_many import choose_part, evaluate_many

    def print_message(text: str) -> None:
        typer.echo(text, err=True)

    chosen = choose_part(runs, split)
    if where is None:
        found = evaluate_many(chosen, data, request, report=print_message, quiet=True, **options)
    else:
        found = evaluate_on_launcher(chosen, data, request, report=print_message, **where, **options)
    counts = {"evaluated": len(found.evaluated), "skipped": len(found.skipped), "failed": len(found.failed)}
    if as_json:
        failed = {str(run): why for run, why in found.failed.items()}
        scores = [one.scores for one in found.evaluated]
        typer.echo(json.dumps({**counts, "scores": scores, "reasons": failed}, indent=2))
    else:
        typer.echo(
            f"{counts['evaluated']} {'run' if counts['evaluated'] == 1 else 'runs'} evaluated, "
            f"{counts['skipped']} had these scores, "
            f"{counts['failed']} failed."
        )
    if found.failed:
        run, why = next(iter(found.failed.items()))
        what = "1 run was" if len(found.failed) == 1 else f"{len(found.failed)} runs were"
        raise SteepenError(f"{what} not evaluated, {run.name} because: {why}")


@app.command("filter")
def filter_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS", help="Stores, run directories or record.json files of the reference arm."
        ),
    ],
    arm: Annotated[
        str, typer.Option(help="Only runs of this arm; the paper's reference is vanilla.")
    ] = "vanilla",
    min_gap: Annotated[
        float, typer.Option(help="Minimum accuracy above chance of the largest run.", min=-1, max=1)
    ] = 0.02,
    min_tau: Annotated[
        float, typer.Option(help="Minimum Kendall τ_b of accuracy with training tokens.", min=-1, max=1)
    ] = 0.50,
    out: Annotated[
        Path | None, typer.Option(help="Write the selected labels to a file, one per line.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Select tasks above chance that improve with training, from the CORE scores of reference runs.

    The paper's two criteria: the run with the most tokens is at least two
    points above chance, and Kendall's τ_b between training tokens and accuracy
    is at least 0.50.
    """
    from dataclasses import asdict

    from steepen.evaluation.scored_runs import filter_scored_tasks, read_scored_runs

    runs, results = filter_scored_tasks(read_scored_runs(paths), arm, min_gap, min_tau)
    selected = [label for label, result in results.items() if result.passed]
    if out is not None:
        out.write_text("".join(f"{label}\n" for label in selected), encoding="utf-8")
    if as_json:
        values = {label: asdict(result) for label, result in results.items()}
        typer.echo(json.dumps({"arm": arm, "runs": runs, "selected": selected, "tasks": values}, indent=2))
        return
    for label, result in results.items():
        line = f"{label:<34} {100 * result.gap:+7.2f} points  τ_b {result.tau:+.3f}"
        typer.echo(f"{line}  {'selected' if result.passed else f'rejected: {result.reason}'}")
    typer.echo(f"{len(selected)} of {len(results)} tasks selected, from {runs} runs of {arm}.")
