"""Write a run directory from weights that were trained elsewhere or exported before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from steepen.data.tokenizer import Tokenizer, write_run_tokenizer
from steepen.errors import UsageError
from steepen.model.init import build_on_meta
from steepen.model.load_weights import copy_weights
from steepen.model.network import Network
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory
from steepen.training.checkpoint import TrainingProgress, write_checkpoint
from steepen.training.state_files import tensor_key
from steepen.utils.json_io import write_json


def network_of(spec: RunSpec, stored_passes: int) -> Network:
    """The network of a spec, grown to `stored_passes`, without memory for its weights."""
    multipliers = spec.hyperparameters.multipliers
    return build_on_meta(spec.shape, spec.arm, multipliers, spec.options, passes=stored_passes)


def write_run(
    directory: Path,
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    *,
    step: int,
    stored_passes: int,
    tokenizer: Tokenizer | None,
    record: RunRecord | None,
) -> Path:
    """Write spec, tokenizer, one checkpoint and the record into a new directory.

    The checkpoint has no optimizer state: the run can be evaluated, exported and used, not resumed.
    """
    if directory.exists():
        raise UsageError(f"{directory} exists; give another directory with `out`.")
    copy_weights(network_of(spec, stored_passes), weights)  # on the meta device: checks names and shapes
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = RunDirectory(partial)
    try:
        write_json(files.spec_file, spec.to_dict())
        if tokenizer is not None:
            write_run_tokenizer(tokenizer, files.tokenizer_file)
        state = TrainingProgress(run=spec.hash, step=step, passes=stored_passes, kind="final")
        tensors = {tensor_key("model", name): value.float().contiguous() for name, value in weights.items()}
        write_checkpoint(files.checkpoints, state, tensors)
        if record is not None:
            write_json(files.record_file, record.to_dict())
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory
