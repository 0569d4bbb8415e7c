"""AdamW over named parameter groups, each with its own learning rate and plain or cautious weight decay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from steepen.optim.config import OptimizerHyperparameters


@dataclass
class _Group:
    """Parameters with one learning rate; the decay is torch's, or zero where it is cautious."""

    cautious: bool
    weight_decay: float
    lr: float | Tensor = 0.0
    parameters: list[nn.Parameter] = field(default_factory=list[nn.Parameter])


class AdamW:
    """AdamW with groups by name; a group's decay is torch's, or cautious and applied here.

    The update is `torch.optim.adamw.adamw`. The class `torch.optim.AdamW` would do the same, but creating one
    imports the compiler (torch._dynamo), two to five seconds of every run's start.
    """

    def __init__(
        self,
        groups: Sequence[str],
        hyperparameters: OptimizerHyperparameters,
        *,
        cautious_groups: Collection[str] = (),
        on_gpu: bool,
    ) -> None:
        self.hyperparameters, self.weight_decay = hyperparameters, hyperparameters.weight_decay
        self.on_gpu = on_gpu
        # Cautious decay depends on the update's sign, so it is applied here and torch's is switched off.
        self.groups = {
            group: _Group(group in cautious_groups, 0.0 if group in cautious_groups else self.weight_decay)
            for group in groups
        }
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter, group after group."""
        return [p for group in self.groups.values() for p in group.parameters]

    def add(self, group: str, parameter: nn.Parameter) -> None:
        """Add a parameter to a group."""
        self.groups[group].parameters.append(parameter)

    def set_lr(self, lr: Mapping[str, float | Tensor]) -> None:
        """Set the learning rate of every group."""
        for name, group in self.groups.items():
            group.lr = lr[name]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.groups.values():
            parameters = [p for p in group.parameters if p.grad is not None]
            if not parameters:
                continue
            before = [p.detach().clone() for p in parameters] if group.cautious else []
            self._update(group, parameters)
            if group.cautious:
                updates = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
                apply_cautious_decay(before, updates, group.lr, self.weight_decay)
                for parameter, start, update in zip(parameters, before, updates, strict=True):
                    parameter.copy_(start + update)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """State of a parameter by key (exp_avg, exp_avg_sq, step), or None before its first step."""
        return dict(self.state[parameter]) if parameter in self.state else None

    def load_state_of(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
        """Replace a parameter's state."""
        # The fused kernel counts steps on the GPU, the others on the host.
        self.state[parameter] = {
            key: value.to(parameter.device) if parameter.is_cuda or key != "step" else value.cpu()
            for key, value in tensors.items()
        }

    def _update(self, group: _Group, parameters: list[nn.Parameter]) -> None:
        states = [self._state_for_step(p) for p in parameters]
        hyper = self.hyperparameters
        adamw(
            [p.detach() for p in parameters],
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=self.on_gpu,
            capturable=self.on_gpu,
            amsgrad=False,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            lr=group.lr,
            weight_decay=group.weight_decay,
            eps=hyper.adam_eps,
            maximize=False,
        )

    def _state_for_step(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), device=parameter.device) if self.on_gpu else torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]


def apply_cautious_decay(
    parameters: list[Tensor], updates: list[Tensor], lr: float | Tensor, weight_decay: float
) -> None:
    """Multiply weights by 1 − lr·weight_decay, except those that the update (to be added) enlarges."""
    if weight_decay == 0:
        return
    amount = lr * weight_decay
    for parameter, update in zip(parameters, updates, strict=True):
        shrinking = (parameter * update <= 0).to(parameter.dtype)
        parameter.mul_(1 - amount * shrinking)
