"""`steepen study`: run a study to its answer."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.cli.launch_options import (
    BudgetText,
    Device,
    DryRun,
    Gpu,
    GpusPerRunText,
    Jobs,
    LauncherName,
    LauncherOptions,
    Mfu,
    Price,
    RetryDiverged,
    SampleEvery,
    SamplePrompt,
    ShardText,
    Track,
    check_device,
    launch_study,
)
from steepen.cli.parse_lists import parse_integers, parse_words
from steepen.studies.registry import STUDIES
from steepen.utils.formatting import wrap_to_terminal

if TYPE_CHECKING:
    from steepen.studies.answer import Answer

# Panels of --help, besides those of `launch_options`.
SELECTION = "Study"
SINGLE_STUDY = "Options of single studies"
FILES = "Data and files"
OUTPUT = "Output"


def study(
    name: Annotated[
        str,
        typer.Argument(help="A study of the list, or module:function of a custom one.", show_default=False),
    ],
    preset: Annotated[
        str, typer.Option(help="tiny, mini, paper, or a custom YAML file.", rich_help_panel=SELECTION)
    ] = "tiny",
    arms: Annotated[
        str | None, typer.Option(help="Arms, e.g. vanilla,operator-1.", rich_help_panel=SELECTION)
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(help="Depths, e.g. 2-6, 6-20:2 or 2,3,5.", rich_help_panel=SELECTION)
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, e.g. 0-2 or 0,1.", rich_help_panel=SELECTION)
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only this part of the study (repeatable).", rich_help_panel=SELECTION),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipe instead of the preset's: paper, paper-fixed-rho, paper-affine-rho, "
            "paper-constant-lr, or a file of fit-recipe or growth-timing (repeatable).",
            rich_help_panel=SELECTION,
        ),
    ] = None,
    tpp: Annotated[
        float | None,
        typer.Option(
            help="Tokens per initial stored parameter of every arm, instead of its recipe's.",
            rich_help_panel=SELECTION,
            min=1e-06,
            max=1000000000.0,
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="Also evaluate every run of the study, then answer again: core, nll, kl-depth, "
            "comma-separated.",
            rich_help_panel=SELECTION,
        ),
    ] = None,
    core: Annotated[
        Path | None,
        typer.Option(help="Directory of the CORE bundle, for --score core and nll.", rich_help_panel=FILES),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Optimizer of every run: authors, muon, normuon, adamw or module:factory. Fit its recipe "
            "first (fit-recipe --optimizer NAME).",
            show_default="authors",
            rich_help_panel=SELECTION,
        ),
    ] = None,
    sweep_flops: Annotated[
        str | None,
        typer.Option(
            help="What the FLOPs of sweeps count: total, or matrix (without attention, as the paper's).",
            show_default="the preset's",
            rich_help_panel=SELECTION,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="ladder: the arm to compare the others with.", rich_help_panel=SINGLE_STUDY),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="ladder: known standard deviation of a run's loss.",
            min=1e-9,
            rich_help_panel=SINGLE_STUDY,
            max=100,
        ),
    ] = None,
    c0: Annotated[
        float | None,
        typer.Option(
            help="ladder: C0 of the law in FLOPs (default: the reference's run at the depth of tuning).",
            min=1.0,
            show_default=False,
            rich_help_panel=SINGLE_STUDY,
            max=1e40,
        ),
    ] = None,
    lr_regret: Annotated[
        float | None,
        typer.Option(
            help="ladder: regret of a learning rate off by 2×, from a sweep; see steepen fit --help.",
            min=0,
            show_default=False,
            rich_help_panel=SINGLE_STUDY,
            max=100,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="transfer: the arm whose recipe is transferred.", rich_help_panel=SINGLE_STUDY
        ),
    ] = None,
    hold_out: Annotated[
        int | None,
        typer.Option(
            help="extrapolate: the depth to predict.", min=1, rich_help_panel=SINGLE_STUDY, max=10_000
        ),
    ] = None,
    from_recipe: Annotated[
        bool,
        typer.Option(
            "--from-recipe",
            help="chain-tuning: start from the recipe, not from the paper's initial values.",
            rich_help_panel=SINGLE_STUDY,
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data directory made by `steepen data prepare` (default: the preset's own).",
            rich_help_panel=FILES,
        ),
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(
            help="Maximum number of epochs (repeats of the data).", min=1, rich_help_panel=FILES, max=10**6
        ),
    ] = 1,
    runs: Annotated[
        Path, typer.Option("--runs", help="Directory of all runs.", rich_help_panel=FILES)
    ] = Path("runs"),
    studies: Annotated[
        Path,
        typer.Option("--studies", help="Directory of journals and answers.", rich_help_panel=FILES),
    ] = Path("studies"),
    label: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the study's directory.",
            show_default="study-preset[-arms]",
            rich_help_panel=FILES,
        ),
    ] = None,
    launcher: LauncherName = "local",
    jobs: Jobs = None,
    launcher_options: LauncherOptions = None,
    device: Device = "auto",
    gpus_per_run: GpusPerRunText = "1",
    shard: ShardText = "optimizer",
    sample_every: SampleEvery = None,
    sample_prompt: SamplePrompt = None,
    dry_run: DryRun = False,
    budget: BudgetText = None,
    gpu: Gpu = None,
    mfu: Mfu = None,
    dollars_per_hour: Price = None,
    retry_diverged: RetryDiverged = False,
    track: Track = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as JSON.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Run a study to its answer. The same command resumes it after a kill; no finished run is repeated."""
    from steepen.api.study_data import (
        assumed_data,
        open_data,
        study_title,
        tokenizer_note,
        with_sweep_flops,
        write_recipes,
    )
    from steepen.api.study_scores import score_request, score_runs
    from steepen.recipe.recipe_choice import choose_recipes
    from steepen.studies.context import StudyContext, whole_validation_tokens
    from steepen.studies.preset import load_preset
    from steepen.studies.registry import find_study
    from steepen.studies.synthetic import SIMULATED_RECORDS
    from steepen.training.trackers import check_trackers

    trackers = check_trackers(track or (), installed=True)
    listed = find_study(name)
    chosen = load_preset(preset)
    given = _given(
        arms=parse_words(arms),
        rungs=parse_integers("--rungs", rungs),
        seeds=parse_integers("--seeds", seeds),
        parts=list(parts or ()),
        reference=reference,
        noise=noise,
        c0=c0,
        lr_regret=lr_regret,
        source=source,
        hold_out=hold_out,
        from_recipe=from_recipe,
    )
    chosen = with_sweep_flops(chosen, sweep_flops)
    choice = choose_recipes(recipe or (), tpp)
    request = score_request(parse_words(score), core)
    check_device(device, launcher, dry_run)  # before data is prepared
    # Reject wrong options before data is prepared: on assumed data, where the study has the tokens it needs.
    planned = StudyContext(chosen, assumed_data(chosen), epochs=epochs, choice=choice)
    listed.check(planned.with_optimizer(optimizer), given)
    title = label or study_title(listed, chosen, given, optimizer)
    folder, facts = open_data(chosen, data, runs, dry_run, (studies, title))
    context = StudyContext(chosen, facts, epochs=epochs, choice=choice).with_optimizer(optimizer)
    listed.check(context, given)  # rejects wrong options before a journal is written
    if (note := tokenizer_note(chosen, folder, facts)) is not None:
        print(wrap_to_terminal(f"note: {note}", sys.stderr), file=sys.stderr)
    wanted = whole_validation_tokens(
        chosen.validation_tokens, sys.maxsize, chosen.context, chosen.batch_tokens
    )
    if context.validation_tokens < wanted:
        print(
            f"note: losses are of {context.validation_tokens:,} validation tokens, all that the data has; "
            f"the preset asks for {wanted:,}.",
            file=sys.stderr,
        )
    options: dict[str, Any] = {
        "study": name if ":" in name else listed.name,
        "preset": chosen.name, "data": facts.identity, "epochs": epochs,
        "recipes": sorted(choice.files), **given,
        **_given(recipe=choice.name, tpp=tpp, sweep_flops=sweep_flops, optimizer=optimizer),
    }  # fmt: skip
    launch = functools.partial(
        launch_study, lambda: listed.start(context, given),
        name=title, options=options, data=folder, runs=runs, studies=studies, launcher=launcher, jobs=jobs,
        launcher_options=launcher_options,
        dry_run=dry_run, budget=budget, gpu=gpu, mfu=mfu, dollars_per_hour=dollars_per_hour, device=device,
        gpus_per_run=gpus_per_run, shard=shard, trackers=trackers,
        sample_every=sample_every or chosen.sample_every,
        sample_prompts=sample_prompt or chosen.sample_prompts,
        retry_diverged=retry_diverged, accept_diverged=listed.accept_diverged, as_json=as_json,
        stand_ins=SIMULATED_RECORDS if dry_run and listed.adaptive else (),
    )  # fmt: skip
    answer: Answer | None = launch()
    if answer is None:  # a dry run
        return
    if request is not None:
        score_runs(
            [runs / run for run in dict.fromkeys(answer.runs)], folder, request, device=device,
            launcher=launcher, jobs=jobs, launcher_options=launcher_options or (),
        )  # fmt: skip
        answer = launch()  # the same answer, with the scores
        assert answer is not None
    written = write_recipes(answer, studies / title)
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from steepen.report.terminal import print_answer

    print_answer(answer)
    file = studies / title / "study.json"
    print(f"\nThe answer is in {file}; its {len(set(answer.runs))} runs are in {runs}.")
    for path in written:
        print(f"The recipe is {path}: give it to plan, train or study with `--recipe {path}`.")


def _list_of_studies() -> str:
    """The studies with their questions and parts, for a help text 80 columns wide."""
    lines: list[str] = []
    for name, entry in STUDIES.items():
        question = textwrap.wrap(entry.question, 58)
        parts = textwrap.wrap(f"parts: {', '.join(entry.parts)}", 58, break_on_hyphens=False)
        first, *more = [*question, *(parts if entry.parts else ())]
        lines += [f"[bold]{name:<17}[/bold] {first}", *(f"{'':18}{line}" for line in more)]
    return "\n".join(lines)


study.__doc__ = (
    f"{(study.__doc__ or '').strip()}\n\n\b\n{_list_of_studies()}\n\n"
    "Example: [bold]steepen study ladder --preset tiny --arms vanilla,operator-1[/bold]"
)


def _given(**options: Any) -> dict[str, Any]:
    """The options given on the command line."""
    return {name: value for name, value in options.items() if value not in (None, [], False)}
