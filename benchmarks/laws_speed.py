"""Every verdict of 8 and 40 arms of eight rungs, of 10,000 distinct rungs, and of 100,000 rows.

    python benchmarks/laws_speed.py

The machine may be busy, so a fixed amount of numpy work is timed too and the ratio is printed.
"""

from __future__ import annotations

import os
import resource
import time

import numpy as np

from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.fits.chinchilla import fit_chinchilla
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.power import LadderPlan, cheapest_ladder, simulate_power


def yardstick() -> float:
    """Seconds of a fixed batch of small solves and exponentials, the kind of work the fits do."""
    rng = np.random.default_rng(0)
    matrices, values = rng.standard_normal((20_000, 5, 5)) + 5 * np.eye(5), rng.standard_normal((20_000, 16))
    begun = time.perf_counter()
    for _ in range(5):
        np.linalg.solve(matrices, values[:, :5, None])
        np.exp(values).sum()
    return time.perf_counter() - begun


def cpu_seconds() -> float:
    """CPU seconds of this process and its finished children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> None:
    rng = np.random.default_rng(0)
    flops = np.geomspace(3.25e17, 1.01e20, 8)

    def arms(count: int) -> dict[str, Ladder]:
        laws = [(f"arm{i}", 1.5 - 0.16 * i / count, 0.111 + 0.0056 * i / count) for i in range(count)]
        return {
            name: make_ladder(
                name, flops, 1.83 + a * (flops / 1e18) ** -g + 1e-3 * rng.standard_normal(len(flops))
            )
            for name, a, g in laws
        }

    def judge(ladders: dict[str, Ladder]) -> object:
        return analyse(ladders, AnalysisRequest("arm0", draws=2000, budget=1e25))

    distinct = np.geomspace(1e12, 1e34, 5000)  # 2 arms × 5,000 rungs
    long = {
        name: make_ladder(
            name, distinct, 1.83 + a * (distinct / 1e18) ** -0.111 + 1e-3 * rng.standard_normal(5000)
        )
        for name, a in (("arm0", 1.5), ("arm1", 1.4))
    }

    many = np.repeat(flops, 6250)  # 2 arms × 8 rungs × 6,250 seeds
    rows = {
        name: make_ladder(
            name, many, 1.83 + a * (many / 1e18) ** -0.111 + 1e-3 * rng.standard_normal(len(many))
        )
        for name, a in (("arm0", 1.5), ("arm1", 1.4))
    }
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 16), np.geomspace(1e9, 3e11, 15)))
    loss = (1.82 + 480 / n**0.347 + 2100 / d**0.366) * np.exp(0.005 * rng.standard_normal(240))
    unit = yardstick()
    jobs = {
        "eight arms, 2,000 draws, all verdicts": lambda: judge(arms(8)),
        "40 arms": lambda: judge(arms(40)),
        "10,000 distinct rungs, two arms": lambda: judge(long),
        "100,000 rows, two arms": lambda: judge(rows),
        "chinchilla, 240 points, 144 starts": lambda: fit_chinchilla(n, d, loss),
        "power, 1,000 simulated pairs": lambda: simulate_power(LadderPlan(0.0027)),
        "power, search for the cheapest ladder": lambda: cheapest_ladder(LadderPlan(0.0027), "growth"),
    }
    for name, job in jobs.items():
        begun, busy = time.perf_counter(), cpu_seconds()
        job()
        took, worked = time.perf_counter() - begun, cpu_seconds() - busy
        print(
            f"{name:<50} {took:6.2f} s, {worked:5.2f} s of CPU   {took / unit:.1f} yardsticks ({unit:.3f} s)"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
