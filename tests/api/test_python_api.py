"""`import steepen`: what it offers, tables of every library in, results out."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import steepen
from steepen.errors import UsageError
from steepen.requests.app import main
from steepen.requests.tables import as_table
from steepen.results.table import WRITERS
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]
SOURCE = Path(__file__).resolve().parents[2] / "src"


def ladders() -> dict[str, list[Any]]:
    """Two ladders under foreign column names: `steep` has the larger exponent, without noise to speak of."""
    flops = np.geomspace(1e17, 1e20, 8)
    noise = np.random.default_rng(0).normal(0, 3e-4, (2, 8))
    rows: dict[str, list[Any]] = {"method": [], "train_flop": [], "ppl_nats": []}
    for i, (name, gamma) in enumerate((("plain", 0.10), ("steep", 0.13))):
        rows["method"] += [name] * 8
        rows["train_flop"] += flops.tolist()
        rows["ppl_nats"] += (1.8 + 1.5 * (flops / 1e17) ** -gamma + noise[i]).tolist()
    return rows


NAMES: dict[str, Any] = {"arm": "method", "flops": "train_flop", "loss": "ppl_nats"}


@pytest.fixture(scope="module")
def judged() -> Any:
    return steepen.fit(pd.DataFrame(ladders()), columns=NAMES, reference="plain", draws=100, budget=1e22)


def test_import_loads_neither_numpy_nor_torch_and_lists_its_names() -> None:
    code = (
        "import sys, steepen; names = dir(steepen); assert {'fit', 'report', 'ladder'} <= set(names);"
        "sys.exit(bool({'numpy', 'torch', 'pandas', 'typer'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    documented = [name for name in steepen.__all__ if getattr(steepen, name).__doc__]
    assert documented == steepen.__all__


def test_every_name_that_is_loaded_lazily_is_declared_for_editors() -> None:
    tree = ast.parse(Path(steepen.__file__).read_text(encoding="utf-8"))
    block = next(one for one in tree.body if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one))
    declared: dict[str, str | None] = {}  # names with their modules
    for statement in block.body:
        if isinstance(statement, ast.ImportFrom):
            # Only a name that is imported as itself is part of a typed package.
            declared |= {one.name: statement.module for one in statement.names if one.asname == one.name}
        elif isinstance(statement, ast.AnnAssign):
            declared[ast.unparse(statement.target)] = None
    assert declared.keys() == {*steepen.__all__, "__version__"}
    for name, module in declared.items():
        assert module is None or module == f"steepen.{steepen.MODULES[name]}"


def test_report_is_a_package_and_a_function() -> None:
    from steepen.report.write import PAGE_NAME

    package: Any = steepen.report
    assert package.write.PAGE_NAME == PAGE_NAME
    with pytest.raises(UsageError, match="there is no study"):
        steepen.report("no-such-study", "out")


class OnlyArrow:
    """A frame with nothing but the Arrow PyCapsule protocol, as a DuckDB relation."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


class OnlyInterchange:
    """A frame with nothing but the dataframe interchange protocol."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.table = pa.table(columns)

    def __dataframe__(self, **options: Any) -> Any:
        return self.table.__dataframe__(**options)


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    "make",
    [pd.DataFrame, pa.table, OnlyArrow, OnlyInterchange, dict, rows_of],
    ids=lambda make: make.__name__,
)
def test_frames_of_every_library_give_the_same_table(make: Callable[..., Any]) -> None:
    table = as_table(make(ladders()), columns=NAMES)
    assert table.names("arm") == ladders()["method"]
    assert table.numbers("loss").tolist() == ladders()["ppl_nats"]


def test_polars_frames() -> None:
    polars = pytest.importorskip("polars")
    table = as_table(polars.DataFrame(ladders()), columns=NAMES)
    assert table.numbers("flops").tolist() == ladders()["train_flop"]


def test_a_missing_value_of_a_frame_is_named_with_its_row() -> None:
    frame = pd.DataFrame(ladders())
    frame.loc[3, "ppl_nats"] = None
    with pytest.raises(UsageError, match="row 4: loss is empty"):
        steepen.fit(frame, reference="plain", columns=NAMES)


@pytest.mark.parametrize("data", [7, [1, 2], {}, object(), None, pd.Series([1.0]), pa.array([1])])
def test_what_is_no_table_is_rejected(data: Any) -> None:
    with pytest.raises(UsageError):
        steepen.fit(data)


def test_missing_columns_are_named_as_in_python_without_an_arm_that_the_frame_lacks() -> None:
    frame = pd.DataFrame({"who": ["a", "b"], "petaflops": [0.1, 0.2], "val_ce": [3.0, 2.9]})
    with pytest.raises(UsageError) as caught:
        steepen.fit(frame)
    message = str(caught.value)
    assert "no columns 'flops', 'loss'; it needs flops, loss, and has who, petaflops, val_ce." in message
    assert message.endswith("Name a column with `columns` flops=ITS_NAME.") and "--" not in message
    with pytest.raises(UsageError, match=r"no column 'budget'.* with `columns` budget=ITS_NAME"):
        steepen.fit(frame, law="isoflop", columns={"x": "who", "loss": "val_ce"})
    with pytest.raises(UsageError, match=r"^`where` 'petaflops 3' is not a condition"):
        steepen.fit(frame, columns={"flops": "petaflops", "loss": "val_ce"}, where=("petaflops 3",))


def test_fit_finds_the_steeper_law(judged: Any) -> None:
    assert judged["steep"].growth == "grows"
    frame = judged.to_frame().set_index("arm")
    assert frame.loc["steep", "gamma"] == pytest.approx(0.13, abs=0.01)
    assert frame.loc["plain", "better"] == "reference"
    assert repr(judged).startswith("<fit against plain: steep") and len(repr(judged)) < 120
    assert judged["steep"].sentence in " ".join(judged.summary().split())


def test_heads_of_the_summary_stand_over_their_columns(judged: Any) -> None:
    text = judged.summary()
    assert text.startswith("Against plain: better") and max(map(len, text.splitlines())) <= 80
    text = replace(judged, full=True).summary()
    head, _, row = text[text.index("L = E + A") :].splitlines()[3:6]
    ends = [head.index(word) + len(word) for word in ("γ", "90% interval", "90% given E", "log A")]
    assert all(row[end - 1].isdigit() and row[end : end + 1] == " " for end in ends)


def test_results_have_html_latex_and_a_figure(judged: Any, tmp_path: Path) -> None:
    assert "<td>steep</td>" in judged._repr_html_()
    latex = judged.to_latex(caption="Laws of 2 arms_", label="tab:laws")
    assert r"\toprule" in latex and r"\caption{Laws of 2 arms\_}" in latex
    assert latex.startswith("% needs \\usepackage{booktabs}\n\\begin{table}")
    head = next(line for line in latex.splitlines() if line.startswith("arm & "))
    assert r"& p (growth) & $\Delta\gamma$ & multiplier at the top & $\gamma$ & $\gamma$ low" in head
    assert "<th>p (better)</th>" in judged._repr_html_()
    axes = judged.plot()
    assert {text.get_text().split(",")[0] for text in axes.get_legend().get_texts()} >= {"plain", "steep"}
    assert judged.plot(ax=axes) is axes
    assert judged.save_figure(tmp_path / "laws.pdf").stat().st_size > 1000


def test_other_laws_and_a_wrong_setting() -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(1e9, 1e11, 4)))
    loss = 1.7 + 400 / n**0.34 + 410 / d**0.28
    frame = pd.DataFrame({"N": n, "D": d, "val": loss})
    law: Any = steepen.fit(frame, law="chinchilla", columns={"loss": "val"}, draws=0)
    assert "N* ∝ C^0.45" in repr(law) and len(law.residual_rows()) == 16
    constants = law.to_frame().set_index("constant")["value"]
    assert constants["α"] == pytest.approx(0.34, abs=1e-3) and constants["E"] == pytest.approx(1.7, abs=1e-3)
    assert r"$\alpha$ & " in law.to_latex() and "1e+07" not in law.to_latex()
    wrong: dict[str, Any] = {"marginn": 1}
    with pytest.raises(UsageError, match="has no setting 'marginn'; the nearest are margin"):
        steepen.fit(pd.DataFrame(ladders()), columns=NAMES, reference="plain", **wrong)
    with pytest.raises(UsageError, match="with `reference`; the arms are plain, steep"):
        steepen.fit(pd.DataFrame(ladders()), columns=NAMES)


def test_plan_power_and_arms() -> None:
    planned = steepen.plan("untied-grow", 8, gpus=2)
    assert planned["depth"] == 8 and planned["learning_rate"] > 0 and "untied-grow d8" in repr(planned)
    power = steepen.power(0.01, rungs=5, draws=100, search=False)
    assert 0 <= power.power.growth <= 1 and len(power.to_frame()) == 1
    arms = steepen.arms()
    assert arms["untied-2"].name == "untied-2" and len(arms.to_frame()) > 8
    for result in (planned, power, arms):
        assert result.plot() is not None and result.summary()


def test_the_class_of_a_block_is_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocks_of_mine.py").write_text(
        "from steepen.model.block import TransformerBlock\n"
        "class WideNorm(TransformerBlock):\n    '''A test block.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("blocks_of_mine")
    planned = steepen.plan(module.WideNorm, 4)
    arm = planned.plan.run.arm
    assert (arm.name, arm.block, arm.about) == ("wide-norm", "blocks_of_mine:WideNorm", "A test block.")
    assert steepen.arms()["blocks_of_mine:WideNorm"] == arm

    class Local:
        pass

    with pytest.raises(UsageError, match="cannot be imported by name"):
        steepen.plan(Local, 4)


@pytest.fixture
def runs(store: RunStore, spec: Spec, trainer: ModuleType) -> Path:
    """Three finished runs, one of them evaluated, and one that waits."""
    for seed, arm in ((1, "vanilla"), (2, "vanilla"), (3, "untied-2")):
        core = {"core22": 0.25, "tasks": {"arc": {"centered": 0.5, "nll": 2.0}}}
        scores = {"core": core} if seed == 2 else {}
        record = trainer.record_of(spec(seed, arm=arm), loss=4.0 - seed / 10, evaluation=scores)
        folder = store.root / record.run
        write_json(folder / "spec.json", record.spec.to_dict())
        write_json(folder / "record.json", record.to_dict())
        (folder / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.5}\n{"step": 2, "validation_loss": 4.4}\n'
        )
    write_json(store.run(spec(4)).spec_file, spec(4).to_dict())
    return store.root


def test_runs_filter_sort_and_become_a_frame(runs: Path) -> None:
    found = steepen.open_runs(runs)
    assert len(found) == 4 and "3 finished, 1 waiting" in repr(found)
    assert [run["seed"] for run in found.filter("loss < 3.85 and arm == 'vanilla'")] == [2]
    assert [run["seed"] for run in found.filter(arm="untied-2")] == [3]
    assert found.best().fields["seed"] == 3 and found.sort("-loss")[0]["seed"] == 1
    frame = found.to_frame()
    wanted = {"learning_rate", "beta1", "parameters", "flops", "seconds_training", "core22", "data", "recipe"}
    assert wanted <= set(frame.columns)
    assert frame.set_index("seed").loc[2, "core.arc"] == 0.5
    assert len(found.metrics()) == 9 and set(found.metrics()["run"]) == {r.name for r in found} - {
        r.name for r in found.filter(status="waiting")
    }
    assert found[0].plot() is not None and found["" + found[1].name[:8]].name == found[1].name
    with pytest.raises(UsageError, match="the nearest are"):
        found.filter("learningrate > 1")


def test_runs_are_a_table_for_fit(runs: Path) -> None:
    table = as_table(steepen.open_runs(runs, status="finished"))
    assert len(table) == 3 and table.has("parameters") and table.has("tokens")


def test_fit_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["method,C,val"]
    rows += [f"{arm},{c:g},{1.8 + a * c**-0.1:.5f}" for arm, a in (("plain", 60.0), ("mine", 57.0))
             for c in (1e17, 3e17, 1e18, 3e18, 1e19, 3e19)]  # fmt: skip
    (tmp_path / "own.csv").write_text("\n".join(rows))
    words = [
        "fit",
        str(tmp_path / "own.csv"),
        "--columns",
        "arm=method,flops=C,loss=val",
        "--reference",
        "plain",
    ]
    files = [tmp_path / name for name in ("laws.tex", "laws.csv", "laws.md")]
    assert main([*words, *(word for file in files for word in ("--write-result", str(file)))]) == 0
    assert "table: " in capsys.readouterr().out
    tex, table, markdown = (file.read_text() for file in files)
    assert tex.splitlines()[1].startswith("\\begin{tabular}") and "mine & " in tex
    assert table.splitlines()[0].startswith("arm,better,multiplier,") and len(table.splitlines()) == 3
    assert "| mine |" in markdown
    assert main([*words, "--write-result", "laws.doc"]) == 2
    said = capsys.readouterr().err
    assert "laws.doc must end in" in said and all(kind in said for kind in WRITERS)
