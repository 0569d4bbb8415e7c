"""The optimizer of a run: Muon (or a custom one) on the block matrices, AdamW on everything else.

The flow of a step: set the learning rates of the schedule and Muon's momentum, clip or measure the gradient
norm, step AdamW and Muon, refresh the low-precision copies of the weights (`after_step`).

Learning rates and momentum are tensors where a step can be captured in a CUDA graph, since a graph replays
with the memory it was captured with. State is read and loaded by parameter name, so that a checkpoint does
not depend on which rank held a parameter, and growth can copy the state of one core to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from steepen.errors import UsageError
from steepen.execution.cuda_graphs import StreamPool, run_sequentially
from steepen.optim.adamw import AdamW
from steepen.optim.config import CautiousDecay, GrowthState, OptimizerConfig, OptimizerHyperparameters
from steepen.optim.custom_optimizer import CustomOptimizer
from steepen.optim.muon import Muon, OptimizerState

# Keys under which Muon, AdamW and torch's SGD keep the running mean of the gradient.
MOMENTUM_KEYS = ("momentum", "exp_avg", "momentum_buffer")
GROUPS = ("matrices", "embedding", "head", "vectors")
# Elements of all block matrices together up to which the parts of a step run on parallel CUDA streams: the
# kernels of a small network leave most of a GPU idle, a large one would only hold more memory. Not measured.
PARALLEL_MAX_ELEMENTS = 2**24


def parameter_group(name: str, parameter: Tensor) -> str:
    """Group of a parameter: "embedding", "head", "matrices" (of blocks) or "vectors" (of custom blocks)."""
    if name in ("embedding", "head"):
        return name
    return "matrices" if parameter.ndim >= 2 else "vectors"


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Norm of all gradients together, a scalar; on a CPU in fp64, so that the order does not matter."""
    if gradients and gradients[0].is_cpu:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        return torch.stack(norms).square().sum().sqrt().to(gradients[0].dtype)
    return nn.utils.get_total_norm(gradients)


@torch.no_grad()
def round_to_bf16_(tensor: Tensor) -> None:
    """Round the values to those that bf16 has; the dtype stays."""
    tensor.copy_(tensor.bfloat16())


class Optimizer:
    """Steps named parameters by a recipe's hyperparameters; state is read and loaded by parameter name.

    `after_step` is called at the end of every step, also inside a CUDA graph: fused execution refreshes the
    low-precision copies of the weights there. `total_norm` computes the norm of a list of gradients; it is
    given if a process holds only a part of them, or none: `device` is then where they would be.
    """

    collective_forward = False  # whether every forward gathers weights from all ranks

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        hyperparameters: OptimizerHyperparameters,
        config: OptimizerConfig,
        after_step: Callable[[], None] | None = None,
        *,
        total_norm: Callable[[list[Tensor]], Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        named = dict(named_parameters)
        self.total_norm = total_norm or gradient_norm
        self.hyperparameters, self.config, self.after_step = hyperparameters, config, after_step
        self.device = device or next(iter(named.values())).device
        on_gpu = self.device.type == "cuda"
        self.muon = Muon({}, config) if config.kind == "muon" else None
        self.custom = CustomOptimizer(config, hyperparameters) if config.is_custom else None
        cautious: dict[CautiousDecay, tuple[str, ...]] = {
            "none": (),
            "matrices": ("matrices",),
            "all": GROUPS,
        }
        self.adamw = AdamW(
            GROUPS, hyperparameters, cautious_groups=cautious[config.cautious_decay], on_gpu=on_gpu
        )
        # On a GPU learning rates and momentum are tensors there, so that a captured step reads the values set
        # since.
        # AdamW's kernel reads its rate as fp32, whatever the dtype of the weights.
        self._peaks: Tensor | None = None
        self.lr: dict[str, float | Tensor] = dict.fromkeys(GROUPS, 0.0)
        if on_gpu:
            rates = list(self.peak_lr().values())
            self._peaks = torch.tensor(rates, dtype=torch.float32, device=self.device)
            self._current_lr = torch.zeros_like(self._peaks)
            self.lr = dict(zip(GROUPS, self._current_lr.unbind(), strict=True))
        self.momentum: float | Tensor = config.momentum
        if on_gpu:
            self.momentum = torch.full((), config.momentum, dtype=torch.float32, device=self.device)
        self.adamw.set_lr(self.lr)
        self.streams = StreamPool()
        self.parameters: dict[str, nn.Parameter] = {}
        self._add(named)

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured in a CUDA graph; custom optimizers keep their rate on the host."""
        return self.custom is None

    @property
    def matrices(self) -> dict[str, nn.Parameter]:
        """Block matrices that are not stepped by AdamW, by name."""
        stepper = self.muon or self.custom
        return {} if stepper is None else stepper.parameters

    def peak_lr(self) -> dict[str, float]:
        """Peak learning rate of each group."""
        hyper = self.hyperparameters
        peak = {"embedding": hyper.embedding_lr, "head": hyper.head_lr}
        return {group: peak.get(group, hyper.learning_rate) for group in GROUPS}

    def step(self, factor: float, step: int | None = None) -> Tensor:
        """Step at `factor` times the peak learning rates; returns the gradient norm before clipping.

        `step` is the number of the step, for Muon's momentum; without it, momentum is as last set.
        """
        self.set_lr_factor(factor)
        if step is not None:
            self.set_momentum(step)
        return self.step_at_current_lr()

    def set_momentum(self, step: int) -> None:
        """Set Muon's momentum for step `step` (from 0); before the first call it is `config.momentum`."""
        if self.config.momentum_start is None:
            return
        value = self.config.momentum_at(step)
        if isinstance(self.momentum, Tensor):
            self.momentum.fill_(value)
        else:
            self.momentum = value

    def set_lr_factor(self, factor: float) -> None:
        """Set the learning rates of the next steps to `factor` times their peaks."""
        if self.custom is not None:
            self.custom.set_factor(factor)
        if self._peaks is not None:
            torch.mul(self._peaks, factor, out=self._current_lr)
            return
        self.lr = {group: rate * factor for group, rate in self.peak_lr().items()}
        self.adamw.set_lr(self.lr)

    def step_at_current_lr(self) -> Tensor:
        """Step at the current learning rates; returns the norm of all gradients before clipping, a scalar.

        On a GPU it can be captured in a CUDA graph. The first step creates the state, and growing or loading
        replaces it: capture after a step, and again after growth or loading.
        """
        small = sum(p.numel() for p in self.matrices.values()) <= PARALLEL_MAX_ELEMENTS
        # Only during capture: eagerly, a small step is limited by the host, which streams would burden more.
        parallel = self.device.type == "cuda" and small and torch.cuda.is_current_stream_capturing()
        embedding = self.parameters.get("embedding")
        rounded = embedding if self.config.embedding_precision == "bf16" else None
        if rounded is not None and rounded.grad is not None:
            round_to_bf16_(rounded.grad)
        tasks: list[Callable[[], Any]] = [self.adamw.step]
        if self.muon is not None:
            weight_decay = self.hyperparameters.weight_decay
            tasks += self.muon.tasks(self.lr["matrices"], weight_decay, self.momentum, parallel=parallel)
        if self.custom is not None:
            tasks.append(self.custom.step)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.config.clip is not None:
            before = self.total_norm(gradients)
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.clip, before)
            tasks.insert(0, lambda: before)
        else:
            tasks.insert(0, lambda: self.total_norm(gradients))
        norm, *_ = self.streams(tasks, self.device) if parallel else run_sequentially(tasks)
        if rounded is not None:
            state = self.adamw.state_of(rounded) or {}
            for tensor in (rounded, *(value for key, value in state.items() if key != "step")):
                round_to_bf16_(tensor)
        if self.after_step is not None:
            self.after_step()
        return norm

    def warm_up(self) -> None:
        """Compile the kernels of a Muon step, on zeros: one block matrix of each shape."""
        if self.muon is None:
            return
        shapes = {p.shape: p for p in self.muon.parameters.values()}
        zeros = {str(shape): nn.Parameter(torch.zeros_like(p)) for shape, p in shapes.items()}
        for parameter in zeros.values():
            parameter.grad = torch.zeros_like(parameter)
        Muon(zeros, self.config).step(self.lr["matrices"], self.hyperparameters.weight_decay, self.momentum)

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def grow(self, named_parameters: Iterable[tuple[str, nn.Parameter]], sources: Mapping[str, str]) -> None:
        """Add the parameters that growth made, with their state by the configured policy.

        `named_parameters` are the grown network's; `sources` is what `steepen.model.growth.grow` returned.
        """
        state = self.state()
        grow_state(state, sources, self.config.growth_state)
        self._add(dict(named_parameters))
        self.load_state({name: state[name] for name in sources if name in state})

    def state(self) -> OptimizerState:
        """State by parameter name; the tensors are the live ones."""
        found = {name: self._state_of(name, parameter) for name, parameter in self.parameters.items()}
        return {name: state for name, state in found.items() if state is not None}

    def load_state(self, state: OptimizerState) -> None:
        """Replace the state of the parameters named in `state`."""
        for name, tensors in state.items():
            parameter = self.parameters[name]
            if self.muon is not None and name in self.muon.parameters:
                self.muon.state[name] = {key: value.to(parameter.device) for key, value in tensors.items()}
            elif self.custom is not None and name in self.custom.parameters:
                self.custom.load_state_of(name, tensors)
            else:
                self.adamw.load_state_of(parameter, tensors)

    def _state_of(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        if self.muon is not None and name in self.muon.parameters:
            return dict(self.muon.state[name]) if name in self.muon.state else None
        if self.custom is not None and name in self.custom.parameters:
            return self.custom.state_of(name)
        return self.adamw.state_of(parameter)

    def _add(self, named: dict[str, nn.Parameter]) -> None:
        """Put the parameters that are new into their groups, and check that each is in exactly one."""
        matrices: dict[str, nn.Parameter] = {}
        for name, parameter in named.items():
            if name in self.parameters:
                continue
            self.parameters[name] = parameter
            group = parameter_group(name, parameter)
            if group == "matrices" and self.config.kind != "adamw":
                matrices[name] = parameter
            else:
                self.adamw.add(group, parameter)
        # The order is the network's, also after growth: sums over parameters round alike in a resumed run.
        self.parameters = {name: self.parameters[name] for name in named}
        if self.muon is not None:
            self.muon.parameters = _in_order(self.muon.parameters | matrices, named)
        if self.custom is not None:
            self.custom.set_parameters(_in_order(self.custom.parameters | matrices, named))
        self._check(named)

    def _check(self, named: dict[str, nn.Parameter]) -> None:
        stepped = [id(p) for p in (*self.matrices.values(), *self.adamw.parameters)]
        expected = {id(p) for p in named.values()}
        assert len(stepped) == len(set(stepped)) and set(stepped) == expected, (
            "a parameter is not in exactly one group"
        )
        if self.config.kind != "adamw":
            matrices = {name for name, p in named.items() if parameter_group(name, p) == "matrices"}
            assert set(self.matrices) == matrices, "a block matrix is not stepped by the matrix optimizer"


def _in_order(parameters: dict[str, nn.Parameter], order: Iterable[str]) -> dict[str, nn.Parameter]:
    return {name: parameters[name] for name in order if name in parameters}


def grow_state(state: OptimizerState, sources: Mapping[str, str], policy: GrowthState = "copy") -> None:
    """Add entries for the parameters that growth made; `sources` maps a new name to the copied one.

    "copy" clones the state of the source, "zero" does the same but zeros the momentum, and "fresh" adds
    nothing, as for a parameter that was never stepped.
    """
    if policy not in get_args(GrowthState):
        raise UsageError(
            f"growth state policy {policy!r} is not known: use one of {', '.join(get_args(GrowthState))}."
        )
    if policy == "fresh":
        return
    for new, source in sources.items():
        if source in state:
            state[new] = {
                key: torch.zeros_like(value) if policy == "zero" and key in MOMENTUM_KEYS else value.clone()
                for key, value in state[source].items()
            }
