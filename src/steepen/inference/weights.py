"""Names of the weights in exported models, and files of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steepen.errors import SteepenError, UsageError
from steepen.model.network import Network

# Matrices of a block: our stacks (count, out, in) and the linear layers of modeling_steepen.py.
LAYERS = {
    "qkv": "qkv_proj",
    "query": "q_proj",
    "key_value": "kv_proj",
    "out": "o_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "router": "router",
    "expert_gate_up": "expert_gate_up_proj",
    "expert_down": "expert_down_proj",
}
STACKS = {"qkv": 3, "gate_up": 2}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def hugging_face_name(name: str, *, custom: bool = False) -> str:
    """cores.0.1.qkv → model.cores.0.1.qkv_proj.weight; parameters of a custom block keep their names."""
    if name in ("embedding", "head"):
        return "model.embed_tokens.weight" if name == "embedding" else "lm_head.weight"
    block, _, matrix = name.rpartition(".")
    return f"model.{block}.{LAYERS[matrix]}.weight" if matrix in LAYERS and not custom else f"model.{name}"


def hugging_face_weights(weights: Mapping[str, Tensor], *, custom: bool = False) -> dict[str, Tensor]:
    """The weights by the names of modeling_steepen.py; stacks of the built-in block become one matrix."""
    return {
        hugging_face_name(name, custom=custom): (
            value.flatten(0, -2) if value.ndim > 1 and not custom else value
        ).contiguous()
        for name, value in weights.items()
    }


def from_hugging_face(weights: Mapping[str, Tensor], network: Network) -> dict[str, Tensor]:
    """The weights of a network from those of modeling_steepen.py."""
    found: dict[str, Tensor] = {}
    expected = dict(network.named_parameters())
    custom = ":" in network.arm.block
    names = {hugging_face_name(name, custom=custom): name for name in expected}
    for name in sorted(names.keys() ^ weights.keys()):
        raise SteepenError(
            f"these weights belong to another network: {'lacking' if name in names else 'unexpected'} {name}."
        )
    for name, own in names.items():
        if weights[name].numel() != expected[own].numel():
            shape = tuple(weights[name].shape)
            raise SteepenError(f"these weights belong to another network: {name} has the shape {shape}.")
        found[own] = weights[name].reshape(expected[own].shape)
    return found


def network_weights(network: Network) -> dict[str, Tensor]:
    """The parameters of a network on the CPU."""
    return {name: parameter.detach().cpu() for name, parameter in network.named_parameters()}


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def checked_fp32(weights: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The weights of a file in fp32; raises for what no training has made, and for a memory bomb."""
    if problem := _problem(weights, file.stat().st_size):
        raise SteepenError(f"{file} was not loaded: {problem}.")
    return {name: value.float() for name, value in weights.items()}


def _problem(weights: Mapping[str, Tensor], size: int) -> str:
    total = sum(value.numel() * value.element_size() for value in weights.values())
    if total > 2 * size:  # twice: a model may tie its embeddings
        return f"its tensors have {total:,} bytes, more than the file"
    for name, value in weights.items():
        if value.dtype not in FLOATS or value.layout != torch.strided or value.is_meta:
            return f"{name} is not a dense tensor of bf16, fp16, fp32 or fp64"
        if not value.float().isfinite().all():
            return f"{name} has values that are not finite numbers"
    return ""


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a folder, in fp32."""
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        raise UsageError(f"{folder} has no safetensors file.")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                read = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SteepenError(f"the weights {file} cannot be read ({error}): copy them again.") from error
        found |= checked_fp32(read, file)
    return found
