"""Tables for `law` chinchilla, looped and isoflop: the right answer, or one sentence that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.results.chinchilla import ChinchillaResult
from steepen.results.isoflop import IsoflopResult

Rows = dict[str, list[Any]]
GRID = list(product(np.geomspace(1e8, 2e9, 4).tolist(), np.geomspace(2e9, 4e10, 4).tolist()))


def law(n: float, d: float, m: float = 1.0) -> float:
    """A law whose arm needs m times fewer N·D."""
    return float(1.8 + 400 / (n * m**0.5) ** 0.34 + 1500 / (d * m**0.5) ** 0.36)


def table(
    cells: Sequence[tuple[float, float]] = GRID, arms: dict[str, float] | None = None, seed: int = 0
) -> Rows:
    rng = np.random.default_rng(seed)
    arms = arms or {"vanilla": 1.0}
    rows = [
        (arm, n, d, law(n, d, m) * float(np.exp(1e-3 * rng.standard_normal())))
        for arm, m in arms.items()
        for n, d in cells
    ]
    return {name: [row[i] for row in rows] for i, name in enumerate(("arm", "parameters", "tokens", "loss"))}


def join(*tables: Rows) -> Rows:
    return {name: [cell for one in tables for cell in one[name]] for name in tables[0]}


def chinchilla(rows: Rows, **options: Any) -> ChinchillaResult:
    result = steepen.fit(rows, law="chinchilla", **options)
    assert isinstance(result, ChinchillaResult)
    return result


def words(result: Any) -> str:
    return " ".join(str(result).split())


def test_arm_that_needs_more_compute_is_said_to_need_more() -> None:
    result = chinchilla(table(arms={"vanilla": 1.0, "slow": 1 / 2.4}), reference="vanilla")
    (one,) = result.table_fit.comparisons.values()
    assert one.multiplier.value == pytest.approx(1 / 2.4, rel=0.03)
    assert "slow against vanilla: worse" in words(result) and "× more compute" in words(result)
    assert "× less" not in words(result)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (table([(n, 20 * n) for n in np.geomspace(1e8, 4e9, 6)]), {}, "told apart; fit `law` compute"),
        (table([(1e9, d) for d in np.geomspace(1e9, 1e11, 8)]), {}, "parameters takes only one value"),
        (table(), {"hold_out": "1e30"}, "hold-out 1e30 matches no run"),
        (table(), {"hold_out": "grow:1e20"}, "there is no arm 'grow'"),
        (table(), {"reference": "vanila"}, "did you mean vanilla"),
        (table(GRID[:5]), {}, "the law has 5 parameters and the table 5 rows"),
        ({**table(), "loss": [None, *table()["loss"][1:]]}, {}, "row 1: loss is empty"),
        ({**table(), "loss": [-3.0, *table()["loss"][1:]]}, {}, "must be greater than zero"),
        (join(table(), table(GRID[:1])), {}, "is already at row 1"),
        ({name: cells for name, cells in table().items() if name != "tokens"}, {}, "has no column 'tokens'"),
    ],
)  # fmt: skip
def test_hostile_table_gets_one_sentence(rows: Rows, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as error:
        chinchilla(rows, **options)
    assert len(str(error.value)) < 300


def test_arm_with_one_size_is_left_out_and_the_others_are_fitted() -> None:
    single = table([(1e9, d) for _, d in GRID[:4]], {"single": 1.0})
    result = chinchilla(join(table(arms={"vanilla": 1.0, "fast": 1.3}), single), reference="vanilla")
    assert list(result.table_fit.arms) == ["vanilla", "fast"]
    assert any("arm 'single' is left out" in note for note in result.notes)
    assert result.table_fit.comparisons["fast"].multiplier.value == pytest.approx(1.3, rel=0.03)


def test_missing_cells_of_an_arm_leave_the_others_paired() -> None:
    rows = join(table(), table(GRID[2:-2], {"fast": 1.3}, seed=1))
    one = chinchilla(rows, reference="vanilla").table_fit.comparisons["fast"]
    assert one.pairs == 12 and one.multiplier.value == pytest.approx(1.3, rel=0.05)


def test_arms_at_different_compute_are_said_not_to_overlap() -> None:
    far = table([(30 * n, 30 * d) for n, d in GRID], {"far": 1.3}, seed=1)
    assert "do not overlap" in words(chinchilla(join(table(), far), reference="vanilla"))


def test_comparison_of_checkpoints_of_one_run_has_a_warning() -> None:
    cells = [(n, d) for n in np.geomspace(1e8, 2e9, 8).tolist() for d in np.geomspace(2e9, 4e10, 4).tolist()]
    rows = table(cells, {"vanilla": 1.0, "fast": 1.3})
    rows["run"] = [f"{arm}-{n}" for arm, n in zip(rows["arm"], rows["parameters"], strict=True)]
    assert any("share training runs" in note for note in chinchilla(rows, reference="vanilla").notes)


def test_perplexities_are_noticed() -> None:
    rows = table()
    rows["loss"] = [float(np.exp(loss)) for loss in rows["loss"]]
    with pytest.raises(UsageError, match="a perplexity"):
        chinchilla(rows)


def test_figures_show_every_arm(tmp_path: Path) -> None:
    result = chinchilla(table(arms={"vanilla": 1.0, "fast": 1.3}))
    residuals, *laws = result.panels()
    assert {series.arm for series in residuals.series} == {"vanilla", "fast"} and len(laws) == 2
    result.save_figure(tmp_path / "laws.svg")


def looped(rows: Rows, **options: Any) -> ChinchillaResult:
    result = steepen.fit(rows, law="looped", **options)
    assert isinstance(result, ChinchillaResult)
    return result


def test_looped_law_from_a_table_with_other_names(tmp_path: Path) -> None:
    rows = [
        {"params_once": 0.3 * n, "params_recurrent": 0.7 * n, "loops": k, "tokens": d,
         "val_loss": law(0.3 * n + k**0.5 * 0.7 * n, d)}
        for n, d in GRID for k in (1, 2, 4)
    ]  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    result = looped(columns)
    assert result.table_fit.first.fit.phi == pytest.approx(0.5, abs=1e-3)
    assert "φ" in [row.constant for row in result.rows] and "φ = 0.500" in result.headline()
    result.save_figure(tmp_path / "looped.svg")
    held = looped(columns, hold_out=2e20).table_fit.first.hold_out
    assert held and all(abs(run.error) < 1e-3 for run in held)
    with pytest.raises(UsageError, match="passes takes only one value"):
        looped(columns, where="loops=2")
    with pytest.raises(UsageError, match="must be parameter counts"):
        looped(columns | {"params_recurrent": [-1.0] * len(rows)})
    with pytest.raises(UsageError, match="leave `reference` out"):
        looped(columns, reference="x")


def test_parameters_of_a_looped_law_may_all_be_in_the_loop() -> None:
    rows = [(0.0, n, k, d, law(k**0.5 * n, d)) for n, d in GRID for k in (1, 2)]
    names = ("n_once", "n_rec", "passes", "tokens", "loss")
    columns: Rows = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    assert looped(columns, draws=100).table_fit.first.fit.phi == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(UsageError, match="row 1: n_once and n_rec must be parameter counts"):
        looped(columns | {"n_rec": [0.0, *columns["n_rec"][1:]]})


def sweeps(arms: dict[str, float], noise: float = 5e-4, seed: int = 0, per_sweep: int = 7) -> Rows:
    """Sweeps of N at four budgets for arms that need m times less compute."""
    rng = np.random.default_rng(seed)
    rows = [
        (arm, c, n, c / (6 * n), law(n, c / (6 * n), m) * float(np.exp(noise * rng.standard_normal())))
        for arm, m in arms.items()
        for c in np.geomspace(1e19, 1e21, 4).tolist()
        for n in (0.1 * c**0.5 * np.geomspace(0.4, 2.5, per_sweep)).tolist()
    ]
    names = ("arm", "flops", "params", "n_tokens", "loss")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def isoflop(rows: Rows, **options: Any) -> IsoflopResult:
    result = steepen.fit(rows, law="isoflop", **options)
    assert isinstance(result, IsoflopResult)
    return result


def test_sweeps_of_two_arms_are_compared_at_each_budget(tmp_path: Path) -> None:
    result = isoflop(sweeps({"vanilla": 1.0, "fast": 1.5}), reference="vanilla")
    one = result.table_fit.comparisons["fast"]
    assert len(one.budgets) == 4 and all(at.loss_difference.value < 0 for at in one.budgets)
    for at in one.budgets:
        assert at.multiplier is not None and at.multiplier.value == pytest.approx(1.5, rel=0.04)
    assert one.multiplier is not None and one.multiplier.value == pytest.approx(1.5, rel=0.05)
    assert one.multiplier.p < 0.01 and one.growth is not None and one.growth.p > 0.01
    assert "fast against vanilla: better. It needs 1.5" in words(result)
    assert result.table_fit.x_name == "parameters"
    axes = {panel.x.label for panel in result.panels()} | {panel.y.label for panel in result.panels()}
    assert {"parameters", "best parameters", "compute budget (FLOPs)", "loss"} == axes
    assert {series.arm for series in result.panels()[-2].series} == {"vanilla", "fast"}
    result.save_figure(tmp_path / "sweeps.svg")


def test_comparison_of_sweeps_is_calibrated() -> None:
    p = list[float]()
    for seed in range(40):
        found = isoflop(sweeps({"a": 1.0, "b": 1.0}, 2e-3, seed, 6), reference="a").table_fit.comparisons["b"]
        assert found.multiplier is not None
        p += [found.multiplier.p, found.budgets[0].optimum_ratio.p]
    assert np.mean(np.array(p[::2]) < 0.10) < 0.3 and np.mean(np.array(p[1::2]) < 0.10) < 0.3  # nominal 0.10


def test_sweeps_in_tokens_may_repeat_an_x() -> None:
    rows = sweeps({"vanilla": 1.0})
    rows["n_tokens"] = [float(f"{value:.1e}") for value in rows["n_tokens"]]
    rows["n_tokens"][1] = rows["n_tokens"][0]
    result = isoflop(rows, columns={"x": "n_tokens"})
    assert result.table_fit.x_name == "tokens" and "best tokens" in words(result)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (sweeps({"a": 1.0, "b": 1.0}), {"reference": "c"}, "is not among the arms"),
        (sweeps({"a": 1.0, "b": 1.0}), {"reference": "a", "vertex": "akima"}, "no standard error"),
        (sweeps({"a": 1.0}), {"hold_out": "1e30"}, "matches no run"),
        ({**sweeps({"a": 1.0}), "params": [1e9] * 28}, {}, "no budget has three different x"),
        (sweeps({"a": 1.0, "b": 1.0}, per_sweep=3), {"reference": "a"}, "nothing to estimate noise from"),
        ({"flops": [1e19] * 4, "loss": [3.0] * 4}, {}, "has no column 'x'"),
    ],
)  # fmt: skip
def test_hostile_sweeps_get_one_sentence(rows: Rows, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        isoflop(rows, **options)
