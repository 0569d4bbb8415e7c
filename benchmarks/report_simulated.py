"""Studies with simulated losses, to see a report without training.

    python benchmarks/report_simulated.py FOLDER

writes FOLDER/studies and FOLDER/runs. Losses are drawn from laws with the paper's exponents plus noise; the
question of every study, and so every page and figure, says that it is simulated.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.hypotheses.nested_models import DecisionRule, Growth
from steepen.laws.ladder import Ladder, make_ladder
from steepen.laws.verdict.compare import compare
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.judge import judge_arm
from steepen.model.arms import find_arm
from steepen.recipe.flops import compute_active_parameters, stored_parameters
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.record import Parameters, RunRecord, ValidationScore
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer, Axis, Panel, Series, StudyVerdict, Table
from steepen.studies.driver.journal import Journal
from steepen.utils.json_io import write_json

Array = NDArray[np.float64]
Values = ArrayLike

IRREDUCIBLE, C0 = 1.69, 1e19
SETTINGS = FitSettings(reference="vanilla")
T90 = 1.943  # of a t with the six degrees of freedom that eight rungs leave
# γ and the reducible loss at C0: Vanilla's and Untied-Grow's exponents as printed, others in between.
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


def loss_of(arm: str, flops: Array) -> Array:
    """Loss of an arm under its simulated law."""
    gamma, height = LAWS[arm]
    return IRREDUCIBLE + height * (flops / C0) ** -gamma


def record_of(arm_name: str, depth: int, seed: int = 0) -> RunRecord:
    """A run record with a loss drawn from the arm's law."""
    arm = find_arm(arm_name)
    # Seeded by the run, so that a run in two studies has one loss.
    noise = np.random.default_rng([7, list(LAWS).index(arm_name), depth, seed])
    rung = recipe_of(arm).at(arm, depth)
    spec = RunSpec.from_plan(rung, DataConfig("simulated"), seed=seed)
    flops = rung.flops.total
    loss = float(loss_of(arm_name, np.array(flops)) + noise.normal(0, 2e-3))
    first, last = arm.passes.initial, arm.passes.final
    stored, active = (
        stored_parameters(arm, rung.shape, last),
        compute_active_parameters(arm, rung.shape, last),
    )
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=loss,
        validation_bits_per_byte=None,
        validation_identity="simulated",
        validation_scores=(ValidationScore(spec.steps, loss, None, last),),
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


def points(label: str, x: Values, y: Values, **rest: Any) -> Series:
    """A series of points."""
    return Series(label, "points", floats(x), floats(y), **rest)


def line(label: str, x: Values, y: Values, **rest: Any) -> Series:
    """A line series."""
    return Series(label, "line", floats(x), floats(y), **rest)


def band(label: str, x: Values, low: Values, high: Values, **rest: Any) -> Series:
    """A band series."""
    return Series(label, "band", floats(x), floats(low), floats(high), **rest)


@dataclass(frozen=True)
class Law:
    """A fitted law: log(loss − E) is a straight line in log(compute/C0); E is known."""

    gamma: float
    height: float  # log of the reducible loss at C0
    gamma_half_width: float  # of the 90% interval
    height_half_width: float

    @staticmethod
    def fit(flops: Array, loss: Array) -> Law:
        """Fit by least squares."""
        (slope, height), covariance = np.polyfit(np.log(flops / C0), np.log(loss - IRREDUCIBLE), 1, cov=True)
        reach = T90 * np.sqrt(np.diag(covariance))
        return Law(-float(slope), float(height), float(reach[0]), float(reach[1]))

    def loss(self, flops: Array) -> Array:
        """Loss at these FLOPs."""
        return IRREDUCIBLE + np.exp(self.height) * (flops / C0) ** -self.gamma

    def multiplier(self, reference: Law, flops: Values) -> Array:
        """Compute multiplier over the reference at the reference's `flops`."""
        x = np.log(np.asarray(flops) / C0)
        needed = (self.height - reference.height + reference.gamma * x) / self.gamma
        return np.exp(x - needed)


def ladder(arms: tuple[str, ...], store: RunStore, name: str = "ladder") -> Answer:
    """Loss against compute, multipliers, and the exponent-constant plane."""
    curves: list[Series] = []
    multipliers: list[Series] = []
    plane: list[Series] = []
    rows: list[tuple[Any, ...]] = []
    verdicts: dict[str, Verdict] = {}
    runs: list[str] = []
    reference: Law | None = None
    reference_ladder: Ladder | None = None
    for arm in arms:
        records = [record_of(arm, depth) for depth in DEPTHS]
        for record in records:
            save(store, record)
        own = tuple(record.run for record in records)
        runs += own
        title = records[0].spec.arm.title
        fields: dict[str, Any] = {"arm": arm}
        flops = np.array([record.flops for record in records])
        loss = np.array([record.validation_loss for record in records])
        law = Law.fit(flops, loss)
        inside, beyond = np.geomspace(flops[0], flops[-1], 40), np.geomspace(flops[-1], 1.2e21, 12)
        curves += [
            points(arm, flops, loss, runs=own, **fields),
            line(arm, inside, law.loss(inside), role="fit", note="fitted law", **fields),
            line(arm, beyond, law.loss(beyond), role="extrapolated", style="dashed", **fields),
        ]
        interval = (law.gamma - law.gamma_half_width, law.gamma + law.gamma_half_width)
        sides = (-law.height - law.height_half_width, -law.height + law.height_half_width)
        plane += [
            points(arm, [-law.height], [law.gamma], **fields),
            line(arm, [-law.height] * 2, interval, role="fit", note="90% interval", **fields),
            line(arm, sides, [law.gamma] * 2, role="fit", note="90% interval", **fields),
        ]
        if reference is None or reference_ladder is None:
            reference, reference_ladder = law, make_ladder(arm, flops, loss)
            rows.append((title, len(own), law.gamma, interval, None, "reference"))
            continue
        multipliers += multiplier_series(arm, law, reference, (flops, loss, own))
        fitted = judge_arm(
            compare(reference_ladder, make_ladder(arm, flops, loss), SETTINGS, DecisionRule()),
            SETTINGS,
            draws=100,
        )
        verdicts[arm] = simulated_verdict(title, fitted, law, reference)
        top = float(law.multiplier(reference, 1e20))
        rows.append((title, len(own), law.gamma, interval, top, verdicts[arm].word))
    return Answer(
        study=name,
        question="Simulated laws: which arms are steeper than Vanilla, and which only lower?",
        section="Section 5, ladders",
        findings=("These losses were drawn from laws with known exponents; nothing was trained.",),
        values={"irreducible_loss": IRREDUCIBLE, "c0": C0},
        verdicts=tuple(StudyVerdict(found, arm) for arm, found in verdicts.items()),
        panels=(
            Panel(
                "Loss and fitted laws (simulated)",
                COMPUTE,
                LOSS,
                tuple(curves),
                caption="Simulated. Lines: E + A·(C/C0)^−γ with the irreducible loss known.",
            ),
            Panel(
                "Compute multiplier (simulated)",
                Axis("Vanilla's compute (FLOPs)", "log"),
                Axis("compute multiplier"),
                tuple(multipliers),
                lines=(("y", 1.0, "Vanilla"),),
                caption="Simulated. Points: measured losses read off Vanilla's law. Bands: 90%.",
                lead=True,
            ),
            Panel(
                "Exponent against constant (simulated)",
                Axis("constant, −log A (right is better)"),
                Axis("exponent γ (up is better)"),
                tuple(plane),
                caption="Simulated. Bars: 90% intervals given the irreducible loss.",
            ),
        ),
        tables=(
            Table(
                "Laws and verdicts",
                ("arm", "rungs", "γ", "90% interval", "multiplier at 1e20", "verdict"),
                tuple(rows),
                caption="Simulated.",
                arm_column=0,
            ),
        ),
        warnings=("The irreducible loss is given, not fitted: the intervals leave its error out.",),
        method=(
            "Losses are drawn from E + A·(C/C0)^−γ with noise of 2e-3.",
            "Exponents by least squares in log–log with the irreducible loss known.",
        ),
        runs=tuple(runs),
    )


def multiplier_series(
    arm: str, law: Law, reference: Law, measured: tuple[Array, Array, tuple[str, ...]]
) -> list[Series]:
    """The fitted multiplier with a band, its continuation, and the measured points."""
    budgets, beyond = np.geomspace(5e17, 8e19, 30), np.geomspace(8e19, 2e21, 20)
    middle = law.multiplier(reference, budgets)
    # Half-widths of both parameters added in quadrature, which is precise enough for a figure.
    x = np.log(budgets / C0)
    wide = np.sqrt(law.height_half_width**2 + (x * law.gamma_half_width) ** 2) * np.sqrt(2) / law.gamma
    flops, loss, runs = measured
    fields: dict[str, Any] = {"arm": arm, "role": "fit"}
    # Where the reference's law reaches each measured loss.
    there = C0 * np.exp((reference.height - np.log(loss - IRREDUCIBLE)) / reference.gamma)
    return [
        band(arm, budgets, middle * np.exp(-wide), middle * np.exp(wide), note="90% band", **fields),
        line(arm, budgets, middle, note="fitted", **fields),
        line(arm, beyond, law.multiplier(reference, beyond), arm=arm, role="extrapolated", style="dashed"),
        points(arm, there, there / flops, arm=arm, note="measured", runs=runs),
    ]


def simulated_verdict(title: str, fitted: Verdict, law: Law, reference: Law) -> Verdict:
    """The fitted verdict with answers and sentence replaced by those for a known irreducible loss."""
    gain, error = law.gamma - reference.gamma, math.hypot(law.gamma_half_width, reference.gamma_half_width)
    low, high = (float(law.multiplier(reference, flops)) for flops in (1e18, 1e20))
    growth: Growth = "grows" if gain > error else "undecided" if gain > 0.3 * error else "constant"
    change = ("A rung at 1.2e21 FLOPs would halve the interval of Δγ.",) if growth == "undecided" else ()
    return replace(
        fitted,
        growth=growth,
        by_what="exponent" if growth == "grows" else None,
        fragile=(),
        by_what_fragile=(),
        demoted=None,
        sentence=f"{title}: {growth}. Δγ = {gain:+.4f} ± {error:.4f} (90%) against Vanilla, "
        f"{low:.2f}× the compute at 1e18 and {high:.2f}× at 1e20.",
        delta_gamma=gain,
        what_would_change=change,
    )


def vertices() -> Answer:
    """Sweeps at fixed compute, each with its parabola and its optimum; the last one is censored."""
    noise = np.random.default_rng(3)
    sweeps: list[Series] = []
    optima: list[Series] = []
    rows: list[tuple[Any, ...]] = []
    grid = np.array([2.0, 3, 4, 6, 8, 12, 16, 24, 32])
    for budget, best in ((1e17, 4.6), (3e17, 6.1), (1e18, 8.0), (3e18, 10.4), (1e19, 33.0)):
        bottom = 1.69 + 1.3 * (budget / 1e19) ** -0.11
        loss = bottom + 0.03 * np.log(grid / best) ** 2 + noise.normal(0, 1e-3, len(grid))
        parabola = np.polyfit(np.log(grid), loss, 2)
        vertex = float(np.exp(-parabola[1] / (2 * parabola[0])))
        found = bool(grid[0] < vertex < grid[-1])
        label, fine = f"{budget:.0e} FLOPs", np.geomspace(grid[0], grid[-1], 40)
        place = min(vertex, float(grid[-1]))
        height = float(np.polyval(parabola, np.log(place)))
        role = "optimum" if found else "censored"
        sweeps += [
            points(label, grid, loss, level=budget),
            line(label, fine, np.polyval(parabola, np.log(fine)), level=budget, role="fit", note="parabola"),
            points(label, [place], [height], level=budget, role=role, marker="star", filled=found),
        ]
        optima.append(points(label, [budget], [place], level=budget, role=role, marker="star", filled=found))
        rows.append((budget, vertex if found else None, height, "inside" if found else "censored"))
    budgets, best = (np.array(column) for column in zip(*[row[:2] for row in rows if row[1]], strict=True))
    slope, start = np.polyfit(np.log(budgets), np.log(best), 1)
    fine = np.geomspace(1e17, 1e19, 20)
    tpp = Axis("tokens per parameter", "log")
    return Answer(
        study="tpp",
        question="Simulated laws: how many tokens per parameter are best at each budget?",
        section="Section 4, stage 2",
        findings=(
            f"The optimum grows as compute to the power {slope:.3f}.",
            "The largest budget's optimum lies outside the grid.",
        ),
        values={"exponent": float(slope)},
        panels=(
            Panel(
                "Sweeps at fixed compute",
                tpp,
                Axis("validation loss (nats per token)"),
                tuple(sweeps),
                caption="Simulated. Stars: vertices; hollow: outside the grid.",
            ),
            Panel(
                "Optima",
                COMPUTE,
                replace(tpp, label="best tokens per parameter"),
                (*optima, line(f"∝ C^{slope:.2f}", fine, np.exp(start) * fine**slope, role="fit")),
                caption="Simulated.",
            ),
        ),
        tables=(Table("Optima", ("budget (FLOPs)", "tokens per parameter", "loss", "vertex"), tuple(rows)),),
        warnings=("The vertex at 1e+19 FLOPs is censored: extend the grid to more tokens.",),
    )


def cuts() -> Answer:
    """Loss by depth at several K; the timing of growth; the drift of the learning rate."""
    depths = np.array([4.0, 6, 8, 10, 12, 14, 16])
    family = [
        draw(f"K = {k}", depths, 3.2 + 0.9 / depths + 0.004 * (depths - 11 + k) ** 2 / k, level=float(k))
        for k in (1, 2, 4, 8)
        for draw in (line, points)
    ]
    fraction = np.linspace(0.05, 0.95, 10)
    timing = [
        points("loop-grow", fraction, 2.9 + 0.06 * (fraction - 0.2) ** 2, arm="loop-grow"),
        points("untied-grow", fraction, 2.9 + 0.09 * (fraction - 0.3) ** 2, arm="untied-grow"),
    ]
    deep = np.linspace(8, 20, 20)
    drift = [
        points("best learning rate", [8, 12, 16], [0.041, 0.031, 0.024]),
        line("power law", deep, 0.041 * (deep / 8) ** -0.77),
        band("90% t-interval", deep, 0.030 * (deep / 8) ** -1.1, 0.056 * (deep / 8) ** -0.45),
    ]
    loss = Axis("validation loss (nats per token)")
    return Answer(
        study="data-constrained",
        question="Simulated laws: on a small pool, does depth or repetition of the core serve better?",
        section="Section 7",
        findings=("Each K has its own best depth: with more passes the best depth is smaller.",),
        values={"best": {"1": 10, "8": 10}},
        panels=(
            Panel("Cuts at fixed passes", Axis("depth"), loss, tuple(family), caption="Simulated."),
            Panel(
                "When to grow",
                Axis("ρ, fraction of tokens after growth"),
                loss,
                tuple(timing),
                lines=(("x", 0.29, "law, ρ = 0.29"),),
                caption="Simulated.",
            ),
            Panel(
                "Drift of the learning rate",
                Axis("depth", "log"),
                Axis("best GLR", "log"),
                tuple(drift),
                caption="Simulated. Three points leave one degree of freedom.",
            ),
        ),
        tables=(Table("Cuts", ("K", "best depth", "loss"), ((1, 10, 3.29), (8, 10, 3.315))),),
    )


def hold_out() -> Answer:
    """A forecast at a held-out rung and its simulated measurement."""
    arm, last = "untied-grow", 1.225e21
    flops, further = np.geomspace(3e17, 1e20, 8), np.geomspace(1e20, last, 15)
    forecast = loss_of(arm, further)
    wide = 0.012 * np.log10(further / 1e20) + 0.004
    end = float(forecast[-1])
    curves = (
        band(arm, further, forecast - wide, forecast + wide, arm=arm, role="fit", note="90% band"),
        points(arm, flops, loss_of(arm, flops), arm=arm),
        line(arm, flops, loss_of(arm, flops), arm=arm, role="fit", note="law"),
        line(arm, further, forecast, arm=arm, role="extrapolated", note="forecast", style="dashed"),
        points(arm, [last], [end - 0.03], arm=arm, role="held_out", marker="square", filled=False),
    )
    return Answer(
        study="extrapolate",
        question="Simulated laws: does the ladder's law hold at a rung ten times larger?",
        section="Section 6",
        findings=("The held-out rung lands 0.030 below the forecast, outside its 90% band.",),
        values={"miss": -0.03},
        panels=(
            Panel(
                "Forecast and hold-out",
                COMPUTE,
                LOSS,
                curves,
                caption="Simulated, with a deliberate miss.",
            ),
        ),
        tables=(
            Table(
                "Hold-out",
                ("arm", "FLOPs", "forecast", "measured", "miss"),
                ((arm, last, end, end - 0.03, -0.03),),
                arm_column=0,
            ),
        ),
        warnings=("The miss is deliberate.",),
    )


def floats(values: Values) -> tuple[float, ...]:
    """Python floats."""
    return tuple(float(value) for value in np.asarray(values).ravel())


def save(store: RunStore, record: RunRecord) -> None:
    """Write the spec and record files of a finished run."""
    run = store.run(record.spec)
    write_json(run.spec_file, record.spec.to_dict())
    write_json(run.record_file, record.to_dict())


def write_study(folder: Path, name: str, answer: Answer) -> Path:
    """Write the journal of a finished study."""
    journal = Journal.open(folder / "studies", name, {"simulated": True}, folder / "runs")
    journal.set_answer(answer)
    return journal.folder


def main(folder: Path) -> None:
    """Write every simulated study."""
    folder = folder.absolute()
    store = RunStore(folder / "runs")
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
