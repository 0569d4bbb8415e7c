"""`steepen fit` and `steepen power` on the command line: results, JSON, figures, errors that name the row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import steepen
from steepen.laws.verdict.holdout import hold_out_rungs
from steepen.laws.verdict.questions import BETTER, GROWTH
from steepen.requests.app import main
from steepen.results.fit import STYLES
from steepen.tables.read_table import read_table

HEADER = "arm,flops,loss"
FLOPS = np.geomspace(3.25e17, 1.01e20, 8)


def lines(noise: float = 1e-3) -> list[str]:
    rng = np.random.default_rng(0)
    found = []
    for arm, a, gamma in (("vanilla", 1.5, 0.1113), ("grow", 1.5 * 1.3**-0.1168, 0.1168)):
        for flops in FLOPS:
            found.append(
                f"{arm},{flops:.6g},{1.83 + a * (flops / 1e18) ** -gamma + noise * rng.standard_normal():.6f}"
            )
    return found


def write(folder: Path, rows: list[str], header: str = HEADER, name: str = "runs.csv") -> str:
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def result(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_fit_prints_laws_verdicts_and_what_would_change_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("fit", write(tmp_path, lines()), "--reference", "vanilla", "--draws", "200")
    code, out, _ = run(capsys, *words, "--full")
    assert code == 0
    for word in (
        "joint method",
        "paper method",
        "grow against vanilla",
        "what hangs on E",
        "interpolated",
        "fitted (paper)",
        "re-sweep",
    ):
        assert word in out
    assert max(len(line) for line in out.splitlines()) <= 80
    _, brief, _ = run(capsys, *words)
    assert len(brief.splitlines()) <= 25 and "re-sweep" not in brief
    assert max(len(line) for line in brief.splitlines()) <= 80


def test_table_of_answers_comes_first_and_explains_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*lines(), *(line.replace("grow,", "a-second-long-name,") for line in lines() if "grow" in line)]
    _, out, _ = run(capsys, "fit", write(tmp_path, rows), "--reference", "vanilla", "--draws", "100")
    assert out.startswith("Against vanilla: better, by how much, and does the gain grow?")
    assert "multiplier: times less compute" in out and "(Holm)" in out


def test_shrinking_gain_is_called_so_in_text_json_and_power(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("fit", write(tmp_path, lines()), "--reference", "grow", "--draws", "200")
    code, out, _ = run(capsys, *words)
    assert code == 0 and "vanilla against grow: worse" in out and "loses ground" in out
    verdict = result(capsys, *words)["arms"]["vanilla"]["verdict"]
    assert (verdict["better"], verdict["growth"], verdict["by_what"]) == ("worse", "shrinks", None)
    assert verdict["slope"]["p_value"] < 0.05 and verdict["growth_per_decade"] < 1
    assert set(STYLES) == {*BETTER, *GROWTH}, "every word has its colour"
    planned = result(capsys, "power", "--delta-gamma", "-0.0055", "--draws", "100", "--no-search")
    assert planned["expected_growth"] == "shrinks" and planned["growth"] > 0.9


def test_three_formats_give_the_same_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split(",") for line in lines()]
    records = [{"arm": a, "flops": float(c), "loss": float(y)} for a, c, y in rows]
    jsonl = tmp_path / "runs.jsonl"
    jsonl.write_text("\n".join(json.dumps(record) for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "runs.parquet")
    found = [
        result(capsys, "fit", path, "--reference", "vanilla", "--draws", "200")
        for path in (write(tmp_path, lines()), str(jsonl), str(tmp_path / "runs.parquet"))
    ]
    grow = found[0]["arms"]["grow"]
    assert {"gamma", "log_a", "e", "intervals", "verdict", "multipliers"} <= set(grow)
    assert abs(grow["gamma"] - 0.1168) < 0.005
    for other in found[1:]:
        assert other["arms"]["grow"]["gamma"] == pytest.approx(grow["gamma"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: [*rows[:3], "vanilla,1e19,-2.5", *rows[4:]], "line 5: loss is -2.5"),
        (lambda rows: [*rows[:3], "vanilla,1e19,0", *rows[4:]], "line 5: loss is 0"),
        (lambda rows: [*rows[:3], "vanilla,1e19,oops", *rows[4:]], "line 5: loss is 'oops'"),
        (lambda rows: [*rows[:3], "vanilla,1e19,", *rows[4:]], "line 5: loss is empty"),
        (lambda rows: [*rows[:3], "vanilla,1e19,nan", *rows[4:]], "line 5: loss is nan"),
        (lambda rows: [*rows[:3], "vanilla,inf,3.0", *rows[4:]], "line 5: flops is inf"),
        (lambda rows: [*rows[:3], ",1e19,3.0", *rows[4:]], "line 5: arm is empty"),
        (lambda rows: [*rows[:3], "vanilla,1e19", *rows[4:]], "line 5: 2 cells"),
        (lambda rows: [*rows, rows[2]], "line 18: arm 'vanilla'"),
    ],
)
def test_error_for_a_bad_table_names_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, expected: str
) -> None:
    code, _, err = run(
        capsys, "fit", write(tmp_path, change(lines())), "--reference", "vanilla", "--draws", "200"
    )
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_both_methods_read_what_the_joint_one_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [*lines()[:15], "grow,1.01e20,1.2"])
    words = ("fit", path, "--reference", "vanilla", "--draws", "100")
    found = result(capsys, *words)
    assert [one["loss"] for one in found["left_out"]] == [1.2]
    assert {"joint", "paper"} <= set(found["arms"]["grow"]), "without it the paper's method can fit too"


def test_missing_column_is_named_with_the_columns_present(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, lines(), header="arm,cost,loss")
    code, _, err = run(capsys, "fit", path, "--reference", "vanilla")
    assert code == 2
    assert "'flops'" in err
    assert "arm, cost, loss" in err


def test_unit_in_a_columns_name_is_converted_and_an_unlabelled_one_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = [line.split(",") for line in lines()]
    in_days = [",".join([arm, f"{float(flops) / 8.64e19!r}", *rest]) for arm, flops, *rest in fields]
    words = ("--reference", "vanilla", "--draws", "100", "--method", "joint")
    plain = result(capsys, "fit", write(tmp_path, lines()), *words)
    assert not [warning for warning in plain["warnings"] if "unit" in warning]
    path = write(tmp_path, in_days, header=HEADER.replace("flops", "compute (PF-days)"), name="days.csv")
    found = result(capsys, "fit", path, *words)
    assert found["problems"][0]["done"] == "multiplied by 8.64e+19"
    assert found["arms"]["vanilla"]["joint"]["gamma"] == pytest.approx(
        plain["arms"]["vanilla"]["joint"]["gamma"], rel=1e-4
    )
    path = write(tmp_path, in_days, header=HEADER.replace("flops", "cost"), name="days.csv")
    found = result(capsys, "fit", path, *words, "--columns", "flops=cost")
    assert "the column is in another unit" in found["warnings"][0]
    assert "1 PF-day is 8.64e19 FLOPs" in found["warnings"][0]
    gammas = [one["arms"]["vanilla"]["joint"]["gamma"] for one in (plain, found)]
    assert gammas[1] == pytest.approx(gammas[0], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--reference"),
        (["--reference", "vanila"], "vanilla"),
        (["--reference", "vanilla", "--law", "cubic"], "'compute', 'chinchilla', 'looped', 'isoflop'"),
        (["--reference", "vanilla", "--objective", "l2"], "'huber', 'mse', 'log-mse'"),
        (["--reference", "vanilla", "--figure", "x.doc"], ".pdf"),
        (["--reference", "vanilla", "--hold-out", "lots"], "FLOPS"),
        (["--reference", "vanilla", "--hold-out", "9e30"], "matches no run"),
        (["--reference", "vanilla", "--hold-out", "grw:1e19"], "grow"),
        (["--reference", "vanilla", "--budget", "-1"], "budget"),
        (["--law", "isoflop"], "budget"),
        (["--law", "chinchilla"], "parameters"),
    ],
)
def test_wrong_argument_exits_2_with_what_would_be_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    code, _, err = run(capsys, "fit", write(tmp_path, lines()), *words)
    assert code == 2
    assert expected in err


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("runs.csv", "", "empty"),
        ("runs.csv", "arm,flops,loss\n", "no rows"),
        ("runs.csv", "arm,arm,loss\n1,2,3\n", "twice"),
        ("runs.xls", "\xd0\xcf", "no rows"),
        ("runs.jsonl", '{"arm": 1}\nnot json\n', "line 2"),
        ("runs.jsonl", "[1, 2]\n", "line 1"),
        ("runs.parquet", "not parquet", "Parquet"),
    ],
)
def test_file_that_is_not_a_table_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, expected: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    code, _, err = run(capsys, "fit", str(path), "--reference", "vanilla")
    assert code == 2
    assert expected in err
    assert run(capsys, "fit", str(tmp_path / "absent.csv"), "--reference", "v")[0] == 2


def test_hold_out_by_compute_by_arm_and_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path, lines())
    base = ("fit", table, "--reference", "vanilla", "--draws", "200")
    assert len(result(capsys, *base, "--hold-out", "9e19")["hold_out"]) == 2
    (held,) = result(capsys, *base, "--hold-out", "grow:9e19")["hold_out"]
    assert held["arm"] == "grow"
    assert held["interval"][0] < held["observed"] < held["interval"][1]
    later = write(tmp_path, ["grow,1.225e21,2.45"], name="later.csv")
    (held,) = result(capsys, *base, "--hold-out", later)["hold_out"]
    assert held["decades_beyond"] == pytest.approx(np.log10(1.225e21 / 1.01e20), abs=1e-3)
    assert "held out" in run(capsys, *base, "--hold-out", later)[1]
    same = write(tmp_path, lines()[-1:], name="same.csv")
    by_file, by_compute = (result(capsys, *base, "--hold-out", hold) for hold in (same, "grow:1e20"))
    assert by_file["hold_out"][0]["forecast"] == by_compute["hold_out"][0]["forecast"]
    holds = ("vanilla:1e20", "4e19", later)
    union = result(capsys, *base, *(word for hold in holds for word in ("--hold-out", hold)))["hold_out"]
    assert [(one["arm"], round(one["flops"] / 1e19)) for one in union] == [
        ("vanilla", 4), ("vanilla", 10), ("grow", 4), ("grow", 10), ("grow", 122)
    ]  # fmt: skip
    whole = write(tmp_path, lines()[8:], name="whole.csv")
    code, _, err = run(capsys, *base, "--hold-out", whole)
    assert code == 2
    assert "'grow' is held out but not fitted" in err


def test_hold_out_table_is_read_as_the_fitted_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its noise is that of its own column, its columns have the names of --columns."""
    fitted = write(tmp_path, [f"{row},0.001" for row in lines()], header="arm,flops,my_loss,loss_sd")
    base = ("fit", fitted, "--reference", "vanilla", "--draws", "100", "--method", "joint")
    held = [
        result(capsys, *base, "--columns", "loss=my_loss", "--hold-out", later)["hold_out"][0]
        for later in (
            write(tmp_path, ["grow,1.225e21,2.45,0.001"], name="a.csv", header="arm,flops,my_loss,loss_sd"),
            write(tmp_path, ["grow,1.225e21,2.45,0.02"], name="b.csv", header="arm,flops,loss,loss_sd"),
        )
    ]
    assert held[0]["forecast"] == held[1]["forecast"]
    variance = [(one["error"] / one["error_in_standard_errors"]) ** 2 for one in held]
    assert variance[1] - variance[0] == pytest.approx(0.02**2 - 0.001**2)


def test_hold_out_table_takes_a_seed_of_a_rung_out_of_the_fit(tmp_path: Path) -> None:
    rows = [row.split(",") for row in lines()]
    runs = [f"{arm},{float(flops) * factor:.6g},{loss}" for arm, flops, loss in rows for factor in (1, 1.004)]
    table = read_table(write(tmp_path, runs))
    fitted, held = hold_out_rungs(table, [write(tmp_path, runs[-1:], name="held.csv")])
    assert [len(fitted[arm].flops) for arm in ("vanilla", "grow")] == [8, 7]
    assert len(held["grow"].flops) == 1


def test_repeats_need_a_seed_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"{arm},{flops},{float(loss) + (-1) ** seed * 0.001 * (i % 3 + 1)},{seed}"
        for seed in (0, 1)
        for i, (arm, flops, loss) in enumerate(row.split(",") for row in lines())
    ]
    path = write(tmp_path, rows, header=HEADER + ",seed")
    data = result(capsys, "fit", path, "--reference", "vanilla", "--draws", "200")
    assert all(0.001 < sd < 0.005 for _, sd in data["seed_noise"])


def test_chinchilla_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 3e11, 7)))
    loss = 1.82 + 480 / n**0.347 + 2100 / d**0.366
    rows = [f"{a},{b},{c}" for a, b, c in zip(n, d, loss, strict=True)]
    path = write(tmp_path, rows, header="parameters,tokens,loss")
    words = ("fit", path, "--law", "chinchilla", "--budget", "1e21", "--hold-out", "1e22", "--draws", "100")
    data = result(capsys, *words)
    assert {"e", "a", "b", "alpha", "beta", "objective", "starts_at_optimum"} <= set(data)
    assert data["alpha"] == pytest.approx(0.347, abs=1e-3)
    assert abs(data["hold_out"][0]["error"]) < 1e-3
    assert 6 * data["optimum"]["parameters"] * data["optimum"]["tokens"] == pytest.approx(1e21)
    figure = tmp_path / "fit.png"
    code, out, _ = run(capsys, *words, "--figure", str(figure))
    assert code == 0
    assert "N* ∝" in out
    assert figure.stat().st_size > 10_000
    path, later = (
        write(tmp_path, part, header="parameters,tokens,my_loss", name=f"{len(part)}.csv")
        for part in (rows[:-1], rows[-1:])
    )
    words = ("fit", path, "--law", "chinchilla", "--draws", "100", "--columns", "loss=my_loss")
    (held,) = result(capsys, *words, "--hold-out", later)["hold_out"]
    assert held["observed"] == pytest.approx(loss[-1])


def test_chinchilla_laws_of_two_arms_are_compared_and_hold_outs_named_by_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 3e11, 6)))
    rng = np.random.default_rng(0)
    rows = []
    for arm, alpha in (("vanilla", 0.34), ("grow", 0.36)):
        loss = (1.82 + 480 / n**alpha + 2100 / d**0.366) * np.exp(1e-4 * rng.standard_normal(len(n)))
        rows += [f"{arm},{a},{b},{c}" for a, b, c in zip(n, d, loss, strict=True)]
    path = write(tmp_path, rows, header="arm,N,D,loss")
    words = ("fit", path, "--law", "chinchilla", "--reference", "vanilla", "--draws", "100")
    data = result(capsys, *words, "--hold-out", "grow:1e22", "--delta", "1e-2")
    assert data["arms"]["vanilla"]["hold_out"] == []
    held = data["arms"]["grow"]["hold_out"]
    assert held and all(run["interval"][0] < run["forecast"] < run["interval"][1] for run in held)
    assert data["arms"]["grow"]["settings"]["delta"] == 1e-2
    found = data["comparisons"]["grow"]
    assert found["growth"] > 1 and found["p_growth"] < 1e-6 and found["p_exponents"] < 1e-6
    assert found["multiplier"]["value"] > 1 and found["pairs"] == 36 - len(held)
    text = " ".join(run(capsys, *words)[1].split())
    assert "grow against vanilla: better, and the gain grows with compute" in text
    assert "one α and β (p = " in text and "rejected" in text
    code, _, err = run(capsys, *words, "--hold-out", "grown:1e22")
    assert code == 2 and "there is no arm 'grown'" in err
    code, _, err = run(capsys, "fit", path, "--law", "chinchilla", "--reference", "vanila")
    assert code == 2 and "did you mean vanilla" in err


def test_isoflop_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for arm, power in (("vanilla", 0.5), ("grow", 0.55)):
        for budget in np.geomspace(1e18, 1e20, 5):
            for factor in (0.25, 0.5, 1, 2, 4):
                rows.append(
                    f"{arm},{budget},{budget**power * factor},{3 * np.exp(0.02 * np.log(factor) ** 2)}"
                )
    path = write(tmp_path, rows, header="arm,budget,x,loss")
    words = ("fit", path, "--law", "isoflop", "--budget", "1e22", "--hold-out", "1e20")
    data = result(capsys, *words)
    assert data["arms"]["grow"]["exponent"] == pytest.approx(0.55)
    assert data["arms"]["vanilla"]["at"]["x"] == pytest.approx(1e11)
    assert data["arms"]["vanilla"]["hold_out"][0]["x"] == pytest.approx(1e10)
    figure = tmp_path / "fit.svg"
    assert run(capsys, *words, "--figure", str(figure))[0] == 0
    assert figure.stat().st_size > 10_000
    assert run(capsys, "fit", path, "--law", "isoflop", "--objective", "huber")[0] == 2


def test_compute_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "fit.pdf"
    words = (
        "--reference",
        "vanilla",
        "--draws",
        "200",
        "--figure",
        str(figure),
        "--extrapolate",
        "--budget",
        "1e25",
    )
    code, out, _ = run(capsys, "fit", write(tmp_path, lines()), *words)
    assert code == 0
    assert str(figure.name) in out.replace("\n", "")
    assert figure.read_bytes().startswith(b"%PDF")


def test_power_prints_probabilities_and_the_cheapest_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    data = result(capsys, "power", "--delta-gamma", "0.0055", "--draws", "100", "--noise", "3e-3")
    assert data["growth"] > 0.8
    assert sum(data["growth_fractions"].values()) == pytest.approx(1)
    assert sum(data["better_fractions"].values()) == pytest.approx(1) and data["better"] > 0.9
    assert data["growth"] == data["growth_fractions"]["grows"]
    for target, least in (("growth", "growth"), ("exponent", "exponent")):
        option = data["cheapest"][target]
        assert option["power"][least] >= 0.9
        assert option["cost_flops"] == pytest.approx(option["power"]["cost_flops"])
    assert (
        data["cheapest"]["growth"]["cost_flops"]
        < data["cost_flops"]
        < data["cheapest"]["exponent"]["cost_flops"]
    )
    code, out, _ = run(
        capsys, "power", "--delta-gamma", "0.0055", "--span", "2", "--no-search", "--draws", "100"
    )
    assert code == 0
    assert "2.00 decades" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--delta-gamma", "0.005", "--rungs", "2"], "rungs"),
        (["--delta-gamma", "0.005", "--noise", "0"], "noise"),
        (["--delta-gamma", "-0.5"], "delta_gamma"),
        (["--delta-gamma", "0.005", "--highest", "1e20", "--span", "2"], "--span"),
        (["--delta-gamma", "0.005", "--goal", "1.2"], "goal"),
        ([], "delta-gamma"),
    ],
)
def test_wrong_plan_exits_2(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    code, _, err = run(capsys, "power", *words, "--draws", "100")
    assert code == 2
    assert expected in err


@pytest.mark.parametrize("law", ["isoflop", "chinchilla"])
def test_duplicate_run_is_rejected_without_a_seed_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], law: str
) -> None:
    rows = [
        f"{c:g},{x:g},{2 + 400 / x**0.34 + 400 / c**0.34:.6f}"
        for c in (1e9, 3e9, 1e10)
        for x in (1e8, 2e8, 4e8, 8e8)
    ]
    header = "budget,x,loss" if law == "isoflop" else "parameters,tokens,loss"
    words = ("--law", law, "--draws", "100")
    code, _, err = run(capsys, "fit", write(tmp_path, [*rows, rows[1]], header), *words)
    assert code == 2
    assert "line 14" in err
    assert "already at line 3" in err
    seeded = [f"{row},0" for row in rows] + [f"{rows[1]},1"]
    assert run(capsys, "fit", write(tmp_path, seeded, f"{header},seed"), *words)[0] == 0


@pytest.mark.parametrize("words", [("--reference", "vanilla"), ("--law", "chinchilla")])
def test_holding_every_run_out_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    rows = [f"{line},{10 ** (8 + i / 10)},{10 ** (9 + i / 7)}" for i, line in enumerate(lines())]
    path = write(tmp_path, rows, HEADER + ",parameters,tokens")
    code, _, err = run(capsys, "fit", path, *words, "--hold-out", "1e17")
    assert code == 2
    assert "held out" in err
    assert "left to fit" in " ".join(err.split())


def test_column_names_are_case_insensitive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--reference", "vanilla", "--draws", "100")
    upper = result(capsys, "fit", write(tmp_path, lines(), "Arm,FLOPs,LOSS"), *words)
    assert upper["arms"] == result(capsys, "fit", write(tmp_path, lines()), *words)["arms"]
    doubled = [f"{line},1" for line in lines()]
    code, _, err = run(capsys, "fit", write(tmp_path, doubled, "arm,FLOPs,loss,Flops"), *words)
    assert code == 2
    assert "each of which could be flops" in " ".join(err.split())


def test_single_arm_needs_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [line for line in lines() if line.split(",")[0] in ("arm", "vanilla")]
    code, out, _ = run(capsys, "fit", write(tmp_path, one), "--draws", "200")
    assert code == 0 and "vanilla" in out


def test_power_of_a_table_lists_the_further_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(3)
    flops = np.geomspace(1e18, 3e19, 5)
    rows = ["arm,flops,seed,loss"] + [
        f"{arm},{c:.6g},0,{1.8 + a * (c / 1e18) ** -0.11 + 0.004 * rng.standard_normal():.6f}"
        for arm, a in (("base", 1.5), ("mine", 1.46))
        for c in flops.tolist()
    ]
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    found: Any = steepen.power(table=tmp_path / "runs.csv", reference="base", draws=200)
    plan = found.power.plan
    assert (plan.rungs, plan.seeds, plan.lowest) == (5, 1, pytest.approx(1e18))
    further = found.further
    assert further.question == "better" and further.path and further.path[-1].paid > 0
    assert {step.offer.arm for step in further.path} == {"base", "mine"}
    part: Any = steepen.power(
        table=tmp_path / "runs.csv", reference="base", where=("flops < 2e19",), draws=200
    )
    assert part.power.plan.rungs == 4
    words = ["power", "--from", str(tmp_path / "runs.csv"), "--reference", "base", "--draws", "200"]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "further runs" in printed and "to show that the arm is better or worse" in printed.replace(
        "that would show", "to show"
    )
    assert main(["power"]) == 2
    assert "--delta-gamma, or a --from" in capsys.readouterr().err


def test_power_of_a_table_has_the_noise_of_every_rung_and_its_gain() -> None:
    """Seeds that scatter ten times as much at the bottom, and a gain that is the mean over the range."""
    rng = np.random.default_rng(4)
    noise = dict(
        zip(np.geomspace(1e18, 3e19, 6).tolist(), np.geomspace(0.03, 0.003, 6).tolist(), strict=True)
    )
    rows = [
        {"arm": arm, "flops": c, "seed": seed, "loss": 1.8 + a * (c / 1e18) ** -0.11 + sd * draw}
        for arm, a in (("base", 1.5), ("mine", 1.46))
        for c, sd in noise.items()
        for seed, draw in enumerate(rng.standard_normal(4).tolist())
    ]
    found: Any = steepen.power(table=rows, reference="base", delta_gamma=0.02, draws=200)
    low, *_, high = found.power.plan.run_noise.tolist()
    assert low == pytest.approx(0.03, rel=0.7) and high == pytest.approx(0.003, rel=0.7) and low > 3 * high
    plan, laws = found.power.plan, found.power.plan.laws()
    x = np.linspace(plan.x[0], plan.x[-1], 50)
    log_multiplier = (laws.log_a[0, 0] - laws.gamma[0, 0] * x - laws.log_a[0, 1]) / laws.gamma[0, 1] + x
    fitted: Any = steepen.fit(rows, reference="base", method="joint", draws=100)
    assert math.exp(float(log_multiplier.mean())) == pytest.approx(fitted["mine"].gain.value, rel=0.02)
