"""Tokens per second of steepen's generation, against what memory bandwidth allows and transformers' generate.

    python benchmarks/generate_speed.py [--depths 8 12] [--arms vanilla loop-2] [--batches 1 32]
        [--tokens 256] [--prompt 128] [--no-transformers] [--out OUT.json]

Random weights (not zero), bf16, random prompts without padding; greedy, and "sampled" with the defaults of
`steepen generate`. Every number is the median of --repeats calls after one warm-up call; calls of the
programs alternate. A call is the whole thing, prompt and all new tokens, capture of CUDA graphs included;
"decoding" is the time of the new tokens after the first 16. The floor of a step is the time to read each
weight that it needs once, and the cached keys and values, at the bandwidth of a copy in the same run;
"weights_fraction" leaves out keys and values. transformers runs the exported folder with its own generate()
and DynamicCache. Before timing, greedy tokens are compared in fp32: with those of the reference (every step
by the network's own forward), and the first 32 with those of transformers; they are equal up to near ties.
"""

from __future__ import annotations

import argparse
import json
import math
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

GREEDY = Sampling(temperature=0)


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


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes: the best of several."""
    source = torch.ones(2**28 if device != "cpu" else 2**20, dtype=torch.int64, device=device)
    target, best = torch.empty_like(source), math.inf
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        target.copy_(source)
        synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def step_bytes(run: Any, batch: int, keys: float) -> tuple[int, int]:
    """Bytes that a step has to read: of weights, and of `keys` cached keys and values of each row."""
    network, size = run.network, run.network.embedding.element_size()
    weights = sum(p.numel() for block in network.blocks() for p in block.parameters())
    shape = network.shape
    head = network.token_ids * shape.width
    per_key = 2 * network.arm.block_options.heads(shape) * shape.head_dim
    cached = batch * keys * per_key * shape.allocation.executed(run.passes)
    return size * (weights + head), round(size * cached)


def time_steepen(
    run: Any, prompts: list[list[int]], tokens: int, sampling: Sampling = GREEDY
) -> tuple[float, float]:
    timer = Timer()
    last = len(prompts) - 1
    continue_tokens(
        run.network, prompts, tokens, sampling, passes=run.passes,
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


def load_transformers(args: argparse.Namespace, path: Path, out: Path) -> Any:
    """The exported model in fp32, or None with --no-transformers."""
    if args.no_transformers:
        return None
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        export(path, out), dtype=torch.float32, trust_remote_code=True
    )
    return model.to(args.device).eval()


def equal_tokens(args: argparse.Namespace, run: Any, model: Any, prompt: list[int]) -> dict[str, Any]:
    """How many greedy tokens are those of the reference and of transformers, in fp32."""

    def tokens(count: int, cuda_graphs: bool) -> list[int]:
        return continue_tokens(
            run.network, [prompt], count, GREEDY, passes=run.passes, cuda_graphs=cuda_graphs
        )[0].tokens  # fmt: skip

    def equal(ours: list[int], theirs: list[int]) -> int:
        return sum(a == b for a, b in zip(ours, theirs, strict=True))

    found = {
        f"equal_to_reference_of_{args.tokens}": equal(tokens(args.tokens, True), tokens(args.tokens, False))
    }
    if model is not None:
        ids = torch.tensor([prompt], device=args.device)
        theirs = generate_greedily(model, ids, 32)[0, args.prompt :].tolist()
        found["equal_to_transformers_of_32"] = equal(tokens(32, True), theirs)
    return found


def measure_batch(
    args: argparse.Namespace, run: Any, model: Any, prompts: list[list[int]], bandwidth: float
) -> dict[str, Any]:
    """Rates of all programs for these prompts, and the fraction of the floor that steepen reaches."""
    batch = len(prompts)
    calls: dict[str, Callable[[], tuple[float, float]]] = {
        "steepen": lambda: time_steepen(run, prompts, args.tokens),
        "steepen_sampled": lambda: time_steepen(run, prompts, args.tokens, Sampling()),
    }
    if model is not None:
        calls["transformers"] = lambda: time_transformers(model, prompts, args.tokens)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(1 + args.repeats):
        for name, call in calls.items():
            rates = call()
            if repeat:  # the first call is a warm-up
                times[name].append(rates)
    row: dict[str, Any] = {"batch": batch}
    for name, rates in times.items():
        row[f"{name}_tokens_per_second"] = statistics.median(each[0] for each in rates)
        row[f"{name}_decoding_tokens_per_second"] = statistics.median(each[1] for each in rates)
    for name in ("", "decoding_") if model is not None else ():
        ours, theirs = (row[f"{program}_{name}tokens_per_second"] for program in ("steepen", "transformers"))
        row[f"{name}ratio"] = ours / theirs
    weights, cached = step_bytes(run, batch, args.prompt + (16 + args.tokens) / 2)
    step = batch / row["steepen_decoding_tokens_per_second"]
    row |= {"step_us": 1e6 * step, "floor_us": 1e6 * (weights + cached) / bandwidth}
    row |= {"floor_fraction": row["floor_us"] / row["step_us"]}
    return row | {"weights_fraction": weights / bandwidth / step, "bandwidth_tb_s": bandwidth / 1e12}


def measure(args: argparse.Namespace, arm: str, depth: int, folder: Path) -> list[dict[str, Any]]:
    path = make_run(folder, arm, depth, args.tiny)
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(0, 50_000, (args.prompt,), generator=generator).tolist()
        for _ in range(max(args.batches))
    ]
    run = load(path, device=args.device, precision="fp32")
    model = load_transformers(args, path, folder / f"hf-{arm}-{depth}")
    same = equal_tokens(args, run, model, rows[0])
    if args.precision == "bf16":  # as load(precision="bf16") and from_pretrained(dtype=torch.bfloat16) do
        run.network.to(torch.bfloat16)
        model = None if model is None else model.to(torch.bfloat16)
    bandwidth = copy_bandwidth(args.device)
    found: list[dict[str, Any]] = []
    for batch in args.batches:
        measured = measure_batch(args, run, model, rows[:batch], bandwidth)
        found.append({"arm": arm, "depth": depth, **measured, **same})
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found[-1].items()}
        print(json.dumps(shown), flush=True)
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
    parser.add_argument("--no-transformers", action="store_true", help="leave out the comparison")
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
