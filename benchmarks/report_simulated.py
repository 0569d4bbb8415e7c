"""Studies of simulated laws, to see what a report looks like without training anything.

    python benchmarks/report_simulated.py FOLDER

writes FOLDER/studies and FOLDER/runs. Losses are drawn from laws with the paper's exponents plus noise; every
question, and so every page and figure made of it, says that it is simulated.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from steepen.model.arms import find_arm
from steepen.recipe.accounting import compute_active_parameters, stored_parameters
from steepen.recipe.paper import recipe_of
from steepen.runs.record import Parameters, RunRecord, Score
from steepen.runs.spec import DataChoice, RunSpec
from steepen.runs.store import Store, write_json
from steepen.studies.answer import Answer, Axis, Panel, Series, Table

FLOOR, C0 = 1.69, 1e19
# γ and the loss above the floor at C0: Vanilla's and Untied-Grow's exponents as printed, others in between.
LAWS = {
    "vanilla": (0.1113, 1.300),
    "deep-vanilla": (0.1113, 1.289),
    "operator-1": (0.1140, 1.280),
    "loop-2": (0.1130, 1.276),
    "untied-2": (0.1145, 1.269),
    "loop-grow": (0.1155, 1.264),
    "untied-grow": (0.1168, 1.251),
    "deep-vanilla-grow": (0.1120, 1.283),
}
DEPTHS = (6, 8, 10, 12, 14, 16, 18, 20)
COMPUTE = Axis("training compute (FLOPs)", "log")
LOSS = Axis("validation loss (nats per token)", "log")


def loss_of(arm: str, flops: np.ndarray) -> np.ndarray:
    """The simulated law."""
    gamma, height = LAWS[arm]
    return FLOOR + height * (flops / C0) ** -gamma


def record_of(arm_name: str, depth: int, noise: np.random.Generator, seed: int = 0) -> RunRecord:
    """A record as training would have left it, its loss drawn from the law."""
    arm = find_arm(arm_name)
    rung = recipe_of(arm).at(arm, depth)
    spec = RunSpec.of(rung, DataChoice("simulated"), seed=seed)
    flops = rung.flops.total
    loss = float(loss_of(arm_name, np.array(flops)) + noise.normal(0, 2e-3))
    first, last = arm.passes.initial, arm.passes.final
    stored, active = stored_parameters(arm, rung.shape, last), compute_active_parameters(arm, rung.shape, last)
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=loss,
        validation_bits_per_byte=None,
        validation_identity="simulated",
        scores=(Score(spec.steps, loss, None, last),),
        train_loss=loss,
        tokens=spec.tokens,
        flops=flops,
        flops_by_term=rung.flops.to_dict(),
        parameters=Parameters(
            stored=stored,
            initial_stored=stored_parameters(arm, rung.shape, first),
            compute_active=active,
            initial_compute_active=compute_active_parameters(arm, rung.shape, first),
            mean_compute_active=float(active),
            embedding=rung.shape.vocabulary * rung.shape.width,
            blocks=stored - 2 * rung.shape.vocabulary * rung.shape.width,
        ),
        seconds_training=flops / 4e14,
        seconds_total=flops / 4e14,
        tokens_per_second=spec.tokens / (flops / 4e14),
        mfu=None,
        peak_memory_bytes=None,
        hardware={"device": "simulated"},
        versions={"steepen": "0.1.0"},
        git=None,
        finished="2026-01-01T00:00:00+00:00",
    )


def fit(flops: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and height of log(loss − floor) in log(compute/C0), with their covariance; the floor is known."""
    coefficients, covariance = np.polyfit(np.log(flops / C0), np.log(loss - FLOOR), 1, cov=True)
    return coefficients, covariance


def ladder(arms: tuple[str, ...], store: Store, name: str = "ladder") -> Answer:
    """Loss against compute, multipliers, and the exponent-constant plane."""
    noise = np.random.default_rng(7)
    curves: list[Series] = []
    multipliers: list[Series] = []
    plane: list[Series] = []
    rows: list[tuple[Any, ...]] = []
    verdicts: dict[str, Any] = {}
    runs: list[str] = []
    reference: tuple[np.ndarray, np.ndarray] | None = None
    budgets = np.geomspace(5e17, 8e19, 30)
    beyond = np.geomspace(8e19, 2e21, 20)
    for arm in arms:
        records = [record_of(arm, depth, noise) for depth in DEPTHS]
        for record in records:
            save(store, record)
        runs += [record.run for record in records]
        title = records[0].spec.arm.title
        flops = np.array([record.flops for record in records])
        loss = np.array([record.validation_loss for record in records])
        (slope, height), covariance = fit(flops, loss)
        error = np.sqrt(np.diag(covariance))
        own = tuple(record.run for record in records)
        line = np.geomspace(flops[0], flops[-1], 40)
        further = np.geomspace(flops[-1], 1.2e21, 12)
        law = lambda c, s=slope, h=height: FLOOR + np.exp(h) * (c / C0) ** s  # noqa: E731
        curves += [
            Series(title, "points", floats(flops), floats(loss), arm=arm, runs=own),
            Series(f"{title} fitted law", "line", floats(line), floats(law(line)), arm=arm),
            Series(f"{title} extrapolated", "line", floats(further), floats(law(further)), arm=arm, style="dashed"),
        ]
        gamma, sd = -slope, error[0]
        plane += [
            Series(title, "points", (float(-height),), (float(gamma),), arm=arm),
            Series(f"{title} 90% interval", "line", (float(-height),) * 2, (gamma - 1.94 * sd, gamma + 1.94 * sd), arm=arm),
            Series(f"{title} 90% interval", "line", (float(-height - 1.94 * error[1]), float(-height + 1.94 * error[1])), (float(gamma),) * 2, arm=arm),
        ]  # fmt: skip
        if reference is None:
            reference = (slope, height)
            rows.append((title, len(own), float(gamma), (gamma - 1.94 * sd, gamma + 1.94 * sd), None, "reference"))
            continue
        share = lambda c, s=slope, h=height: c / (C0 * np.exp((reference[1] - h + reference[0] * np.log(c / C0)) / s))  # noqa: E731, E501
        wide = 0.03 + 0.02 * np.abs(np.log10(budgets / C0))
        multipliers += [
            Series(f"{title} 90% band", "band", floats(budgets), floats(share(budgets) * np.exp(-wide)), floats(share(budgets) * np.exp(wide)), arm=arm),
            Series(f"{title} fitted", "line", floats(budgets), floats(share(budgets)), arm=arm),
            Series(f"{title} extrapolated", "line", floats(beyond), floats(share(beyond)), arm=arm, style="dashed"),
            Series(f"{title} interpolated", "points", floats(flops[1:-1]), floats(share(flops[1:-1]) * np.exp(noise.normal(0, 0.01, 6))), arm=arm, runs=own[1:-1]),
        ]  # fmt: skip
        gain = gamma + reference[0]
        word = "steeper" if gain > 3 * sd else "lower" if share(C0) > 1.05 else "undecided"
        sentence = (
            f"{title} is {word}: Δγ = {gain:+.4f} ± {1.94 * sd:.4f} (90%) against Vanilla, "
            f"{share(1e18):.2f}× the compute at 1e18 and {share(1e20):.2f}× at 1e20."
        )
        verdicts[arm] = {
            "arm": arm,
            "reference": arms[0],
            "word": word,
            "sentence": sentence,
            "delta_gamma": float(gain),
            "would_decide": ["A rung at 1.2e21 FLOPs would tell an exponent from a lower floor."]
            if word == "undecided"
            else [],
        }
        rows.append((title, len(own), float(gamma), (gamma - 1.94 * sd, gamma + 1.94 * sd), float(share(1e20)), word))
    return Answer(
        study=name,
        question="Simulated laws: which arms are steeper than Vanilla, and which only lower?",
        section="Section 5, ladders",
        findings=(
            *(verdict["sentence"] for verdict in verdicts.values()),
            "These losses were drawn from laws with known exponents; nothing was trained.",
        ),
        values={"verdicts": verdicts, "floor": FLOOR, "c0": C0},
        panels=(
            Panel("Loss and fitted laws", COMPUTE, LOSS, tuple(curves), caption="Simulated. Lines: E + A·(C/C0)^−γ with the floor known."),
            Panel("Compute multiplier over Vanilla", Axis("Vanilla's compute (FLOPs)", "log"), Axis("compute multiplier"), tuple(multipliers), lines=(("y", 1.0, "Vanilla"),), caption="Simulated. Points: interpolated between rungs. Bands: 90%."),
            Panel("Exponent against constant", Axis("constant, −log A (right is better)"), Axis("exponent γ (up is better)"), tuple(plane), caption="Simulated. Bars: 90% intervals given the floor."),
        ),
        tables=(Table("Laws and verdicts", ("arm", "rungs", "γ", "90% interval", "multiplier at 1e20", "verdict"), tuple(rows), caption="Simulated."),),
        warnings=("The floor is given, not fitted: the intervals leave its error out.",),
        method=("Losses are drawn from E + A·(C/C0)^−γ with noise of 2e-3.", "Exponents by least squares in log–log with the floor known."),
        runs=tuple(runs),
    )  # fmt: skip


def vertices() -> Answer:
    """Sweeps at fixed compute, each with its parabola and its optimum; the last one is censored."""
    noise = np.random.default_rng(3)
    sweeps: list[Series] = []
    optima: list[Series] = []
    grid = np.array([2.0, 3, 4, 6, 8, 12, 16, 24, 32])
    rows: list[tuple[Any, ...]] = []
    for budget, best in ((1e17, 4.6), (3e17, 6.1), (1e18, 8.0), (3e18, 10.4), (1e19, 33.0)):
        floor = 1.69 + 1.3 * (budget / 1e19) ** -0.11
        loss = floor + 0.03 * np.log(grid / best) ** 2 + noise.normal(0, 1e-3, len(grid))
        a, b, c = np.polyfit(np.log(grid), loss, 2)
        vertex = float(np.exp(-b / (2 * a)))
        inside = bool(grid[0] < vertex < grid[-1])
        label = f"{budget:.0e} FLOPs"
        line = np.geomspace(grid[0], grid[-1], 40)
        curve = np.polyval((a, b, c), np.log(line))
        place = (min(vertex, float(grid[-1])),)
        height = (float(np.polyval((a, b, c), np.log(place[0]))),)
        star = "optimum" if inside else "optimum outside the grid (censored)"
        sweeps += [
            Series(label, "points", floats(grid), floats(loss), level=budget),
            Series(f"{label} parabola", "line", floats(line), floats(curve), level=budget),
            Series(f"{label} {star}", "points", place, height, level=budget, marker="star", filled=inside),
        ]
        optima.append(Series(label, "points", (budget,), place, level=budget, marker="star", filled=inside))
        rows.append((budget, vertex if inside else None, height[0], "inside" if inside else "censored"))
    kept = [(row[0], row[1]) for row in rows if row[1] is not None]
    slope, start = np.polyfit(np.log([k for k, _ in kept]), np.log([v for _, v in kept]), 1)
    line = np.geomspace(1e17, 1e19, 20)
    law = Series(f"∝ C^{slope:.2f}", "line", floats(line), floats(np.exp(start) * line**slope))
    tpp = Axis("tokens per parameter", "log")
    return Answer(
        study="tpp",
        question="Simulated laws: how many tokens per parameter are best at each budget?",
        section="Section 4, stage 2",
        findings=(f"The optimum grows as compute to the power {slope:.3f}; the largest budget's is outside the grid.",),
        values={"exponent": float(slope)},
        panels=(
            Panel("Sweeps at fixed compute", tpp, Axis("validation loss (nats per token)"), tuple(sweeps), caption="Simulated. Stars: vertices; hollow: outside the grid."),
            Panel("Optima", COMPUTE, replace(tpp, label="best tokens per parameter"), (*optima, law), caption="Simulated."),
        ),
        tables=(Table("Optima", ("budget (FLOPs)", "tokens per parameter", "loss", "vertex"), tuple(rows)),),
        warnings=("The vertex at 1e+19 FLOPs is censored: extend the grid to more tokens.",),
    )  # fmt: skip


def cuts() -> Answer:
    """Loss by depth at several K, on a pool seen often: two cuts and the growth's timing."""
    depths = np.array([4.0, 6, 8, 10, 12, 14, 16])
    family = [
        Series(f"K = {k}", kind, floats(depths), floats(3.2 + 0.9 / depths + 0.004 * (depths - 11 + k) ** 2 / k), level=float(k), marker="square" if k == 1 and kind == "points" else "circle")
        for k in (1, 2, 4, 8)
        for kind in ("line", "points")
    ]  # fmt: skip
    share = np.linspace(0.05, 0.95, 10)
    timing = [
        Series(name, "points", floats(share), floats(2.9 + depth * (share - best) ** 2), arm=arm)
        for name, arm, best, depth in (("Loop-Grow", "loop-grow", 0.2, 0.06), ("Untied-Grow", "untied-grow", 0.3, 0.09))
    ]
    drift_x = np.array([8.0, 12, 16])
    drift = [
        Series("best learning rate", "points", floats(drift_x), (0.041, 0.031, 0.024)),
        Series("power law", "line", floats(np.linspace(8, 20, 20)), floats(0.041 * (np.linspace(8, 20, 20) / 8) ** -0.77)),
        Series("90% t-interval", "band", floats(np.linspace(8, 20, 20)), floats(0.030 * (np.linspace(8, 20, 20) / 8) ** -1.1), floats(0.056 * (np.linspace(8, 20, 20) / 8) ** -0.45)),
    ]  # fmt: skip
    return Answer(
        study="data-constrained",
        question="Simulated laws: on a small pool, does depth or repetition of the core serve better?",
        section="Section 7",
        findings=("Each K has its own best depth: more passes want a shallower stack.",),
        values={"best": {"1": 10, "8": 4}},
        panels=(
            Panel("Cuts at fixed passes", Axis("depth"), Axis("validation loss (nats per token)"), tuple(family)),
            Panel("When to grow", Axis("ρ, share of tokens after growth"), Axis("validation loss (nats per token)"), tuple(timing), lines=(("x", 0.29, "law, ρ = 0.29"),)),
            Panel("Drift of the learning rate", Axis("depth", "log"), Axis("best GLR", "log"), tuple(drift), caption="Simulated. Three points leave one degree of freedom."),
        ),
        tables=(Table("Cuts", ("K", "best depth", "loss"), ((1, 10, 3.29), (8, 4, 3.425))),),
    )  # fmt: skip


def hold_out() -> Answer:
    """A forecast at a rung that was held out, and what was measured there."""
    flops = np.geomspace(3e17, 1e20, 8)
    further = np.geomspace(1e20, 1.225e21, 15)
    forecast = loss_of("untied-grow", further)
    wide = 0.012 * np.log10(further / 1e20) + 0.004
    return Answer(
        study="extrapolate",
        question="Simulated laws: does the ladder's law hold at a rung ten times larger?",
        section="Section 6",
        findings=("The held-out rung lands 0.030 below the forecast, outside its 90% band: the law is too simple.",),
        values={"miss": -0.03},
        panels=(
            Panel(
                "Forecast and hold-out",
                COMPUTE,
                LOSS,
                (
                    Series("Untied-Grow 90% band", "band", floats(further), floats(forecast - wide), floats(forecast + wide), arm="untied-grow"),
                    Series("Untied-Grow", "points", floats(flops), floats(loss_of("untied-grow", flops)), arm="untied-grow"),
                    Series("Untied-Grow law", "line", floats(flops), floats(loss_of("untied-grow", flops)), arm="untied-grow"),
                    Series("Untied-Grow forecast", "line", floats(further), floats(forecast), arm="untied-grow", style="dashed"),
                    Series("Untied-Grow held out", "points", (1.225e21,), (float(forecast[-1] - 0.03),), arm="untied-grow", marker="square", filled=False),
                ),
                caption="Simulated, with a miss put in by hand to show one.",
            ),
        ),
        tables=(Table("Hold-out", ("arm", "FLOPs", "forecast", "measured", "miss"), (("untied-grow", 1.225e21, float(forecast[-1]), float(forecast[-1] - 0.03), -0.03),)),),
        warnings=("The miss was put in by hand.",),
    )  # fmt: skip


def floats(values: np.ndarray) -> tuple[float, ...]:
    """Plain numbers."""
    return tuple(float(value) for value in values)


def save(store: Store, record: RunRecord) -> None:
    """A finished run's files."""
    run = store.run(record.spec)
    write_json(run.spec_file, record.spec.to_dict())
    write_json(run.record_file, record.to_dict())


def write_study(folder: Path, name: str, answer: Answer | None, **journal: Any) -> Path:
    """A study's journal as driving it would have left it."""
    entry = {
        "name": name,
        "options": {"simulated": True},
        "runs_directory": str(folder / "runs"),
        "status": "finished",
        "answer": None if answer is None else answer.to_dict(),
        **journal,
    }
    write_json(folder / "studies" / name / "study.json", entry)
    return folder / "studies" / name


def main(folder: Path) -> None:
    """Write every simulated study."""
    folder = folder.absolute()
    store = Store(folder / "runs")
    studies = {
        "ladder": ladder(("vanilla", "operator-1", "untied-grow"), store),
        "family": ladder(tuple(LAWS), store, "family"),
        "tpp": vertices(),
        "data-constrained": cuts(),
        "extrapolate": hold_out(),
    }
    for name, answer in studies.items():
        print(write_study(folder, name, answer))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/report_simulated.py FOLDER")
    main(Path(sys.argv[1]))
