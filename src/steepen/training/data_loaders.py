"""The text of a run: what it trains on, and what it is scored on."""

from __future__ import annotations

from steepen.data import BatchLoader, Dataset, ValidationSet
from steepen.errors import UsageError
from steepen.runs.spec import RunSpec


def make_loaders(spec: RunSpec, dataset: Dataset) -> tuple[BatchLoader, ValidationSet]:
    """What a run trains on and what it is scored on; refuses what the data cannot give."""
    shape, data = spec.shape, spec.data
    if dataset.vocabulary > shape.vocabulary:
        raise UsageError(
            f"the data has {dataset.vocabulary:,} token ids, the network only {shape.vocabulary:,}: "
            f"use a vocabulary of {dataset.padded_vocabulary:,}."
        )
    batches = BatchLoader(
        dataset,
        shape.context,
        spec.batch_tokens,
        spec.seed,
        pool_tokens=data.pool_tokens,
        epochs=data.epochs,
    )
    batches.require(spec.steps)
    return batches, ValidationSet(dataset, shape.context, spec.validation_tokens)
