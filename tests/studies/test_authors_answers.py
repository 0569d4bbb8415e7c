"""The authors' published runs, fed through the studies' own analysis, give the paper's conclusions."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steepen.studies.cells import Row
from steepen.studies.data_constrained import frontier_gap
from steepen.studies.design.allocation import fit_envelope
from steepen.studies.design.growth_target import choose
from steepen.utils.rows import Rows

Find = Callable[[str], Path]


def rows(find: Find, table: str) -> list[dict[str, str]]:
    with find(f"refdata/authors/{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_best_core_share_varies_little_with_depth(reference_data: Find) -> None:
    table = rows(reference_data, "block_allocation")
    depth, core, flops, loss = (
        np.array([float(row[name]) for row in table])
        for name in ("depth", "core_blocks", "matrix_flops", "val_loss")
    )
    found = fit_envelope(depth, flops, core / depth, loss)
    assert found.p_drift is not None and found.p_drift > 0.05
    shares = list(found.shares.values())
    assert len(shares) == 5 and max(shares) - min(shares) < 0.05


def test_four_passes_are_the_lowest_growth_target_at_every_budget(reference_data: Find) -> None:
    table = rows(reference_data, "growth_targets")
    losses = {
        (int(row["target_passes"]), float(row["mean_passes"])): float(row["val_loss"])
        for row in table
        if float(row["mean_passes"]) < int(row["target_passes"])
    }
    found = choose(losses, 1e-3)
    assert found.best == 4
    assert found.ties == (3,)  # measured at one budget only, and 0.0010 behind there
    for budget in {block for target, block in losses if target == 4}:
        own = {target: loss for (target, block), loss in losses.items() if block == budget}
        assert min(own, key=lambda target: own[target]) == 4


def test_retuned_decay_lowers_the_frontier_of_passes_by_at_most_two_hundredths(reference_data: Find) -> None:
    chosen = {6: 0.4, 8: 0.8, 10: 0.8, 12: 1.2, 14: 1.2, 16: 1.6, 18: 1.6}  # at one pass, by depth
    table = [row for row in rows(reference_data, "data_constrained_grid") if int(row["depth"]) in chosen]

    def cells(decay: Callable[[int], float]) -> Rows[Row]:
        return Rows(
            Row({"flops": float(r["matrix_flops"]), "loss": float(r["val_loss"])})
            for r in table
            if float(r["weight_decay"]) == decay(int(r["depth"]))
        )

    gap = frontier_gap(cells(lambda _: 0.8), cells(lambda depth: chosen[depth]))
    assert gap == pytest.approx(0.02, abs=0.005)
