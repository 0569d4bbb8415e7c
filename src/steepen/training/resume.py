"""Network and optimizer of a run: taken up from its newest whole checkpoint or begun, and saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from steepen.execution.select import ExecutionMode, apply_execution_mode
from steepen.model.init import initialise, name_seed, on_meta
from steepen.model.load_weights import allocate, copy_weights
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.runs.spec import RunSpec
from steepen.training import checkpoint as checkpoints
from steepen.training.checkpoint import Checkpoint, CorruptCheckpoint, TrainingState

Begun = tuple[Network, Optimizer, TrainingState]  # all that a run goes on with


def load_or_init(
    spec: RunSpec, folder: Path, device: torch.device, way: ExecutionMode, say: Callable[[str], None]
) -> Begun:
    """What the newest checkpoint that is whole holds, or a beginning."""
    checkpoints.remove_partial(folder)
    left = checkpoints.list_checkpoints(folder)
    while left:
        saved = left.pop()
        try:
            network, optimizer, position = _load(saved, spec, device, way)
        except CorruptCheckpoint as error:
            then = "Trying the one before it." if left else "None is left: the run begins anew."
            say(f"{error} {then}")
            checkpoints.set_aside(saved)
            continue
        say(f"going on from step {position.step:,} of {spec.steps:,}.")
        return network, optimizer, position
    return _begin(spec, device, way)


def save(folder: Path, position: TrainingState, network: Network, optimizer: Optimizer) -> None:
    """Write a checkpoint of all that `take_up` needs to go on as if nothing had happened."""
    weights = {name: p.data for name, p in network.named_parameters()}
    random = {"cpu": torch.get_rng_state()}
    device = network.embedding.device
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    checkpoints.save(folder, position, weights, optimizer.state(), random)


def _load(saved: Checkpoint, spec: RunSpec, device: torch.device, way: ExecutionMode) -> Begun:
    position = saved.training_state()
    weights, state, random = saved.load(device)
    if position.run != spec.hash:
        raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({position.run}).")
    network, optimizer = _build(spec, position.passes, device, way)
    copy_weights(network, weights)
    optimizer.load_state(state)
    torch.set_rng_state(random["cpu"].cpu())
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"].cpu(), device)
    return network, optimizer, replace(position, resumed=position.resumed + 1)


def _begin(spec: RunSpec, device: torch.device, way: ExecutionMode) -> Begun:
    network, optimizer = _build(spec, spec.schedule.initial, device, way)
    hyper = spec.hyperparameters
    # For blocks of a user's own that draw numbers: the run's seed decides them too.
    torch.manual_seed(name_seed(spec.seed, "run"))
    initialise(network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=spec.seed)
    return network, optimizer, TrainingState(run=spec.hash, step=0, passes=network.passes)


def _build(spec: RunSpec, passes: int, device: torch.device, way: ExecutionMode) -> tuple[Network, Optimizer]:
    """A network on the device, its weights still to come, and its optimizer."""
    hyper = spec.hyperparameters
    bare = on_meta(spec.shape, spec.arm, hyper.multipliers, spec.options, passes=passes)
    network = allocate(bare, device)
    apply_execution_mode(network, spec.precision, fused=way.fused, compiled=way.compiled)
    return network, Optimizer(network.named_parameters(), hyper, spec.optimizer, network.refresh)
