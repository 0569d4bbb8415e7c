"""`steepen forecast table.csv`: compute → loss → accuracy by three chains, and hold-outs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.laws.downstream_table import Chain, forecast_table, resample_residuals
from steepen.requests.app import main
from steepen.tables.table import Table, table_from

FLOPS = np.geomspace(1e18, 1e21, 10)


def loss_at(flops: np.ndarray, gamma: float = 0.1) -> np.ndarray:
    return 1.7 + 1.6 * (flops / 1e18) ** -gamma


LINKS = {
    "gadre": lambda loss: 0.2 + 9.0 * np.exp(-1.5 * loss),
    "olmo": lambda loss: 0.25 + 0.6 / (1 + np.exp(4 * (loss - 2.5))),
    "paper": lambda loss: 1 / (1 + np.exp(2.0 * loss - 5.0)),
}


def table(chain: str, *, noise: float = 0.0, error: bool = False) -> Table:
    rng = np.random.default_rng(0)
    arms, flops, loss = [], [], []
    for arm, gamma in (("vanilla", 0.1), ("grow", 0.12)):
        arms += [arm] * len(FLOPS)
        flops += FLOPS.tolist()
        loss += (loss_at(FLOPS, gamma) + noise * rng.standard_normal(len(FLOPS))).tolist()
    accuracy = LINKS[chain](np.array(loss)) + noise * rng.standard_normal(len(loss))
    score = {"error": (1 - accuracy).tolist()} if error else {"accuracy": accuracy.tolist()}
    return table_from({"arm": arms, "flops": flops, "loss": loss, **score})


@pytest.mark.parametrize("chain", list(LINKS))
def test_chain_recovers_its_own_truth_beyond_the_data(chain: Chain) -> None:
    found = forecast_table(table(chain), chain, targets=[1e23])
    truth = [float(LINKS[chain](loss_at(np.array(1e23), gamma))) for gamma in (0.1, 0.12)]
    assert [one.accuracy for one in found.targets] == pytest.approx(truth, abs=2e-3)
    assert [one.arm for one in found.hold_out] == ["vanilla", "grow"]
    assert all(abs(one.error or 0) < 1e-3 for one in found.hold_out)


@pytest.mark.parametrize("error", [False, True])
def test_a_task_may_be_solved_or_failed_entirely_but_scores_are_fractions(error: bool) -> None:
    name = "error" if error else "accuracy"
    plain = table("olmo", error=error)

    def with_first(score: float) -> Table:
        columns = {key: list(cells) for key, cells in plain.columns.items()}
        columns[name][0] = score
        return table_from(columns)

    assert forecast_table(with_first(1.0), "direct").hold_out
    with pytest.raises(UsageError, match="fractions, not percent"):
        forecast_table(with_first(1.01), "direct")


def test_rows_of_one_run_are_resampled_together() -> None:
    residuals, rng = np.arange(1.0, 7.0), np.random.default_rng(0)
    signs = resample_residuals(residuals, np.array([0, 0, 0, 1, 1, 1]), 50, rng) / residuals
    assert (signs[:, :3] == signs[:, :1]).all() and (signs[:, 3:] == signs[:, 3:4]).all()
    assert set(np.unique(signs)) == {-1.0, 1.0} and (signs[:, 0] != signs[:, 3]).any()


def test_run_column_of_a_forecast_table_is_used() -> None:
    plain = table("gadre", noise=2e-3)
    shared = table_from({**plain.columns, "run": [f"run{i // 5}" for i in range(20)]})
    intervals = [
        forecast_table(part, targets=[1e22], hold_out=["none"]).targets[0].interval
        for part in (plain, shared)
    ]
    assert intervals[0] != intervals[1]


def test_intervals_hold_the_truth_and_errors_mirror_accuracies() -> None:
    found, mirrored = (
        forecast_table(table("gadre", noise=2e-3, error=error), targets=[1e22], hold_out=["none"])
        for error in (False, True)
    )
    for one, gamma in zip(found.targets, (0.1, 0.12), strict=True):
        low, high = one.interval
        assert low < float(LINKS["gadre"](loss_at(np.array(1e22), gamma))) < high
        assert high - low > 4e-3  # more than the noise of a run
    assert found.hold_out == () and mirrored.is_error
    assert [a.accuracy for a in mirrored.targets] == pytest.approx([a.accuracy for a in found.targets])


def test_without_flops_targets_are_losses_and_without_loss_the_error_has_a_law() -> None:
    whole = table("olmo")
    by_loss = table_from({name: whole.columns[name] for name in ("loss", "accuracy")})
    found = forecast_table(by_loss, "olmo", targets=[2.0])
    assert found.by_loss and found.laws == {}
    assert found.targets[0].accuracy == pytest.approx(float(LINKS["olmo"](2.0)), abs=2e-3)
    error = 0.1 + 0.6 * (FLOPS / 1e18) ** -0.2
    direct = forecast_table(table_from({"C": FLOPS.tolist(), "error": error.tolist()}), targets=[1e23])
    assert direct.chain == "direct"
    assert direct.targets[0].accuracy == pytest.approx(0.9 - 0.6 * 1e5**-0.2, abs=1e-3)


def test_forecast_command_reads_the_papers_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["forecast", "paper:fineweb-edu", "--columns", "loss=answer_nll,accuracy=core_accuracy"]
    assert main([*words, "--chain", "olmo", "--hold-out", "untied-grow:1e21", "--json"]) == 0
    (held,) = json.loads(capsys.readouterr().out)["hold_out"]
    assert held["observed"] == pytest.approx(0.3865, abs=1e-4)
    assert held["interval"][0] < held["observed"] < held["interval"][1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chain", "cubic"], "'gadre', 'olmo', 'paper', 'direct'"),
        (["--hold-out", "grown:1e20"], "did you mean grow"),
        (["--hold-out", "1"], "every run is held out"),
        (["--columns", "accuracy=flops"], "fractions"),
        (["--where", "arm=none"], "no row"),
        (["--figure", "x.png"], "nothing to draw"),
    ],
)
def test_wrong_request_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({name: list(cells) for name, cells in table("olmo").columns.items()}))
    assert main(["forecast", str(path), *words]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
