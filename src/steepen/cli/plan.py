"""`steepen arms` and `steepen plan`: the table of arms, and the planner."""

from __future__ import annotations

import json
import operator
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from steepen.recipe.planner import Plan

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WIDE = 110  # terminal columns from which parameter counts are shown too


# Panels of --help.
SIZE = "Size rule"
CLUSTER = "Memory, time and cost"


def arms(
    depth: Annotated[int, typer.Option(min=1, help="Nominal depth ℓ; the width is 128·ℓ.", max=512)] = 8,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw the blocks that the eight main arms execute to this file (PNG, PDF, SVG)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the arms, with their size at a depth.

    Any number of passes K is an arm too: loop-3, untied-4, tied-vanilla-6,
    untied-vanilla-3. The paper's names of ablations are accepted wherever an
    arm is named. A custom arm is named module:attribute.
    """
    from steepen.errors import UsageError
    from steepen.model.arms import ARMS, MAIN_ARMS, paper_names
    from steepen.recipe.flops import compute_active_parameters, stored_parameters

    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.studies.family_panel import family_panel

        save_panels([family_panel([ARMS[name] for name in MAIN_ARMS], depth)], figure)
    rows: list[dict[str, Any]] = []
    for arm in ARMS.values():
        try:
            shape = arm.shape(depth)
        except UsageError:
            continue  # a fixed allocation such as 2/C/3 needs a minimum depth
        first, last = arm.passes.initial, arm.passes.final
        rows.append(
            {
                "arm": arm.name,
                "title": arm.title,
                "other_names": paper_names(arm.name),
                "about": arm.about,
                "core_boundary": arm.core_boundary,
                "coda_boundary": arm.coda_boundary,
                "tied": arm.tied,
                "passes": [list(stage.passes) for stage in arm.passes.stages],
                "allocation": str(shape.allocation),
                "width": shape.width,
                "initial_executed_depth": shape.allocation.executed(first),
                "executed_depth": shape.allocation.executed(last),
                "initial_stored_parameters": stored_parameters(arm, shape, first),
                "stored_parameters": stored_parameters(arm, shape, arm.passes.max_passes),
                "compute_active_parameters": compute_active_parameters(arm, shape, last),
                "recipe": arm.recipe,
            }
        )
    if as_json:
        print(json.dumps({"depth": depth, "arms": rows}, indent=2, ensure_ascii=False))
        return
    from rich.table import Table

    from steepen.utils.console import SafeConsole

    table = Table(
        title=f"Arms at d{depth} (width {128 * depth}); blocks: prelude/core/coda",
        box=None,
        header_style="bold",
    )
    for column in ("arm", "what it is"):
        table.add_column(column, no_wrap=column == "arm")
    console = SafeConsole(markup=False)
    wide = console.width >= WIDE  # otherwise descriptions would be cut
    for column in ("passes", "blocks", "executed", *(("stored", "compute-active") if wide else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row["arm"],
            "; also ".join([row["about"], *row["other_names"][:1]]),
            " → ".join(_counts(stage) for stage in row["passes"]),
            row["allocation"],
            _change(row["initial_executed_depth"], row["executed_depth"]),
        ]
        if wide:
            stored = _size(row["initial_stored_parameters"]), _size(row["stored_parameters"])
            cells += [_change(*stored), _size(row["compute_active_parameters"])]
        table.add_row(*cells)
    console.print(table)
    if not wide:
        console.print(f"Parameter counts: widen the terminal to {WIDE} columns, or use --json.", style="dim")


def plan(
    arm: Annotated[
        str | None,
        typer.Option(help="Arm: listed by `steepen arms`, loop-K, untied-K, or module:attribute."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Nominal depth ℓ; the width is 128·ℓ.", min=1, max=512)
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="Compute budget, e.g. 1e19; alone, it chooses the depth.", min=1, max=1e40),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Token budget, e.g. 1e9; with --depth, at that depth.", min=1, max=1000000000000000.0
        ),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="Fraction of tokens after growth, instead of the recipe's.", min=0, max=1),
    ] = None,
    tpp: Annotated[
        float | None,
        typer.Option(
            help="Tokens per initial stored parameter, instead of the recipe's.", min=1e-06, max=1000000000.0
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipe: paper, paper-fixed-rho, paper-affine-rho, paper-constant-lr, or a recipe file "
            "(repeatable). Without --arm, plans its whole ladders.",
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Context length in tokens.", rich_help_panel=SIZE, min=1, max=10**8)
    ] = 2048,
    vocabulary: Annotated[
        int, typer.Option(help="Vocabulary size, padded.", rich_help_panel=SIZE, min=1, max=10**8)
    ] = 50_304,
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
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per step.", show_default="524288", rich_help_panel=SIZE, min=1, max=10**15),
    ] = None,
    base_depth: Annotated[
        int | None,
        typer.Option(
            help="Depth at which the base learning rate applies.",
            show_default="8",
            rich_help_panel=SIZE,
            min=1,
            max=10**8,
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="GPUs the run would use.", rich_help_panel=CLUSTER, min=1, max=10**6)
    ] = 1,
    gpu: Annotated[
        str, typer.Option(help="GPU model: a100, h100, h200, b200, …", rich_help_panel=CLUSTER)
    ] = "h100",
    mfu: Annotated[
        float,
        typer.Option(help="Model FLOPs utilization to assume.", rich_help_panel=CLUSTER, min=1e-06, max=1),
    ] = 0.4,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences per GPU and micro-batch.",
            show_default="what fits, in each stage of growth",
            rich_help_panel=CLUSTER,
            min=1,
            max=10**6,
        ),
    ] = None,
    dollars_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of one GPU hour.", rich_help_panel=CLUSTER, min=0, max=1000000.0),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a run: size, tokens, FLOPs, hyperparameters, memory, time and cost.

    --depth alone gives the recipe's compute-optimal run; --flops or --tokens
    alone chooses the depth; together they spend the budget at that depth.

    [bold]steepen plan --arm untied-grow --depth 26 --gpus 16[/bold]

    [bold]steepen plan --arm vanilla --flops 1e19 --json[/bold]

    [bold]steepen plan --recipe paper[/bold]
    """
    from steepen.errors import UsageError
    from steepen.model.arms import find_arm
    from steepen.model.shape import SizeRule
    from steepen.recipe.hardware import find_accelerator
    from steepen.recipe.planner import Cluster, ladder_row, make_plan, plan_ladders
    from steepen.recipe.recipe_choice import choose_recipes

    choice = choose_recipes(recipe or (), tpp)
    size = SizeRule(aspect, head_dim, mlp_multiple, context, vocabulary)
    given = {"batch_tokens": batch_tokens, "base_depth": base_depth}
    changes = {name: value for name, value in given.items() if value is not None}
    if arm is None:
        if recipe is None or any(value is not None for value in (depth, flops, tokens, rho)):
            raise UsageError("give --arm, or --recipe alone for the whole ladders of a recipe.")
        rows = [ladder_row(planned) for planned in plan_ladders(choice, size, **changes)]
        if as_json:
            print(json.dumps({"recipe": recipe, "runs": rows}, indent=2))
        else:
            _show_ladders(rows)
        return
    found = find_arm(arm)
    choice.require_file_for(found)
    result = make_plan(
        found,
        depth=depth,
        flops=flops,
        tokens=tokens,
        rho=rho,
        size_rule=size,
        recipe=replace(choice.of(found), **changes),
        cluster=Cluster(gpus, find_accelerator(gpu), mfu, dollars_per_hour, micro_batch),
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)


def _show_ladders(rows: list[dict[str, Any]]) -> None:
    """Print one line per run, with every digit where the terminal is wide enough."""
    from steepen.utils.formatting import format_flops

    lines = _ladder_lines(rows, str)
    known = sys.stdout.isatty() or "COLUMNS" in os.environ  # otherwise a pipe or a file, of any width
    if known and len(lines[0]) > shutil.get_terminal_size().columns:
        rounded = _ladder_lines(rows, lambda value: format_flops(value, 4))
        lines = [*rounded, f"Every digit: widen the terminal to {len(lines[0])} columns, or use --json."]
    print("\n".join(lines))


def _ladder_lines(rows: list[dict[str, Any]], format_float: Callable[[float], str]) -> list[str]:
    """Headings and one line per run, in aligned columns."""
    columns = {
        "arm": "arm", "depth": "depth", "steps": "steps", "growth_step": "growth", "learning_rate": "lr",
        "embedding_lr": "emb. lr", "head_lr": "head lr", "flops": "FLOPs",
    }  # fmt: skip

    def cell(value: Any) -> str:
        return format_float(value) if isinstance(value, float) else "" if value is None else str(value)

    cells = [[*columns.values()], *([cell(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]


def _show(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    from steepen.utils.console import SafeConsole
    from steepen.utils.formatting import format_bytes

    console = SafeConsole(markup=False)
    facts = plan.to_dict()
    planned = plan.run

    def table(title: str, rows: list[tuple[str, str]]) -> None:
        grid = Table(title=title, title_justify="left", box=None, show_header=False, title_style="bold")
        grid.add_column(no_wrap=True, style="dim", min_width=22)
        grid.add_column()
        for row in rows:
            grid.add_row(*row)
        console.print(grid)

    executed = _change(facts["initial_executed_depth"], facts["executed_depth"])
    stored = _change(_exact(facts["initial_stored_parameters"]), _exact(facts["stored_parameters"]))
    active = _change(
        _exact(facts["initial_compute_active_parameters"]), _exact(facts["compute_active_parameters"])
    )
    table(
        f"{planned.arm.title} d{planned.shape.depth}",
        [
            (
                "width, heads, MLP width",
                f"{planned.shape.width}, {planned.shape.heads}, {planned.shape.mlp_width}",
            ),
            ("prelude/core/coda", facts["allocation"]),
            ("executed depth", executed),
            ("stored parameters", stored),
            ("compute-active param.", active),
        ],
    )
    rows = [
        (
            "tokens",
            f"{_exact(planned.tokens)} ({facts['tokens_per_parameter']:.2f} per initial stored parameter)",
        ),
        ("steps", f"{_exact(planned.steps)} of {_exact(planned.batch_tokens)} tokens"),
    ]
    if planned.growth_step is not None:
        fraction = f" (ρ = {planned.rho:.4f} of the tokens after it)" if planned.rho is not None else ""
        rows.append(("growth after step", f"{_exact(planned.growth_step)}{fraction}"))
    rows.append(("total FLOPs", f"{facts['flops']:.4e}"))
    for phase in facts["phases"]:
        terms = phase["flops_per_token"]
        rows.append(
            (
                f"FLOPs per token, K={_counts(phase['passes'])}",
                f"{terms['total']:.4e} (matmul {terms['matmul']:.3e}, attention {terms['attention']:.3e}, "
                f"head {terms['head']:.3e})",
            )
        )
    table("Budget", rows)
    hyper = facts["hyperparameters"]
    table(
        "Hyperparameters (the paper's code)",
        [(_coded(name), f"{value:.12g}{_printed(name, value)}") for name, value in hyper.items()],
    )
    cluster = facts["cluster"]
    alone = ", without communication" if cluster["gpus"] > 1 else ""
    rows = [("time", f"{_hours(cluster['hours'])} ({cluster['gpu_hours']:.1f} GPU hours{alone})")]
    if cluster["dollars"] is not None:
        rows.append(("cost", f"${cluster['dollars']:,.2f}"))
    saved = cluster["checkpoint_bytes"]
    rows.append(("disk", f"{format_bytes(saved)} for a checkpoint; 2 are kept while it trains"))
    for kind, memory in cluster["memory_gib_per_gpu"].items():
        used, limits = cluster["micro_batch"][kind], cluster["largest_micro_batch"][kind]
        fits = "fits" if all(map(operator.le, used, limits)) else "does NOT fit"
        if fits != "fits" and memory["total"] <= cluster["gpu_memory_gib"]:
            fits = "fits, with less than 10% to spare"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in memory.items() if name != "total"
        )
        chosen = f"micro-batch {_stages(used)}"
        largest = f"largest that fits: {_stages(limits)}" if limits[-1] else "a single sequence does not fit"
        rows.append(
            (f"memory, {kind}", f"{memory['total']:.1f} GiB per GPU, {fits} ({parts}); {chosen}, {largest}")
        )
    for kind, exchange in cluster["communication_per_step"].items():
        rows.append(
            (
                f"communication, {kind}",
                f"{exchange['gradient_gib']:.1f} GiB of gradients and {exchange['weight_gib']:.1f} GiB of "
                f"weights per GPU and step, {exchange['exposed_seconds']:.2f} s exposed (not "
                f"overlapped): {exchange['efficiency']:.0%} efficiency, {_hours(exchange['hours'])}",
            )
        )
    where = f"On {cluster['gpus']} × {cluster['gpu']} at {cluster['mfu']:.0%} MFU"
    table(f"{where} (estimates)", rows)
    for warning in plan.warnings:
        console.print(Text.assemble(("note", "yellow"), f": {warning}"), highlight=False)


def _printed(name: str, value: float) -> str:
    """The three decimals that the paper prints of a base value with more of them."""
    if name in ("learning_rate", "adam_eps") or round(value, 3) == value:
        return ""
    return f" (printed {value:.3f})"


def _coded(name: str) -> str:
    """A hyperparameter with the paper's code beside it: learning_rate (GLR)."""
    from steepen.recipe.hyperparameters import paper_code

    code = paper_code(name)
    return name if code is None else f"{name} ({code})"


def _counts(passes: list[int]) -> str:
    return str(passes[0]) if len(passes) == 1 else f"{min(passes)}..{max(passes)}"


def _change(first: object, last: object) -> str:
    return str(first) if first == last else f"{first} → {last}"


def _exact(value: int) -> str:
    return f"{value:,}"


def _size(value: int) -> str:
    return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.1f}M"


def _stages(values: list[int]) -> str:
    """A number for each stage of growth: "4, then 2"; once if all are equal."""
    return ", then ".join(map(str, values if len(set(values)) > 1 else values[:1]))


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
