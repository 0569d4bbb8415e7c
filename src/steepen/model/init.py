"""Weight initialization, all in one function; and saved weights, loaded into a network.

Every parameter has its own generator, seeded by the run's seed and the parameter's name, so its values do not
depend on the other parameters or their order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from steepen.errors import SteepenError
from steepen.model.arm import Arm
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.network import Network
from steepen.model.shape import Shape


def name_seed(seed: int, name: str) -> int:
    """Derive a 63-bit seed from the run's seed and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def initialize(network: Network, *, embedding_std: float, init_scale: float, seed: int) -> None:
    """Initialize the weights; see `initializer`."""
    fill = initializer(network, embedding_std=embedding_std, init_scale=init_scale, seed=seed)
    for name, parameter in network.named_parameters():
        fill(name, parameter)
    network.refresh()


def initializer(
    network: Network, *, embedding_std: float, init_scale: float, seed: int
) -> Callable[[str, Tensor], None]:
    """A function that fills a tensor with the initial values of the parameter of a name, as the paper states
    (Appendix "Architecture").

    The embedding is normal with standard deviation `embedding_std` (WTE); the head and the blocks' output
    projections are zero; all other parameters are uniform within ±`init_scale`/√width (UIS), or with
    `ModelOptions.init_bound` "fan_in" with standard deviation `init_scale`/√fan_in.
    """
    constants: dict[str, float] = {"head": 0.0}
    for path, module in network.named_modules():
        for name, value in getattr(type(module), "constant_init", {}).items():
            constants[f"{path}.{name}"] = value

    def fill(name: str, tensor: Tensor) -> None:
        generator = torch.Generator(tensor.device).manual_seed(name_seed(seed, name))
        if name in constants:
            nn.init.constant_(tensor, constants[name])
        elif name == "embedding":
            nn.init.normal_(tensor, std=embedding_std, generator=generator)
        else:
            fan_in = tensor.shape[-1] if tensor.ndim else 1
            by_width = network.options.init_bound == "width"
            bound = init_scale * math.sqrt(1.0 / network.shape.width if by_width else 3.0 / fan_in)
            nn.init.uniform_(tensor, -bound, bound, generator=generator)

    return fill


def build_on_meta(
    shape: Shape,
    arm: Arm,
    multipliers: Multipliers | None = None,
    options: ModelOptions | None = None,
    *,
    passes: int | None = None,
) -> Network:
    """Build a network on the meta device, without memory: to count, shard or materialize it."""
    with torch.device("meta"):
        return Network(shape, arm, multipliers, options, passes=passes)


def to_empty(network: Network, device: torch.device | str) -> Network:
    """`network.to_empty` without importing sympy, a second or more, which `torch.empty_like` does."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return network._apply(empty)  # pyright: ignore[reportPrivateUsage]


def materialize(
    network: Network,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    embedding_std: float = 0.02,
    init_scale: float = 1.0,
    seed: int = 0,
) -> Network:
    """Allocate a meta network on a device and initialize its weights."""
    allocate(network, device, dtype)
    initialize(network, embedding_std=embedding_std, init_scale=init_scale, seed=seed)
    return network


class WeightsMismatch(SteepenError):
    """Saved weights are those of another network."""


def copy_weights(network: Network, weights: Mapping[str, Tensor]) -> None:
    """Copy saved values into every parameter; raises on a missing, unexpected or misshapen one."""
    fill = weight_copier(network, weights, weights.__getitem__)
    for name, parameter in network.named_parameters():
        fill(name, parameter)
    network.refresh()


def weight_copier(
    network: Network, names: Iterable[str], read: Callable[[str], Tensor]
) -> Callable[[str, Tensor], None]:
    """A function that copies the saved values of a parameter, which `read` gives, into a tensor of its shape.

    Raises WeightsMismatch on a missing or unexpected name at once, on a wrong shape when it is copied.
    """
    expected = dict(network.named_parameters())
    for name in sorted(expected.keys() ^ set(names)):
        side = "lacks" if name in expected else "has an unexpected"
        raise WeightsMismatch(f"these weights belong to another network: the file {side} {name}.")

    @torch.no_grad()
    def fill(name: str, tensor: Tensor) -> None:
        value = read(name)
        if value.shape != tensor.shape:
            raise WeightsMismatch(
                f"these weights belong to another network: {name} is {tuple(value.shape)}, "
                f"not {tuple(tensor.shape)}."
            )
        if not value.is_floating_point():
            raise WeightsMismatch(f"these weights are not those of a network: {name} is {value.dtype}.")
        tensor.copy_(value)

    return fill


def allocate(network: Network, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Network:
    """Allocate a meta network on a device; weights are uninitialized."""
    to_empty(network, device).to(dtype)
    network.reset_rotary()
    return network
