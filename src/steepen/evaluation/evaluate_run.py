"""Evaluate a checkpoint: validation loss, CORE, KL effective depth, test-time passes; save the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError
from steepen.evaluation.load import LoadedRun, RunCheckpoint, find_checkpoint, load
from steepen.evaluation.published_scores import (
    PUBLISHED_DATA,
    find_corpus,
    find_published,
    imported_scores,
)
from steepen.evaluation.score_store import (
    has_run_tokenizer,
    save_scores,
    scores_directory,
    writable_directory,
)
from steepen.utils.progress import StageProgressCallback, stage_progress

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.distributed.world import World
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.run_suite import CoreOptions

RANK_TIMEOUT = 7200.0  # seconds that ranks wait for rank 0, which measures all but CORE
DEPTH_TOKENS = 16_384  # for KL effective depth, where no other number is requested


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure; the validation loss is always measured."""

    core: Bundle | None = None
    core_options: CoreOptions | None = None
    kl_depth: bool = False  # KL effective depth
    kl_threshold: float = 2.0  # nats, of KL effective depth
    kl_direction: str = "final-to-block"  # of the KL divergence
    kl_depth_tokens: int | None = None  # None: DEPTH_TOKENS
    passes: tuple[int, ...] = ()  # core passes to measure the loss at
    validation_tokens: int | None = None  # None: as many as the run was validated on
    published: Path | None = None  # folder of the authors' score tables, to compare with

    def __post_init__(self) -> None:
        for name in ("kl_depth_tokens", "validation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} {value} is not valid: it must be at least 1.")
        if self.core is not None and self.core_options is not None:
            for label in self.core_options.tasks or ():
                self.core.task(label)  # raises for a label the bundle does not have


@dataclass
class Evaluation:
    """The scores of a checkpoint, and where they were saved."""

    checkpoint: RunCheckpoint
    scores: dict[str, Any]
    in_record: bool = False  # whether they are in the run's record
    saved: Path | None = None
    notes: list[str] = field(default_factory=list[str])


def evaluate(
    path: str | Path | RunCheckpoint,
    data: str | Path | Dataset,
    request: EvaluationRequest | None = None,
    *,
    update_record: bool | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
    on_scores: Callable[[dict[str, Any]], None] | None = None,
    world: World | None = None,
) -> Evaluation:
    """Evaluate a run directory or a checkpoint directory on prepared data, and save the scores.

    `update_record` adds them to the run's record; None does so for the last checkpoint if the data is known
    to have the run's tokenizer. `on_scores` is called before anything is saved, so that no score is lost to a
    full disk. An interrupted CORE evaluation resumes after its last finished task. In processes that torchrun
    or srun started, the examples of CORE are shared out among them, and rank 0 does the rest; `world` is one
    that was joined before.
    """
    from steepen.data import Dataset
    from steepen.distributed.environment import process_environment
    from steepen.distributed.world import joined_world
    from steepen.training.device import rank_device

    place = process_environment()
    if world is None and place.size > 1:
        own, shared = rank_device(device, place.local_rank, place.size)
        with joined_world(own, shared_device=shared, timeout=RANK_TIMEOUT) as ranks:
            return evaluate(
                path,
                data,
                request,
                update_record=update_record,
                device=str(own),
                precision=precision,
                quiet=quiet or not ranks.is_main,
                on_scores=on_scores,
                world=ranks,
            )

    request = request or EvaluationRequest()
    checkpoint = path if isinstance(path, RunCheckpoint) else find_checkpoint(path)
    dataset = Dataset.open(data) if isinstance(data, str | Path) else data
    context = checkpoint.spec.shape.context
    if request.kl_depth and request.kl_depth_tokens is not None and request.kl_depth_tokens < context:
        raise UsageError(
            f"--kl-depth-tokens {request.kl_depth_tokens:,} is not valid: give at least the run's context, "
            f"{context:,}."
        )
    if world is not None and not world.is_main:  # only the examples of CORE are shared out
        if request.core is not None:
            run = load(checkpoint, data=dataset, device=device, precision=precision)
            with stage_progress(quiet=True) as progress:
                _measure_core(run, dataset, request, None, progress, world)
        return Evaluation(checkpoint, {})
    notes: list[str] = []
    directory = scores_directory(checkpoint)
    same_tokenizer = has_run_tokenizer(checkpoint, dataset, update_record)
    if not same_tokenizer:
        notes.append(
            f"{dataset.directory} is not what the run was trained on, and the tokenizer of the run is not "
            "recorded; the scores are meaningful only if the tokenizer is the same, and will not be added "
            "to the run's record."
        )
        # A separate directory: scores with two tokenizers must not be merged into one file.
        directory, update_record = directory / "other-data" / dataset.identity[:12], False
    if request.core is not None and request.core.altered_core:
        notes.append(
            f"{request.core.directory} is not the published CORE bundle: its tasks have other examples or "
            "settings, so these scores cannot be compared with published ones (`steepen eval fetch-core`)."
        )
    published, spec = None, checkpoint.spec
    corpus = find_corpus(spec.data.identity, dataset.manifest.source)
    if request.published is not None:
        published, reason = find_published(request.published, spec.arm, spec.shape, corpus)
        if published is None:
            notes.append(f"no published scores to compare with: {reason}.")
    with writable_directory(directory) as (folder, problem):
        try:
            run = load(checkpoint, data=dataset, device=device, precision=precision)
            if published is None and spec.data.identity.startswith(PUBLISHED_DATA) and run.record is not None:
                published = imported_scores(run.record, corpus)
            scores = measure(run, dataset, request, folder=folder, quiet=quiet, world=world)
        except KeyboardInterrupt as interrupt:
            if request.core is not None and problem is None:
                interrupt.add_note("Finished tasks are saved; run the same command again to resume.")
            raise
        if same_tokenizer:
            scores["tokenizer"] = dataset.manifest.tokenizer.sha256
        # Published scores are shown beside the run's own and not saved with them.
        shown = scores if published is None else {**scores, "published": published}
        if on_scores is not None:
            on_scores(shown)
        saved = save_scores(checkpoint, scores, update_record, folder=folder, problem=problem)
    notes += saved.notes
    used = scores["kl_depth"]["tokens"] if request.kl_depth else None
    if request.kl_depth_tokens is not None and used not in (None, request.kl_depth_tokens):
        notes.append(
            f"--kl-depth-tokens {request.kl_depth_tokens:,}: {used:,} were used, the largest multiple of the "
            "context that fits."
        )
    return Evaluation(checkpoint, shown, saved.in_record, saved.file, notes)


def measure(
    run: LoadedRun,
    dataset: Dataset,
    request: EvaluationRequest,
    *,
    folder: Path | None = None,
    quiet: bool = True,
    world: World | None = None,
) -> dict[str, Any]:
    """Measure what is requested, as JSON values; outcomes of CORE tasks are saved under `folder`."""
    from steepen.data import ValidationSet
    from steepen.evaluation.kl_depth import measure_kl_depth
    from steepen.evaluation.passes_at_test_time import measure_test_time_passes
    from steepen.evaluation.validation_loss import validate

    spec, passes, network = run.spec, run.passes, run.network
    context = spec.shape.context
    available = max(context, len(dataset.tokens("val")) // (context + 1) * context)
    tokens = max(context, request.validation_tokens or min(spec.validation_tokens, available))
    validation = ValidationSet(dataset, context, tokens)
    scores: dict[str, Any] = {
        "run": spec.hash,
        "step": run.checkpoint.step,
        "passes": passes,
        "precision": run.precision,
        "data": dataset.identity,
    }
    if dataset.identity == spec.data.identity:
        scores["tokenizer"] = dataset.manifest.tokenizer.sha256
    with stage_progress(quiet) as progress:
        scores["validation"] = validate(
            network, validation, passes, progress=lambda done, total: progress("validation", done, total)
        ).to_dict()
        if request.kl_depth:
            depth_tokens = request.kl_depth_tokens or DEPTH_TOKENS
            subset = ValidationSet(dataset, context, max(context, min(depth_tokens, available)))
            scores["kl_depth"] = measure_kl_depth(
                network,
                subset,
                passes,
                threshold=request.kl_threshold,
                direction=request.kl_direction,  # pyright: ignore[reportArgumentType]  (checked there)
                progress=lambda done, total: progress("KL effective depth", done, total),
            ).to_dict()
        if request.passes:
            scores["test_time_passes"] = measure_test_time_passes(
                network,
                validation,
                request.passes,
                passes,
                progress=lambda done, total: progress("passes at test time", done, total),
            ).to_dict()
        if request.core is not None:
            scores["core"] = _measure_core(run, dataset, request, folder, progress, world)
    return scores


def _measure_core(
    run: LoadedRun,
    dataset: Dataset,
    request: EvaluationRequest,
    folder: Path | None,
    progress: StageProgressCallback,
    world: World | None = None,
) -> dict[str, Any]:
    from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core, settings_key
    from steepen.utils.json_io import write_json

    bundle, options = request.core, request.core_options or CoreOptions()
    assert bundle is not None
    tokenizer = dataset.tokenizer()
    settings = {
        "bundle": bundle.identity,
        "tokenizer": tokenizer.identity,
        "weights": run.checkpoint.weights_sha256,
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
        tokenizer,
        bundle,
        options,
        passes=run.passes,
        folder=outcomes,
        progress=lambda now: progress("CORE", now.done, now.total, detail=now.job),
        world=world,
    ).to_dict()
    # Equal keys mean equal settings; seeds and tasks may differ between requests, and are in the scores.
    location = None if outcomes is None else str(outcomes)
    core |= {"bundle": bundle.identity, "examples": options.examples, "outcomes": location}
    if outcomes is not None:
        write_json(outcomes / "scores.json", core)
    return core
