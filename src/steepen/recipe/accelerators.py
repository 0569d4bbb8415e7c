"""Peak speed and memory of known GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError, nearest


@dataclass(frozen=True)
class Accelerator:
    """Dense bf16 peak and memory, from the vendor's data sheet."""

    name: str
    peak_flops: float
    memory_gib: float


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("a100", 312e12, 74.5),  # the 80 GB part
        Accelerator("h100", 989.4e12, 74.5),
        Accelerator("h200", 989.4e12, 131.3),
        Accelerator("b200", 2250e12, 167.6),
        Accelerator("gh200", 989.4e12, 89.4),
        Accelerator("l40s", 362e12, 44.7),
        Accelerator("rtx4090", 165.2e12, 22.4),
        Accelerator("mi300x", 1307.4e12, 178.8),
    )
}


def accelerator_of(product: str) -> Accelerator | None:
    """The accelerator that a product name (NVIDIA H200 NVL) contains; None if none is known."""
    name = product.lower().replace(" ", "")
    found = [gpu for gpu in ACCELERATORS.values() if gpu.name in name]
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def find_accelerator(name: str) -> Accelerator:
    """An accelerator by name."""
    key = name.strip().lower().replace(" ", "").replace("-", "")
    if key not in ACCELERATORS:
        raise UsageError(f"there is no accelerator {name!r}; known are {nearest(key, ACCELERATORS, 4)}.")
    return ACCELERATORS[key]
