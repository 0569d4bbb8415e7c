"""The paper authors' optimizer against plain Muon at d3, each at its own best learning rate.

    python benchmarks/optimizer_loss.py --data DATA --out OUT.jsonl --seconds 900

Preset `mini` at its base depth (d3, width 384): its shape, context, batch and recipes; only the learning
rate, the optimizer and the schedule differ between runs. One process, so kernels compile once. After every
run a line is appended to OUT.jsonl; the same command goes on after the last line. It prints the tables at the
end (also when the time is up), and with `--table` from the file alone.

Phases
1. tune: every arm × optimizer, seed 0, learning rates FACTORS × the preset's; while the best is at an end of
   the grid, that end is extended by 2 (at most 3 times); then √2 to either side of the best.
2. seeds: the best rate of each with seeds 1 and 2 (paired: a seed fixes initial weights and data order).
3. published: Operator-1 and Vanilla at the paper's own rate, both optimizers: 0.04 (the table's, at d8), and
   what the paper's rule gives at this size with base depth 8 (what `steepen train --depth 3` uses).

Settings
  authors  OptimizerConfig.named("authors"), LRScheduleConfig(decay_to_zero=True, rewarm_steps=40)
  muon     OptimizerConfig.named("muon") (momentum 0.95, Newton–Schulz, plain decay, growth copies state),
           LRScheduleConfig(decay_to_zero=False, rewarm_steps=0): the default of steepen 0.1, except that
           the growth step is now floor((1 − ρ)·steps), at most one step earlier.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.data import Dataset
from steepen.model.arms import find_arm
from steepen.optim.config import LRScheduleConfig, OptimizerConfig
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.training.run import train
from steepen.training.stopping import Diverged
from steepen.training.train_options import TrainOptions

SETTINGS = {
    "authors": (OptimizerConfig.named("authors"), LRScheduleConfig(decay_to_zero=True, rewarm_steps=40)),
    "muon": (OptimizerConfig.named("muon"), LRScheduleConfig(decay_to_zero=False, rewarm_steps=0)),
}
MAX_EXTENSIONS = 3


class OutOfTime(Exception):
    pass


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--depth", type=int, help="default: the preset's base depth")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--arms", nargs="+", default=["vanilla", "operator-1", "untied-grow"])
    parser.add_argument("--factors", nargs="+", type=float, default=[1, 0.5, 2, 0.25, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--validation-tokens", type=int, help="default: the preset's")
    parser.add_argument("--rewarm", type=int, default=40, help="of `authors`; a toy run needs fewer")
    parser.add_argument("--no-refine", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the tables of OUT and do not train")
    return parser.parse_args()


class Comparison:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.dataset = Dataset.open(options.data)
        preset = load_preset(options.preset)
        preset = replace(
            preset,
            base_depth=options.depth or preset.base_depth,
            base_tokens=options.steps * preset.batch_tokens,
            validation_tokens=options.validation_tokens or preset.validation_tokens,
        )
        info = DatasetInfo(
            self.dataset.identity,
            self.dataset.padded_vocabulary,
            len(self.dataset.tokens("train")),
            len(self.dataset.tokens("val")),
        )
        self.context = StudyContext(preset, info, epochs=options.epochs)
        self.lines: list[dict[str, Any]] = []
        if options.out.exists():
            self.lines = [json.loads(line) for line in options.out.read_text().splitlines() if line.strip()]
        self.found = {line["run"]: line for line in self.lines}
        self.longest = 0.0  # seconds of the longest run of this process
        self.scratch = Path(tempfile.mkdtemp(prefix="compare-"))

    def rate(self, arm: str) -> float:
        """The preset's learning rate at its base depth."""
        recipe = self.context.recipe(find_arm(arm))
        return recipe.learning_rate(find_arm(arm), self.context.preset.base_depth, self.context.size_rule)

    def published_rate(self, arm: str) -> float:
        """The paper's rule at this size: 0.04 at d8, anchored there with this vocabulary."""
        found = find_arm(arm)
        return recipe_of(found).learning_rate(found, self.context.preset.base_depth, self.context.size_rule)

    def spec(self, arm: str, name: str, rate: float, seed: int) -> RunSpec:
        found = find_arm(arm)
        recipe = self.context.recipe(found)
        recipe = replace(recipe, base=replace(recipe.base, learning_rate=rate), learning_rate_base=None)
        rung = self.context.base_run(found, recipe)
        optimizer, schedule = SETTINGS[name]
        if name == "authors":
            schedule = replace(schedule, rewarm_steps=self.options.rewarm)
        return replace(self.context.spec(rung, seed=seed, optimizer=optimizer), lr_schedule=schedule)

    def run(self, phase: str, arm: str, name: str, rate: float, seed: int) -> float:
        """The validation loss of a run (inf: diverged), trained unless its line exists."""
        rate = float(f"{rate:.6g}")
        spec = self.spec(arm, name, rate, seed)
        if spec.hash in self.found:
            loss = self.found[spec.hash]["loss"]
            return math.inf if loss is None else loss
        if time.monotonic() - self.started + self.longest > self.options.seconds:
            raise OutOfTime
        begun = time.monotonic()
        try:
            record = train(spec, self.dataset, RunStore(self.scratch), TrainOptions(quiet=True))
            loss, flops, tail = record.validation_loss, record.flops, record.tokens_per_second
        except Diverged as error:
            print(f"  {error}", file=sys.stderr)
            loss, flops, tail = None, None, None
        seconds = time.monotonic() - begun
        self.longest = max(self.longest, seconds)
        shutil.rmtree(self.scratch / spec.hash, ignore_errors=True)
        line = {
            "run": spec.hash, "phase": phase, "arm": arm, "optimizer": name, "learning_rate": rate,
            "factor": rate / self.rate(arm), "seed": seed, "loss": loss, "steps": spec.steps,
            "tokens": spec.tokens, "depth": spec.shape.depth, "width": spec.shape.width,
            "vocabulary": spec.shape.vocabulary, "precision": spec.precision,
            "data": self.dataset.identity[:16],
            "rewarm_steps": spec.lr_schedule.rewarm_steps, "decay_to_zero": spec.lr_schedule.decay_to_zero,
            "flops": flops, "tokens_per_second": tail, "seconds": round(seconds, 1),
        }  # fmt: skip
        with self.options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self.found[spec.hash] = line
        shown = "diverged" if loss is None else f"{loss:.4f}"
        print(
            f"{phase:9} {arm:12} {name:8} lr {rate:<9.4g} seed {seed}  {shown}  {seconds:.1f} s", flush=True
        )
        return math.inf if loss is None else loss

    def tuned(self, arm: str, name: str) -> dict[float, float]:
        """Loss by learning rate of the tuning phase, from the lines."""
        found = {}
        for line in self.lines:
            if line["phase"] == "tune" and (line["arm"], line["optimizer"]) == (arm, name):
                found[line["learning_rate"]] = math.inf if line["loss"] is None else line["loss"]
        return dict(sorted(found.items()))

    def tune(self, arm: str, name: str) -> float:
        base = self.rate(arm)
        losses = {f: self.run("tune", arm, name, base * f, 0) for f in self.options.factors}
        for _ in range(MAX_EXTENSIONS):
            best = min(losses, key=losses.__getitem__)
            if best == max(losses) and math.isfinite(losses[best]):
                new = best * 2
            elif best == min(losses):
                new = best / 2
            else:
                break
            losses[new] = self.run("tune", arm, name, base * new, 0)
        best = min(losses, key=losses.__getitem__)
        if not self.options.no_refine:
            for new in (best * math.sqrt(2), best / math.sqrt(2)):
                losses[new] = self.run("tune", arm, name, base * new, 0)
            best = min(losses, key=losses.__getitem__)
        return float(f"{base * best:.6g}")

    def go(self) -> None:
        best = {(arm, name): self.tune(arm, name) for arm in self.options.arms for name in SETTINGS}
        for seed in range(self.options.seeds):
            for (arm, name), rate in best.items():
                self.run("seeds", arm, name, rate, seed)
        for seed in range(self.options.seeds):
            for arm in ("operator-1", "vanilla"):
                for rate in (0.04, self.published_rate(arm)):
                    for name in SETTINGS:
                        self.run("published", arm, name, rate, seed)

    def by_seed(self, arm: str, name: str, rate: float) -> dict[int, float]:
        return {
            line["seed"]: math.inf if line["loss"] is None else line["loss"]
            for line in self.lines
            if (line["arm"], line["optimizer"]) == (arm, name)
            and math.isclose(line["learning_rate"], rate, rel_tol=1e-5)
        }

    def print_tables(self) -> None:
        print(f"\n{len(self.lines)} runs in {self.options.out}")
        for arm in self.options.arms:
            for name in SETTINGS:
                losses = self.tuned(arm, name)
                if not losses:
                    continue
                best = min(losses, key=losses.__getitem__)
                rates = list(losses)
                finite = [r for r in rates if math.isfinite(losses[r])]
                end = " (at an end of the grid: NOT bracketed)" if best in (rates[0], rates[-1]) else ""
                cells = "  ".join(f"{r:.4g}: {losses[r]:.4f}" for r in rates)
                print(
                    f"tune {arm} {name}: best {best:.4g}{end if finite else ' (all diverged)'}\n    {cells}"
                )
        print("\nbest rates, paired seeds (authors minus muon, same seed)")
        print(
            "| arm | authors: rate | losses | mean | muon: rate | losses | mean | difference ± s.e. | pairs |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for arm in self.options.arms:
            cells, seeds = [], {}
            for name in SETTINGS:
                losses = self.tuned(arm, name)
                if not losses:
                    break
                rate = min(losses, key=losses.__getitem__)
                seeds[name] = self.by_seed(arm, name, rate)
                values = [seeds[name][seed] for seed in sorted(seeds[name])]
                cells += [
                    f"{rate:.4g}",
                    " ".join(f"{v:.4f}" for v in values),
                    f"{statistics.fmean(values):.4f}",
                ]
            else:
                print(f"| {arm} | {' | '.join(cells)} | {difference(seeds['authors'], seeds['muon'])} |")
        print("\nthe paper's own rate (0.04 at d8; by the rule at this size), every seed that was run")
        print("| arm | rate | authors | muon | difference ± s.e. | pairs | muon minus its own best rate |")
        print("|---|---|---|---|---|---|---|")
        for arm in ("operator-1", "vanilla"):
            for rate in (0.04, self.published_rate(arm)):
                found = {name: self.by_seed(arm, name, rate) for name in SETTINGS}
                if not all(found.values()):
                    continue
                words = [" ".join(f"{v[s]:.4f}" for s in sorted(v)) for v in found.values()]
                losses = self.tuned(arm, "muon")
                own = self.by_seed(arm, "muon", min(losses, key=losses.__getitem__)) if losses else {}
                away = difference(found["muon"], own) if own else "-"
                print(
                    f"| {arm} | {rate:.4g} | {' | '.join(words)} | "
                    f"{difference(found['authors'], found['muon'])} | {away.split(' |')[0]} |"
                )


def difference(one: dict[int, float], two: dict[int, float]) -> str:
    """Mean and standard error of one − two over common seeds, and their number, as two cells."""
    pairs = [one[s] - two[s] for s in sorted(one.keys() & two.keys())]
    pairs = [p for p in pairs if math.isfinite(p)]
    if not pairs:
        return "– | 0"
    error = f" ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.4f}" if len(pairs) > 1 else ""
    return f"{statistics.fmean(pairs):+.4f}{error} | {len(pairs)}"


def main() -> None:
    options = parse()
    comparison = Comparison(options)
    try:
        if not options.table:
            comparison.go()
    except OutOfTime:
        print("the time is up; the same command goes on from here.")
    finally:
        shutil.rmtree(comparison.scratch, ignore_errors=True)
    comparison.print_tables()


if __name__ == "__main__":
    main()
