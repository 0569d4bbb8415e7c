"""Eight arms × eight rungs, 2,000 bootstrap draws and every verdict: promised in under five seconds.

    python benchmarks/laws_speed.py

The machine may be busy, so a fixed amount of numpy work is timed too and the ratio is printed.
"""

from __future__ import annotations

import time

import numpy as np

from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.fits.chinchilla import fit_chinchilla
from steepen.laws.ladder import make_ladder
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


def main() -> None:
    rng = np.random.default_rng(0)
    flops = np.geomspace(3.25e17, 1.01e20, 8)
    ladders = {
        f"arm{i}": make_ladder(
            f"arm{i}",
            flops,
            1.83 + (1.5 - 0.02 * i) * (flops / 1e18) ** -(0.111 + 0.0007 * i) + 1e-3 * rng.standard_normal(8),
        )
        for i in range(8)
    }
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 16), np.geomspace(1e9, 3e11, 15)))
    loss = (1.82 + 480 / n**0.347 + 2100 / d**0.366) * np.exp(0.005 * rng.standard_normal(240))
    unit = yardstick()
    jobs = {
        "eight arms, 2,000 draws, all verdicts": lambda: analyse(
            ladders, AnalysisRequest("arm0", draws=2000, budget=1e25)
        ),
        "chinchilla, 240 points, 144 starts, 200 redraws": lambda: fit_chinchilla(n, d, loss),
        "power, 2,000 simulated ladders": lambda: simulate_power(LadderPlan(0.0027)),
        "power, search for the cheapest ladder": lambda: cheapest_ladder(LadderPlan(0.0027), "growth"),
    }
    for name, job in jobs.items():
        begun, busy = time.perf_counter(), time.process_time()
        job()
        took, worked = time.perf_counter() - begun, time.process_time() - busy
        print(
            f"{name:<50} {took:6.2f} s, {worked:5.2f} s of CPU   {took / unit:.1f} yardsticks ({unit:.3f} s)"
        )


if __name__ == "__main__":
    main()
