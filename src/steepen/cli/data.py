"""`steepen data`: prepare text for training, verify it, show what it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steepen.cli.token_count import parse_token_count

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.data.prepare_request import PrepareProgress

app = typer.Typer(
    help="Prepare, verify and show training data.", no_args_is_help=True, rich_markup_mode="rich"
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            help="Files, quoted globs or directories of text, JSON lines or Parquet (also .gz and .zst); "
            "[bold]builtin[/bold], the corpus that comes with steepen; [bold]fineweb[/bold] or "
            "[bold]fineweb-edu[/bold], with a config and revision as in fineweb-edu:sample-10BT@main, or the "
            "paper's data as fineweb:paper and fineweb-edu:paper; or "
            "[bold]module:attribute[/bold], a Python function that returns documents.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="Output directory; written as DIR.partial until it is complete.", show_default=False
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="gpt2, or bpe:SIZE to train one on the source.")] = "gpt2",
    val_tokens: Annotated[
        int | None,
        typer.Option(
            help="Validation tokens to split off, by document.",
            show_default="1/50, at most 10,485,760",
            parser=parse_token_count,
            metavar="COUNT≤1e15",
        ),
    ] = None,
    val_source: Annotated[
        list[str] | None,
        typer.Option(help="Take validation from this source instead; repeatable.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Stop after the document that reaches this many training tokens.",
            parser=parse_token_count,
            metavar="COUNT≤1e15",
        ),
    ] = None,
    dedup_tokens: Annotated[
        int | None,
        typer.Option(
            help="Drop training documents whose first so many tokens equal those of a validation document "
            "(needs --val-source); 0: drop none.",
            show_default="off; whole documents are compared",
            min=0,
            max=10**9,
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Field of JSON lines or Parquet that holds the text.")] = "text",
    format: Annotated[str, typer.Option(help="auto, text, jsonl or parquet.")] = "auto",
    separator: Annotated[
        str, typer.Option(help="Separator between documents in text files; \\n is a line break.")
    ] = "<|endoftext|>",
    replace_invalid: Annotated[
        bool, typer.Option("--replace-invalid", help="Read invalid UTF-8 as U+FFFD.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, uint16 or uint32.")] = "auto",
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens per shard file.", min=256, max=10**12)
    ] = 100_000_000,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Tokenizer threads; they do not change the result.",
            show_default="all cores",
            min=1,
            max=10_000,
        ),
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(
            help="Another Hugging Face Hub: its URL, or a directory with its layout.",
            show_default="huggingface.co",
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete an unfinished preparation first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenize a source into shards, split into training and validation by document.

    An interrupted preparation resumes when the same command is run again.

    [bold]steepen data prepare builtin --out data/builtin --tokenizer bpe:4096[/bold]

    [bold]steepen data prepare 'corpus/*.parquet' --out data/corpus --val-tokens 1e6[/bold]

    [bold]steepen data prepare fineweb-edu:sample-10BT --out data/edu --max-tokens 2B[/bold]

    [bold]steepen data prepare fineweb:paper --out data/fineweb[/bold]
    """
    from steepen.data.prepare import PrepareRequest
    from steepen.data.prepare import prepare as run
    from steepen.data.sources.readers import ReadOptions
    from steepen.utils.progress import stage_progress

    read_options = ReadOptions(format, field, separator.replace("\\n", "\n"), replace_invalid)
    request = PrepareRequest(
        source=tuple(source),
        val_source=tuple(val_source or ()),
        tokenizer=tokenizer,
        val_tokens=val_tokens,
        max_tokens=max_tokens,
        dedup_tokens=dedup_tokens,
        read_options=read_options,
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
        typer.echo("Interrupted. Run the same command again to resume.", err=True)
        raise
    _print(dataset, as_json)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A prepared directory.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Verify every byte of the shards (SHA-256), the token ids and the document counts."""
    from steepen.data import Dataset

    dataset = Dataset.open(directory)
    tty = sys.stderr.isatty() and not as_json

    def report(file: str, size: int) -> None:
        if tty:
            typer.echo(f"{file}: {size:,} bytes, verified", err=True)

    dataset.verify(report)
    if as_json:
        typer.echo(json.dumps({"directory": str(directory), "identity": dataset.identity, "valid": True}))
    else:
        shards = len(dataset.manifest.shards)
        typer.echo(
            f"{directory} is valid: {shards} shards and the tokenizer match identity {dataset.identity}."
        )


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A prepared directory.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show a prepared directory: source, tokenizer, documents and tokens per split, identity."""
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
    from rich.table import Table

    from steepen.utils.console import SafeConsole
    from steepen.utils.validate import is_whole

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
    console = SafeConsole(highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    padded = f"{dataset.vocabulary:,} ids, {dataset.padded_vocabulary:,} padded"
    console.print(f"source     {manifest.source.get('name', '?')}", markup=False)
    console.print(f"tokenizer  {manifest.tokenizer.name} ({padded}), {manifest.dtype}", markup=False)
    console.print(f"identity   {dataset.identity}", markup=False)
    noted = manifest.notes.get("validation_tokens_requested")
    requested = noted if is_whole(noted) else 0
    if manifest.splits["val"].tokens < requested:
        found = manifest.splits["val"].tokens
        console.print(f"note       the source has {found:,} of the {requested:,} validation tokens requested")
