"""AdamW over named parameter groups, each with its own learning rate and plain or cautious weight decay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steepen.optim.config import OptimizerHyperparameters


class AdamW:
    """`torch.optim.AdamW` with groups by name; a group's decay is torch's, or cautious and applied here."""

    def __init__(
        self,
        groups: Sequence[str],
        hyperparameters: OptimizerHyperparameters,
        *,
        cautious_groups: Collection[str] = (),
        on_gpu: bool,
    ) -> None:
        self.weight_decay, self.cautious_groups = hyperparameters.weight_decay, frozenset(cautious_groups)
        # Cautious decay depends on the update's sign, so it is applied here and torch's is switched off.
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [],
                    "name": group,
                    "weight_decay": 0.0 if group in self.cautious_groups else self.weight_decay,
                }
                for group in groups
            ],
            lr=0.0,
            betas=(hyperparameters.beta1, hyperparameters.beta2),
            eps=hyperparameters.adam_eps,
            fused=on_gpu,
            capturable=on_gpu,
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter, group after group."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def add(self, group: str, parameter: nn.Parameter) -> None:
        """Add a parameter to a group."""
        self._group(group)["params"].append(parameter)

    def set_lr(self, lr: Mapping[str, float | Tensor]) -> None:
        """Set the learning rate of every group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr[group["name"]]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        groups = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.optimizer.param_groups
            if group["name"] in self.cautious_groups
        ]
        before = [[p.detach().clone() for p in parameters] for _, parameters in groups]
        self.optimizer.step()
        with torch.no_grad():
            for (group, parameters), old in zip(groups, before, strict=True):
                updates = [p.detach() - o for p, o in zip(parameters, old, strict=True)]
                apply_cautious_decay(old, updates, group["lr"], self.weight_decay)
                for parameter, start, update in zip(parameters, old, updates, strict=True):
                    parameter.copy_(start + update)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """State of a parameter by key (exp_avg, exp_avg_sq, step), or None before its first step."""
        return dict(self.optimizer.state[parameter]) if parameter in self.optimizer.state else None

    def load_state_of(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
        """Replace a parameter's state."""
        # The fused kernel counts steps on the GPU, the others on the host.
        self.optimizer.state[parameter] = {
            key: value.to(parameter.device) if parameter.is_cuda or key != "step" else value.cpu()
            for key, value in tensors.items()
        }

    def _group(self, name: str) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if group["name"] == name)


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
