"""The optimizer of a run: Muon on every block matrix, AdamW on embedding and head."""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steepen.execution.cuda_streams import StreamPool, run_sequentially
from steepen.model.growth import State, grow
from steepen.model.network import Network
from steepen.optim.config import OptimizerConfig
from steepen.optim.muon import Muon, decay
from steepen.recipe.hyperparameters import Hyperparameters

GROUPS = ("matrices", "embedding", "head", "vectors")
# Numbers in all block matrices up to which the parts of a step are done side by side: a small network's leave
# most of a GPU idle, a large one's would only hold more memory at once. Where to draw the line is a guess.
OVERLAP_UP_TO = 2**24


def route(network: Network) -> dict[str, str]:
    """Parameter name → group: block matrices, embedding, head, or vectors of a user's block."""
    routes: dict[str, str] = {}
    for name, parameter in network.named_parameters():
        if name in ("embedding", "head"):
            routes[name] = name
        else:
            routes[name] = "matrices" if parameter.ndim >= 2 else "vectors"
    return routes


class Optimizer:
    """Steps a network by a recipe's hyperparameters. State is kept by parameter name."""

    def __init__(self, network: Network, hyper: Hyperparameters, choice: OptimizerConfig) -> None:
        self.network, self.hyper, self.choice = network, hyper, choice
        self.muon = Muon({}, choice)
        on_gpu = network.embedding.is_cuda
        # The decay of a cautious optimizer needs the step's direction, so it is applied here, not by AdamW.
        self.adam = torch.optim.AdamW(
            [{"params": [], "name": group} for group in GROUPS],
            lr=0.0,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.adam_eps,
            weight_decay=0.0 if choice.cautious_decay else hyper.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        # On a GPU the rates lie there, where a captured step reads what has been set since its capture.
        # AdamW's kernel reads its rate as fp32, whatever the weights are.
        self._peaks: Tensor | None = None
        self.lr: dict[str, float | Tensor] = dict.fromkeys(GROUPS, 0.0)
        if on_gpu:
            rates = list(self.rates().values())
            self._peaks = torch.tensor(rates, dtype=torch.float32, device=network.embedding.device)
            self._live = torch.zeros_like(self._peaks)
            self.lr = dict(zip(GROUPS, self._live.unbind(), strict=True))
        for group in self.adam.param_groups:
            group["lr"] = self.lr[group["name"]]
        self.side_by_side = StreamPool()
        self.names: dict[str, nn.Parameter] = {}
        self.adopt()

    def adopt(self) -> None:
        """Take in parameters the network has gained, and check that every one is in exactly one group."""
        routes = route(self.network)
        for name, parameter in self.network.named_parameters():
            if name in self.names:
                continue
            self.names[name] = parameter
            if self.choice.kind == "muon" and routes[name] == "matrices":
                self.muon.parameters[name] = parameter
            else:
                self._adam_group(routes[name])["params"].append(parameter)
        self._check(routes)

    def rates(self) -> dict[str, float]:
        """Peak learning rate of each group."""
        hyper = self.hyper
        peak = {"embedding": hyper.embedding_lr, "head": hyper.head_lr}
        return {group: peak.get(group, hyper.learning_rate) for group in GROUPS}

    def step(self, factor: float) -> Tensor:
        """One step at this share of the peak learning rates; returns what `apply` does."""
        self.set_rates(factor)
        return self.apply()

    def set_rates(self, factor: float) -> None:
        """Have the next steps taken at this share of the peak rates: all that differs from step to step."""
        if self._peaks is not None:
            torch.mul(self._peaks, factor, out=self._live)
            return
        self.lr = {group: rate * factor for group, rate in self.rates().items()}
        for group in self.adam.param_groups:
            group["lr"] = self.lr[group["name"]]

    def apply(self) -> Tensor:
        """One step at the rates that were set; returns the norm of all gradients together, before clipping.

        On a GPU it can be captured in a graph and replayed. State is created by the first step, and growing
        or loading state replaces it: capture after a step was taken, and again after those.
        """
        device = self.network.embedding.device
        small = sum(p.numel() for p in self.muon.parameters.values()) <= OVERLAP_UP_TO
        # Only in a recording: elsewhere a small step waits for the host, whose work streams are.
        at_once = device.type == "cuda" and small and torch.cuda.is_current_stream_capturing()
        works: list[Callable[[], Any]] = [
            self._step_adam,
            *self.muon.works(self.lr["matrices"], self.hyper.weight_decay, at_once=at_once),
        ]
        if self.choice.clip is not None:
            clipped = nn.utils.clip_grad_norm_(self.names.values(), self.choice.clip)
            works.insert(0, lambda: clipped)
        else:
            gradients = [p.grad for p in self.names.values() if p.grad is not None]
            works.insert(0, lambda: nn.utils.get_total_norm(gradients))
        norm, *_ = self.side_by_side(works, device) if at_once else run_sequentially(works)
        self.network.refresh()
        return norm

    def warm_up(self) -> None:
        """Have the kernels of a step compiled, on zeros: one block matrix of each shape."""
        shapes = {p.shape: p for p in self.muon.parameters.values()}
        zeros = {str(shape): nn.Parameter(torch.zeros_like(p)) for shape, p in shapes.items()}
        for parameter in zeros.values():
            parameter.grad = torch.zeros_like(parameter)
        Muon(zeros, self.choice).step(self.lr["matrices"], self.hyper.weight_decay)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.names.values():
            parameter.grad = None

    def grow(self, passes: int) -> dict[str, str]:
        """Grow the network and give its new cores their state by the chosen policy."""
        state = self.state()
        sources = grow(self.network, state, passes, self.choice.growth_state)
        self.adopt()
        self.load_state({name: state[name] for name in sources if name in state})
        return sources

    def state(self) -> State:
        """All state by parameter name; the tensors are the live ones."""
        state: State = {}
        for name, parameter in self.names.items():
            if name in self.muon.state:
                state[name] = dict(self.muon.state[name])
            elif parameter in self.adam.state:
                state[name] = dict(self.adam.state[parameter])
        return state

    def load_state(self, state: State) -> None:
        """Take over the state of the parameters named in `state`."""
        for name, tensors in state.items():
            parameter = self.names[name]
            if name in self.muon.parameters:
                self.muon.state[name] = {key: value.to(parameter.device) for key, value in tensors.items()}
            else:
                # AdamW counts steps on the host unless it is fused with the update.
                self.adam.state[parameter] = {
                    key: value.to(parameter.device) if parameter.is_cuda or key != "step" else value.cpu()
                    for key, value in tensors.items()
                }

    def _step_adam(self) -> None:
        if not self.choice.cautious_decay:
            self.adam.step()
            return
        groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.adam.param_groups]
        before = [[p.detach().clone() for p in parameters] for _, parameters in groups]
        self.adam.step()
        with torch.no_grad():
            for (group, parameters), old in zip(groups, before, strict=True):
                updates = [p.detach() - o for p, o in zip(parameters, old, strict=True)]
                decay(old, updates, group["lr"], self.hyper.weight_decay, cautious=True)
                for parameter, start, update in zip(parameters, old, updates, strict=True):
                    parameter.copy_(start + update)

    def _adam_group(self, name: str) -> dict[str, Any]:
        return next(group for group in self.adam.param_groups if group["name"] == name)

    def _check(self, routes: dict[str, str]) -> None:
        in_adam = [p for group in self.adam.param_groups for p in group["params"]]
        stepped = [id(p) for p in (*self.muon.parameters.values(), *in_adam)]
        expected = {id(p) for p in self.network.parameters()}
        assert len(stepped) == len(set(stepped)) and set(stepped) == expected, (
            "a parameter is not in one group"
        )
        if self.choice.kind == "muon":
            matrices = {name for name, group in routes.items() if group == "matrices"}
            assert set(self.muon.parameters) == matrices, "a block matrix is not stepped by Muon"
