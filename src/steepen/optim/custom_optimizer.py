"""Custom optimizers for the block matrices, by "module:attribute" or as a Python object.

The object is a factory: a function or class called as `factory(named_parameters, config, hyperparameters)`
that returns a `torch.optim.Optimizer`.

- `named_parameters` is a list of (name, parameter), as torch's optimizers accept. A parameter is a stack
  of logical matrices (…, out, in): Q, K and V of a block are one parameter of shape (3, width, width).
- `config` is the run's `OptimizerConfig`, `hyperparameters` its tuned numbers (learning_rate, weight_decay…).
- The learning rate given to each parameter group is its peak: before a step, `group["lr"]` is set to the
  peak times the schedule's factor. The optimizer applies weight decay; gradients arrive clipped.
- `optimizer.state[parameter]` holds tensors. It is saved in checkpoints; state outside of it is not. At
  growth the factory is called again with all parameters: new cores start without state or, under
  `growth_state="copy"`, with a copy.

Embedding, head and vectors stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from steepen.errors import UsageError
from steepen.optim.config import OptimizerConfig, OptimizerHyperparameters
from steepen.utils.imports import import_object

OptimizerFactory = Callable[
    [list[tuple[str, nn.Parameter]], OptimizerConfig, OptimizerHyperparameters], torch.optim.Optimizer
]


class CustomOptimizer:
    """Steps named block matrices with the optimizer that a user's factory makes."""

    def __init__(self, config: OptimizerConfig, hyperparameters: OptimizerHyperparameters) -> None:
        self.config, self.hyperparameters = config, hyperparameters
        found = import_object(config.kind, "optimizer")
        if not callable(found):
            raise UsageError(
                f"the optimizer {config.kind!r} is a {type(found).__name__}, not a function "
                "(named_parameters, config, hyperparameters)."
            )
        self.factory = cast("OptimizerFactory", found)
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None

    def set_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Build the optimizer again with these parameters, old and new; the state of the old ones stays."""
        state = {name: found for name in self.parameters if (found := self.state_of(name))}
        self.parameters = dict(parameters)
        if not self.parameters:  # a rank that owns no matrix
            return
        self.optimizer = self._build()
        for name, tensors in state.items():
            self.load_state_of(name, tensors)

    def set_factor(self, factor: float) -> None:
        """Set every group's learning rate to this fraction of its peak."""
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = group["initial_lr"] * factor

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        if self.optimizer is not None:
            self.optimizer.step()

    def state_of(self, name: str) -> dict[str, Tensor] | None:
        """State of a parameter by key, or None before its first step."""
        found = self._built_optimizer().state.get(self.parameters[name]) or {}
        tensors: dict[str, Tensor] = {}
        for key, value in found.items():
            if isinstance(value, Tensor):
                tensors[key] = value
            elif value is not None:
                raise UsageError(
                    f"the optimizer {self.config.kind!r} keeps state {key!r} as a {type(value).__name__}, "
                    "which a checkpoint cannot hold: make it a tensor."
                )
        return tensors or None

    def load_state_of(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a parameter's state."""
        optimizer, parameter = self._built_optimizer(), self.parameters[name]
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        # torch's optimizers count steps on the host unless the update is fused or captured.
        on_host = not (group.get("fused") or group.get("capturable"))
        optimizer.state[parameter] = {
            key: value.cpu() if key == "step" and on_host else value.to(parameter.device)
            for key, value in tensors.items()
        }

    def _built_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, "parameters are added first"
        return self.optimizer

    def _build(self) -> torch.optim.Optimizer:
        kind = self.config.kind
        try:
            made: Any = self.factory(list(self.parameters.items()), self.config, self.hyperparameters)
        except Exception as error:  # whatever the user's factory raises
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"the optimizer {kind!r} failed: {type(error).__name__}: {reason}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer {kind!r} made a {type(made).__name__}, not a torch.optim.Optimizer."
            )
        held = [id(p) for group in made.param_groups for p in group["params"]]
        if sorted(held) != sorted(id(p) for p in self.parameters.values()):
            raise UsageError(
                f"the optimizer {kind!r} holds {len(held)} parameters; it must hold each of the "
                f"{len(self.parameters)} it was given once."
            )
        for group in made.param_groups:
            group["initial_lr"] = float(group["lr"])  # the name torch's schedulers use
        return made
