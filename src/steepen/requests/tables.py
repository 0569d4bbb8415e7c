"""Tables of runs as verbs take them: a file, or a frame of pandas, polars and others in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from steepen.errors import UsageError
from steepen.requests.request import Argument
from steepen.utils.codec import HelpPanel
from steepen.utils.values import Pairs

if TYPE_CHECKING:
    from steepen.tables.table import Table

TABLE = HelpPanel("Table")  # panel of --help


@dataclass(frozen=True)
class ReadsTable:
    """The fields of a verb that reads a table of runs."""

    table: Annotated[
        Any,
        Argument(
            "CSV, TSV, JSON, Parquet or Excel file, - for standard input; runs of a tracker: "
            "wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, trackio:PROJECT, or a folder of W&B, MLflow, "
            "TensorBoard or steepen runs; or the paper's own runs: paper:fineweb, paper:fineweb-edu.",
            python="Also a pandas, polars or Arrow frame, a dict of columns, a list of dicts, or open_runs.",
        ),
    ]
    _: KW_ONLY
    columns: Pairs | None = TABLE(
        "Names of the table's columns, or of a tracker's metrics and settings: "
        "loss=eval/loss,arm=model.name,dataset=corpus. Usual names (C, compute, params, N, D, val_loss, "
        "tokens (B), pf_days) are recognized."
    )
    where: tuple[str, ...] = TABLE(
        "Use only the rows with dataset=c4, arm=a,b, arm!=c, params>=1e8 or 'loss < 3 and depth > 4'. "
        "Repeatable.",
        (),
    )
    at: str = TABLE(
        "Which value of a tracker's metric counts: final, best (the lowest), or that at a step.", "final"
    )
    x: str = TABLE(
        "What laws are fitted along: flops, hours, seconds, tokens, dollars, or another column.", "flops"
    )
    flops: Literal["table", "6nd", "exact"] = TABLE(
        "table; 6nd: 6·N·D from parameters and tokens, in every row; exact: of steepen's own arms, counted "
        "from arm, depth and tokens, and context, vocabulary, aspect or rho where they are columns.",
        "table",
    )
    drop_missing: bool = TABLE("Leave out rows that lack a value.", False)
    keep_diverged: bool = TABLE("Keep runs whose loss is far above that of their arm's other runs.", False)
    write_table: Path | None = TABLE("Write the table as it was understood to this .csv.")

    def read_table(self, needs: tuple[str, ...], by: str | None = None) -> dict[str, Table]:
        """The runs by the values of the column `by` (without one under ""), and what was done to them.

        The columns that a law needs are numbers, under our names.
        """
        from steepen.tables.clean_table import Cleaning, clean

        if self.write_table is not None and self.write_table.suffix.lower() != ".csv":
            raise UsageError(
                f"`write_table` {self.write_table.name} must end in .csv: it is the table as it was "
                "understood. Laws and verdicts are written with --write-result."
            )
        whole = as_table(self.table, columns=self.columns, where=self.where, at=self.at)
        whole = _count_flops(whole) if self.flops == "exact" else whole
        cleaning = Cleaning(needs, self.x, self.flops, self.drop_missing, self.keep_diverged)
        found: dict[str, Table] = {}
        errors: list[str] = []
        for value, part in ({"": whole} if by is None else whole.split(by)).items():
            try:
                found[value] = clean(part, cleaning)
            except UsageError as error:
                errors.append(str(error))
        if errors:
            raise UsageError("\n".join(errors))
        if self.write_table is not None:
            _write_table(list(found.values()), self.write_table)
        return found


def _count_flops(table: Table) -> Table:
    """The table with FLOPs of steepen's own arms; sizes without a column are the defaults of `plan`."""
    from steepen.model.arms import find_arm
    from steepen.requests.plan import Plan

    names = ("depth", "tokens", "context", "vocabulary", "aspect", "head_dim", "mlp_multiple", "rho")
    sizes = {name: table.numbers(name) for name in names if name in names[:2] or table.has(name)}
    flops: list[float] = []
    for row, name in enumerate(table.names("arm")):
        own = {each: float(values[row]) for each, values in sizes.items()}
        try:
            plan, arm = Plan(arm=name, **own), find_arm(name)  # pyright: ignore[reportArgumentType]
            size = plan.size_rule(vocabulary=plan.vocabulary)
            run = plan.recipe_of(arm).at_budget(
                arm, int(own["depth"]), size, tokens=plan.tokens, rho=plan.rho
            )
        except UsageError as error:
            raise UsageError(f"{table.place(row)}: {error}") from None
        flops.append(run.flops.total * own["tokens"] / run.tokens)  # runs have whole steps
    return replace(table.rename({"flops": "none"}), columns={**table.columns, "flops": tuple(flops)})


def _write_table(tables: Sequence[Table], path: Path) -> None:
    """Every column of the rows in use, with those that were understood first."""
    from steepen.results.table import Table as Rows
    from steepen.results.table import to_csv
    from steepen.utils.files import write_atomically

    first = tables[0]
    names = dict.fromkeys(("arm", *(first.cleaning.needs if first.cleaning else ()), *first.columns))
    names = [name for name in names if name in first.columns]
    rows = [row for one in tables for row in zip(*(one.columns[name] for name in names), strict=True)]
    write_atomically(path, to_csv(Rows(first.source, tuple(names), tuple(rows))))


def as_table(
    data: Any, *, columns: Mapping[str, str] | None = None, where: Sequence[str] = (), at: str = "final"
) -> Table:
    """A table of runs from a file's path or from data in memory.

    `data` is what `read_table` reads, a frame (of pandas, of polars, or anything with the Arrow PyCapsule or
    the dataframe interchange protocol), a dict of columns, a list of dicts, or `Runs`. `columns` maps our
    names to the data's own: `{"loss": "val_loss"}`. `where` keeps the rows that satisfy every condition.
    """
    from steepen.tables.frames import columns_in_memory
    from steepen.tables.read_table import read_table
    from steepen.tables.table import table_from

    name = "table"
    if isinstance(data, str | Path) and (rows := _own_runs(Path(data))) is not None:
        data, name = rows, str(data)
    if isinstance(data, str | Path):
        return read_table(data, columns=columns, where=where, at=at)
    if hasattr(data, "to_rows"):  # Runs, or another result of this package
        data = data.to_rows()
    found = columns_in_memory(data)
    if not found:
        raise UsageError(f"the {name} has no columns.")
    return table_from(found, name).rename(columns or {}).where(where)


def _own_runs(path: Path) -> list[dict[str, Any]] | None:
    """The fields of the finished runs in a directory of steepen's; None if it is none."""
    if not path.is_dir() or next(path.glob("*/record.json"), None) is None:
        return None
    from steepen.runs.fields import all_run_fields
    from steepen.runs.store import RunStore

    store = RunStore(path)
    return [row for row in all_run_fields(store, store.rows()) if row["status"] == "finished"]
