"""`keep`: an honest answer to automatic searches, from seeds and rungs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.laws.keep import keep_change
from steepen.laws.ladder import make_ladder
from steepen.requests.app import main

SD = 0.003
SCALES = (1e18, 4e18)


def table(gains: dict[float, float], seeds: int = 3, seed: int = 0) -> dict[str, list[Any]]:
    """Runs of `base` and `mine`, whose loss is lower by the gain at each compute."""
    rng = np.random.default_rng(seed)
    rows = [
        (arm, flops, repeat, 3.0 * (flops / 1e18) ** -0.05 - gain * (arm == "mine") + SD * rng.normal())
        for flops, gain in gains.items()
        for arm in ("base", "mine")
        for repeat in range(seeds)
    ]
    return dict(zip(("arm", "flops", "seed", "loss"), map(list, zip(*rows, strict=True)), strict=True))


def answer(gains: dict[float, float], seeds: int = 3, seed: int = 0, **options: Any) -> Any:
    return steepen.keep(table(gains, seeds, seed), reference="base", **options).found


def test_a_gain_at_two_scales_is_kept_and_one_scale_asks_for_another() -> None:
    assert answer(dict.fromkeys(SCALES, 0.02)).answer == "yes"
    one = answer({1e18: 0.02})
    assert one.answer == "undecided"
    assert "Confirm at another scale: run both at 4e18 FLOPs with 3 seeds" in one.next_step
    gone = answer({1e18: 0.02, 4e18: -0.03})
    assert gone.answer == "no" and "worse at the largest scale" in gone.reason
    near = answer({1e18: 0.02, 1.2e18: 0.02})
    assert near.answer == "undecided"


def test_a_gain_within_the_noise_is_not_kept_and_says_what_would_resolve_it() -> None:
    unclear = answer(dict.fromkeys(SCALES, 0.004), seed=5)
    assert unclear.answer == "undecided" and "within the noise of seeds" in unclear.reason
    assert "seeds of each at 4e18 FLOPs would resolve a gain" in unclear.next_step
    single = answer(dict.fromkeys(SCALES, 0.02), seeds=1)
    assert single.answer == "undecided" and "nothing was repeated" in single.reason
    assert answer(dict.fromkeys(SCALES, 0.02), seeds=1, noise=SD).answer == "yes"
    shown = steepen.keep(table(dict.fromkeys(SCALES, 0.02), 1), reference="base").summary()
    assert "unknown" in shown and "inf" not in shown


def test_changes_tried_share_the_level() -> None:
    assert answer(dict.fromkeys(SCALES, 0.02)).level == 0.05
    assert answer(dict.fromkeys(SCALES, 0.02), tried=100_000).answer == "undecided"


def test_false_keeps_are_rarer_than_the_level() -> None:
    """Of changes without effect, and of those whose gain is gone at the larger scale."""
    rng = np.random.default_rng(1)

    def kept(gain: float) -> float:
        count = 0
        for _ in range(1000):
            ladders = {
                arm: make_ladder(
                    arm,
                    np.repeat(SCALES, 3),
                    np.repeat((3.0 - g, 2.9), 3) + SD * rng.standard_normal(6),
                )
                for arm, g in (("base", 0.0), ("mine", gain))
            }
            count += keep_change(ladders, "mine", "base").answer == "yes"
        return count / 1000

    assert kept(0.0) <= 0.005
    assert kept(0.03) <= 0.05


def test_long_ladders_are_judged_by_their_laws() -> None:
    flops = np.geomspace(1e18, 1e20, 6)
    found = answer(dict.fromkeys(flops.tolist(), 0.02))
    assert found.answer == "yes" and found.verdict.better == "better"
    assert answer(dict.fromkeys(flops.tolist(), 0.0), seeds=8).answer in ("no", "undecided")
    assert answer(dict.fromkeys(flops.tolist(), -0.02)).answer == "no"


def test_command_ends_with_its_exit_codes_and_follows_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    file = Path(steepen.__file__).parent / "results" / "assets" / "keep-1.schema.json"
    for gain, seeds, code in ((0.02, 3, 0), (-0.02, 3, 4), (0.02, 1, 3)):
        columns = table(dict.fromkeys(SCALES, gain), seeds)
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (tmp_path / "runs.csv").write_text("\n".join([",".join(columns), *lines]))
        words = ["keep", str(tmp_path / "runs.csv"), "--reference", "base"]
        assert main([*words, "--json"]) == code
        jsonschema.validate(json.loads(capsys.readouterr().out), json.loads(file.read_text()))
    assert main([*words, "--arm", "other"]) == 2
    with pytest.raises(UsageError, match="no runs at the same FLOPs"):
        steepen.keep({"arm": ["a", "b"], "flops": [1e18, 3e18], "loss": [3.0, 2.9]}, reference="a")
    with pytest.raises(UsageError, match="did you mean"):
        steepen.keep(table({1e18: 0.1}), reference="bas")
