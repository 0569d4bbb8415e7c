"""Runs as results: those of a directory, and one in full.

`open_runs` is how Python opens a directory of runs; `steepen runs` prints what it returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError, nearest
from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result, to_pandas
from steepen.results.table import Column, Table, table_of, to_csv
from steepen.results.text import Block, Lines, Paragraph, print_blocks, text_plot
from steepen.utils.formatting import counted, format_bytes

if TYPE_CHECKING:
    from steepen.runs.record import RunRecord
    from steepen.runs.spec import RunSpec

WIDE = 100  # terminal columns from which whole hashes, tokens and speed are shown
PIPE_WIDTH = 200  # a pipe has no width: whole lines are printed, unless COLUMNS asks for one
FIRST = ("arm", "depth", "seed", "parameters", "tokens", "flops", "loss", "corpus", "recipe", "run")
LISTED = ("status", "run", "arm", "depth", "seed", "tokens", "flops", "loss", "tokens_per_second")
SHOWN = ("run", "status", "arm", "depth", "seed", "parameters", "tokens", "flops", "loss")
STYLES = {
    "finished": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "waiting": "dim",
    "unknown": "magenta",
}  # fmt: skip


def open_runs(directory: str | Path = "runs", where: str | Sequence[str] = (), **equal: Any) -> Runs:
    """The runs of a directory; `where` and keywords filter them as `Runs.filter` does."""
    from steepen.runs.fields import all_run_fields
    from steepen.runs.store import RunStore

    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"there is no directory {path}; name the directory of your runs with `runs`.")
    store = RunStore(path)
    found = all_run_fields(store, store.rows())
    runs = Runs(tuple(Run(path / fields["run"], fields) for fields in found), path)
    for condition in [where] if isinstance(where, str) else where:
        runs = runs.filter(condition)
    return runs.filter(**equal)


def find_run(name: str | Path, directory: Path) -> Run:
    """The run that a hash, the beginning of one, or a run's directory names."""
    path = Path(name)
    if (path / "spec.json").is_file() or (path / "record.json").is_file():
        return open_runs(path.absolute().parent)[path.absolute().name]
    return open_runs(directory)[str(name)]


def run_path(name: str | Path, directory: Path) -> Path:
    """The path itself if there is something, else the run whose hash begins so; to read a checkpoint from."""
    path = Path(name)
    if path.exists() or len(path.parts) != 1 or not directory.is_dir():
        return path
    return find_run(path, directory).path


@dataclass(frozen=True, eq=False, repr=False)
class Run(Result):
    """One run: its directory, its fields by name, its spec, record and metrics."""

    path: Path
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The hash that names the run."""
        return self.path.name

    @property
    def status(self) -> str:
        """finished, running, failed, interrupted, waiting or unknown."""
        return self.fields["status"]

    @property
    def spec(self) -> RunSpec:
        """Everything that decides the result."""
        from steepen.runs.spec import read_spec

        record = self.record
        return record.spec if record is not None else read_spec(self.path / "spec.json")

    @property
    def record(self) -> RunRecord | None:
        """What came out; None until the run has finished."""
        from steepen.runs.store import RunDirectory

        return RunDirectory(self.path).record()

    def __getitem__(self, field: str) -> Any:
        """A field by name or by one of its other names: `run["learning_rate"]`, `run["GLR"]`."""
        from steepen.runs.fields import check_field

        return self.fields[check_field(field, list(self.fields), "field")]

    def metrics_rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one per logged step and one per validation."""
        from steepen.runs.store import read_metrics

        return read_metrics(self.path / "metrics.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        """Texts that the run generated while it trained (`sample_every`): step, prompt and text of each."""
        from steepen.runs.store import read_samples

        return read_samples(self.path / "samples.jsonl")

    def metrics(self) -> Any:
        """The metrics as a pandas DataFrame: step, loss, learning rate, gradient norm, speed, …"""
        return to_pandas(self.metrics_rows())

    def headline(self) -> str:
        """Run, arm, depth, status and loss."""
        loss = self.fields.get("loss")
        shown = "" if loss is None else f", loss {loss:.4f}"
        return f"run {self.name}: {self.fields['arm']} d{self.fields['depth']}, {self.status}{shown}"

    def to_rows(self) -> list[dict[str, Any]]:
        """The fields as one row."""
        return [dict(self.fields)]

    def to_dict(self) -> dict[str, Any]:
        """The fields, as `steepen runs show --json` prints them."""
        return dict(self.fields)

    def table(self, caption: str = "") -> Table:
        """The main fields as one row."""
        return _field_table([self], SHOWN, self.headline(), caption)

    def blocks(self, width: int) -> Iterable[Block]:
        """Every field that has a value, the loss curve, waits for checkpoints, and samples."""
        from steepen.runs.fields import format_field

        yield Lines(f"{self.headline()}\n{self.path}\n")
        known = {name: value for name, value in self.fields.items() if value not in (None, "")}
        wide = max(map(len, known))
        yield Lines("\n".join(f"{name:{wide}}  {format_field(name, known[name])}" for name in known))
        if self.status == "finished" and (record := self.record) is not None:
            yield from (Lines(f"\nnote: {remark}") for remark in record.remarks)
        yield from loss_chart([self], width)
        if waits := [row["checkpoint_wait"] for row in self.metrics_rows() if row.get("checkpoint_wait")]:
            longest = f", at most {max(waits):.2f} s for one" if len(waits) > 1 else ""
            saved = counted(len(waits), "checkpoint")
            yield Lines(f"\ntraining waited {sum(waits):.2f} s for {saved}{longest}")
        yield from self._samples()

    def _samples(self) -> Iterator[Block]:
        """The first and the last texts that the run generated."""
        samples = self.samples()
        for step in sorted({one["step"] for one in (samples[:1] + samples[-1:])}):
            yield Lines(f"\nsamples at step {step:,}")
            for one in (one for one in samples if one["step"] == step):
                prompt = f"“{one['prompt']}” " if one["prompt"] else ""
                yield Paragraph(f"{prompt}{' '.join(one['text'].split())}", indent=2)

    def curve(self, metric: str = "loss") -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Tokens and values of a metric where it was measured: "loss" or "validation_loss"."""
        tokens = self.fields.get("batch_tokens") or 1
        found = [row for row in self.metrics_rows() if metric in row]
        return tuple(row["step"] * tokens for row in found), tuple(row[metric] for row in found)

    def panels(self) -> list[Panel]:
        """The training loss over tokens, with validation losses as points."""
        return [curves_panel([self])]


def curves_panel(runs: Iterable[Run]) -> Panel:
    """Training loss over tokens of some runs; validations as points."""
    series: list[Series] = []
    for run in runs:
        label = f"{run.fields['arm']} d{run.fields['depth']} {run.name[:6]}"
        series.append(Series(label, "line", *run.curve(), note="training"))
        series.append(Series(label, "points", *run.curve("validation_loss"), note="validation"))
    measured = tuple(one for one in series if one.x)
    return Panel("Loss curves", Axis("tokens"), Axis("loss (nats per token)"), measured)


def loss_chart(runs: Sequence[Run], width: int) -> Iterator[Block]:
    """The training losses of some runs as text."""
    chart = text_plot([run.curve() for run in runs], min(80, width))
    if chart:
        yield Lines("\ntraining loss over tokens\n" + "\n".join(chart))


@dataclass(frozen=True, eq=False, repr=False)
class Runs(Result):
    """Runs of a directory, in the order of their names or as sorted."""

    runs: tuple[Run, ...]
    directory: Path
    columns: tuple[str, ...] = ()  # fields to list instead of the usual ones
    asked: tuple[str, ...] = ()  # fields that a filter or the order named: listed too
    written: tuple[Path, ...] = ()  # files with the finished runs

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        """The runs."""
        return iter(self.runs)

    def __getitem__(self, key: str | int) -> Run:
        """A run by the beginning of its hash, or by its place."""
        if isinstance(key, int):
            return self.runs[key]
        found = [run for run in self.runs if run.name.startswith(key)]
        if len(found) != 1:
            if found:
                names = ", ".join(run.name for run in found[:6]) + ", …" * (len(found) > 6)
                raise UsageError(f"{len(found)} runs in {self.directory} begin with {key!r}: {names}.")
            known = nearest(key, [run.name for run in self.runs])
            raise UsageError(f"there is no run {key!r} in {self.directory}; the nearest are {known}.")
        return found[0]

    @property
    def field_names(self) -> list[str]:
        """The names of the fields, which all runs have."""
        return list(self.runs[0].fields) if self.runs else []

    def filter(self, where: str = "", **equal: Any) -> Runs:
        """The runs that satisfy a condition and have these values.

        `runs.filter("glr > 0.1 and tokens / parameters < 20", arm="untied-2", status="finished")`.
        """
        from steepen.runs.fields import check_field, parse_where

        if not self.runs:
            return self
        condition = parse_where(where, self.field_names) if where else None
        wanted = {check_field(name, self.field_names, "field"): value for name, value in equal.items()}
        kept = [
            run
            for run in self.runs
            if (condition is None or condition(run.fields))
            and all(run.fields.get(name) == value for name, value in wanted.items())
        ]
        named = () if condition is None else condition.fields
        return replace(self, runs=tuple(kept), asked=(*self.asked, *named, *wanted))

    def sort(self, field: str) -> Runs:
        """The runs sorted by a field, descending with a leading "-"; those without a value come last."""
        from steepen.runs.fields import field_name, sort_by_field

        by_name = {run.name: run for run in self.runs}
        ordered = sort_by_field([run.fields for run in self.runs], field)
        name = field_name(field.removeprefix("-"))
        named = () if name in LISTED else (name,)
        return replace(self, runs=tuple(by_name[row["run"]] for row in ordered), asked=(*self.asked, *named))

    def best(self, field: str = "loss") -> Run:
        """The finished run with the lowest value of a field (with "-" before it, the highest)."""
        from steepen.runs.fields import field_name

        name = field_name(field.removeprefix("-"))
        finished = [run for run in self.runs if run.status == "finished" and run.fields.get(name) is not None]
        if not finished:
            raise UsageError(f"no finished run of {self.directory} has a {name}.")
        return replace(self, runs=tuple(finished)).sort(field)[0]

    def records(self) -> list[RunRecord]:
        """The records of the finished runs."""
        return list(filter(None, (run.record for run in self.runs if run.status == "finished")))

    def metrics(self) -> Any:
        """The metrics of all runs as one pandas DataFrame, with a column `run`."""
        return to_pandas([{"run": run.name, **line} for run in self.runs for line in run.metrics_rows()])

    def write_finished(self, path: Path, parquet: bool = False) -> Path:
        """Write the finished runs as CSV or Parquet, for `steepen fit`: what laws need comes first."""
        from steepen.utils.files import write_atomically

        rows = [run.fields for run in self.runs if run.status == "finished"]
        if not rows:
            raise UsageError(f"none of these runs is finished: {path} was not written.")
        names = sorted(rows[0], key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
        if not parquet:
            cells = tuple(tuple(row[name] for name in names) for row in rows)
            write_atomically(path, to_csv(Table("runs", tuple(names), cells)))
            return path
        import pyarrow as pa
        import pyarrow.parquet as pq

        def plain(value: Any) -> Any:
            return json.dumps(value) if isinstance(value, list | tuple | dict) else value

        buffer = pa.BufferOutputStream()
        pq.write_table(pa.table({name: [plain(row[name]) for row in rows] for name in names}), buffer)
        write_atomically(path, buffer.getvalue().to_pybytes())
        return path

    @property
    def rows(self) -> tuple[Run, ...]:
        """The runs."""
        return self.runs

    @property
    def notes(self) -> list[str]:
        """The files that were written."""
        count = sum(run.status == "finished" for run in self.runs)
        return [f"{path} has the {count} finished runs." for path in self.written]

    def headline(self) -> str:
        """How many runs there are, by status."""
        counts = {status: sum(run.status == status for run in self.runs) for status in STYLES}
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{counted(len(self.runs), 'run')} of {self.directory}" + (f": {words}" if words else "")

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per run with every field: hyperparameters, parameters, FLOPs, seconds, scores."""
        return [dict(run.fields) for run in self.runs]

    def to_dict(self) -> dict[str, Any]:
        """Every field of every run, as `steepen runs --json` prints them."""
        return {"runs": self.to_rows()}

    def table(self, caption: str = "") -> Table:
        """The main fields, or those that were chosen."""
        return _field_table(self.runs, self.columns or SHOWN, self.headline(), caption)

    def blocks(self, width: int) -> Iterable[Block]:
        """The runs as a table, status first, the causes of failures, and the space on disk."""
        if not self.runs:
            yield Paragraph(f"No run in {self.directory} {'matches' if self.asked else 'yet'}.")
            return
        if self.columns:
            yield replace(_field_table(self.runs, self.columns), rule=False)
        else:
            extra = [name for name in dict.fromkeys(self.asked) if name not in LISTED]
            yield from run_blocks([run.fields for run in self.runs], width, extra)
        size = format_bytes(sum(run.fields["disk_bytes"] for run in self.runs))
        yield Paragraph(f"{counted(len(self.runs), 'run')}, {size} on disk.")

    def print(self) -> None:
        """Print the runs; whole lines where the output is a pipe or a file."""
        from steepen.utils.console import SafeConsole

        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        print_blocks(self.blocks, None if known else SafeConsole(width=PIPE_WIDTH))

    def panels(self) -> list[Panel]:
        """The loss curves of all runs."""
        return [curves_panel(self.runs)]


def _field_table(runs: Sequence[Run], names: Sequence[str], title: str = "", caption: str = "") -> Table:
    """Some fields of runs; those that no run has are left out."""
    known = [name for name in names if runs and name in runs[0].fields]
    return table_of([run.fields for run in runs], list(map(_field, known)), title, caption)


def _field(name: str, header: str = "", format: str | Callable[[Any], str] = "", **shown: Any) -> Column:
    """A column of rows that are fields of runs."""
    return Column(header or name, format, value=itemgetter(name), **shown)


def run_table(rows: Sequence[Mapping[str, Any]], width: int, extra: Sequence[str] = ()) -> Table:
    """Runs, by their fields, as a table of at most `width` columns; `extra` are further fields to show."""
    wide = width >= WIDE + sum(len(field) + 2 for field in extra)
    columns = [
        _field("status", styles=STYLES),
        Column("done", value=_done, align="right"),
        Column("run", value=lambda row: row["run"] if wide else row["run"][:8]),
        _field("arm"),
        _field("depth", format=str),
        _field("seed", format=str),
        _field("tokens", format=","),
        Column("FLOPs", ".2e", value=lambda row: row["flops"] or None, align="right"),
        _field("loss", format=".4f", align="right"),
        *map(_field, extra),
        _field("tokens_per_second", "tokens/s", ",.0f", align="right"),
    ]
    left_out = set() if wide else {"tokens", "tokens/s"}
    left_out |= set() if any(map(_done, rows)) else {"done"}
    return table_of(rows, [column for column in columns if column.header not in left_out], rule=False)


def run_blocks(rows: Sequence[Mapping[str, Any]], width: int, extra: Sequence[str] = ()) -> Iterator[Block]:
    """The table of runs, and the causes of failures."""
    yield (table := run_table(rows, width, extra))
    names = [row[table.columns.index("run")] for row in table.rows]
    for name, row in zip(names, rows, strict=True):
        if row["status"] == "failed":
            yield Paragraph(f"{name} failed: {row['cause']}")
    unknown = dict.fromkeys(row["cause"] for row in rows if row["status"] == "unknown")
    yield from (Paragraph(f"unknown: {cause}") for cause in unknown)


def _done(row: Mapping[str, Any]) -> str:
    """Steps done, in percent, of a run that has started and not finished."""
    started = row["status"] in ("running", "interrupted", "unknown") and row["step"] is not None
    return f"{row['step'] / row['steps']:.0%}" if started and row["steps"] else ""
