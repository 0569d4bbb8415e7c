"""Training speed of the quickstart's models on one CPU thread, against an eager PyTorch loop, in one run.

    OMP_NUM_THREADS=1 python benchmarks/cpu_throughput.py [--arms vanilla:2 vanilla:6 …] [--rounds 15]

`fused` is the step of training, with plain Muon: GradientAccumulator, gradient norm, Optimizer. `eager`
computes the same with one F.linear per matrix, torch's attention, cross-entropy on all logits, Muon one
matrix at a time and torch's AdamW. Both are interleaved in every round. Numbers are medians over rounds of
the thread's CPU time, which other processes on the machine affect less than wall-clock time. Percentages
split the fused step: blocks forward and backward, head and loss (forward and backward), optimizer, and the
rest. `authors'` is what the optimizer of the paper's authors, the default of training, takes more than plain
Muon, in percent of the fused step.

Both loops run with malloc set to keep freed memory; --default-memory leaves malloc at its defaults.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution import cpu_fused as cpu
from steepen.model.arms import find_arm
from steepen.model.init import initialize
from steepen.model.network import Network
from steepen.optim.config import OptimizerConfig
from steepen.optim.optimizer import Optimizer
from steepen.runs.spec import RunSpec
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.preset import load_preset
from steepen.training.device import keep_freed_memory
from steepen.training.train_step import GradientAccumulator

VOCABULARY = 512
CHECKED_STEPS = 5  # after which both losses must agree
TOLERANCE = 1e-3
AUTHORS = "authors'"  # heading of a column
PARTS = ("forward", "backward", "head+loss", "optimizer", "other")
DEFAULT = [
    "vanilla:2",
    "vanilla:4",
    "vanilla:6",
    "operator-1:2",
    "operator-1:6",
    "untied-grow:2",
    "untied-grow:5",
]


class EagerStep:
    """An optimizer step of the same network in eager torch operations."""

    def __init__(self, network: Network, spec: RunSpec) -> None:
        self.network, self.hyper, self.choice = network, spec.hyperparameters, spec.optimizer
        self.eps = spec.options.norm_eps
        self.embedding, self.head = (self._copy(p) for p in (network.embedding, network.head))
        self.stages = [
            self._stage(network.prelude),
            *map(self._stage, network.cores),
            self._stage(network.coda),
        ]
        self.matrices = [w for stage in self.stages for block in stage for w in block]
        self.momentum = [torch.zeros_like(w) for w in self.matrices]
        self.adam = torch.optim.AdamW(
            [
                {"params": [self.embedding], "lr": self.hyper.embedding_lr},
                {"params": [self.head], "lr": self.hyper.head_lr},
            ],
            betas=(self.hyper.beta1, self.hyper.beta2),
            eps=self.hyper.adam_eps,
            weight_decay=self.hyper.weight_decay,
        )
        cos, sin = network.rotary.unsqueeze(2)
        self.cos, self.sin = cos, sin

    @staticmethod
    def _copy(weight: Tensor) -> nn.Parameter:
        return nn.Parameter(weight.detach().clone())

    def _stage(self, blocks: nn.Module) -> list[list[nn.Parameter]]:
        children: list[Any] = list(blocks.children())
        return [
            [self._copy(w) for w in (*block.qkv, block.out, *block.gate_up, block.down)] for block in children
        ]

    def norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        rotated = first * self.cos - second * self.sin, first * self.sin + second * self.cos
        return torch.cat(rotated, dim=-1)

    def block(self, x: Tensor, weights: list[nn.Parameter]) -> Tensor:
        query, key, value, out, gate, up, down = weights
        shape = self.network.shape
        n = self.norm(x)
        q, k, v = (functional.linear(n, w).unflatten(-1, (shape.heads, -1)) for w in (query, key, value))
        q, k = self.norm(self.rotate(q)), self.norm(self.rotate(k))
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=shape.head_dim**-0.5,
        )
        x = x + self.hyper.residual_multiplier * functional.linear(attended.transpose(1, 2).flatten(-2), out)
        n = self.norm(x)
        hidden = functional.silu(functional.linear(n, gate)) * functional.linear(n, up)
        return x + self.hyper.residual_multiplier * functional.linear(hidden, down)

    def loss(self, tokens: Tensor, targets: Tensor, passes: int) -> Tensor:
        def run(stage: list[list[nn.Parameter]], x: Tensor) -> Tensor:
            for weights in stage:
                x = self.block(x, weights)
            return x

        network, alpha = self.network, self.hyper.injection_weight
        prelude, *cores, coda = self.stages
        e = run(prelude, self.norm(functional.embedding(tokens, self.embedding)))
        h: Tensor | None = None
        for index in range(passes):
            core = cores[0 if network.arm.tied else index]
            h = run(core, e if h is None else network.core_boundary(h, e, alpha, self.norm))
        x = run(coda, network.coda_boundary(h, e, alpha, self.norm))
        logits = self.hyper.output_multiplier * functional.linear(self.norm(x), self.head)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self, tokens: Tensor, targets: Tensor, passes: int) -> float:
        loss = self.loss(tokens, targets, passes)
        loss.backward()
        parameters = [self.embedding, self.head, *self.matrices]
        torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        self.muon()
        self.adam.step()
        for parameter in parameters:
            parameter.grad = None
        return loss.item()

    @torch.no_grad()
    def muon(self) -> None:
        beta, lr = self.choice.momentum, self.hyper.learning_rate
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 1 - beta)
            x = weight.grad.lerp(momentum, beta)
            transposed = x.shape[0] > x.shape[1]
            x = x.T if transposed else x
            x = x / (x.norm() + 1e-7)
            for _ in range(self.choice.orthogonalization_steps):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if transposed else x
            weight.mul_(1 - lr * self.hyper.weight_decay)
            weight.add_(x, alpha=-lr * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


class FusedStep:
    """An optimizer step as training runs it, and its components."""

    def __init__(self, network: Network, spec: RunSpec, passes: int) -> None:
        self.network, self.passes = network, passes
        cpu.install_fused_cpu(network)
        named, hyper = list(network.named_parameters()), spec.hyperparameters
        self.optimizer = Optimizer(named, hyper, spec.optimizer, network.refresh)
        self.authors = Optimizer(named, hyper, OptimizerConfig.named("authors"), network.refresh)
        self.accumulator = GradientAccumulator(network, spec.batch_sequences, None, print)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.accumulator(tokens, targets, self.passes)
        self.update()
        return loss.item()

    def update(self) -> None:
        self.optimizer.step(1.0)
        self.optimizer.zero_grad()

    def authors_extra(self, tokens: Tensor, targets: Tensor) -> float:
        """Seconds that the authors' optimizer takes more than this one, on the same gradients."""
        self.accumulator(tokens, targets, self.passes)
        _, plain = timed(lambda: self.optimizer.step(1.0))
        _, authors = timed(lambda: self.authors.step(1.0, 0))
        self.optimizer.zero_grad()
        return authors - plain

    def parts(self, tokens: Tensor, targets: Tensor) -> dict[str, float]:
        """Seconds of each component of a step."""
        seconds: dict[str, float] = {}

        def part(name: str, action: Callable[[], Any]) -> Any:
            result, seconds[name] = timed(action)
            return result

        def whole() -> None:
            hidden = part("forward", lambda: self.network.hidden_states(tokens, self.passes))
            leaf = hidden.detach().requires_grad_()
            part("head+loss", lambda: self.network.loss(leaf, targets).backward())
            part("backward", lambda: hidden.backward(leaf.grad))
            part("optimizer", self.update)

        _, total = timed(whole)
        return {**seconds, "other": total - sum(seconds.values())}


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Result of an action, and its seconds of CPU time."""
    begun = time.thread_time()
    result = action()
    return result, time.thread_time() - begun


def compare(name: str, rounds: int) -> str:
    """Measure one arm and depth (`name` is ARM:DEPTH) and return its row of the table."""
    arm_name, depth = name.split(":")
    arm = find_arm(arm_name)
    context = StudyContext(load_preset("tiny+context=64"), DatasetInfo("0" * 64, VOCABULARY, 10**12, 10**9))
    muon = OptimizerConfig.named("muon")
    spec = context.spec(context.recipe(arm).at(arm, int(depth), context.size_rule), optimizer=muon)
    passes = spec.schedule.final
    network = Network(spec.shape, arm, spec.hyperparameters.multipliers, spec.options, passes=passes)
    network.reset_rotary()
    initialize(
        network,
        embedding_std=spec.hyperparameters.embedding_init_std,
        init_scale=spec.hyperparameters.init_scale,
        seed=0,
    )
    eager, fused = EagerStep(network, spec), FusedStep(network, spec, passes)
    batch = torch.randint(VOCABULARY, (spec.batch_sequences, spec.shape.context + 1))
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    losses = (0.0, 0.0)
    for _ in range(CHECKED_STEPS):
        losses = eager.step(tokens, targets, passes), fused.step(tokens, targets)
    difference = abs(losses[0] - losses[1])
    assert difference < TOLERANCE, f"{name}: the losses are {losses} after {CHECKED_STEPS} steps"

    times: dict[str, list[float]] = {"eager": [], "fused": []}
    for _ in range(rounds):
        times["eager"].append(timed(lambda: eager.step(tokens, targets, passes))[1])
        times["fused"].append(timed(lambda: fused.step(tokens, targets))[1])
        parts = {**fused.parts(tokens, targets), "authors": fused.authors_extra(tokens, targets)}
        for part, seconds in parts.items():
            times.setdefault(part, []).append(seconds)
    median = {part: statistics.median(samples) for part, samples in times.items()}
    rate = {kind: spec.batch_tokens / median[kind] for kind in ("eager", "fused")}
    whole = sum(median[part] for part in PARTS)
    cells = "".join(f"{median[part] / whole:>10.0%}" for part in PARTS)
    return (
        f"{arm.name + ' d' + depth:<16}{spec.shape.width:>6}{passes:>3}{1e3 * median['fused']:>9.1f}"
        f"{rate['fused']:>12,.0f}{rate['eager']:>11,.0f}{rate['fused'] / rate['eager']:>8.2f}"
        f"{cells}{median['authors'] / median['fused']:>+10.1%}{difference:>10.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=DEFAULT, metavar="ARM:DEPTH", help="e.g. vanilla:4")
    parser.add_argument("--rounds", type=int, default=15, help="of eager and fused steps")
    parser.add_argument("--default-memory", action="store_true", help="do not keep freed memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not args.default_memory:
        keep_freed_memory()
    print(f"torch {torch.__version__}, one thread, tokens per step 2048, medians of {args.rounds} rounds")
    parts = "".join(f"{part:>10}" for part in PARTS)
    print(f"{'arm':<16}{'width':>6}{'K':>3}{'ms':>9}{'fused tok/s':>12}{'eager':>11}{'ratio':>8}", end="")
    print(f"{parts}{AUTHORS:>10}{'|Δloss|':>10}")
    for name in args.arms:
        print(compare(name, args.rounds), flush=True)


if __name__ == "__main__":
    main()
