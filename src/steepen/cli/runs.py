"""`steepen runs`: list, show, compare and clean the runs of a store."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steepen.cli.launch_options import Runs, Studies
from steepen.errors import UsageError, nearest

if TYPE_CHECKING:
    from steepen.runs.disk import Removal
    from steepen.runs.status import RunRow
    from steepen.runs.store import RunStore

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WIDE = 100  # terminal columns from which whole hashes, tokens and speed are shown
FIRST = ("arm", "depth", "seed", "parameters", "tokens", "flops", "loss", "corpus", "recipe", "run")
STYLES = {
    "finished": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "waiting": "dim",
}  # fmt: skip

app = typer.Typer(help="List, show, compare and clean runs.", invoke_without_command=True)


@app.callback()
def runs(
    context: typer.Context,
    runs: Runs = Path("runs"),
    arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None,
    depth: Annotated[int | None, typer.Option(help="Only this depth.", min=1, max=10_000)] = None,
    status: Annotated[
        str | None, typer.Option(help="Only finished, running, failed, interrupted or waiting.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help="Only runs with fields like this: 'glr > 0.1 and arm == \"untied-2\"'.", show_default=False
        ),
    ] = None,
    sort: Annotated[str, typer.Option(help="Sort by any field; -loss reverses.")] = "arm",
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
    from steepen.runs.fields import all_run_fields, check_field, field_names, parse_where, sort_by_field
    from steepen.runs.status import check_status, is_row_key, sort_rows
    from steepen.runs.store import VALIDATED_RUNS
    from steepen.utils.formatting import wrap_to_terminal

    store = _open_store(runs)
    chosen = None if status is None else check_status(status)
    rows = {row.run: row for row in store.rows(arm=arm, depth=depth, status=chosen)}
    large = len(store.runs()) > VALIDATED_RUNS
    if large:
        note = (
            f"note: more than {VALIDATED_RUNS:,} runs: only the fields shown here were checked; "
            "`steepen report` and `steepen fit` check whole records."
        )
        print(wrap_to_terminal(note, sys.stderr), file=sys.stderr)
    asked = (where, columns, table, parquet)
    if large and not (as_json or fields or any(value is not None for value in asked)) and is_row_key(sort):
        # Records are read once only: listing 10,000 runs must not take seconds.
        print_rows(sort_rows(rows.values(), sort))
        return
    found = all_run_fields(store, rows.values(), disk=not large)
    if fields:
        print(wrap_to_terminal(", ".join(field_names(found)), sys.stdout))
        return
    if where is not None and found:
        condition = parse_where(where, found)
        found = [one for one in found if condition(one)]
    found = sort_by_field(found, sort)
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
        print_rows([rows[one["run"]] for one in found])
    _print_sizes(found)


@app.command("show")
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

    found = _find(run, _directory(context, runs))
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
        print(
            f"\ntraining stood still for {sum(waits):.2f} s to save {len(waits)} checkpoints, "
            f"at most {max(waits):.2f} s"
        )
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


@app.command("compare")
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
    from steepen.utils.formatting import format_value
    from steepen.utils.text_plot import MARKS, text_plot

    directory = _directory(context, runs)
    pair = [_find(first, directory), _find(second, directory)]
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
    width = max((len(name) for name in different), default=0)
    cells = {name: [format_value(value, 6) for value in values] for name, values in different.items()}
    middle = max((len(values[0]) for values in cells.values()), default=0)
    print()
    for name, (left, right) in cells.items():
        print(f"{name.ljust(width)}  {left.ljust(middle)}  {right}")
    curves = [loss_curve(one.metrics_rows(), one.fields.get("batch_tokens") or 1) for one in pair]
    chart = text_plot(curves, min(80, shutil.get_terminal_size().columns))
    if chart:
        print("\ntraining loss over tokens\n" + "\n".join(chart))
    if figure is not None:
        print(f"figure: {figure}")


@app.command("clean")
def clean(
    context: typer.Context,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Checkpoints of finished runs; records and curves stay.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Whole directories of runs that failed.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Whole directories of runs that no study requested.")
    ] = False,
    keep_final: Annotated[
        bool, typer.Option("--keep-final", help="With --checkpoints: keep each run's last one, its weights.")
    ] = False,
    where: Annotated[
        str | None, typer.Option(help="Only runs with fields like this: 'depth < 8'.", show_default=False)
    ] = None,
    runs: Annotated[Path | None, typer.Option("--runs", help="Directory of all runs.")] = None,
    studies: Studies = Path("studies"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Free disk space. A run that is being trained is never touched.

    Example: steepen runs clean --checkpoints --keep-final --dry-run
    """
    from steepen.utils.formatting import format_bytes

    if not (checkpoints or failed or orphans):
        raise UsageError("say what to remove: --checkpoints, --failed or --orphans.")
    if keep_final and not checkpoints:
        raise UsageError("--keep-final belongs to --checkpoints.")
    store = _open_store(_directory(context, runs))
    removals = _removals(store, checkpoints, failed, orphans, keep_final, where, studies)
    if not removals:
        print("There is nothing to remove.")
        return
    from steepen.runs.disk import total_bytes

    for removal in removals:
        print(f"{removal.run.path.name:16}  {removal.what:15}  {format_bytes(removal.bytes):>8}")
    total = format_bytes(total_bytes(removals))
    if dry_run:
        print(f"{total} would be freed; nothing was removed.")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{total} would be removed; confirm with --yes, or look with --dry-run.")
        typer.confirm(f"Remove {total} for good?", abort=True)
    for removal in removals:
        removal.apply()
    print(f"{total} freed.")


def _removals(
    store: RunStore,
    checkpoints: bool,
    failed: bool,
    orphans: bool,
    keep_final: bool,
    where: str | None,
    studies: Path,
) -> list[Removal]:
    from steepen.runs.disk import removable_checkpoints, removable_run
    from steepen.runs.fields import all_run_fields, parse_where
    from steepen.runs.store import RunDirectory
    from steepen.studies.driver.journal import read_journals

    requested: set[str] = set()
    if orphans:
        journals, unreadable = read_journals(studies)
        if unreadable or not journals:
            why = (
                f"{', '.join(unreadable)} cannot be read" if unreadable else f"there is no study in {studies}"
            )
            raise UsageError(
                f"--orphans needs every study that may use these runs, and {why}; see --studies."
            )
        requested = {asked.run for journal in journals for asked in journal.entry.runs}
    rows = all_run_fields(store, store.rows(), disk=False)
    if where is not None and rows:
        condition = parse_where(where, rows)
        rows = [row for row in rows if condition(row)]
    found: list[Removal] = []
    for row in rows:
        run = RunDirectory(store.root / row["run"])
        removal = None
        if (failed and row["status"] == "failed") or (orphans and row["run"] not in requested):
            removal = removable_run(run)
        elif checkpoints and row["status"] == "finished":
            removal = removable_checkpoints(run, keep_final=keep_final)
        if removal is not None:
            found.append(removal)
    return found


def _open_store(directory: Path) -> RunStore:
    from steepen.runs.store import RunStore

    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}; name the directory of your runs with --runs.")
    return RunStore(directory)


def _directory(context: typer.Context, given: Path | None) -> Path:
    """--runs after the subcommand, or before it."""
    parent = context.parent.params.get("runs") if context.parent is not None else None
    return given or parent or Path("runs")


def _find(name: str, directory: Path) -> Any:
    from steepen.api.runs import open_runs

    path = Path(name)
    if (path / "spec.json").is_file() or (path / "record.json").is_file():
        directory, name = path.absolute().parent, path.absolute().name
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}; name the directory of your runs with --runs.")
    found = [run for run in open_runs(directory) if run.name.startswith(name)]
    if len(found) != 1:
        known = nearest(name, [path.name for path in directory.iterdir() if path.is_dir()])
        what = f"{len(found)} runs begin with" if found else "there is no run"
        raise UsageError(f"{what} {name!r} in {directory}; the nearest are {known}.")
    return found[0]


def _split(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _ordered(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Fields of a file: those that laws need first."""
    return [*(name for name in FIRST if name in rows[0]), *(name for name in rows[0] if name not in FIRST)]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table that `steepen fit` reads, one line per run."""
    from steepen.report.table_files import to_csv
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
    from rich.table import Table

    from steepen.utils.formatting import format_column, is_number

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        number = any(is_number(row[name]) for row in rows)
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    cells = [format_column([row[name] for row in rows]) for name in columns]
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    _print(table)


def print_rows(rows: Sequence[RunRow]) -> None:
    """Print runs as a table of at most the terminal's width, status first, and the causes of failures."""
    from rich.table import Table
    from rich.text import Text

    from steepen.utils.formatting import wrap_to_terminal

    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("status", no_wrap=True)
    started = any(map(_done, rows))  # else the column would be empty
    names = (*(("done",) if started else ()), "run", "arm", "depth", "seed", *(("tokens",) if wide else ()))
    for column in (*names, "FLOPs", "loss"):
        right = column not in ("run", "arm")
        table.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    if wide:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    for row in rows:
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        cells: list[Any] = [
            Text(row.status, style=STYLES[row.status]),
            *([_done(row)] if started else []),
            row.run if wide else row.run[:8],
            row.arm,
            str(row.depth),
            str(row.seed),
            *([f"{row.tokens:,}"] if wide else []),
            f"{row.flops:.2e}" if row.flops else "–",
            loss if row.status == "finished" else Text(loss, style="dim"),
        ]
        if wide:
            cells.append("" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}")
        table.add_row(*cells)
    _print(table)
    for row in rows:
        if row.status == "failed":
            name = row.run if wide else row.run[:8]
            print(wrap_to_terminal(f"{name} failed: {row.cause}", sys.stdout))


def _done(row: RunRow) -> str:
    """Steps done, in percent, of a run that has started and not finished."""
    started = row.status in ("running", "interrupted") and row.steps and row.step is not None
    return f"{(row.step or 0) / (row.steps or 1):.0%}" if started else ""


def _print_sizes(rows: Sequence[dict[str, Any]]) -> None:
    """The disk space of the runs, where it is known."""
    from steepen.utils.formatting import format_bytes

    if "disk_bytes" in rows[0]:
        noun = "run" if len(rows) == 1 else "runs"
        print(f"{len(rows)} {noun}, {format_bytes(sum(row['disk_bytes'] for row in rows))} on disk.")


def _print(table: Any) -> None:
    from steepen.utils.console import SafeConsole

    # A pipe or file has no width: print whole lines.
    SafeConsole(width=None if sys.stdout.isatty() else 200, markup=False).print(table)
