"""`steepen pack` and `steepen unpack`: a study as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steepen.cli.launch_options import Studies


def pack(
    study: Annotated[str, typer.Argument(help="Name of a study, a prefix of it, or its directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="NAME.steepen.tar.gz")
    ] = None,
    studies: Studies = Path("studies"),
    runs: Annotated[Path | None, typer.Option(help="Directory of its runs, if it has moved.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Add the last checkpoint of every run.")] = False,
) -> None:
    """Pack a study with its runs, answer and report into one checksummed file.

    Example: steepen pack ladder-tiny --out ladder.tar.gz
    """
    from steepen.api.pack import pack as pack_study
    from steepen.cli.report import with_progress
    from steepen.utils.formatting import format_bytes

    made = pack_study(study, out, studies=studies, runs=runs, weights=weights, show=with_progress)
    print(f"{made.path}: {made.study}, {made.runs} runs, {made.files} files, {format_bytes(made.bytes)}.")


def unpack(
    file: Annotated[Path, typer.Argument(help="A file that `steepen pack` wrote.")],
    out: Annotated[
        Path, typer.Option(help="Directory for studies/, runs/ and report/; created if missing.")
    ] = Path(),
) -> None:
    """Unpack a study; its files are checked first.

    Example: steepen unpack ladder.tar.gz --out moved
    """
    from steepen.api.pack import unpack as unpack_study

    made = unpack_study(file, out)
    print(f"{made.path}: {made.study}, {made.runs} runs; see `steepen status {made.path}`.")
