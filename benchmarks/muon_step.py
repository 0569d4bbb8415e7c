"""Time of an optimizer step: ours, torch.optim.Muon, and the orthogonalization alone.

    python benchmarks/muon_step.py [--arm vanilla] [--depth 8] [--graph] [--profile] [--tiles]

All rows are interleaved in one run, so that a drift of the clock affects all; times are medians. The
reference is torch.optim.Muon, which processes one logical matrix at a time; compare it with the Muon row.
FLOPs count full GEMMs, so kernels that compute half of a symmetric result may exceed the hardware's peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import SizeRule
from steepen.optim import muon
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.recipe.paper_tables import BASE
from steepen.training.device import find_device, synchronize

CONFIG = OptimizerConfig.named("muon")
AUTHORS = OptimizerConfig.named("authors")
TILES = [  # edge, depth, warps, stages
    (64, 64, 4, 4),
    (64, 128, 4, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
]


def orthogonalize_reference(matrices: Tensor) -> Tensor:
    """Newton–Schulz orthogonalization with torch.baddbmm."""
    norm = matrices.norm(dim=(-2, -1), keepdim=True)
    x = matrices / (norm + muon.NORM_EPS["newton-schulz"])
    a, b, c = muon.NEWTON_SCHULZ[0]
    for _ in range(CONFIG.orthogonalization_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def reference(optimizer: Optimizer) -> tuple[str, Callable[[], object]]:
    """Name and step of the reference optimizer, on copies of the same logical matrices."""
    singles: list[nn.Parameter] = []
    for stack in optimizer.matrices.values():
        for matrix in stack.detach().reshape(-1, *stack.shape[-2:]):
            singles.append(nn.Parameter(matrix.clone()))
            singles[-1].grad = torch.randn_like(matrix)
    if hasattr(torch.optim, "Muon"):
        torch_muon = torch.optim.Muon(singles, lr=1e-3, weight_decay=0.1, momentum=CONFIG.momentum)
        return "torch.optim.Muon", torch_muon.step
    optimizers = [muon.Muon({"": single}, CONFIG) for single in singles]
    return "Muon, one matrix at a time", lambda: [single.step(1e-3, 0.1) for single in optimizers]


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Replay of the work as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Mean seconds per call, by CUDA events on a GPU."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats / 1e3
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begun) / repeats


def buckets(optimizer: Optimizer) -> dict[tuple[int, int], int]:
    """Shape (rows ≤ columns) → number of logical matrices with it or its transpose."""
    found: dict[tuple[int, int], int] = {}
    for parameter in optimizer.matrices.values():
        rows, columns = sorted(parameter.shape[-2:])
        count = parameter.numel() // (rows * columns)
        found[rows, columns] = found.get((rows, columns), 0) + count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", default="vanilla")
    parser.add_argument("--depth", type=int, help="default: 8 on a GPU, 2 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 50,304 on a GPU, 1,024 on a CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, help="default: 10 on a GPU, 1 on a CPU")
    parser.add_argument("--graph", action="store_true", help="time steepen's rows as CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step by time")
    parser.add_argument(
        "--tiles", action="store_true", help="time the symmetric kernels with every tile size"
    )
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = find_device(args.device)
    on_gpu = device.type == "cuda"
    if args.graph and not on_gpu:
        parser.error("--graph needs a GPU")
    depth = args.depth or (8 if on_gpu else 2)
    repeats = args.repeats or (10 if on_gpu else 1)
    scale = SizeRule(vocabulary=args.vocabulary or (50_304 if on_gpu else 1_024))

    arm = find_arm(args.arm)
    network = materialize(build_on_meta(arm.shape(depth, scale), arm), device)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = Optimizer(network.named_parameters(), BASE["vanilla"], CONFIG, network.refresh)
    optimizer.step(0.1)
    authors = Optimizer(network.named_parameters(), BASE["vanilla"], AUTHORS, network.refresh)
    authors.step(0.1, 0)
    precision = torch.bfloat16 if on_gpu else torch.float32
    batches = {
        shape: torch.randn(count, *shape, dtype=precision, device=device)
        for shape, count in buckets(optimizer).items()
    }

    def fused(*shapes: tuple[int, int]) -> Callable[[], object]:
        return lambda: [muon.orthogonalize(batches[shape]) for shape in shapes]

    def with_baddbmm(*shapes: tuple[int, int]) -> Callable[[], object]:
        return lambda: [orthogonalize_reference(batches[shape]) for shape in shapes]

    def symmetric(shape: tuple[int, int]) -> Callable[[], object]:
        def work() -> object:
            with patch.object(muon, "SYMMETRIC_MIN_ROWS", 1):
                return muon.orthogonalize(batches[shape])

        return work

    stepper, authors_stepper = optimizer.muon, authors.muon
    assert stepper is not None and authors_stepper is not None
    wd = optimizer.hyperparameters.weight_decay
    works: dict[str, Callable[[], object]] = {
        "whole step, with gradient norm": optimizer.step_at_current_lr,
        "  Muon, one shape at a time": lambda: stepper.step(optimizer.lr["matrices"], wd),
        "  AdamW": optimizer.adamw.step,
        "whole step, authors' optimizer": authors.step_at_current_lr,
        "  Muon, authors'": lambda: authors_stepper.step(authors.lr["matrices"], wd, authors.momentum),
        "orthogonalize, as in the step": fused(*batches),
        "orthogonalize, torch.baddbmm": with_baddbmm(*batches),
    }
    for shape, batch in batches.items():
        title = f"  {len(batch)} × {shape[0]} × {shape[1]}"
        works[f"{title}, symmetric"] = symmetric(shape)
        works[f"{title}, torch.baddbmm"] = with_baddbmm(shape)
    if args.graph:
        works = {name: captured(work) for name, work in works.items()}
    base, step = reference(optimizer)
    works[base] = step

    for work in works.values():  # warm up, compile, create state
        work()
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            times[name].append(seconds(work, repeats, device))
    medians = {name: statistics.median(values) for name, values in times.items()}

    def flops(shapes: list[tuple[int, int]]) -> float:
        each = [len(batches[m, n]) * (4 * m * m * n + 2 * m**3) for m, n in shapes]
        return float(CONFIG.orthogonalization_steps * sum(each))

    launch = "CUDA graphs" if args.graph else "launched kernel by kernel"
    matrices = sum(map(len, batches.values()))
    print(f"{arm.name} d{depth}, {matrices} logical matrices, vocabulary {scale.vocabulary:,}, {launch}")
    print(f"{'work':<40}{'ms':>10}{'TFLOP/s':>10}{f'time/{base}':>30}")
    for name, median in medians.items():
        shapes = [shape for shape in batches if f"{shape[0]} × {shape[1]}," in name]
        work = flops(shapes or list(batches)) if shapes or name.startswith("orthogonalize") else 0.0
        speed = f"{work / median / 1e12:.3g}" if work else "-"
        compared = name == base or name.startswith(("whole", "  Muon"))
        ratio = f"{median / medians[base]:.3f}" if compared else "-"
        print(f"{name:<40}{1e3 * median:>10.3f}{speed:>10}{ratio:>30}")
    if args.profile:
        show_kernels(optimizer)
    if args.tiles:
        if not on_gpu:
            parser.error("--tiles needs a GPU")
        for batch in batches.values():
            show_tiles(batch, repeats)


def show_tiles(batch: Tensor, repeats: int) -> None:
    """Print times of the symmetric kernels with each tile configuration and of torch, in CUDA graphs."""
    from steepen.kernels import gram as gram_module
    from steepen.kernels.dispatch import REFERENCE, TRITON, Kernels

    gram = REFERENCE.gram(batch) / batch.shape[-1]
    out = torch.empty_like(gram)

    def milliseconds(kernels: Kernels) -> tuple[float, float]:
        works: list[Callable[[], object]] = [
            lambda: kernels.gram(batch, out=out),
            lambda: kernels.symmetric_polynomial(gram, -4.775, 2.0315, a=3.4445, out=out),
        ]
        graphs = [captured(work) for work in works]
        found = [
            statistics.median(seconds(graph, repeats, batch.device) for _ in range(9)) for graph in graphs
        ]
        return 1e3 * found[0], 1e3 * found[1]

    count, rows, columns = batch.shape
    title = f"{count} × {rows} × {columns}"
    print(f"\n{title:<40}{'gram, ms':>12}{'polynomial, ms':>18}")
    times = milliseconds(REFERENCE)
    print(f"{'torch':<40}{times[0]:>12.4f}{times[1]:>18.4f}")
    for use_tma in (True, False):
        for edge, depth, warps, stages in TILES:
            tiles = gram_module.TileConfig(edge, depth, warps, stages)
            with (
                patch.object(gram_module, "USE_TMA", use_tma),
                patch.object(gram_module, "SMALL_TILE", tiles),
                patch.object(gram_module, "LARGE_TILE", tiles),
            ):
                times = milliseconds(TRITON)
            name = f"{edge}² × {depth}, {warps} warps, {stages} stages{', TMA' if use_tma else ''}"
            print(f"{name:<40}{times[0]:>12.4f}{times[1]:>18.4f}")


def show_kernels(optimizer: Optimizer) -> None:
    """Print the kernels (on a CPU: operators) of one step with counts and times."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as measured:
        optimizer.step_at_current_lr()
        if cuda:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(measured.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
