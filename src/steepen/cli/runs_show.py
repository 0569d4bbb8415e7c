"""`steepen runs show` and `runs compare`: one run in full, and two runs compared."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from steepen.cli.run_options import Json, find_run, runs_directory


def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="The run's hash or the beginning of it, or its directory.")],
    runs: Annotated[Path | None, typer.Option("--runs", help="Directory of all runs.")] = None,
    as_json: Json = False,
) -> None:
    """Show everything about a run, with its loss curve.

    Example: steepen runs show 6084f5
    """
    from steepen.api.runs import loss_curve
    from steepen.utils.text_plot import text_plot

    found = find_run(run, runs_directory(context, runs))
    if as_json:
        print(json.dumps(dict(found.fields), indent=2, ensure_ascii=False))
        return
    print(f"{found.headline()}\n{found.path}\n")
    print(found.summary())
    curve = loss_curve(found.metrics_rows(), found.fields.get("batch_tokens") or 1)
    chart = text_plot([curve], min(80, shutil.get_terminal_size().columns))
    if chart:
        print("\ntraining loss over tokens\n" + "\n".join(chart))
    waits = [row["checkpoint_wait"] for row in found.metrics_rows() if row.get("checkpoint_wait")]
    if waits:
        noun = "checkpoint" if len(waits) == 1 else "checkpoints"
        longest = f", at most {max(waits):.2f} s for one" if len(waits) > 1 else ""
        print(f"\ntraining waited {sum(waits):.2f} s for {len(waits)} {noun}{longest}")
    samples = found.samples()
    if samples:
        print(f"\n{_samples_text(samples)}")


def _samples_text(samples: Sequence[Mapping[str, Any]]) -> str:
    """The texts of the first and the last sampled step; prompts in quotation marks."""
    from steepen.utils.formatting import wrap_to_terminal

    steps = sorted({sample["step"] for sample in samples})
    lines: list[str] = []
    for step in sorted({steps[0], steps[-1]}):
        lines.append(f"samples at step {step:,}")
        for sample in samples:
            if sample["step"] == step:
                prompt = f"“{sample['prompt']}” " if sample["prompt"] else ""
                text = " ".join(str(sample["text"]).split())
                lines.append(wrap_to_terminal(f"  {prompt}{text}", sys.stdout))
    return "\n".join(lines)


def compare(
    context: typer.Context,
    first: Annotated[str, typer.Argument(help="A run, as in `runs show`.")],
    second: Annotated[str, typer.Argument(help="The run to compare it with.")],
    runs: Annotated[Path | None, typer.Option("--runs", help="Directory of all runs.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw both loss curves to this .pdf, .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the fields in which two runs differ, and their loss curves.

    Example: steepen runs compare 6084f5 d31e5a --figure curves.pdf
    """
    from steepen.api.runs import loss_curve
    from steepen.utils.text_plot import MARKS, text_plot

    directory = runs_directory(context, runs)
    pair = [find_run(first, directory), find_run(second, directory)]
    names = list(dict.fromkeys([*pair[0].fields, *pair[1].fields]))
    different = {
        name: [one.fields.get(name) for one in pair]
        for name in names
        if pair[0].fields.get(name) != pair[1].fields.get(name)
    }
    if figure is not None:
        from steepen.report.figure import save_panels
        from steepen.report.run_panels import compared_curves

        names_and_curves = [
            (f"{one.fields['arm']} d{one.fields['depth']} {one.name[:6]}", one.metrics_rows()) for one in pair
        ]
        tokens = [one.fields.get("batch_tokens") or 1 for one in pair]
        save_panels([compared_curves(names_and_curves, tokens)], figure)
    if as_json:
        print(json.dumps({"runs": [one.name for one in pair], "different": different}, indent=2))
        return
    for mark, one in zip(MARKS, pair, strict=False):
        print(f"{mark} {one.headline()}")
    _print_differences(different)
    curves = [loss_curve(one.metrics_rows(), one.fields.get("batch_tokens") or 1) for one in pair]
    chart = text_plot(curves, min(80, shutil.get_terminal_size().columns))
    if chart:
        print("\ntraining loss over tokens\n" + "\n".join(chart))
    if figure is not None:
        print(f"figure: {figure}")


def _print_differences(different: Mapping[str, Sequence[Any]]) -> None:
    """Print a table of fields with two values each: settings, then what was measured."""
    from steepen.runs.fields import format_field, is_setting

    cells = {name: [format_field(name, value) for value in values] for name, values in different.items()}
    width = max((len(name) for name in cells), default=0)
    middle = max((len(values[0]) for values in cells.values()), default=0)
    settings = [name for name in cells if is_setting(name) and name != "run"]
    for title, names in (
        ("settings that differ", settings),
        ("results", [n for n in cells if not is_setting(n)]),
    ):
        if names:
            print(f"\n{title}")
        for name in names:
            left, right = cells[name]
            print(f"{name.ljust(width)}  {left.ljust(middle)}  {right}")
    if not settings:
        print("\nno setting differs")
