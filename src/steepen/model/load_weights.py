"""Load saved weights into a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steepen.errors import SteepenError
from steepen.model.init import to_empty
from steepen.model.network import Network


class WeightsMismatch(SteepenError):
    """Saved weights are those of another network."""


def read_weights(file: Path, prefix: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read the tensors of a safetensors file whose names start with `prefix`; keys come without it."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise SteepenError(f"the weights {file} cannot be read ({error}).") from error


def copy_weights(network: Network, weights: Mapping[str, Tensor]) -> None:
    """Copy saved values into every parameter; raises on a missing, unexpected or misshapen one."""
    fill = weight_copier(network, weights)
    for name, parameter in network.named_parameters():
        fill(name, parameter)
    network.refresh()


def weight_copier(network: Network, weights: Mapping[str, Tensor]) -> Callable[[str, Tensor], None]:
    """A function that copies the saved values of a parameter into a tensor of its shape.

    Raises WeightsMismatch on a missing or unexpected parameter at once, on a misshapen one when it is copied.
    """
    expected = dict(network.named_parameters())
    for name in sorted(expected.keys() ^ weights.keys()):
        side = "lacks" if name in expected else "has an unexpected"
        raise WeightsMismatch(f"these weights belong to another network: the file {side} {name}.")

    @torch.no_grad()
    def fill(name: str, tensor: Tensor) -> None:
        value = weights[name]
        if value.shape != tensor.shape:
            raise WeightsMismatch(
                f"these weights belong to another network: {name} is {tuple(value.shape)}, "
                f"not {tuple(tensor.shape)}."
            )
        if not value.is_floating_point():
            raise WeightsMismatch(f"these weights are not those of a network: {name} is {value.dtype}.")
        tensor.copy_(value)

    return fill


def allocate(network: Network, device: torch.device | str) -> Network:
    """Allocate a meta network in fp32 on a device; weights are uninitialized."""
    to_empty(network, device).to(torch.float32)
    network.reset_rotary()
    return network
