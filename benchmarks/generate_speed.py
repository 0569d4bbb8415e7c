"""Tokens per second of steepen's generation against transformers' generate of the exported model, in one run.

    python benchmarks/generate_speed.py [--depths 8 12] [--arms vanilla loop-2] [--batches 1 32]
        [--tokens 256] [--prompt 128] [--out OUT.json]

Random weights (not zero), bf16, greedy, random prompts without padding. Every number is the median of
--repeats calls after one warm-up call; calls of both programs alternate. A call is the whole thing, prompt
and all new tokens, capture of CUDA graphs included; "decoding" is the time of the new tokens after the first
16. transformers runs the exported folder with its own generate() and DynamicCache. Before timing, the first
32 greedy tokens of both are compared in fp32; they must be equal up to near ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from steepen.data import Tokenizer
from steepen.evaluation.load import load
from steepen.inference.decoding import Sampling, continue_tokens
from steepen.inference.export import export
from steepen.inference.import_model import write_run
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.paper_tables import recipe_of
from steepen.runs.spec import DataConfig, RunSpec
from steepen.training.run_state import build_network


def make_run(folder: Path, arm: str, depth: int, tiny: bool) -> Path:
    """A run directory with random weights at the paper's size."""
    found = find_arm(arm)
    rule = (
        SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=512, vocabulary=50_304)
        if tiny
        else SizeRule()
    )
    rung = recipe_of(found).at_budget(
        found, depth, rule, tokens=2**19 * 8, rho=0.5 if found.passes.grows else None
    )
    spec = RunSpec.from_plan(rung, DataConfig("random"), precision="bf16")
    passes = spec.schedule.max_passes
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
        for name, p in build_network(spec, spec.network_after(spec.steps)).named_parameters()
    }
    return write_run(
        folder / spec.hash, spec, weights, step=spec.steps, stored_passes=passes,
        tokenizer=Tokenizer.gpt2(), record=None,
    )  # fmt: skip


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timer:
    """Times of the tokens as they come out."""

    def __init__(self) -> None:
        synchronize()
        self.start = time.perf_counter()
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def rates(self, batch: int) -> tuple[float, float]:
        """Tokens per second of the whole call and of decoding after the first 16 tokens."""
        whole = batch * len(self.marks) / (self.marks[-1] - self.start)
        decoding = batch * (len(self.marks) - 16) / (self.marks[-1] - self.marks[15])
        return whole, decoding


def time_steepen(run: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    timer = Timer()
    last = len(prompts) - 1
    continue_tokens(
        run.network, prompts, tokens, Sampling(temperature=0), passes=run.passes,
        on_token=lambda row, token: timer.mark() if row == last else None,
    )  # fmt: skip
    return timer.rates(len(prompts))


def time_transformers(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    from transformers import StoppingCriteria, StoppingCriteriaList

    ids = torch.tensor(prompts, device=model.device)
    timer = Timer()

    class Mark(StoppingCriteria):
        """Called after every token; stops nothing."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            timer.mark()
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    generate_greedily(model, ids, tokens, stopping_criteria=StoppingCriteriaList([Mark()]))
    synchronize()
    timer.marks[-1] = time.perf_counter()
    return timer.rates(len(prompts))


def generate_greedily(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> Any:
    """transformers' generate, without an end token."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def measure(args: argparse.Namespace, arm: str, depth: int, folder: Path) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    path = make_run(folder, arm, depth, args.tiny)
    out = export(path, folder / f"hf-{arm}-{depth}")
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(0, 50_000, (args.prompt,), generator=generator).tolist()
        for _ in range(max(args.batches))
    ]
    run = load(path, device=args.device, precision="fp32")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=True)
    model = model.to(args.device).eval()

    # The same tokens first, in fp32.
    ids = torch.tensor(rows[:1], device=args.device)
    theirs = generate_greedily(model, ids, 32)[0, args.prompt :].tolist()
    ours = continue_tokens(run.network, rows[:1], 32, Sampling(temperature=0), passes=run.passes)[0].tokens
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))

    if args.precision == "bf16":  # as load(precision="bf16") and from_pretrained(dtype=torch.bfloat16) do
        run.network.to(torch.bfloat16)
        model = model.to(torch.bfloat16)
    found: list[dict[str, Any]] = []
    for batch in args.batches:
        prompts = rows[:batch]
        row: dict[str, Any] = {"arm": arm, "depth": depth, "batch": batch, "equal_tokens_of_32": same}
        calls: dict[str, Callable[[], tuple[float, float]]] = {
            "steepen": lambda p=prompts: time_steepen(run, p, args.tokens),
            "transformers": lambda p=prompts: time_transformers(model, p, args.tokens),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for repeat in range(1 + args.repeats):
            for name, call in calls.items():
                rates = call()
                if repeat:  # the first call is a warm-up
                    times[name].append(rates)
        for name, rates in times.items():
            row[f"{name}_tokens_per_second"] = statistics.median(each[0] for each in rates)
            row[f"{name}_decoding_tokens_per_second"] = statistics.median(each[1] for each in rates)
        row["ratio"] = row["steepen_tokens_per_second"] / row["transformers_tokens_per_second"]
        row["decoding_ratio"] = (
            row["steepen_decoding_tokens_per_second"] / row["transformers_decoding_tokens_per_second"]
        )
        found.append(row)
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--arms", nargs="+", default=["vanilla", "loop-2"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small width, to test the script on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in args.arms:
            for depth in args.depths:
                rows += measure(args, arm, depth, Path(folder))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
