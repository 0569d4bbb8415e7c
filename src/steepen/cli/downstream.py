"""`steepen downstream`: scores along ladders, at equal loss, and forecast beyond the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def downstream(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Stores, run directories or record.json files with scores; or tables with columns arm, "
            "flops, loss, answer_nll, core22, core17, depth, corpus, and one with a column task.",
        ),
    ],
    reference: Annotated[str, typer.Option(help="The arm that multipliers compare with.")] = "vanilla",
    arms: Annotated[str | None, typer.Option(help="Only these arms, comma-separated.")] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(help="Leave a run (the beginning of its name) out of every fit; repeatable."),
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option(help="Compute in FLOPs to forecast CORE at; repeatable.", min=1, max=1e40),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Name a corpus: HASH=NAME, with the beginning of its hash; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a page, figures and tables to this directory.")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="Figure formats: pdf, svg, png.")] = "pdf,svg,png",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Do gains in loss carry over to downstream scores?

    Answer NLL and CORE along the ladders with compute multipliers at equal
    scores, what the loss does not explain (one pooled line, and task by task),
    the task sigmoids, and forecasts of loss, answer NLL and CORE with held-out
    runs. KL effective depth and passes at test time where they were evaluated.
    Several corpora are compared with one another.

    \b
    Examples:
    [bold]steepen downstream runs --out downstream[/bold]
    [bold]steepen downstream core_scores.csv core_task_scores.csv --hold-out untied-grow-d26[/bold]
    """
    import json

    from steepen.api.downstream import analyse_scores
    from steepen.cli.parse_lists import parse_words

    found = analyse_scores(
        paths, reference=reference, arms=parse_words(arms), hold_out=hold_out or (), targets=target or (),
        corpora=_corpora(corpus or ()),
    )  # fmt: skip
    answer = found.answer()
    written: list[Path] = []
    if out is not None:
        from steepen.report.load_studies import LoadedStudy
        from steepen.report.write import FORMATS, write_report
        from steepen.utils.values import parse_words as parse_formats

        study = LoadedStudy("downstream", answer, {}, tuple(found.records))
        kinds = set(parse_formats(formats))
        steps = write_report([study], out, tuple(kind for kind in FORMATS if {kind} <= kinds))
        written = [file for step in steps for file in step]
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from steepen.results.study import answer_blocks
    from steepen.results.text import print_blocks

    print_blocks(lambda width: answer_blocks(answer, width))
    if written:
        print(f"\n{written[0]}, and {len(written) - 1} files of figures and tables.")


def _corpora(words: list[str] | tuple[str, ...]) -> dict[str, str]:
    from steepen.errors import UsageError
    from steepen.utils.series import DIGITS

    found: dict[str, str] = {}
    for word in words:
        key, equals, name = word.partition("=")
        if not (key and equals and name):
            raise UsageError(f"--corpus {word!r}: write HASH=NAME, e.g. 1a2b3c4d=fineweb-edu.")
        found[key[:DIGITS]] = name
    return found
