"""One run, from its spec to its record, in one process or on one of several ranks.

`train` joins the ranks (`distributed.world`), rejects what cannot be trained, takes the run's lock and leaves
the rest to the `Trainer`. Calling it again resumes an interrupted run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from steepen.data import BatchLoader, Dataset, ValidationSet
from steepen.data.tokenizer import write_run_tokenizer
from steepen.distributed.environment import process_environment
from steepen.distributed.world import RanksDiffer, World, is_communication_error, joined_world, stop_all_ranks
from steepen.errors import Failure, UsageError, failure_of, is_out_of_memory
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, code_digest
from steepen.runs.store import RunDirectory, RunLost, RunStore
from steepen.training.device import package_digest, rank_device
from steepen.training.run_state import execution_mode
from steepen.training.stopping import Diverged, Interrupted
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import OutOfMemory
from steepen.training.trainer import Trainer
from steepen.utils.files import remove_leftovers
from steepen.utils.json_io import write_json
from steepen.utils.progress import ProgressDisplay


def train(
    spec: RunSpec,
    dataset: Dataset,
    store: RunStore,
    options: TrainOptions | None = None,
    *,
    world: World | None = None,
) -> RunRecord:
    """Train a run to its end, resuming if it was interrupted; returns the existing record if finished.

    In a process that torchrun, srun or `steepen train --gpus` started, this is one rank of the run; all ranks
    return the record. `world` is one that was joined before, for several runs in the same processes.
    """
    options = options or TrainOptions()
    if world is not None:
        return _train(spec, dataset, store, options, world)
    place = process_environment()
    # Reject a wrong name even if the run is finished.
    device, shared = rank_device(options.device, place.local_rank, place.size)
    if place.size == 1:
        return _train(spec, dataset, store, options, World(place, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_world(device, shared_device=shared, timeout=options.rank_timeout) as ranks:
        try:
            return _train(spec, dataset, store, options, ranks)
        except Exception as error:
            agreed = isinstance(error, Interrupted | Diverged | RanksDiffer)
            stop_all_ranks(ranks, error, ranks.step, agreed=agreed)


def _train(
    spec: RunSpec,
    dataset: Dataset,
    store: RunStore,
    options: TrainOptions,
    world: World,
) -> RunRecord:
    _check(spec, dataset, options, world)
    directory = store.run(spec)
    # Rank 0 reads and the others are told: a file that another process writes just now may be visible to some
    # ranks only, and ranks that disagree would wait for each other forever.
    finished = _record_of(directory, world)
    if finished is not None:  # checked before locking: the storage may be read-only
        return finished
    # Reject what this device or data cannot train before the run directory is created.
    execution_mode(spec, options, world)
    batches, validation = make_loaders(spec, dataset)
    batches.row_range(world.rank, world.size)
    if options.sample_every is not None:
        from steepen.training.samples import check_prompts

        check_prompts(options.sample_prompt or ("",), dataset, spec.shape.context)

    with directory.lock(options.wait) if world.is_main else contextlib.nullcontext():
        # Again, with the lock: another process may have finished the run while this one waited for it.
        finished = _record_of(directory, world)
        if finished is not None:
            return finished
        if world.is_main:
            remove_leftovers(directory.path)
            if not directory.spec_file.exists():
                write_json(directory.spec_file, spec.to_dict())
            if not directory.tokenizer_file.exists():
                write_run_tokenizer(dataset.tokenizer(), directory.tokenizer_file)
            directory.failure_file.unlink(missing_ok=True)
        display = ProgressDisplay(quiet=bool(options.quiet) or not world.is_main)
        with contextlib.closing(display), _failure_kept(directory, world):
            return Trainer(spec, batches, validation, directory, options, display, world).run()


@contextlib.contextmanager
def _failure_kept(directory: RunDirectory, world: World) -> Generator[None]:
    """Have rank 0 leave failure.json if the run fails, but not if it was interrupted and can resume."""

    def leave_failure(failure: Failure) -> None:
        if not failure.transient:  # a lost rank is an interruption too
            directory.write_failure(failure)

    if world.monitor is not None:
        world.monitor.on_fault = leave_failure
    try:
        yield
    except Exception as error:
        reported = error
        if is_out_of_memory(error):
            reported = OutOfMemory(
                "out of memory outside gradient computation (optimizer step, growth or validation); "
                "use a smaller `micro_batch`, or a device with more memory."
            )
        lost = world.size > 1 and is_communication_error(reported)
        if world.is_main and not isinstance(reported, Interrupted | RunLost) and not lost:
            leave_failure(failure_of(reported))
        raise reported from error


def _check(spec: RunSpec, dataset: Dataset, options: TrainOptions, world: World) -> None:
    """Raise UsageError unless code and data are those of the spec, and the same on all ranks."""
    if spec.code != code_digest(spec.arm, spec.optimizer):
        raise UsageError(
            f"the custom code of arm {spec.arm.name!r} or of its optimizer has changed since the spec; "
            "make the spec again (a new run), or restore the old code."
        )
    if dataset.identity != spec.data.identity:
        raise UsageError(
            f"the spec asks for data {spec.data.identity[:16]}, but {dataset.directory} is "
            f"{dataset.identity[:16]}; give the data set the spec was made for."
        )
    if world.size > 1:
        world.require_agreement(
            {
                "spec": spec.hash,
                "data": dataset.identity,
                "code": package_digest(),
                "version of torch": torch.__version__,
                "shard": options.shard,
            }
        )


def _record_of(directory: RunDirectory, world: World) -> RunRecord | None:
    record = directory.record() if world.is_main else None
    if world.size == 1:
        return record
    value = world.broadcast_object(None if record is None else record.to_dict())
    return None if value is None else RunRecord.from_dict(value)


def make_loaders(spec: RunSpec, dataset: Dataset) -> tuple[BatchLoader, ValidationSet]:
    """Build the training and validation loaders; raises UsageError if the data does not fit."""
    shape, data = spec.shape, spec.data
    if dataset.vocabulary > shape.token_ids:
        raise UsageError(
            f"the data has {dataset.vocabulary:,} token ids, the network only {shape.token_ids:,}: "
            f"use a vocabulary of {dataset.padded_vocabulary:,}."
        )
    batches = BatchLoader(
        dataset,
        shape.context,
        spec.batch_tokens,
        spec.seed,
        pool_tokens=spec.pool_size(len(dataset.tokens("train"))),
        pool=data.pool,
        windows=data.windows,
        epochs=data.epochs,
    )
    batches.require_steps(spec.steps)
    return batches, ValidationSet(dataset, shape.context, spec.validation_tokens)
