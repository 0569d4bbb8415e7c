"""Cost of the boundary operator: forward and backward of arms against Vanilla at equal shape, in one run.

    python benchmarks/operator_cost.py [--depth 8] [--rows 32] [--arms operator-1 loop-2 untied-2]

Arms are interleaved within each round, so that a drift of the clock affects all; ratios are of medians.
Arms that execute more blocks are compared by time per FLOP.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from steepen.execution.select import apply_execution_mode
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta, materialize
from steepen.model.network import Network
from steepen.model.shape import SizeRule
from steepen.recipe.flops import flops_per_token
from steepen.training.device import configure_backends, find_device, peak_flops, synchronize


def build(name: str, depth: int, scale: SizeRule, device: torch.device) -> Network:
    arm = find_arm(name)
    network = materialize(build_on_meta(arm.shape(depth, scale), arm), device)
    generator = torch.Generator(device).manual_seed(0)
    # Some weights are initialized to zero, and GEMMs of zeros run faster than those of training.
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.add_(0.5 * parameter.shape[-1] ** -0.5 * noise)
    if device.type == "cuda":
        apply_execution_mode(network, "bf16", fused=True, compiled=False)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=["operator-1", "loop-2", "untied-2"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = find_device(args.device)
    scale = SizeRule(context=args.context, vocabulary=args.vocabulary)
    names = ["vanilla", *args.arms]
    tokens = torch.randint(0, args.vocabulary, (args.rows, args.context), device=device)

    with configure_backends(device):
        networks = {name: build(name, args.depth, scale, device) for name in names}

        def seconds_per_call(network: Network) -> float:
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(args.repeats):
                network(tokens, tokens).backward()
            synchronize(device)
            network.zero_grad(set_to_none=True)
            return (time.perf_counter() - begun) / args.repeats

        times: dict[str, list[float]] = {name: [] for name in names}
        for network in networks.values():  # warm up, compile
            seconds_per_call(network)
            seconds_per_call(network)
        for round_index in range(args.rounds):
            first = round_index % len(names)  # rotate the order
            for name in [*names[first:], *names[:first]]:
                times[name].append(seconds_per_call(networks[name]))

    peak = peak_flops(device)
    batch = f"{args.rows}×{args.context} tokens"
    print(f"forward + backward, d{args.depth}, {batch}, vocabulary {args.vocabulary}")
    print(f"{'arm':<14}{'ms':>9}{'tokens/s':>12}{'MFU':>8}{'time/vanilla':>14}{'time per FLOP':>15}")
    base = statistics.median(times["vanilla"])
    cost = {n: flops_per_token(x.arm, x.shape, x.passes).total for n, x in networks.items()}
    for name in names:
        median = statistics.median(times[name])
        rate = tokens.numel() / median
        mfu = f"{rate * cost[name] / peak:.1%}" if peak else "-"
        per_flop = (median / cost[name]) / (base / cost["vanilla"])
        print(f"{name:<14}{1e3 * median:>9.2f}{rate:>12,.0f}{mfu:>8}{median / base:>14.4f}{per_flop:>15.4f}")


if __name__ == "__main__":
    main()
