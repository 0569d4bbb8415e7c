"""What a rank of several does in a step besides forward and backward: measured on one GPU, scaled to others.

One H200 ran steps of the rank whose matrices cost Muon most, with collectives that move nothing, and the same
forward and backward alone (vanilla, the recipe's batch of 524,288 tokens; 2026-11-19, docs/performance.md):

    python benchmarks/rank_work.py --depths 12 20 26 --ranks 8 16
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from steepen.recipe.accelerators import ACCELERATORS

PEAK_FLOPS = ACCELERATORS["h200"].peak_flops  # others are taken to be as much faster or slower as their peaks


@dataclass(frozen=True)
class RankStep:
    """A measured step; times in milliseconds."""

    depth: int
    ranks: int
    parameters: float
    cost: float  # of what the rank owns, by `distributed.owners.orthogonalization_cost`
    step: float
    compute: float  # forward and backward alone
    muon: float


MEASURED = (
    RankStep(12, 8, 494_272_512, 3.382e11, 340.7, 316.7, 2.853),
    RankStep(12, 16, 494_272_512, 1.788e11, 163.6, 164.6, 1.742),
    RankStep(20, 8, 1_843_527_680, 2.624e12, 1233.0, 1211.0, 16.55),
    RankStep(20, 16, 1_843_527_680, 1.349e12, 613.4, 607.8, 8.747),
    RankStep(26, 8, 3_812_556_800, 7.553e12, 2503.0, 2452.0, 45.06),
    RankStep(26, 16, 3_812_556_800, 3.845e12, 1258.0, 1221.0, 23.41),
)


def rank_seconds(parameters: float, cost: float, peak_flops: float = PEAK_FLOPS) -> float:
    """Seconds of a step besides forward and backward, for a rank that owns matrices of this cost.

    Muon takes as long per unit of cost as in the measured row nearest to it. The rest (AdamW on rows, norms,
    copies into and out of buckets) grows with the parameters of the network, of which every rank has
    gradients and compute weights; it is smaller than the drift of a GPU's clock between two steps, so its
    rate is the median of all rows.
    """
    nearest = min(MEASURED, key=lambda row: abs(math.log(row.cost / max(cost, 1.0))))
    muon = nearest.muon * cost / nearest.cost
    rates = [(row.step - row.compute - row.muon) / row.parameters for row in MEASURED]
    return (muon + statistics.median(rates) * parameters) / 1e3 * PEAK_FLOPS / peak_flops
