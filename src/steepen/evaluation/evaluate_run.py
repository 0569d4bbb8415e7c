"""Evaluate a checkpoint: validation loss, CORE, KL effective depth, test-time passes; save the scores.

The flow: `evaluate` finds the checkpoint, joins the ranks, chooses where scores may be saved, loads the
network once and calls `measure`, which makes every measurement that was asked for; `save_scores` writes them
beside the checkpoint and, for the last one, into the run's record. Only the examples of CORE are shared out
among ranks: everything else takes seconds.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from steepen.data import Dataset, ValidationSet
from steepen.distributed.environment import process_environment
from steepen.distributed.world import World, joined_world
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.core.run_suite import evaluate_core, settings_key
from steepen.evaluation.kl_depth import measure_kl_depth
from steepen.evaluation.load import LoadedRun, RunCheckpoint, find_checkpoint, load
from steepen.evaluation.score_options import DEPTH_TOKENS, ScoreOptions
from steepen.evaluation.score_store import (
    Evaluation,
    check_record_update,
    check_tokenizer,
    save_scores,
    scores_directory,
    write_problem,
)
from steepen.evaluation.validation_loss import measure_test_time_passes, validate
from steepen.training.device import rank_device
from steepen.utils.json_io import write_json
from steepen.utils.progress import StageProgressCallback, stage_progress

RANK_TIMEOUT = 7200.0  # seconds that ranks wait for rank 0, which measures all but CORE


def evaluate(
    path: str | Path | RunCheckpoint,
    data: str | Path | Dataset,
    options: ScoreOptions | None = None,
    *,
    update_record: bool | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
) -> Evaluation:
    """Evaluate a run directory or a checkpoint directory on prepared data, and save the scores.

    `update_record` adds them to the run's record; None does so for the last checkpoint. An interrupted CORE
    evaluation resumes after its last finished task. In processes that torchrun or srun started, the examples
    of CORE are shared out among them, and rank 0 does the rest.
    """
    options = options or ScoreOptions()
    checkpoint = path if isinstance(path, RunCheckpoint) else find_checkpoint(path)
    dataset = Dataset.open(data) if isinstance(data, str | Path) else data
    context = checkpoint.spec.shape.context
    if options.kl_depth and options.kl_depth_tokens is not None and options.kl_depth_tokens < context:
        raise UsageError(
            f"`kl_depth_tokens` = {options.kl_depth_tokens:,} is not valid: give at least the run's context, "
            f"{context:,}."
        )
    place = process_environment()
    own, shared = rank_device(device, place.local_rank, place.size)
    with joined_world(own, shared_device=shared, timeout=RANK_TIMEOUT) as world:
        if not world.is_main:
            if options.bundle is not None:  # only the examples of CORE are shared out
                run = load(checkpoint, device=own, precision=precision)
                _measure_core(run, options, None, None, world)
            return Evaluation(checkpoint, {})
        check_record_update(checkpoint, update_record)
        check_tokenizer(checkpoint, dataset)
        folder = scores_directory(checkpoint)
        problem = write_problem(folder)
        try:
            run = load(checkpoint, device=own, precision=precision)
            where = folder if problem is None else None
            scores = measure(run, dataset, options, folder=where, quiet=quiet, world=world)
        except KeyboardInterrupt as interrupt:
            if options.core is not None and problem is None:
                interrupt.add_note("Finished tasks are saved; run the same command again to resume.")
            raise
        saved = save_scores(checkpoint, scores, update_record, problem)
    saved.notes[:0] = _notes(options, scores)
    return saved


def _notes(options: ScoreOptions, scores: dict[str, Any]) -> list[str]:
    """Where scores are not what was asked for, or cannot be compared with others."""
    found: list[str] = []
    if options.bundle is not None and options.bundle.altered_core:
        found.append(
            f"{options.bundle.directory} is not the published CORE bundle: its tasks have other examples or "
            "settings, so these scores cannot be compared with published ones (`steepen eval fetch-core`)."
        )
    asked = options.kl_depth_tokens
    if options.kl_depth and asked is not None and (used := scores["kl_depth"]["tokens"]) != asked:
        found.append(
            f"`kl_depth_tokens` = {asked:,}: {used:,} were used, the largest multiple of the context that "
            "fits."
        )
    return found


def measure(
    run: LoadedRun,
    dataset: Dataset,
    options: ScoreOptions,
    *,
    folder: Path | None = None,
    quiet: bool = True,
    world: World | None = None,
) -> dict[str, Any]:
    """Measure what is requested, as JSON values; outcomes of CORE tasks are saved under `folder`."""
    spec, passes, network = run.spec, run.passes, run.network
    context = network.shape.context
    available = max(context, dataset.validation_tokens // (context + 1) * context)
    tokens = max(context, options.validation_tokens or min(spec.validation_tokens, available))
    validation = ValidationSet(dataset, context, tokens)
    scores: dict[str, Any] = {
        "run": spec.hash,
        "step": run.checkpoint.step,
        "passes": passes,
        "precision": run.precision,
        "data": dataset.identity,
        "tokenizer": run.tokenizer.identity,
    }
    with stage_progress(quiet) as progress:
        found = validate(network, validation, passes, partial(progress, "validation"))
        if not math.isfinite(found.loss):
            raise SteepenError(f"the validation loss of {run.checkpoint.checkpoint.path} is {found.loss}.")
        scores["validation"] = found.to_dict()
        if options.kl_depth:
            depth_tokens = options.kl_depth_tokens or DEPTH_TOKENS
            subset = ValidationSet(dataset, context, max(context, min(depth_tokens, available)))
            scores["kl_depth"] = measure_kl_depth(
                network,
                subset,
                passes,
                threshold=options.kl_threshold,
                direction=options.kl_direction,
                progress=partial(progress, "KL effective depth"),
            ).to_dict()
        if options.passes:
            report = partial(progress, "passes at test time")
            curve = measure_test_time_passes(network, validation, options.passes, passes, report)
            scores["test_time_passes"] = curve.to_dict()
        if options.bundle is not None:
            scores["core"] = _measure_core(run, options, folder, progress, world)
    return scores


def _measure_core(
    run: LoadedRun,
    scores: ScoreOptions,
    folder: Path | None,
    progress: StageProgressCallback | None,
    world: World | None = None,
) -> dict[str, Any]:
    bundle, options = scores.bundle, scores.core_options
    assert bundle is not None
    settings = {
        "bundle": bundle.identity,
        "tokenizer": run.tokenizer.identity,
        "weights": run.checkpoint.checkpoint.sha256,
        "passes": run.passes,
        "precision": run.precision,
        "examples": options.examples,
        "convention": options.convention,
    }
    outcomes = None if folder is None else folder / "core" / settings_key(settings)
    if outcomes is not None:
        write_json(outcomes / "settings.json", settings)
    core = evaluate_core(
        run.network,
        run.tokenizer,
        bundle,
        options,
        passes=run.passes,
        folder=outcomes,
        progress=progress,
        world=world,
    ).to_dict()
    # Equal keys mean equal settings; seeds and tasks may differ between requests, and are in the scores.
    location = None if outcomes is None else str(outcomes)
    core |= {"bundle": bundle.identity, "examples": options.examples, "outcomes": location}
    if outcomes is not None:
        write_json(outcomes / "scores.json", core)
    return core
