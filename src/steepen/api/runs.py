"""`steepen.open_runs`: the runs of a directory, filtered, as a frame of records and of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.errors import UsageError, nearest
from steepen.results.result import to_pandas

if TYPE_CHECKING:
    from steepen.runs.record import RunRecord
    from steepen.runs.spec import RunSpec

SHOWN = ("run", "status", "arm", "depth", "seed", "parameters", "tokens", "flops", "loss")


def open_runs(directory: str | Path = "runs", where: str = "", **equal: Any) -> Runs:
    """The runs of a directory; `where` and keywords filter them as `Runs.filter` does."""
    from steepen.runs.fields import all_run_fields
    from steepen.runs.store import RunStore

    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"there is no directory {path}; give the directory of your runs.")
    store = RunStore(path)
    found = all_run_fields(store, store.rows())
    runs = Runs(tuple(Run(path / fields["run"], fields) for fields in found), path)
    return runs.filter(where, **equal) if where or equal else runs


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
        from steepen.runs.metrics import read_metrics

        return read_metrics(self.path / "metrics.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        """Texts that the run generated while it trained (`--sample-every`): step, prompt and text of each."""
        from steepen.runs.samples import read_samples

        return read_samples(self.path / "samples.jsonl")

    def metrics(self) -> Any:
        """The metrics as a pandas DataFrame: step, loss, learning rate, gradient norm, speed, …"""
        return to_pandas(self.metrics_rows())

    def headline(self) -> str:
        """Run, arm, depth, status and loss."""
        loss = self.fields.get("loss")
        shown = "" if loss is None else f", loss {loss:.4f}"
        return f"run {self.name}: {self.fields['arm']} d{self.fields['depth']}, {self.status}{shown}"

    def summary(self) -> str:
        """Every field with its value, one per line."""
        from steepen.runs.fields import format_field

        known = {name: value for name, value in self.fields.items() if value not in (None, "")}
        width = max(map(len, known))
        return "\n".join(f"{name.ljust(width)}  {format_field(name, value)}" for name, value in known.items())

    def to_rows(self) -> list[dict[str, Any]]:
        """The fields as one row."""
        return [dict(self.fields)]

    def shown_columns(self) -> list[str]:
        """The columns of HTML and LaTeX."""
        return [name for name in SHOWN if name in self.fields]

    def plot(self, ax: Any = None, **style: Any) -> Any:
        """Draw the training loss over tokens, with validation losses as points; returns the Axes."""
        ax = new_axes(ax)
        x, y = loss_curve(self.metrics_rows(), self._tokens_per_step())
        style.setdefault("label", f"{self.fields['arm']} d{self.fields['depth']} {self.name[:6]}")
        (line,) = ax.plot(x, y, lw=1, **style)
        x, y = loss_curve(self.metrics_rows(), self._tokens_per_step(), "validation_loss")
        ax.plot(x, y, "o", ms=4, color=line.get_color())
        ax.set(xlabel="tokens", ylabel="loss (nats per token)")
        ax.legend()
        return ax

    def _tokens_per_step(self) -> float:
        return self.fields.get("batch_tokens") or 1


def loss_curve(
    lines: Sequence[Mapping[str, Any]], tokens_per_step: float = 1, name: str = "loss"
) -> tuple[list[float], list[float]]:
    """Tokens and losses of the lines of metrics.jsonl that have the metric."""
    found = [(line["step"] * tokens_per_step, line[name]) for line in lines if line.get(name) is not None]
    return [x for x, _ in found], [y for _, y in found]


@dataclass(frozen=True, eq=False, repr=False)
class Runs(Result):
    """Runs of a directory, in the order of their names or as sorted."""

    runs: tuple[Run, ...]
    directory: Path

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

    def filter(self, where: str = "", **equal: Any) -> Runs:
        """The runs that satisfy a condition and have these values.

        `runs.filter("glr > 0.1 and tokens / parameters < 20", arm="untied-2", status="finished")`.
        """
        from steepen.runs.fields import check_field, parse_where

        rows = [run.fields for run in self.runs]
        if not rows:
            return self
        condition = parse_where(where, rows) if where else None
        wanted = {check_field(name, list(rows[0]), "field"): value for name, value in equal.items()}
        kept = [
            run
            for run in self.runs
            if (condition is None or condition(run.fields))
            and all(run.fields.get(name) == value for name, value in wanted.items())
        ]
        return Runs(tuple(kept), self.directory)

    def sort(self, field: str) -> Runs:
        """The runs sorted by a field, descending with a leading "-"; those without a value come last."""
        from steepen.runs.fields import sort_by_field

        by_name = {run.name: run for run in self.runs}
        ordered = sort_by_field([dict(run.fields) for run in self.runs], field)
        return Runs(tuple(by_name[row["run"]] for row in ordered), self.directory)

    def best(self, field: str = "loss") -> Run:
        """The finished run with the lowest value of a field (with "-" before it, the highest)."""
        from steepen.runs.fields import field_name

        name = field_name(field.removeprefix("-"))
        finished = [run for run in self.runs if run.status == "finished" and run.fields.get(name) is not None]
        if not finished:
            raise UsageError(f"no finished run of {self.directory} has a {name}.")
        return Runs(tuple(finished), self.directory).sort(field)[0]

    def records(self) -> list[RunRecord]:
        """The records of the finished runs."""
        found = [run.record for run in self.runs if run.status == "finished"]
        return [record for record in found if record is not None]

    def metrics(self) -> Any:
        """The metrics of all runs as one pandas DataFrame, with a column `run`."""
        return to_pandas([{"run": run.name, **line} for run in self.runs for line in run.metrics_rows()])

    def headline(self) -> str:
        """How many runs there are, by status."""
        counts = {status: sum(run.status == status for run in self.runs) for status in _statuses()}
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        noun = "run" if len(self.runs) == 1 else "runs"
        return f"{len(self.runs)} {noun} of {self.directory}" + (f": {words}" if words else "")

    def summary(self) -> str:
        """The headline and one line per run."""
        return "\n".join([self.headline(), *(run.headline() for run in self.runs)])

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per run with every field: hyperparameters, parameters, FLOPs, seconds, scores."""
        return [dict(run.fields) for run in self.runs]

    def shown_columns(self) -> list[str]:
        """The columns of HTML and LaTeX."""
        known = self.runs[0].fields if self.runs else {}
        return [name for name in SHOWN if name in known]

    def plot(self, ax: Any = None) -> Any:
        """Draw the loss curves of all runs; returns the Axes."""
        ax = new_axes(ax)
        for run in self.runs:
            run.plot(ax)
        return ax


def _statuses() -> Sequence[str]:
    from steepen.runs.status import STATUSES

    return STATUSES
