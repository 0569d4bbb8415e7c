"""What the ladder's answers would be with other losses: at other rates or tokens per parameter.

    PYTHONPATH=src:tools python results/narrow/sensitivity.py

Prints the optima of the sweeps of tokens per parameter (`around`, `tpp`), with 90% intervals by redrawing
losses with the noise of their depths; losses by ρ; losses and noise by batch; and answers with other losses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paper_claims import LADDER, fit_table, noise_at, noise_by_depth, tokens_per_parameter
from publish_results import read_rows

from steepen import fit
from steepen.utils.arrays import Array

Row = Mapping[str, str]
DRAWS = 2000
RUNG = 6  # the rung that `around` is about
TPP = 5.0  # of Vanilla's recipe


def vertex(x: Array, y: Array, at: float) -> tuple[float, float]:
    """The minimum of the parabola through three points, and how far it lies below the parabola at `at`."""
    curve, slope, _ = np.polyfit(x, y, 2)
    best = -slope / (2 * curve)
    return float(best), float(curve * (at - best) ** 2)


def best_tokens(name: str, points: Iterable[tuple[float, float, float]], at: float) -> float:
    """How far the loss at `at` is above the minimum over (tokens per parameter, loss, noise); prints both."""
    tokens, loss, noise = np.array(sorted(points)).T
    x, generator = np.log(tokens), np.random.default_rng(0)
    best, above = vertex(x, loss, math.log(at))
    drawn = np.array(
        [vertex(x, loss + noise * generator.standard_normal(3), math.log(at)) for _ in range(DRAWS)]
    )
    (low, under), (high, over) = np.quantile(drawn, [0.05, 0.95], axis=0)
    told = ", ".join(f"{one:.4f} at {count:.1f}" for count, one in zip(tokens, loss, strict=True))
    print(
        f"{name}: {told}; optimum {math.exp(best):.1f} "
        f"(90% {math.exp(low):.1f} to {math.exp(high):.1f}), at {at:.1f} above it by {above:.4f} "
        f"({under:.4f} to {over:.4f})"
    )
    return above


def mean_loss(rows: Iterable[Row]) -> float:
    """The mean loss of rows."""
    return statistics.fmean(float(row["loss"]) for row in rows)


def sweeps(
    rows: list[Row], ladder: list[Row], noise: Mapping[int, float]
) -> tuple[dict[str, float], dict[float, float]]:
    """Print the optima; returns how far losses are above them: of arms at the rung, of Vanilla by FLOPs."""
    excess: dict[str, float] = {}
    around = [row for row in rows if row["study"] == "around"]
    for arm in dict.fromkeys(row["arm"] for row in around):
        own = [row for row in ladder if row["arm"] == arm and int(row["depth"]) == RUNG]
        beside = [row for row in around if row["arm"] == arm]
        at = tokens_per_parameter(own[0])
        points = [(at, mean_loss(own), noise_at(noise, RUNG) / math.sqrt(len(own)))]
        points += [
            (tokens_per_parameter(row), float(row["loss"]), noise_at(noise, int(row["depth"])))
            for row in beside if int(row["depth"]) != RUNG
        ]  # fmt: skip
        excess[arm] = best_tokens(f"{arm} d{RUNG}", points, at)
        rho = [(float(row["rho"]), float(row["loss"])) for row in beside if int(row["depth"]) == RUNG]
        if rho:
            triple = sorted([*rho, (2 * min(rho)[0], mean_loss(own))])  # the lowest is half the recipe's
            print(f"    ρ: {', '.join(f'{loss:.4f} at {share:.3f}' for share, loss in triple)}")
    vanillas: dict[float, float] = {}
    budgets: dict[float, list[Row]] = {}
    for row in rows:
        if row["study"] == "tpp":
            budgets.setdefault(float(f"{float(row['flops']):.1e}"), []).append(row)
    for flops, own in sorted(budgets.items()):
        points = [
            (tokens_per_parameter(row), float(row["loss"]), noise_at(noise, int(row["depth"]))) for row in own
        ]
        vanillas[flops] = best_tokens(f"vanilla at {flops:.1e} FLOPs", points, TPP)
    return excess, vanillas


def batches(rows: list[Row], noise: Mapping[int, float]) -> None:
    """Print the best loss and the noise by depth of each batch."""
    for size in (4096, 16384):
        groups: dict[tuple[int, str], list[float]] = {}
        for row in rows:
            if row["study"].startswith(f"shape-batch-{size}"):
                groups.setdefault((int(row["depth"]), row["learning_rate"]), []).append(float(row["loss"]))
        said: list[str] = []
        for depth in sorted({depth for depth, _ in groups}):
            own = [losses for (one, _), losses in groups.items() if one == depth]
            pairs = [statistics.variance(losses) for losses in own if len(losses) > 1]
            spread = f", SD {math.sqrt(statistics.fmean(pairs)):.4f}" if pairs else ""
            said.append(f"d{depth} {min(map(statistics.fmean, own)):.4f}{spread}")
        print(f"{size} tokens a step: {'; '.join(said)}")
    print(f"8192 tokens a step: SD {', '.join(f'd{d} {sd:.4f}' for d, sd in sorted(noise.items()))}")


def answers(name: str, ladder: list[Row], excess: Callable[[dict[str, Any]], float]) -> None:
    """Print the words for every arm where `excess` is taken off the losses."""
    table = fit_table(ladder)
    for row in table:
        row["loss"] -= excess(row)
    found = fit(table, reference="vanilla", method="joint", draws=100).to_rows()
    words = (
        f"{row['arm']} {row['better']} {row['multiplier']:.2f}, {row['growth']} "
        f"×{row['growth_per_decade']:.3f} (p = {row['p_growth']:.2g})"
        for row in found if row["growth"]
    )  # fmt: skip
    print("\n  ".join((f"{name}:", *words)))


def main() -> None:
    """Print all of it."""
    rows: list[Row] = [*read_rows(Path(__file__).parent / "runs.csv")]
    ladder = [row for row in rows if row["study"].startswith(LADDER)]
    noise = noise_by_depth(rows)
    excess, vanillas = sweeps(rows, ladder, noise)
    batches(rows, noise)
    answers("as published", ladder, lambda row: 0.0)
    for lower in ({10: 0.004, 12: 0.004}, {9: 0.004, 10: 0.004, 12: 0.004}, {10: 0.0038, 12: 0.0105}):
        answers(
            f"Vanilla lower by {lower}", ladder,
            lambda row, lower=lower: lower.get(row["depth"], 0.0) * (row["arm"] == "vanilla"),
        )  # fmt: skip
    # d3 is in the lowest budget, far from its law. In between, Vanilla's excess is linear in log compute.
    known = dict(list(vanillas.items())[1:])
    slope, start = np.polyfit(np.log(list(known)), list(known.values()), 1)
    rung = next(float(row["flops"]) for row in ladder if (row["arm"], row["depth"]) == ("vanilla", str(RUNG)))
    constant = {**excess, "vanilla": float(start + slope * math.log(rung))}
    told = f"at the best tokens per parameter, Vanilla {constant['vanilla']:.4f}"
    answers(told, ladder, lambda row: constant[row["arm"]])

    def falling(row: dict[str, Any]) -> float:
        line = max(0.0, float(start + slope * math.log(row["flops"])))
        return line if row["arm"] == "vanilla" else excess[row["arm"]]

    answers("the same, Vanilla by the line through its budgets, at least 0", ladder, falling)


if __name__ == "__main__":
    main()
