"""`steepen export` and `steepen import`: models out and in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steepen.results.runs import run_path


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run (its newest checkpoint): its directory, its hash or the beginning of it; or a "
            "checkpoint directory.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist.")],
    to: Annotated[
        str, typer.Option(help="hf (a folder that transformers loads) or safetensors (weights and a JSON).")
    ] = "hf",
    data_license: Annotated[
        str | None, typer.Option(help="Licence of the training data, for the model card.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Directory of all runs.")] = Path("runs"),
) -> None:
    """Export a trained network, to transformers or to plain safetensors.

    An hf folder has its own modeling code (trust_remote_code=True), tokenizer,
    generation config and model card; it needs no steepen.

    [bold]steepen export runs/HASH --to hf exported/loop-2[/bold]
    """
    from steepen.inference.export import export as export_run

    typer.echo(export_run(run_path(run, runs), out, to, data_license=data_license))


def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE",
            help="A folder that `steepen export` wrote, or a final.pt of the paper's authors with its "
            "result.json beside it or in the folder above.",
        ),
    ],
    runs: Annotated[Path, typer.Option(help="Run store; the run is a directory named by its hash.")] = Path(
        "runs"
    ),
    out: Annotated[Path | None, typer.Option(help="Run directory to write instead.")] = None,
) -> None:
    """Import a model as a run, to evaluate, generate with or export.

    A .pt file is read as weights only; one with code in it is rejected.

    [bold]steepen import exported/loop-2[/bold]
    """
    from steepen.inference.import_model import import_model

    found = import_model(path, runs, out)
    for note in found.notes:
        typer.echo(note, err=True)
    typer.echo(found.path)
