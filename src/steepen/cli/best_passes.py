"""`steepen best-passes`: how many core passes a fixed size should have at a compute budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from steepen.recipe.passes_law import PassesLaw


def best_passes(
    depth: Annotated[int, typer.Option(help="Nominal depth of the size.", min=3, max=512)] = 8,
    tpp: Annotated[
        str,
        typer.Option(help="Tokens per stored parameter that the compute buys at one pass; comma-separated."),
    ] = "6,12,24,48",
    family: Annotated[str, typer.Option(help="tied, untied or both.")] = "both",
    study: Annotated[
        str | None,
        typer.Option(
            help="A finished `passes` study whose laws to use instead of the paper's.", show_default=False
        ),
    ] = None,
    studies: Annotated[Path, typer.Option(help="Directory of all studies.")] = Path("studies"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """The best number of core passes K* at a fixed size, with its expansion and tokens per parameter.

    At a fixed size more passes mean fewer tokens; the law X_K* = c·TPP^p of
    the expansion says how far to go. It does not say whether a larger model would be better.

    Example: [bold]steepen best-passes --depth 10 --tpp 6,20[/bold]
    """
    import json
    from dataclasses import asdict

    from rich.table import Table

    from steepen.api.plans import best_passes as compute
    from steepen.cli.parse_lists import parse_words
    from steepen.errors import UsageError
    from steepen.utils.console import SafeConsole

    try:
        values = [float(word) for word in parse_words(tpp)]
    except ValueError:
        raise UsageError(f"--tpp {tpp!r} is not valid: write numbers, e.g. 6,12,24.") from None
    laws: tuple[PassesLaw, ...] | None = None
    if study is not None:
        from steepen.studies.design.passes_laws import laws_of_study

        laws = laws_of_study(study, studies)
    rows = compute(depth, values, family=family, laws=laws)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(box=None, header_style="bold")
    for name in ("family", "TPP at K = 1", "expansion", "K*", "TPP at K*", "tokens"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in rows:
        table.add_row(
            "tied" if row.tied else "untied", f"{row.tpp:g}", f"{row.expansion:.3f}", f"{row.passes:.2f}",
            f"{row.tpp_at_best:.2f}", f"{row.tokens:.3g}",
        )  # fmt: skip
    SafeConsole().print(table)
