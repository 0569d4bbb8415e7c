"""Import a checkpoint that the paper's authors publish as a run, to evaluate, generate with or export.

    python tools/import_authors_checkpoint.py DIR_OR_FILE [--runs runs] [--out DIR]

It reads final.pt, and result.json with the configuration, beside it or in the folder above. final.pt holds
{"model": parameters by name, …}. Blocks are numbered in the order of execution, untied cores one after the
other. Their rotation by RoPE has the opposite sign of ours, which is the same as negating the second half of
the channels of every head in queries and keys.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import sys
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.inference.import_model import read_object, write_run
from steepen.inference.weights import checked_fp32
from steepen.model.arm import AllocationRule, Arm, StageSchedule
from steepen.model.arms import ARMS
from steepen.model.config import ModelOptions
from steepen.model.shape import GPT2_PADDING, BlockAllocation, Shape
from steepen.recipe.flops import compute_active_parameters, head_parameters, run_flops, stored_parameters
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.runs.record import Parameters, RunRecord, ValidationScore
from steepen.runs.spec import DataConfig, RunSpec

CHECKPOINT, RESULT = "final.pt", "result.json"
# An imported checkpoint's data has no identity: this, and the name of the authors' folder of data.
PUBLISHED_DATA = "published:"
WIDTH_PER_DEPTH = 128
REQUIRED = (
    *("n_layer", "n_head", "n_embd", "depth_scale_mode", "core_repetitions", "output_multiplier"),
    *("residual_branch_multiplier", "recurrence_rmsnorm", "recurrence_emb_alpha", "decoder_inject"),
)
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
MATRICES = {
    "qkv": ("attn.c_q", "attn.c_k", "attn.c_v"),
    "out": ("attn.c_proj",),
    "gate_up": ("mlp.c_gate", "mlp.c_fc"),
    "down": ("mlp.c_proj",),
}


@dataclass(frozen=True)
class AuthorsModel:
    """A published model: its spec, weights and record."""

    spec: RunSpec
    weights: dict[str, Tensor]
    stored_passes: int
    record: RunRecord | None


def find_files(path: Path) -> tuple[Path, Path] | None:
    """final.pt and result.json of a file or folder; None if this is not their layout."""
    if path.suffix == ".pt":
        checkpoint = path
    else:
        places = (path / CHECKPOINT, path / "checkpoints" / CHECKPOINT)
        found = [place for place in places if place.is_file()]
        if not found:
            return None
        checkpoint = found[0]
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / RESULT).is_file():
            return checkpoint, folder / RESULT
    raise UsageError(f"{checkpoint} has no {RESULT} beside it or in the folder above: copy it there.")


def read_model(checkpoint: Path, result: Mapping[str, Any], result_file: Path) -> AuthorsModel:
    """Read a published checkpoint. Raises for a file with code in it, and for an unknown configuration."""
    missing = [name for name in REQUIRED if name not in result]
    if missing:
        raise UsageError(f"{result_file} lacks {missing[0]}: it is not the configuration of a model.")
    try:
        return _model(result, read_parameters(checkpoint), result_file)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # of numbers and names it states
        raise UsageError(f"{result_file} is not the configuration of this model ({error}).") from error


def _model(result: Mapping[str, Any], given: Mapping[str, Tensor], result_file: Path) -> AuthorsModel:
    arm, shape, schedule = _network(result, given, result_file)
    spec = RunSpec(
        arm=arm,
        shape=shape,
        schedule=schedule,
        hyperparameters=_hyperparameters(result),
        data=DataConfig(f"{PUBLISHED_DATA}{Path(str(result.get('data_dir') or 'unknown')).name}"),
        steps=int(result.get("completed_train_steps") or 1),
        batch_tokens=int(result.get("total_batch_size") or shape.context),
        seed=int(result.get("seed") or 0),
        # Their residual stream is fp32 and their cosines and sines are rounded to bf16.
        options=ModelOptions(residual_stream="fp32", rope_table="bf16"),
        precision="bf16",
    )
    passes = schedule.max_passes
    return AuthorsModel(spec, _convert(given, spec, passes), passes, _record(spec, result))


def read_parameters(checkpoint: Path) -> dict[str, Tensor]:
    """The parameters in a final.pt, in fp32, read without executing anything that the file contains."""
    try:
        _check_archive(checkpoint)
        with warnings.catch_warnings(action="ignore"):  # about the kind of file, before it is rejected
            loaded: Any = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SteepenError(
            f"{checkpoint} contains code or objects other than tensors and was not loaded: use a file "
            "that has only weights in it."
        ) from error
    except Exception as error:  # a damaged file fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SteepenError(f"{checkpoint} cannot be read ({reason}): copy it again.") from error
    state: Any = cast("dict[str, Any]", loaded).get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not {EMBEDDING, HEAD} <= cast("dict[str, Any]", state).keys():
        raise UsageError(
            f"{checkpoint} is not a checkpoint of the paper's authors: it has no {EMBEDDING} and {HEAD}."
        )
    tensors = cast("dict[str, Tensor]", state)
    # Buffers follow from the configuration.
    weights = {name: value for name, value in tensors.items() if str(name).endswith(".weight")}
    for name, value in weights.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{checkpoint} is damaged: {name} is not a tensor.")
    return checked_fp32(weights, checkpoint)


def _check_archive(checkpoint: Path) -> None:
    """Raise for an archive that torch would unpack into more than its size, or read without end."""
    with zipfile.ZipFile(checkpoint) as archive:  # torch.save does not compress
        if sum(entry.file_size for entry in archive.infolist()) > checkpoint.stat().st_size:
            raise ValueError("it is compressed, which torch.save does not do")
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    for content in pickles:
        tuples: set[int] = set()
        before = ""
        for code, argument, _ in pickletools.genops(content):
            # Pairs of pairs of … the same tuple: 60 of them as a key have 2⁶⁰ parts to hash.
            if code.name.endswith("BINGET") and argument in tuples:
                raise ValueError("a tuple is used twice, which torch.save does not do")
            if code.name.endswith("BINPUT") and before.startswith("TUPLE"):
                tuples.add(cast("int", argument))
            before = code.name


def _network(
    result: Mapping[str, Any], given: Mapping[str, Tensor], file: Path
) -> tuple[Arm, Shape, StageSchedule]:
    """Arm, shape and pass schedule from the configuration and the sizes of the weights."""
    mode, layers, width = result["depth_scale_mode"], int(result["n_layer"]), int(result["n_embd"])
    if mode not in ("none", "loop", "dep"):
        raise UsageError(f"{file} has depth_scale_mode {mode!r}; known are none, loop and dep.")
    if result["recurrence_rmsnorm"] not in ("none", "recurrence_only"):
        raise UsageError(
            f"{file} has recurrence_rmsnorm {result['recurrence_rmsnorm']!r}, a norm after the prelude that "
            "steepen's boundary operators do not have; known are none and recurrence_only."
        )
    if str(result.get("window_pattern") or "L").upper().strip("L"):
        raise UsageError(
            f"{file} has attention windows ({result['window_pattern']}), which steepen does not."
        )
    passes = float(result["core_repetitions"])
    if not passes.is_integer():
        raise UsageError(f"{file} has {passes:g} core passes; only whole numbers are supported.")
    depth = width // WIDTH_PER_DEPTH if width % WIDTH_PER_DEPTH == 0 else layers
    arm, schedule = _arm(result, depth, layers, int(passes))
    split = _split(result, arm, depth, layers)
    vocabulary = given[EMBEDDING].shape[0]
    shape = Shape(
        depth=depth,
        width=width,
        heads=int(result["n_head"]),
        mlp_width=given["transformer.h.0.mlp.c_fc.weight"].shape[0],
        context=int(result.get("sequence_len") or 2048),
        vocabulary=vocabulary,
        allocation=split,
        real_vocabulary=GPT2_PADDING.get(vocabulary),
    )
    return arm, shape, schedule


def _arm(result: Mapping[str, Any], depth: int, layers: int, passes: int) -> tuple[Arm, StageSchedule]:
    """The arm, a row of the table where there is one, and its schedule with every start."""
    mode = result["depth_scale_mode"]
    if mode == "none":
        fixed = StageSchedule.fixed(1)
        if layers == depth:
            return ARMS["vanilla"], fixed
        deep = ARMS["deep-vanilla"]
        if BlockAllocation.even(depth).executed(2) == layers:
            return deep, deep.passes
        unsplit = AllocationRule(blocks=layers, unsplit=True)
        return Arm("published-vanilla", f"Vanilla with {layers} blocks", allocation=unsplit), fixed
    norm, inject = result["recurrence_rmsnorm"] != "none", float(result["recurrence_emb_alpha"]) != 0
    core = {(0, 0): "identity", (1, 0): "norm", (0, 1): "inject", (1, 1): "norm+inject"}[norm, inject]
    coda = core if bool(result["decoder_inject"]) or not inject else ("norm" if norm else "identity")
    start = result.get("core_repetition_crossover_fraction")
    grows = result.get("core_repetition_schedule") == "late" and start is not None
    schedule = StageSchedule.fixed(passes)
    open_schedule = schedule
    if grows:
        low = int(result["core_repetition_low"])
        schedule = StageSchedule.growing(low, passes, start=float(cast("float", start)))
        open_schedule = StageSchedule.growing(low, passes)
    tied = mode == "loop"
    for row in ARMS.values():
        same = (row.core_boundary, row.coda_boundary, row.passes) == (core, coda, open_schedule)
        # A core that runs once is tied and untied alike.
        if same and (row.tied == tied or passes == 1) and _sizes(result, row, depth, layers) is not None:
            return row, schedule
    allocation = AllocationRule(blocks=layers)
    name = f"published-{mode}-{passes}"
    return Arm(name, name, core, coda, tied=tied, passes=open_schedule, allocation=allocation), schedule


def _given_sizes(result: Mapping[str, Any], layers: int) -> BlockAllocation:
    """Prelude, core and coda as the configuration states them, or divides them."""

    def size(part: str) -> int | None:
        value = result.get(f"resolved_{part}_layer_count", result.get(f"{part}_layer_count"))
        return None if value is None else int(value)

    core = size("core") or layers - 8
    prelude, coda = size("prelude"), size("coda")
    if prelude is None:
        prelude = (layers - core) // 2 if coda is None else layers - core - coda
    return BlockAllocation(prelude, core, layers - core - prelude)


def _sizes(result: Mapping[str, Any], arm: Arm, depth: int, layers: int) -> BlockAllocation | None:
    """The allocation that an arm of the table has at this depth, if it is the given one."""
    try:
        split = arm.allocation.at(depth)
    except UsageError:
        return None
    return split if split == _given_sizes(result, layers) else None


def _split(result: Mapping[str, Any], arm: Arm, depth: int, layers: int) -> BlockAllocation:
    if result["depth_scale_mode"] == "none":
        return arm.allocation.at(depth)
    return _given_sizes(result, layers)


def _convert(given: Mapping[str, Tensor], spec: RunSpec, passes: int) -> dict[str, Tensor]:
    """The weights by our names; raises if one is missing, unexpected or has another shape."""
    split, shape = spec.shape.allocation, spec.shape
    cores = spec.arm.stored_cores(passes)
    blocks = [
        *(f"prelude.{index}" for index in range(split.prelude)),
        *(f"cores.{core}.{index}" for core in range(cores) for index in range(split.core)),
        *(f"coda.{index}" for index in range(split.coda)),
    ]
    left = dict(given)
    weights = {"embedding": left.pop(EMBEDDING), "head": left.pop(HEAD)}
    for number, block in enumerate(blocks):
        for own, theirs in MATRICES.items():
            parts: list[Tensor] = []
            for name in theirs:
                key = f"transformer.h.{number}.{name}.weight"
                if key not in left:
                    raise SteepenError(f"the checkpoint does not fit its {RESULT}: it has no {key}.")
                part = left.pop(key)
                rotated = name in ("attn.c_q", "attn.c_k")
                parts.append(_reverse_rotation(part, shape.heads) if rotated else part)
            weights[f"{block}.{own}"] = torch.stack(parts) if len(parts) > 1 else parts[0]
    if left:
        raise SteepenError(f"the checkpoint does not fit its {RESULT}: it has an unexpected {min(left)}.")
    return weights


def _reverse_rotation(weight: Tensor, heads: int) -> Tensor:
    """Negate the second half of every head's channels: (width, width) → the same shape."""
    by_head = weight.clone().unflatten(0, (heads, 2, -1))
    by_head[:, 1].neg_()
    return by_head.flatten(0, 2)


def _hyperparameters(result: Mapping[str, Any]) -> Hyperparameters:
    """The hyperparameters of the training; those that a result does not state are the network's defaults."""

    def number(*names: str, default: float = 0.0) -> float:
        return float(next((result[name] for name in names if result.get(name) is not None), default))

    rate = number("effective_matrix_lr", "matrix_lr", default=0.04) or 0.04
    betas = result.get("adam_betas") or (0.8, 0.95)
    return Hyperparameters(
        learning_rate=rate,
        embedding_lr_multiplier=number("effective_embedding_lr", "embedding_lr") / rate,
        head_lr_multiplier=number("effective_unembedding_lr", "unembedding_lr") / rate,
        residual_multiplier=float(result["residual_branch_multiplier"]),
        output_multiplier=float(result["output_multiplier"]),
        injection_weight=float(result["recurrence_emb_alpha"]) or 1.0,
        weight_decay=number("matrix_weight_decay", "weight_decay"),
        embedding_init_std=number("wte_init_std"),
        init_scale=number("uniform_init_scale"),
        warmup_steps=int(number("warmup_steps")),
        warmdown_fraction=number("warmdown_ratio"),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        adam_eps=number("adam_eps", default=1e-10),
    )


def _record(spec: RunSpec, result: Mapping[str, Any]) -> RunRecord | None:
    """A record with what the result states; times are the authors'. None if it does not state the losses."""
    if result.get("val_loss") is None or result.get("final_train_loss") is None:
        return None
    arm, shape, schedule = spec.arm, spec.shape, spec.schedule
    flops = run_flops(arm, shape, schedule, spec.steps, spec.batch_tokens)
    first, last = schedule.initial, schedule.max_passes
    active = [compute_active_parameters(arm, shape, passes) for passes in (first, last)]
    stored = stored_parameters(arm, shape, last)
    loss = float(result["val_loss"])
    seconds = float(result.get("total_training_time_seconds") or 0.0)
    environment: dict[str, Any] = result.get("environment") or {}
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=loss,
        validation_bits_per_byte=None,
        validation_identity="published",
        validation_scores=(ValidationScore(spec.steps, loss, None, schedule.final),),
        train_loss=float(result["final_train_loss"]),
        tokens=spec.tokens,
        flops=flops.total,
        flops_by_term=flops.to_dict(),
        parameters=Parameters(
            stored=stored,
            initial_stored=stored_parameters(arm, shape, first),
            compute_active=active[1],
            initial_compute_active=active[0],
            mean_compute_active=flops.matrix / 6 / spec.tokens,
            embedding=head_parameters(shape),
            blocks=stored - 2 * head_parameters(shape),
        ),
        seconds_training=seconds,
        seconds_total=float(result.get("total_wall_time_seconds") or seconds),
        tokens_per_second=spec.tokens / seconds if seconds else 0.0,
        mfu=None,
        peak_memory_bytes=None,
        hardware={"gpu": environment.get("gpu")},
        versions={key: str(environment[key]) for key in ("python", "torch") if key in environment},
        git=None,
        finished="",
    )


def import_checkpoint(path: Path, runs: Path, out: Path | None = None) -> Path:
    """Write the run directory `out`, by default a directory of `runs` named by the run's hash."""
    if not path.exists():
        raise UsageError(f"{path} does not exist.")
    files = find_files(path)
    if files is None:
        raise UsageError(f"{path} has no {CHECKPOINT}: give a {CHECKPOINT} of the paper's authors.")
    model = read_model(files[0], read_object(files[1]), files[1])
    return write_run(
        runs / model.spec.hash if out is None else out,
        model.spec,
        model.weights,
        step=model.spec.steps,
        stored_passes=model.stored_passes,
        tokenizer=Tokenizer.gpt2(),
        record=model.record,
    )


def main(words: list[str] | None = None) -> int:
    """Print the run directory, or one sentence that says what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        print(import_checkpoint(given.path, given.runs, given.out))
    except SteepenError as error:
        print(f"import_authors_checkpoint: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
