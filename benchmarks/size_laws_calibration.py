"""Coverage of intervals and error rates of comparisons for laws in size and tokens, by simulation.

    python benchmarks/size_laws_calibration.py [draws] [processes]

The truth is L = 1.82 + 480/N^.347 + 2100/D^.366 on a grid of N and D (4 × 4: 1e8 to 1e9 parameters, 2e9 to
2e10 tokens; 6 × 6: 20 times wider), with a noise of 0.3% of the loss; cells of paired arms also share 0.6%.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from steepen.laws.fits.chinchilla import ChinchillaLoss, ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.isoflop import fit_isoflop
from steepen.laws.fits.isoflop_comparison import compare_sweeps
from steepen.laws.fits.size_law_comparison import ArmRuns, compare_laws
from steepen.laws.fits.size_law_solver import ModelSize

NOISE, SHARED = 3e-3, 6e-3
OBJECTIVES: tuple[ChinchillaLoss, ...] = ("huber", "log-mse")
TRUTH = {"e": 1.82, "alpha": 0.347, "beta": 0.366, "parameters_exponent": 0.366 / 0.713}


def law(n: np.ndarray, d: np.ndarray, m: np.ndarray | float = 1.0) -> np.ndarray:
    """The loss of an arm that needs m times fewer N·D."""
    return 1.82 + 480 / (n * np.sqrt(m)) ** 0.347 + 2100 / (d * np.sqrt(m)) ** 0.366


def cells(per_axis: int) -> tuple[np.ndarray, np.ndarray]:
    wide = 1.0 if per_axis == 4 else 20**0.5
    sizes = np.geomspace(1e8 / wide, 1e9 * wide, per_axis)
    n, d = np.meshgrid(sizes, np.geomspace(2e9 / wide, 2e10 * wide, per_axis))
    return n.ravel(), d.ravel()


def intervals(per_axis: int, loss: ChinchillaLoss, draws: int) -> str:
    rng = np.random.default_rng(0)
    n, d = cells(per_axis)
    inside = np.zeros(len(TRUTH))
    for _ in range(draws):
        y = law(n, d) * np.exp(NOISE * rng.standard_normal(len(n)))
        fit = fit_chinchilla(n, d, y, ChinchillaSettings(loss=loss, starts_per_axis=4))
        inside += [fit.intervals[k][0] < value < fit.intervals[k][1] for k, value in TRUTH.items()]
    return f"{f'{per_axis**2}, {loss}':<26}" + "".join(f"{one:9.3f}" for one in inside / draws)


def hold_out(name: str, draws: int) -> str:
    few = np.array([1e7, 8e7, 1.5e8, 4e8, 1e7])
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(2e7, 4e8, 6), np.geomspace(4e8, 8e9, 6)))
    parameters, tokens, settings = {
        "36, five constants, huber": (n, d, ChinchillaSettings(starts_per_axis=4)),
        "36, five constants, mse": (n, d, ChinchillaSettings(loss="mse", starts_per_axis=4)),
        "5, α = β, mse": (
            few,
            few * np.array([20, 20, 20, 20, 320]),
            ChinchillaSettings(loss="mse", tied=True, starts_per_axis=4),
        ),
    }[name]
    rng, inside = np.random.default_rng(5), 0
    for _ in range(draws):
        columns = np.append(parameters, 7e9), np.append(tokens, 1.4e11)
        y = 1.82 + 480 / columns[0] ** 0.347 + 1500 / columns[1] ** 0.347
        y *= np.exp(NOISE * rng.standard_normal(len(y)))
        low, high = fit_chinchilla(parameters, tokens, y[:-1], settings).forecast_interval(7e9, 1.4e11)[0]
        inside += bool(low < y[-1] < high)
    return f"{name:<26}{inside / draws:9.3f}"


def passes(draws: int) -> str:
    stored, k, tpp = (part.ravel() for part in np.meshgrid([3e7, 1e8, 4e8, 1e9], [1, 2, 4, 8], [5, 20, 80]))
    size, d = ModelSize(0.4 * stored, 0.6 * stored, np.log(k)), tpp * stored
    rng, inside = np.random.default_rng(1), 0
    for _ in range(draws):
        y = law(size.effective(0.5)[0], d) * np.exp(NOISE * rng.standard_normal(len(d)))
        low, high = fit_chinchilla(size, d, y, ChinchillaSettings(starts_per_axis=7)).intervals["phi"]
        inside += bool(low < 0.5 < high)
    return f"{'48 runs':<26}{inside / draws:9.3f}"


def comparison(per_axis: int, paired: bool, m: float, g: float, draws: int) -> str:
    rng, found = np.random.default_rng(2), np.zeros(4)
    n, d = cells(per_axis)
    for _ in range(draws):
        shared, runs = SHARED * rng.standard_normal(len(n)), list[ArmRuns]()
        for arm in (0, 1):
            own = (n, d) if paired or not arm else (n * 1.1, d * 0.95)
            c = own[0] * own[1] / np.exp(np.log(n * d).mean())
            y = law(*own, (m * c**g) ** arm) * np.exp(NOISE * rng.standard_normal(len(n)) + paired * shared)
            settings = ChinchillaSettings(loss="log-mse", starts_per_axis=3)
            runs.append(ArmRuns(*own, y, 6 * own[0] * own[1], fit_chinchilla(*own, y, settings)))
        one = compare_laws(runs[0], runs[1])
        (low, high), (slow, fast) = one.multiplier.interval, one.growth_interval
        truth = 10 ** (g / (1 + g))
        found += [one.multiplier.p < 0.05, low < m < high, one.p_growth < 0.05, slow < truth < fast]
    label = f"{per_axis**2} {'paired' if paired else 'unpaired'}, {m:g}, {g:g}"
    return f"{label:<26}" + "".join(f"{value:12.3f}" for value in found / draws)


def sweep(m: float, draws: int) -> str:
    budget = np.repeat(np.geomspace(1e19, 1e21, 4), 6)
    n = 0.1 * np.sqrt(budget) * np.tile(np.geomspace(0.4, 2.5, 6), 4)
    rng, found = np.random.default_rng(3), np.zeros(3)
    for _ in range(draws):
        losses = [law(n, budget / (6 * n), one) * np.exp(NOISE * rng.standard_normal(24)) for one in (1.0, m)]
        fits = [fit_isoflop(budget, n, y) for y in losses]
        one = compare_sweeps((fits[0], fits[1]), [(budget, n, y) for y in losses])
        assert one.multiplier is not None and one.growth is not None
        p = (one.multiplier.p, one.growth.p, one.budgets[0].optimum_ratio.p)
        found += [value < 0.05 for value in p]
    return f"{m:<26g}" + f"{found[0] / draws:12.3f}{found[1] / draws:12.3f}{found[2] / draws:24.3f}"


Rows = tuple[Callable[..., str], list[tuple[Any, ...]]]


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    constants = "".join(f"{name:>9}" for name in ("E", "α", "β", "N* exp."))
    tests = "".join(f"{name:>12}" for name in ("p(m) < .05", "m covered", "p(g) < .05", "g covered"))
    tables: dict[str, Rows] = {
        f"coverage of 90% intervals of one law\n{'runs, objective':<26}{constants}": (
            intervals, [(axis, loss) for axis in (6, 4) for loss in OBJECTIVES],
        ),
        "coverage of 90% intervals of a held-out run 17 times larger": (
            hold_out, [("36, five constants, huber",), ("36, five constants, mse",), ("5, α = β, mse",)],
        ),
        "coverage of 90% intervals of φ": (passes, [()]),
        "two arms with a multiplier of m·(C/C̄)^g: p < .05 and coverage of 90% intervals\n"
        f"{'cells, m, g':<26}{tests}": (comparison, [
            (4, True, 1.0, 0.0), (4, False, 1.0, 0.0), (6, True, 1.0, 0.0), (6, False, 1.0, 0.0),
            (4, True, 1.2, 0.0), (4, True, 1.2, -0.05), (6, True, 1.2, -0.05),
        ]),
        "iso-FLOP sweeps of two arms, 4 budgets × 6 sizes: p < .05\n"
        f"{'m':<26}{'multiplier':>12}{'growth':>12}{'optimum at one budget':>24}": (sweep, [(1.0,), (1.1,)]),
    }  # fmt: skip
    print(f"{draws} draws each")
    with ProcessPoolExecutor(jobs) as pool:
        rows = [
            (title, [pool.submit(row, *case, draws) for case in cases])
            for title, (row, cases) in tables.items()
        ]
        for title, found in rows:
            print(f"\n{title}")
            for one in found:
                print(one.result(), flush=True)


if __name__ == "__main__":
    main()
