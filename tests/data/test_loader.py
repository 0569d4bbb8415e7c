"""The batch loader: one order per seed and epoch, every chunk once per epoch, any step reproducible."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steepen.data import BatchLoader, Dataset, Prefetcher
from steepen.data.permutation import Permutation
from steepen.errors import SteepenError, UsageError

CONTEXT = 31


def chunks_of(dataset: Dataset, context: int = CONTEXT) -> set[bytes]:
    stream = dataset.tokens("train")
    count = len(stream) // (context + 1)
    flat = stream.read(0, count * (context + 1)).astype(np.int64)
    return {row.tobytes() for row in flat.reshape(count, context + 1)}


def joined(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    return np.concatenate([inputs, targets[:, -1:]], axis=1)


@given(st.integers(1, 5000), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_order_is_a_permutation_for_any_size(size: int, key: int) -> None:
    order = Permutation(size, str(key))(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_order_of_a_trillion_tokens_needs_no_memory() -> None:
    size = 10**13 // 2049
    order = Permutation(size, "key")(np.arange(size - 1000, size))
    assert len(set(order.tolist())) == 1000
    assert order.min() >= 0
    assert order.max() < size


def test_every_position_is_equally_likely_for_every_chunk() -> None:
    size, draws = 7, 4000
    counts = np.zeros((size, size))
    for key in range(draws):
        counts[np.arange(size), Permutation(size, str(key))(np.arange(size))] += 1
    chi_squared = ((counts - draws / size) ** 2 / (draws / size)).sum()
    assert chi_squared < 70.7  # 36 degrees of freedom: one in two thousand


def test_neighbouring_chunks_are_uncorrelated_in_the_order() -> None:
    size = 100_000
    order = Permutation(size, "key")(np.arange(size)).astype(float)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.015
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.015


def test_epoch_visits_every_chunk_exactly_once(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0)
    seen = [joined(*batches.at(step))[0].tobytes() for step in range(batches.steps)]
    assert set(seen) == chunks_of(dataset)
    assert len(seen) == len(dataset.tokens("train")) // (CONTEXT + 1)


def test_only_the_last_partial_chunk_is_dropped(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0)
    assert 0 <= len(dataset.tokens("train")) - batches.chunks * (CONTEXT + 1) <= CONTEXT


def test_chunk_across_two_shards_is_complete(dataset: Dataset) -> None:
    first, second = (shard.tokens for shard in dataset.manifest.shards[:2])
    assert first % (CONTEXT + 1), "the fixture should cut a chunk at a shard's end"
    whole = np.concatenate([s.memory_map() for s in dataset.manifest.shards_of(dataset.directory, "train")])
    cut = first // (CONTEXT + 1)
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0)
    step = int(np.flatnonzero(batches.chunk_order(0, batches.chunks) == cut)[0])
    expected = whole[cut * (CONTEXT + 1) : (cut + 1) * (CONTEXT + 1)]
    assert np.array_equal(joined(*batches.at(step))[0], expected)
    assert second


def test_seed_and_epoch_change_the_order(dataset: Dataset) -> None:
    one = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=1, epochs=2)
    other = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=2, epochs=2)
    n = one.chunks
    assert not np.array_equal(one.chunk_order(0, n), other.chunk_order(0, n))
    assert not np.array_equal(one.chunk_order(0, n), one.chunk_order(n, 2 * n))
    assert np.array_equal(np.sort(one.chunk_order(n, 2 * n)), np.arange(n))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_world_size_does_not_change_the_global_batch(dataset: Dataset, world: int) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=3)
    for step in (0, 5):
        pieces = [batches.rank_batch(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate([p[0] for p in pieces]), batches.at(step)[0])
        assert np.array_equal(np.concatenate([p[1] for p in pieces]), batches.at(step)[1])


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_micro_batch_size_gives_the_same_rows(dataset: Dataset, data: st.DataObject) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 16, seed=4)
    step = data.draw(st.integers(0, batches.steps - 1))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, 16), max_size=4))), 16]
    pieces = [batches.batch_rows(step, a, b)[0] for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), batches.at(step)[0])


def test_batch_size_does_not_change_the_order_of_chunks(dataset: Dataset) -> None:
    small = BatchLoader(dataset, CONTEXT, CONTEXT * 2, seed=5)
    large = BatchLoader(dataset, CONTEXT, CONTEXT * 6, seed=5)
    together = np.concatenate([small.at(step)[0] for step in range(3)])
    assert np.array_equal(together, large.at(0)[0])


def test_pool_repeats_its_chunks_in_a_new_order_every_epoch(dataset: Dataset) -> None:
    pool = 50 * (CONTEXT + 1) + 7
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=6, pool_tokens=pool, epochs=10)
    assert batches.chunks == 50
    assert batches.steps == 50 * 10 // 8
    epochs = [batches.chunk_order(50 * epoch, 50 * (epoch + 1)) for epoch in range(10)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 50 for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 10
    assert [batches.epoch_of(step) for step in (0, 6, 7, 62 - 1)] == [0, 0, 1, 9]


def test_pools_are_nested_and_the_same_for_every_seed(dataset: Dataset) -> None:
    def pool(chunks: int, seed: int) -> set[int]:
        batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed, pool_tokens=chunks * (CONTEXT + 1))
        return set(batches.chunk_order(0, chunks).tolist())

    assert pool(20, 1) == pool(20, 2)
    assert pool(20, 1) < pool(60, 1)
    assert pool(60, 1) != set(range(60))  # a sample of the data, not its beginning


def test_more_steps_than_the_data_has_is_refused_naming_both_numbers(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0)
    batches.require_steps(batches.steps)
    needed, there = f"{(batches.steps + 1) * CONTEXT * 8:,}", f"{batches.unique_tokens:,}"
    with pytest.raises(UsageError, match=rf"need {needed} tokens.*give {there}.*epochs"):
        batches.require_steps(batches.steps + 1)
    with pytest.raises(IndexError):
        batches.at(batches.steps)
    BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0, epochs=2).require_steps(batches.steps + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 100}, "batch_tokens 100 is not a multiple of the context 31"),
        ({"context": 0}, "context is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"pool_tokens": 10**9}, "1,000,000,000 unique tokens"),
        ({"pool_tokens": 5}, "5 training tokens do not fill one chunk"),
    ],
)
def test_impossible_batches_name_the_field(dataset: Dataset, changes: dict[str, int], message: str) -> None:
    fields = {"context": CONTEXT, "batch_tokens": CONTEXT * 4, "seed": 0, **changes}
    with pytest.raises(UsageError, match=message):
        BatchLoader(dataset, **fields)  # pyright: ignore[reportArgumentType]


def test_rows_not_divisible_by_the_world_size_are_refused(dataset: Dataset) -> None:
    with pytest.raises(UsageError, match=r"8 rows.*3 processes"):
        BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0).rank_batch(0, 0, 3)


def test_prefetcher_yields_the_loaders_batches(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 4, seed=7)
    with Prefetcher(batches, 0, "cpu") as prefetcher:
        got = [(step, inputs.numpy(), targets.numpy()) for step, inputs, targets in prefetcher]
    assert [step for step, _, _ in got] == list(range(batches.steps))
    for step, inputs, targets in got:
        assert np.array_equal(inputs, batches.at(step)[0])
        assert np.array_equal(targets, batches.at(step)[1])


def test_resuming_with_another_world_size_continues_the_same_batches(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=8)
    whole = {step: inputs.numpy() for step, inputs, _ in Prefetcher(batches, 0, "cpu", stop_step=12)}
    again = BatchLoader(Dataset.open(dataset.directory), CONTEXT, CONTEXT * 8, seed=8)
    ranks = [
        {s: i.numpy() for s, i, _ in Prefetcher(again, 5, "cpu", stop_step=12, rank=rank, world=2)}
        for rank in range(2)
    ]
    for step in range(5, 12):
        assert np.array_equal(np.concatenate([rank[step] for rank in ranks]), whole[step])


def test_error_in_the_background_thread_reaches_the_consumer(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 4, seed=9)
    with pytest.raises(IndexError, match="step -1"):
        list(Prefetcher(batches, -1, "cpu"))


def test_closing_early_stops_the_thread(dataset: Dataset) -> None:
    import threading

    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=10)
    with Prefetcher(batches, 0, "cpu", queue_size=1) as prefetcher:
        for step, _, _ in prefetcher:
            if step == 2:
                break
    assert not [thread for thread in threading.enumerate() if thread.name == "steepen-prefetch"]


def test_prefetcher_refuses_more_steps_than_there_are(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0)
    with pytest.raises(UsageError, match="prepare more data"):
        Prefetcher(batches, 0, "cpu", stop_step=batches.steps + 1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ids_beyond_the_vocabulary_are_refused_naming_the_shard(
    tmp_path: Path, dataset: Dataset, number: int
) -> None:
    copy = Path(shutil.copytree(dataset.directory, tmp_path / "copy"))
    shard = copy / f"train_{number:05d}.bin"
    content = bytearray(shard.read_bytes())
    content[4000:4002] = dataset.vocabulary.to_bytes(2, "little")
    shard.write_bytes(content)
    batches = BatchLoader(Dataset.open(copy), CONTEXT, CONTEXT * 4, seed=0)
    fine = BatchLoader(dataset, CONTEXT, CONTEXT * 4, seed=0)
    seen = 0
    with pytest.raises(SteepenError, match=rf"{shard.name} was altered.*`steepen data verify {copy}`"):
        for step, inputs, _ in Prefetcher(batches, 0, "cpu"):
            assert np.array_equal(inputs.numpy(), fine.at(step)[0])  # up to there nothing is wrong
            seen += 1
    assert seen < batches.steps
