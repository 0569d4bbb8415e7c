"""`steepen runs`: list, show, compare and clean the runs of a store."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from steepen.cli import runs_clean, runs_show
from steepen.cli.run_options import Json, Runs, open_store
from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.runs.row import RunRow

WIDE = 100  # terminal columns from which whole hashes, tokens and speed are shown
FIRST = ("arm", "depth", "seed", "parameters", "tokens", "flops", "loss", "corpus", "recipe", "run")
ROW_FIELDS = ("status", "run", "arm", "depth", "seed", "tokens", "flops", "loss", "tokens_per_second")
STYLES = {
    "finished": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "waiting": "dim",
    "unknown": "magenta",
}  # fmt: skip


class ListsByDefault(TyperGroup):
    """`steepen runs` without a command lists the runs, so there is no command for that."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an error for an unknown one says how to list."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise UsageError(
                f"steepen runs has no command {args[0]!r}: without one it lists the runs; others are "
                f"{', '.join(self.commands)}."
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=ListsByDefault, help="List, show, compare and clean runs.", invoke_without_command=True)


@app.callback()
def runs(
    context: typer.Context,
    runs: Runs = Path("runs"),
    arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None,
    depth: Annotated[int | None, typer.Option(help="Only this depth.", min=1, max=10_000)] = None,
    status: Annotated[
        str | None, typer.Option(help="Only finished, running, failed, interrupted, waiting or unknown.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help="Only runs with fields like this: 'glr > 0.1 and arm == \"untied-2\"'.", show_default=False
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Sort by any field, which is then shown; -loss reverses.")
    ] = "arm",
    columns: Annotated[
        str | None,
        typer.Option(help="Show these fields: run,arm,learning_rate,loss.", show_default=False),
    ] = None,
    fields: Annotated[bool, typer.Option("--fields", help="List the fields, and exit.")] = False,
    as_json: Json = False,
    table: Annotated[
        Path | None,
        typer.Option("--csv", help="Write finished runs to this file, for `steepen fit`."),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", help="The same as a Parquet file.", show_default=False)
    ] = None,
) -> None:
    """List runs with status, loss and speed, or show, compare and clean them.

    An unfinished run shows its last training loss. The command that started an interrupted run resumes it.

    Example: steepen runs --where 'depth >= 4 and loss < 3' --sort loss
    """
    if context.invoked_subcommand is not None:
        return
    from steepen.runs.fields import (
        all_run_fields,
        check_field,
        field_name,
        field_names,
        parse_where,
        sort_by_field,
    )
    from steepen.runs.status import check_status
    from steepen.utils.formatting import wrap_to_terminal

    store = open_store(runs)
    chosen = None if status is None else check_status(status)
    rows = {row.run: row for row in store.rows(arm=arm, depth=depth, status=chosen)}
    found = all_run_fields(store, rows.values())
    if fields:
        print(wrap_to_terminal(", ".join(field_names(found)), sys.stdout))
        return
    asked_for: list[str] = []  # fields that a condition or the sorting names
    if where is not None and found:
        condition = parse_where(where, found)
        asked_for += condition.names.values()
        found = [one for one in found if condition(one)]
    found = sort_by_field(found, sort)
    asked_for.append(field_name(sort.removeprefix("-")))
    shown = [check_field(name, field_names(found), "--columns") for name in _split(columns) if found]
    finished = [one for one in found if one["status"] == "finished"]
    for path, write in ((table, _write_csv), (parquet, _write_parquet)):
        if path is not None:
            if not finished:
                raise UsageError(f"none of these runs is finished: {path} was not written.")
            write(path, finished)
            print(f"{path}: {len(finished)} finished runs.", file=sys.stderr)
    if as_json:
        print(json.dumps({"runs": found}, indent=2, ensure_ascii=False))
        return
    if not found:
        filtered = any(value is not None for value in (arm, depth, status, where))
        print(f"No run in {runs}" + (" matches." if filtered else " yet."))
        return
    if shown:
        _print_columns(found, shown)
    else:
        extra = [name for name in dict.fromkeys(asked_for) if name not in ROW_FIELDS]
        print_rows(
            [rows[one["run"]] for one in found], {name: [one[name] for one in found] for name in extra}
        )
    _print_sizes(found)


app.command("show")(runs_show.show)
app.command("compare")(runs_show.compare)
app.command("clean")(runs_clean.clean)


def _split(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _ordered(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Fields of a file: those that laws need first."""
    return [*(name for name in FIRST if name in rows[0]), *(name for name in rows[0] if name not in FIRST)]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table that `steepen fit` reads, one line per run."""
    from steepen.results.render import to_csv
    from steepen.studies.answer import Table
    from steepen.utils.files import write_atomically

    columns = tuple(_ordered(rows))
    values = tuple(tuple(row[column] for column in columns) for row in rows)
    write_atomically(path, to_csv(Table("runs", columns, values)))


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from steepen.utils.files import write_atomically

    def plain(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list | tuple | dict) else value

    columns = {name: [plain(row[name]) for row in rows] for name in _ordered(rows)}
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_atomically(path, buffer.getvalue().to_pybytes())


def _print_columns(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    from steepen.utils.formatting import format_column, is_number

    cells = [format_column([row[name] for row in rows]) for name in columns]
    right = [any(is_number(row[name]) for row in rows) for name in columns]
    _print_table(columns, list(zip(*cells, strict=True)), right)


def print_rows(rows: Sequence[RunRow], extra: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Print runs as a table of at most the terminal's width, status first, and the causes of failures.

    `extra` are further columns: a value for each row.
    """
    from rich.text import Text

    from steepen.utils.formatting import format_column, is_number, wrap_to_terminal

    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE
    started = any(map(_done, rows))  # else the column would be empty
    names = (*(("done",) if started else ()), "run", "arm", "depth", "seed", *(("tokens",) if wide else ()))
    further = {name: format_column(values) for name, values in (extra or {}).items()}
    speed = ("tokens/s",) if wide else ()
    columns = ("status", *names, "FLOPs", "loss", *further, *speed)
    right = [name not in ("status", "run", "arm", *further) for name in columns]
    for name, values in (extra or {}).items():
        right[columns.index(name)] = any(map(is_number, values))
    lines: list[list[Any]] = []
    for place, row in enumerate(rows):
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        lines.append([
            Text(row.status, style=STYLES[row.status]),
            *([_done(row)] if started else []),
            row.run if wide else row.run[:8],
            row.arm,
            str(row.depth),
            str(row.seed),
            *([f"{row.tokens:,}"] if wide else []),
            f"{row.flops:.2e}" if row.flops else "–",
            loss if row.status == "finished" else Text(loss, style="dim"),
            *(values[place] for values in further.values()),
            *(["" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"] if wide else []),
        ])  # fmt: skip
    _print_table(columns, lines, right, fold=tuple(further))
    for row in rows:
        if row.status == "failed":
            name = row.run if wide else row.run[:8]
            print(wrap_to_terminal(f"{name} failed: {row.cause}", sys.stdout))
    for cause in {row.cause for row in rows if row.status == "unknown"}:
        print(wrap_to_terminal(f"unknown: {cause}", sys.stdout))


def _done(row: RunRow) -> str:
    """Steps done, in percent, of a run that has started and not finished."""
    started = row.status in ("running", "interrupted", "unknown") and row.steps and row.step is not None
    return f"{(row.step or 0) / (row.steps or 1):.0%}" if started else ""


def _print_sizes(rows: Sequence[dict[str, Any]]) -> None:
    """The disk space of the runs, where it is known."""
    from steepen.utils.formatting import format_bytes

    if "disk_bytes" in rows[0]:
        noun = "run" if len(rows) == 1 else "runs"
        print(f"{len(rows)} {noun}, {format_bytes(sum(row['disk_bytes'] for row in rows))} on disk.")


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[bool], fold: Sequence[str] = ()
) -> None:
    """Print a table; the columns `fold` wrap where the terminal is narrow, the others are cut."""
    from rich.table import Table

    from steepen.utils.console import MANY_ROWS, SafeConsole, plain_table

    if len(rows) > MANY_ROWS:
        print(plain_table(columns, [list(map(str, row)) for row in rows], right))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, numbers in zip(columns, right, strict=True):
        table.add_column(
            name, justify="right" if numbers else "left", no_wrap=name not in fold,
            overflow="fold" if name in fold else "ellipsis",
        )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    # A pipe or file has no width: print whole lines, unless COLUMNS asks for one.
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    SafeConsole(width=None if known else 200, markup=False).print(table)
