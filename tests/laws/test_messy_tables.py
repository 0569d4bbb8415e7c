"""Tables as people have them: all problems in one answer, and the truth of a messy project."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import steepen
from laws.messy_project import ARMS, RUNS, project
from steepen.errors import UsageError
from steepen.report.colours import _rgb, arm_styles
from steepen.report.curves import curves_of
from steepen.report.figure_options import FigureOptions
from steepen.requests.app import main
from steepen.tables.clean_table import Cleaning, Problem, clean, diverged
from steepen.tables.table import Table, table_from
from steepen.tables.units import read_number

LADDER = np.geomspace(1e18, 1e20, 6)
fit = cast("Any", steepen.fit)  # its result is that of one of three laws


def runs(**changes: list[Any]) -> dict[str, list[Any]]:
    """Two arms on six rungs of D = 20·N, with some cells replaced."""
    n = np.sqrt(LADDER / 120)
    found: dict[str, list[Any]] = {
        "model": ["base"] * 6 + ["mine"] * 6,
        "params": n.tolist() * 2,
        "tokens": (20 * n).tolist() * 2,
        "flops": LADDER.tolist() * 2,
        "loss": [
            round(1.8 + a * (c / 1e18) ** -0.11, 6) for a in (1.51234, 1.45678) for c in LADDER.tolist()
        ],
    }
    return {**found, **changes}


def cleaned(columns: dict[str, list[Any]], **options: Any) -> Table:
    return clean(table_from(columns, "runs.csv"), Cleaning(**options))


def with_cell(column: str, row: int, cell: Any) -> dict[str, list[Any]]:
    cells = list(runs()[column])
    cells[row] = cell
    return runs(**{column: cells})


def problems(columns: dict[str, list[Any]], **options: Any) -> tuple[Problem, ...]:
    return cleaned(columns, **options).problems


def test_clean_table_has_no_problems_and_its_own_numbers() -> None:
    table = cleaned(runs())
    assert table.problems == ()
    assert table.columns["flops"] == tuple(LADDER.tolist() * 2)


@pytest.mark.parametrize(
    ("cell", "column", "value"),
    [
        ("516M", "parameters", 516e6),
        ("1.2B params", "parameters", 1.2e9),
        ("1,234,567", "parameters", 1234567),
        ("20B tokens", "tokens", 20e9),
        ("1.2e18 FLOPs", "flops", 1.2e18),
        ("3 PF-days", "flops", 3 * 8.64e19),
        ("0.5 petaflop/s-days", "flops", 0.5 * 8.64e19),
        ("2 ZFLOPs", "flops", 2e21),
        ("90 min", "hours", 1.5),
        ("$1,200", "dollars", 1200),
    ],
)
def test_numbers_with_suffixes_and_units_are_read(cell: str, column: str, value: float) -> None:
    found = read_number(cell, column)
    assert found is not None
    assert found[0] == pytest.approx(value)
    assert read_number("12 parsecs", column) is None


@pytest.mark.parametrize(
    ("name", "factor"),
    [("compute (PF-days)", 8.64e19), ("pf_days", 8.64e19), ("train FLOPs [ZFLOPs]", 1e21), ("compute", 1.0)],
)
def test_unit_in_a_columns_name_is_applied(name: str, factor: float) -> None:
    columns = runs()
    columns[name] = [flops / factor for flops in columns.pop("flops")]
    assert cleaned(columns).columns["flops"] == pytest.approx(tuple(LADDER.tolist() * 2))


def test_all_errors_come_in_one_answer_worst_first_with_their_lines() -> None:
    columns = with_cell("loss", 2, "")
    columns["flops"] = [columns["flops"][0] / 8.64e19, *columns["flops"][1:]]
    columns["dataset"] = ["c4"] * 9 + ["pile"] * 3
    with pytest.raises(UsageError) as caught:
        cleaned(columns)
    text = str(caught.value)
    assert "runs.csv has 3 problems:" in text
    assert "row 1: FLOPs are 0.0116, but 6·N·D is 1e18 (PF-days?)" in text
    assert "row 3: loss is empty; leave the row out with `drop_missing`" in text
    assert "2 data sets in the column dataset: c4 (9), pile (3)" in text
    with pytest.raises(UsageError) as caught:
        cleaned(runs(flops=(np.tile(LADDER, 2) / 8.64e19).tolist()))
    assert "runs.csv: FLOPs are 1.2e-20 times 6·N·D, so they are PF-days; rename" in str(caught.value)


def test_rows_with_holes_are_left_out_only_when_asked() -> None:
    columns = with_cell("loss", 2, None)
    with pytest.raises(UsageError, match="row 3: loss is empty"):
        cleaned(columns)
    table = cleaned(columns, drop_missing=True)
    assert len(table) == 11
    assert table.problems[0].sentence() == "row 3: loss is empty; left out"


def test_flops_are_6nd_when_asked_and_offered_when_absent() -> None:
    columns = runs()
    exact = columns.pop("flops")
    with pytest.raises(UsageError, match="no column of FLOPs; take 6·N·D for them with `flops` 6nd"):
        cleaned(columns)
    assert cleaned(columns, flops="6nd").columns["flops"] == pytest.approx(tuple(exact))
    holes = with_cell("flops", 1, None)
    assert cleaned(holes, flops="6nd").columns["flops"] == pytest.approx(tuple(exact))


def test_flops_of_our_own_arms_are_counted_when_asked() -> None:
    plans = [steepen.plan(arm, depth=d) for arm in ("vanilla", "loop-2") for d in (4, 6, 8, 10)]
    columns = {
        "arm": [one.plan.run.arm.name for one in plans],
        "depth": [one.plan.run.shape.depth for one in plans],
        "tokens": [one.plan.run.tokens for one in plans],
        "loss": [3.2, 3.0, 2.85, 2.74, 3.1, 2.9, 2.75, 2.64],
    }
    with pytest.raises(UsageError, match="take our count of steepen's own arms with `flops` exact"):
        fit(columns, reference="vanilla")
    ladders = fit(columns, reference="vanilla", flops="exact", draws=100, method="joint").ladders
    for arm, found in ladders.items():
        own = [one.plan.run.flops.total for one in plans if one.plan.run.arm.name == arm]
        assert found.flops.tolist() == pytest.approx(own, rel=1e-12)
    with pytest.raises(UsageError, match=r"row 1: .*vanila"):
        fit({**columns, "arm": ["vanila"] * 8}, flops="exact")


def test_flops_are_compared_with_the_arms_own_ratio_to_6nd() -> None:
    flops = [4 * one for one in runs()["flops"]]  # four passes of shared weights: right, and said
    (found,) = [one for one in problems(runs(flops=flops)) if "'base'" in one.what]
    assert found.severity == "warning"
    flops[3] /= 4
    with pytest.raises(UsageError, match="row 4: FLOPs are"):
        cleaned(runs(flops=flops))


def test_data_set_column_may_be_the_arm_or_be_chosen() -> None:
    columns = runs(dataset=["c4"] * 6 + ["pile"] * 6)
    assert len(clean(table_from(columns).where(["dataset=c4"]), Cleaning())) == 6
    by_data = table_from(columns).rename({"arm": "dataset"})
    assert set(clean(by_data, Cleaning()).columns["arm"]) == {"c4", "pile"}


def test_spellings_of_an_arm_are_one_arm() -> None:
    table = cleaned(with_cell("model", 4, " BASE"))
    assert table.columns["arm"] == tuple(runs()["model"])
    assert table.problems[0].done == "counted 'BASE' as 'base'"


def test_diverged_runs_are_left_out_of_everything_unless_kept() -> None:
    columns = with_cell("loss", 4, 7.3)
    table = cleaned(columns)
    assert len(table) == 11
    assert table.problems[0].lines == (5,)
    assert len(cleaned(columns, keep_diverged=True)) == 12
    assert len(cleaned(with_cell("loss", 4, "diverged"), keep_diverged=True)) == 11


def test_steep_law_over_many_decades_has_no_diverged_runs() -> None:
    x = np.log(np.geomspace(1e9, 1e21, 30))
    assert not diverged(x, np.log(1.5 + 9 * np.exp(-0.25 * (x - x[0])))).any()


def test_perplexities_are_rejected_or_turned_into_losses() -> None:
    perplexity = [math.exp(loss) for loss in runs()["loss"]]
    with pytest.raises(UsageError, match="a perplexity, whose law is another"):
        cleaned(runs(loss=[10 * one for one in perplexity]))
    columns = runs(val_ppl=perplexity)
    del columns["loss"]
    assert cleaned(columns).columns["loss"] == pytest.approx(tuple(runs()["loss"]))


def test_bits_per_byte_are_noted() -> None:
    (found,) = problems(runs(loss=[loss / 3 for loss in runs()["loss"]]))
    assert found.severity == "note"
    assert "bits per byte" in found.what


def test_seeds_that_are_equal_to_all_digits_are_one_run() -> None:
    columns = {name: cells * 2 for name, cells in runs().items()} | {"seed": [0] * 12 + [1] * 12}
    assert len(cleaned(columns)) == 12
    assert problems(columns)[0].done == "counted once"


def test_arms_are_recognized_in_every_law_but_names_of_runs_are_not_arms() -> None:
    needs = ("parameters", "tokens", "loss")
    assert "arm" in cleaned(runs(), needs=needs).columns
    named = runs(model=[f"run {i}" for i in range(12)])
    assert "arm" not in cleaned(named, needs=needs).columns


def test_hours_as_the_cost_change_the_words_and_nothing_else() -> None:
    columns = runs()
    by_flops = fit(columns, reference="base", method="joint", draws=100)
    hours = fit(
        {**columns, "gpu_hours": [one / 4e17 for one in columns["flops"]]},
        reference="base", method="joint", draws=100, x="hours",
    )  # fmt: skip
    assert hours.rows[1].gamma == pytest.approx(by_flops.rows[1].gamma, rel=1e-6)
    assert "FLOPs" not in hours["mine"].sentence
    assert "hours" in hours.panels()[0].x.label


def test_messy_project_is_recovered_and_its_table_can_be_saved(tmp_path: Path) -> None:
    rows = project()
    assert len(rows) == RUNS
    with pytest.raises(UsageError, match="2 data sets") as caught:
        fit(rows, reference="Baseline")
    assert "compute is empty" in str(caught.value) or "flops is empty" in str(caught.value)
    saved = tmp_path / "understood.csv"
    result = fit(
        rows, reference="Baseline", where="dataset=c4", drop_missing=True, write_table=saved, draws=200,
        method="joint",
    )  # fmt: skip
    kinds = " ".join(one.what for one in result.problems)
    assert "diverged" in kinds and "capitals" in kinds and "empty" in kinds
    laws = {row.arm: row for row in result.rows}
    assert set(laws) == set(ARMS)
    for arm, (_, gamma) in ARMS.items():
        assert laws[arm].gamma == pytest.approx(gamma, abs=0.006)
    assert pytest.approx(1.8, abs=0.08) == laws["Baseline"].E
    again = fit(saved, reference="Baseline", draws=200, method="joint")
    assert [row.gamma for row in again.rows] == pytest.approx([row.gamma for row in result.rows], rel=1e-9)
    assert json.loads(result.to_json())["problems"][0]["severity"] == "warning"


def test_several_data_sets_are_judged_by_themselves_in_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*project(), {"model": "Baseline", "dataset": "tiny", "seed": 0, "compute": 1e18, "val_loss": 3.0}]
    options = {"reference": "Baseline", "drop_missing": True, "draws": 200, "method": "joint"}
    saved = tmp_path / "understood.csv"
    both = fit(rows, by="dataset", write_table=saved, **options)
    for dataset in ("c4", "pile"):
        alone = fit(rows, where=f"dataset={dataset}", **options)
        assert both[dataset].to_dict() == alone.to_dict()
    assert "tiny" in both.page_content().warnings[0] and "tiny" not in both.results
    assert {row["dataset"] for row in both.to_rows()} == {"c4", "pile"}
    assert set(json.loads(both.to_json())["results"]) == {"c4", "pile"}
    again = fit(saved, by="dataset", **options)
    assert again.to_rows()[0]["gamma"] == pytest.approx(both.to_rows()[0]["gamma"], rel=1e-9)
    assert any(max(one.lines) > 150 > min(one.lines) for one in both.problems)  # of both parts, said once
    with pytest.raises(UsageError, match="forecasts are of one data set"):
        fit(rows, by="dataset", register=tmp_path / "ledger.jsonl", budget=1e22, **options)
    words = ["fit", str(saved), "--by", "dataset", "--reference", "Baseline", "--write-table"]
    assert main([*words, str(tmp_path / "laws.tex")]) == 2
    assert "written with --write-result" in " ".join(capsys.readouterr().err.split())


def test_page_of_several_data_sets_names_them_and_keeps_the_colours_of_arms(tmp_path: Path) -> None:
    options = {"reference": "Baseline", "drop_missing": True, "draws": 200, "method": "joint"}
    both = fit(project(), by="dataset", predict="1e22", **options)
    text = both.write_report(tmp_path / "page.html").read_text()
    assert re.findall("<h1[^>]*>(.*)</h1>", text) == [
        "Against Baseline: better, by how much, and does the gain grow? By dataset"
    ]
    assert "Study" not in text
    for dataset in ("c4", "pile"):
        assert text.count(f"<h2>{dataset}: Predicted loss of one run, 90% interval</h2>") == 1
        shades = re.findall(rf'<span class="arm (k\d+)">moe_8x, {dataset}</span>', text)
        keys = [line for line in text.splitlines() if 'class="legend"' in line]
        in_figures = {re.findall(r'class="key (k\d+)"(?:(?!class="key).)*?moe_8x', line)[0] for line in keys}
        assert shades == list(in_figures)
    assert both.page_content().tables[0].title.startswith("c4: ")
    assert not any(
        "by how much" in table.title for table in both.page_content().tables
    )  # those are the answers


def test_exit_code_tells_programs_what_is_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def exit_code(losses: list[float], *words: str) -> int:
        columns = runs(loss=losses)
        lines = zip(columns["model"], columns["flops"], losses, strict=True)
        text = "".join(f"{arm},{flops!r},{loss!r}\n" for arm, flops, loss in lines)
        (tmp_path / "runs.csv").write_text("arm,flops,loss\n" + text)
        return main(["fit", str(tmp_path / "runs.csv"), "--reference", "base", "--draws", "100", *words])

    noise = np.random.default_rng(0).standard_normal(12)
    clear, unclear = (
        [loss + sd * float(e) for loss, e in zip(runs()["loss"], noise, strict=True)] for sd in (1e-4, 0.05)
    )
    assert exit_code(clear, "--exit-code") == 0
    assert exit_code(unclear, "--exit-code") == 3
    assert exit_code(unclear) == 0
    assert exit_code([*clear[:-1], -1.0], "--exit-code") == 2


def test_json_follows_its_published_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = json.loads(fit(runs(), reference="base", draws=100, predict=[1e21]).to_json())
    file = Path(steepen.__file__).parent / "results" / "assets" / "fit.compute-1.schema.json"
    jsonschema.validate(found, json.loads(file.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "arms": {"base": {}}}, json.loads(file.read_text()))


def test_figure_names_arms_as_given_and_takes_options(tmp_path: Path) -> None:
    result = fit(runs(model=["Base line"] * 6 + ["mine_2"] * 6), reference="Base line", draws=100)
    options = FigureOptions(labels={"mine_2": "Mine"}, colours={"mine_2": "#d55e00"}, order=("mine_2",))
    panels = options.apply(result.panels())
    curves = curves_of(panels[0], options.titles)
    assert [curve.label for curve in curves] == ["Mine", "Base line"]
    assert curves[0].colour.light == "#d55e00"
    markers = {one.arm: one.marker for one in panels[0].series if one.kind == "points"}
    assert len(set(markers.values())) == 2
    lines = [one for panel in panels for one in panel.series if one.kind == "line"]
    assert {one.note for one in lines if one.style == "dotted"} == {"fitted"}
    file = result.save_figure(tmp_path / "one.png", panels="multiplier", size="3.5x2.6")
    assert file.read_bytes()[16:24] == (1050).to_bytes(4, "big") + (780).to_bytes(4, "big")
    for wrong in ({"panels": "histogram"}, {"labels": "mime=x"}, {"size": "big"}, {"colours": "mine_2=red"}):
        with pytest.raises(UsageError):
            result.save_figure(tmp_path / "wrong.png", **wrong)


def test_arms_of_any_names_have_colours_and_markers_of_their_own() -> None:
    styles = arm_styles([f"arm {i}" for i in range(12)], {})
    assert len({colour for colour, _ in styles.values()}) == 12
    assert len(set(styles.values())) == 12
    lights = [colour.light for colour, _ in styles.values()]
    assert min(math.dist(_rgb(a), _rgb(b)) for i, a in enumerate(lights) for b in lights[:i]) > 0.2


def test_report_of_a_table_is_one_page_with_names_and_problems(tmp_path: Path) -> None:
    result = fit(with_cell("model", 4, "BASE"), reference="base", draws=100)
    page = result.write_report(tmp_path / "page.html").read_text()
    assert "differ in capitals or spaces only" in page
    assert page.count("<svg") >= 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    with pytest.raises(UsageError, match=r"must end in \.html"):
        result.write_report(tmp_path / "page.pdf")


def test_predictions_cover_the_truth_and_reach_beyond_the_ladder() -> None:
    rng = np.random.default_rng(1)
    columns = runs(loss=[loss + 0.002 * rng.standard_normal() for loss in runs()["loss"]])
    result = fit(columns, reference="base", draws=100, method="joint")
    (base, mine) = result.predict(1e21).rows
    truth = 1.8 + 1.51234 * 1e3**-0.11
    assert base.low < truth < base.high
    assert mine.decades_beyond == pytest.approx(1.0)
    assert [row.high - row.low for row in result.predict([1e20, 1e23]).rows][1] > base.high - base.low
    with pytest.raises(UsageError, match="cannot predict at"):
        result.predict(-1.0)


def test_columns_that_are_not_needed_may_be_ambiguous_or_left_unused() -> None:
    table = cleaned(runs(n_params=[1.0] * 12, num_params=[2.0] * 12))
    assert "parameters" not in table.columns
    columns = runs(dataset=[f"mix {i}" for i in range(12)])
    assert len(clean(table_from(columns).rename({"dataset": "none"}), Cleaning())) == 12


def test_runs_that_have_not_finished_are_pointed_out() -> None:
    (found,) = problems(runs(state=["finished"] * 11 + ["crashed"]))
    assert found.lines == (12,)


def test_options_that_mean_nothing_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("arm,flops,loss\na,1e18,3\n")
    with pytest.raises(UsageError, match="`at` is for runs of a tracker"):
        fit(tmp_path / "runs.csv", at="best")
    with pytest.raises(UsageError, match="write final, best, or a step such as 10000") as error:
        fit(tmp_path / "runs.csv", at="9" * 5000)
    assert len(str(error.value)) < 500
    with pytest.raises(UsageError, match="`x`, `predict` and `exit_code` are for `law` compute"):
        fit(runs(), law="chinchilla", predict=[1e21])


def test_all_repeated_runs_are_listed() -> None:
    columns = {name: [*cells, cells[1], cells[3]] for name, cells in runs().items()}
    with pytest.raises(UsageError, match="rows 13 and 14: the arm, compute and seed of an earlier row"):
        cleaned(columns)
    assert len(cleaned({**columns, "run": [f"r{i}" for i in range(14)]})) == 14
