"""A simulated project of 300 runs as people have them: four arms, two data sets, holes and divergences."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

ARMS = {  # log A and γ of each arm at C0 = 1e18; one E for each data set
    "Baseline": (math.log(1.5), 0.11),
    "Mamba hybrid": (math.log(1.5 * 1.25**-0.11), 0.11),  # a constant multiplier of 1.25
    "moe_8x": (math.log(1.45), 0.125),  # steeper
    "no-norm": (math.log(1.5), 0.11),  # the baseline
}
IRREDUCIBLE = {"c4": 1.8, "pile": 1.5}
SIZES = np.geomspace(30e6, 3e9, 12)
SEEDS = 3
NOISE = 0.004
RUNS = 300


def loss_of(arm: str, dataset: str, flops: float) -> float:
    """The true loss."""
    log_a, gamma = ARMS[arm]
    return IRREDUCIBLE[dataset] + math.exp(log_a) * (flops / 1e18) ** -gamma


def project(seed: int = 0) -> list[dict[str, Any]]:
    """The runs: settings as people write them, and a final loss (NaN where a run diverged early)."""
    rng = np.random.default_rng(seed)
    runs: list[dict[str, Any]] = []
    for dataset in IRREDUCIBLE:
        for arm in ARMS:
            for size in SIZES:
                for repeat in range(SEEDS):
                    tokens = 20 * size
                    loss = loss_of(arm, dataset, 6 * size * tokens) + NOISE * rng.standard_normal()
                    runs.append(
                        {
                            "model": arm, "dataset": dataset, "params": f"{size / 1e6:.6g}M",
                            "train_tokens": float(tokens), "compute": 6 * size * tokens, "seed": repeat,
                            "hours": 6 * size * tokens / 4e17, "val_loss": loss,
                        }
                    )  # fmt: skip
    # Repeats of the smallest rung fill the project up to its size.
    while len(runs) < RUNS:
        again = dict(runs[3 * len(SIZES) * (len(runs) % 8)])
        again |= {"seed": len(runs), "val_loss": again["val_loss"] + NOISE * rng.standard_normal()}
        runs.append(again)
    mess = rng.permutation(len(runs))
    for row in mess[:6]:
        runs[row]["val_loss"] *= 2.2  # diverged
    for row in mess[6:12]:
        runs[row]["val_loss"] = math.nan  # diverged to NaN
    for row in mess[12:22]:
        runs[row]["compute"] = None  # a hole
    for row in mess[22:30]:
        runs[row]["model"] = runs[row]["model"].upper()
    return runs


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(project()[0]))
        writer.writeheader()
        writer.writerows(project())
