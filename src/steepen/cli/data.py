"""`steepen data`: prepare text for training, check it, show what is there."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.data.prepare_options import PrepareProgress

app = typer.Typer(
    help="Text to token shards: prepare, verify, show.", no_args_is_help=True, rich_markup_mode="rich"
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for a script to read.")]


@app.command()
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            help="Files, quoted globs or directories of text, JSON lines or Parquet (also .gz and .zst); or "
            "[bold]embedded[/bold]; or [bold]fineweb[/bold], [bold]fineweb-edu[/bold] with a config, "
            "as in fineweb-edu:sample-10BT.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path, typer.Option(help="Directory to make. DIR.partial until it is whole.", show_default=False)
    ],
    tokenizer: Annotated[str, typer.Option(help="gpt2, or bpe:SIZE trained on the source.")] = "gpt2",
    val_tokens: Annotated[
        float | None,
        typer.Option(
            help="Validation tokens to set aside, by document.", show_default="1/50, at most 10,485,760"
        ),
    ] = None,
    val_source: Annotated[
        list[str] | None,
        typer.Option(
            help="Files that validation is taken from instead; may be given again.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        float | None, typer.Option(help="Stop after the document that reaches this many training tokens.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of JSON lines or Parquet that holds the text.")] = "text",
    format: Annotated[str, typer.Option(help="auto, text, jsonl or parquet.")] = "auto",
    separator: Annotated[
        str, typer.Option(help="What stands between documents in plain text; \\n is a line break.")
    ] = "<|endoftext|>",
    replace_invalid: Annotated[
        bool, typer.Option("--replace-invalid", help="Read bytes that are no UTF-8 as U+FFFD.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, uint16 or uint32.")] = "auto",
    shard_tokens: Annotated[int, typer.Option(help="Tokens in one shard file.")] = 100_000_000,
    threads: Annotated[
        int | None,
        typer.Option(help="Tokenizer threads; the result does not depend on it.", show_default="all cores"),
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(
            help="Another hub: its URL, or a directory laid out like it.", show_default="huggingface.co"
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw an unfinished preparation away.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize a source into shards, split by document. Killed and run again, it continues.

    [bold]steepen data prepare embedded --out data/embedded --tokenizer bpe:4096[/bold]

    [bold]steepen data prepare 'corpus/*.parquet' --out data/corpus --val-tokens 1000000[/bold]

    [bold]steepen data prepare fineweb-edu:sample-10BT --out data/edu --max-tokens 2000000000[/bold]
    """
    from steepen.data.prepare import prepare as run
    from steepen.data.prepare_options import PrepareRequest
    from steepen.data.sources.readers import Reading
    from steepen.utils.progress import stage_progress

    reading = Reading(format, field, separator.replace("\\n", "\n"), replace_invalid)
    request = PrepareRequest(
        source=tuple(source),
        val_source=tuple(val_source or ()),
        tokenizer=tokenizer,
        val_tokens=_count("--val-tokens", val_tokens),
        max_tokens=_count("--max-tokens", max_tokens),
        reading=reading,
        dtype=dtype,
        shard_tokens=shard_tokens,
        hub=hub,
    )
    if threads is not None and threads < 1:
        raise typer.BadParameter("it must be 1 or more", param_hint="--threads")
    try:
        with stage_progress(quiet=as_json) as show:

            def report(now: PrepareProgress) -> None:
                show(now.stage, now.characters, now.total, tokens=now.tokens)

            dataset = run(request, out, report, threads, restart)
    except KeyboardInterrupt:
        typer.echo("Run the same command again to continue where this stopped.", err=True)
        raise
    _print(dataset, as_json)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A prepared directory.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Check every byte: shards by SHA-256, ids against the tokenizer, counts against the manifest."""
    from steepen.data import Dataset

    dataset = Dataset.open(directory)
    tty = sys.stderr.isatty() and not as_json

    def say(file: str, size: int) -> None:
        if tty:
            typer.echo(f"{file}: {size:,} bytes, whole", err=True)

    dataset.verify(say)
    if as_json:
        typer.echo(json.dumps({"directory": str(directory), "identity": dataset.identity, "whole": True}))
    else:
        shards = len(dataset.manifest.shards)
        typer.echo(
            f"{directory} is whole: {shards} shards and the tokenizer match identity {dataset.identity}."
        )


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A prepared directory.", show_default=False)],
    as_json: Json = False,
) -> None:
    """What a prepared directory holds: source, tokenizer, documents and tokens per split, identity."""
    from steepen.data import Dataset

    _print(Dataset.open(directory), as_json)


def _print(dataset: Dataset, as_json: bool) -> None:
    from dataclasses import asdict

    manifest = dataset.manifest
    if as_json:
        head = {"directory": str(dataset.directory), "identity": dataset.identity}
        sizes = {"vocabulary": dataset.vocabulary, "padded_vocabulary": dataset.padded_vocabulary}
        typer.echo(json.dumps({**head, **sizes, **asdict(manifest)}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(dataset.directory), title_justify="left")
    for name, justify in (
        ("split", "left"),
        ("documents", "right"),
        ("tokens", "right"),
        ("shards", "right"),
    ):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name, split in manifest.splits.items():
        shards = sum(shard.split == name for shard in manifest.shards)
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", str(shards))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    padded = f"{dataset.vocabulary:,} ids, {dataset.padded_vocabulary:,} padded"
    console.print(f"source     {manifest.source.get('name', '?')}", markup=False)
    console.print(f"tokenizer  {manifest.tokenizer.name} ({padded}), {manifest.dtype}", markup=False)
    console.print(f"identity   {dataset.identity}", markup=False)
    wanted = manifest.notes.get("validation_tokens_wanted") or 0
    if manifest.splits["val"].tokens < wanted:
        got = manifest.splits["val"].tokens
        console.print(f"note       the source gave {got:,} validation tokens of {wanted:,} wanted")


def _count(option: str, value: float | None) -> int | None:
    """A whole number that may be written 2e9."""
    if value is None:
        return None
    if not math.isfinite(value) or value != int(value):
        raise UsageError(f"{option} {value} is not valid: it must be a whole number of tokens, such as 2e9.")
    return int(value)
