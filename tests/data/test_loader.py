"""The batch loader: documents cut anew every epoch or fixed windows, any step reproducible."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steepen.data import BatchLoader, Dataset, Prefetcher
from steepen.data.windows import FixedWindows, Permutation, RecutWindows, Windows
from steepen.errors import SteepenError, UsageError

CONTEXT = 31


def fixed_windows(dataset: Dataset, context: int = CONTEXT) -> set[bytes]:
    stream = dataset.tokens("train")
    count = len(stream) // (context + 1)
    flat = stream.read(0, count * (context + 1)).astype(np.int64)
    return {row.tobytes() for row in flat.reshape(count, context + 1)}


def documents_of(dataset: Dataset) -> list[list[int]]:
    """The token ids of each training document, <|endoftext|> first."""
    ids = dataset.tokens("train").read(0, len(dataset.tokens("train"))).tolist()
    ends = dataset.document_ends("train").tolist()
    return [ids[start:end] for start, end in pairwise([0, *ends])]


def recut_reference(
    documents: list[list[int]], rows: int, steps: int, seed: int, pool_tokens: int, context: int = CONTEXT
) -> list[np.ndarray]:
    """The batches of successive epochs, by joining the shuffled documents of a prefix in memory."""
    pool: list[list[int]] = []
    for document in documents:
        room = pool_tokens - sum(map(len, pool))
        if room > 0:
            pool.append(document[:room])
    batches: list[np.ndarray] = []
    epoch = 0
    while len(batches) < steps:
        order = Permutation(len(pool), f"steepen documents {seed} {epoch}")(np.arange(len(pool)))
        stream = np.array([token for number in order for token in pool[number]])
        count = len(stream) // (context + 1)
        windows = stream[: count * (context + 1)].reshape(count, context + 1)
        shuffled = windows[Permutation(count, f"steepen windows {seed} {epoch}")(np.arange(count))]
        batches += [shuffled[rows * n : rows * (n + 1)] for n in range(count // rows)]
        epoch += 1
    return batches[:steps]


def joined(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    return np.concatenate([inputs, targets[:, -1:]], axis=1)


@given(st.integers(1, 5000), st.integers(0, 99))
@settings(max_examples=60)
def test_order_is_a_permutation_for_any_size(size: int, key: int) -> None:
    order = Permutation(size, str(key))(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_order_of_a_trillion_tokens_needs_no_memory() -> None:
    size = 10**13 // 2049
    order = Permutation(size, "key")(np.arange(size - 1000, size))
    assert len(set(order.tolist())) == 1000
    assert order.min() >= 0
    assert order.max() < size


def test_every_position_is_equally_likely_for_every_window() -> None:
    size, draws = 7, 4000
    counts = np.zeros((size, size))
    for key in range(draws):
        counts[np.arange(size), Permutation(size, str(key))(np.arange(size))] += 1
    chi_squared = ((counts - draws / size) ** 2 / (draws / size)).sum()
    assert chi_squared < 70.7  # 36 degrees of freedom: one in two thousand


def test_neighbouring_windows_are_uncorrelated_in_the_order() -> None:
    size = 100_000
    order = Permutation(size, "key")(np.arange(size)).astype(float)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.015
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.015


@pytest.mark.parametrize("pool_tokens", [None, 4_000, 7_777])
def test_epochs_shuffle_join_and_cut_the_documents_anew(dataset: Dataset, pool_tokens: int | None) -> None:
    total = len(dataset.tokens("train"))
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=3, pool_tokens=pool_tokens, epochs=3)
    assert batches.steps == 3 * ((pool_tokens or total) // (CONTEXT + 1) // 8)
    expected = recut_reference(documents_of(dataset), 8, batches.steps, 3, pool_tokens or total)
    for step, windows in enumerate(expected):
        assert np.array_equal(joined(*batches.at(step)), windows)


def test_recut_windows_differ_between_epochs_and_fixed_ones_do_not(dataset: Dataset) -> None:
    def epochs(windows: Windows) -> list[set[bytes]]:
        batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0, windows=windows, epochs=2)
        half = batches.steps // 2
        rows = [joined(*batches.at(step))[0].tobytes() for step in range(batches.steps)]
        return [set(rows[:half]), set(rows[half:])]

    first, second = epochs("fixed")
    assert first == second == fixed_windows(dataset)
    first, second = epochs("recut")
    assert len(first & second) < 0.2 * len(first)
    assert len(first & fixed_windows(dataset)) < 0.2 * len(first)


def test_recut_epoch_has_every_token_of_the_pool_but_the_last_partial_window(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0)
    seen = np.concatenate([joined(*batches.at(step))[0] for step in range(batches.steps)])
    stream = dataset.tokens("train")
    missing = np.bincount(stream.read(0, len(stream)), minlength=50_257) - np.bincount(seen, minlength=50_257)
    assert missing.min() >= 0
    assert 0 <= missing.sum() <= CONTEXT


def test_no_batch_of_recut_windows_spans_two_epochs(dataset: Dataset) -> None:
    pool = 50 * (CONTEXT + 1) + 7
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=6, pool_tokens=pool, epochs=10)
    assert (batches.windows, batches.steps) == (50, 60)  # 6 batches of 8 windows an epoch
    assert [batches.epoch_of(step) for step in (0, 5, 6, 59)] == [0, 0, 1, 9]


def test_hundred_million_tokens_give_190_steps_an_epoch() -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(2, 1_500, 200_000))
    order = RecutWindows(ends, 2_049, 256, seed=42, epochs=10, pool="prefix", pool_tokens=100_000_000)
    assert (order.steps_per_epoch, order.steps) == (190, 1_900)
    positions, lengths = order.pieces(1_899, 0, 256)
    assert lengths.sum() == 256 * 2_049
    assert (positions + lengths).max() <= 100_000_000


def test_prefix_pool_is_the_beginning_and_a_smaller_one_is_part_of_a_larger(dataset: Dataset) -> None:
    def tokens(pool_tokens: int, windows: Windows) -> set[int]:
        batches = BatchLoader(dataset, CONTEXT, CONTEXT, 1, pool_tokens=pool_tokens, windows=windows)
        found: set[int] = set()
        for step in range(batches.steps):
            starts, lengths = batches.order.pieces(step, 0, 1)
            found.update(*(range(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)))
        return found

    for windows in ("recut", "fixed"):
        small, large = tokens(2_000, windows), tokens(5_000, windows)
        assert max(small) < 2_000 and len(small) > 2_000 - CONTEXT - 1
        assert max(large) < 5_000 and len(large) > 5_000 - CONTEXT - 1


def test_sampled_pool_of_documents_is_nested_and_the_same_for_every_seed(dataset: Dataset) -> None:
    def documents(pool_tokens: int, seed: int) -> set[int]:
        batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed, pool_tokens=pool_tokens, pool="sample")
        pieces = [batches.order.pieces(step, 0, 1) for step in range(batches.steps)]
        assert batches.windows == pool_tokens // (CONTEXT + 1)
        starts = np.concatenate([start for start, _ in pieces])
        return set(np.searchsorted(dataset.document_ends("train"), starts, side="right").tolist())

    few = documents(2_000, 1)
    assert len(few - documents(2_000, 2)) <= 2  # another order may drop the last partial window elsewhere
    assert few < documents(6_000, 1)
    assert max(few) > len(few)  # not the beginning


def test_epoch_visits_every_fixed_window_exactly_once(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0, windows="fixed")
    seen = [joined(*batches.at(step))[0].tobytes() for step in range(batches.steps)]
    assert set(seen) == fixed_windows(dataset)
    assert len(seen) == len(dataset.tokens("train")) // (CONTEXT + 1)


def test_window_across_two_shards_is_complete(dataset: Dataset) -> None:
    first = dataset.manifest.shards[0].tokens
    assert first % (CONTEXT + 1), "the fixture should cut a window at a shard's end"
    whole = np.concatenate([s.memory_map() for s in dataset.manifest.shards_of(dataset.directory, "train")])
    cut = first // (CONTEXT + 1)
    order = fixed_order(dataset, CONTEXT, seed=0)
    step = int(np.flatnonzero(order.order(0, order.windows) == cut)[0])
    expected = whole[cut * (CONTEXT + 1) : (cut + 1) * (CONTEXT + 1)]
    batches = BatchLoader(dataset, CONTEXT, CONTEXT, seed=0, windows="fixed")
    assert np.array_equal(joined(*batches.at(step))[0], expected)


def fixed_order(dataset: Dataset, batch_tokens: int, seed: int, **options: Any) -> FixedWindows:
    order = BatchLoader(dataset, CONTEXT, batch_tokens, seed, windows="fixed", **options).order
    assert isinstance(order, FixedWindows)
    return order


def test_seed_and_epoch_change_the_order_of_fixed_windows(dataset: Dataset) -> None:
    one = fixed_order(dataset, CONTEXT * 8, seed=1, epochs=2)
    other = fixed_order(dataset, CONTEXT * 8, seed=2, epochs=2)
    n = one.windows
    assert not np.array_equal(one.order(0, n), other.order(0, n))
    assert not np.array_equal(one.order(0, n), one.order(n, 2 * n))
    assert np.array_equal(np.sort(one.order(n, 2 * n)), np.arange(n))


@pytest.mark.parametrize("windows", ["recut", "fixed"])
def test_seed_changes_the_batches(dataset: Dataset, windows: Windows) -> None:
    one, other = (BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed, windows=windows) for seed in (1, 2))
    assert not np.array_equal(one.at(0)[0], other.at(0)[0])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_world_size_does_not_change_the_global_batch(dataset: Dataset, world_size: int) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=3)
    for step in (0, 5):
        pieces = [batches.batch_rows(step, *batches.row_range(r, world_size)) for r in range(world_size)]
        assert np.array_equal(np.concatenate([p[0] for p in pieces]), batches.at(step)[0])
        assert np.array_equal(np.concatenate([p[1] for p in pieces]), batches.at(step)[1])


@given(data=st.data())
@settings(max_examples=30)
def test_any_micro_batch_size_gives_the_same_rows(dataset: Dataset, data: st.DataObject) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 16, seed=4)
    step = data.draw(st.integers(0, batches.steps - 1))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, 16), max_size=4))), 16]
    pieces = [batches.batch_rows(step, a, b)[0] for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), batches.at(step)[0])


def test_batch_size_does_not_change_the_order_of_windows(dataset: Dataset) -> None:
    small = BatchLoader(dataset, CONTEXT, CONTEXT * 2, seed=5)
    large = BatchLoader(dataset, CONTEXT, CONTEXT * 6, seed=5)
    together = np.concatenate([small.at(step)[0] for step in range(3)])
    assert np.array_equal(together, large.at(0)[0])


def test_pool_repeats_its_fixed_windows_in_a_new_order_every_epoch(dataset: Dataset) -> None:
    pool = 50 * (CONTEXT + 1) + 7
    order = fixed_order(dataset, CONTEXT * 8, seed=6, pool_tokens=pool, epochs=10)
    assert order.windows == 50
    assert order.steps == 50 * 10 // 8
    epochs = [order.order(50 * epoch, 50 * (epoch + 1)) for epoch in range(10)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 50 for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 10
    assert [order.epoch_of(step) for step in (0, 6, 7, 62 - 1)] == [0, 0, 1, 9]


def test_sampled_pools_of_fixed_windows_are_nested_and_the_same_for_every_seed(dataset: Dataset) -> None:
    def pool(windows: int, seed: int) -> set[int]:
        tokens = windows * (CONTEXT + 1)
        order = fixed_order(dataset, CONTEXT, seed, pool_tokens=tokens, pool="sample")
        return set(order.order(0, windows).tolist())

    assert pool(20, 1) == pool(20, 2)
    assert pool(20, 1) < pool(60, 1)
    assert pool(60, 1) != set(range(60))  # a sample of the data, not its beginning


def test_more_steps_than_the_data_has_is_rejected_naming_both_numbers(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0)
    batches.require_steps(batches.steps)
    needed, there = f"{(batches.steps + 1) * CONTEXT * 8:,}", f"{batches.steps * CONTEXT * 8:,}"
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
        ({"pool": "first"}, "pool is 'first'; accepted are prefix, sample"),
        ({"windows": "cut"}, "windows is 'cut'; accepted are recut, fixed"),
        ({"pool_tokens": 5}, "5 training tokens do not fill one window"),
    ],
)
def test_impossible_batches_name_the_field(dataset: Dataset, changes: dict[str, Any], message: str) -> None:
    fields = {"context": CONTEXT, "batch_tokens": CONTEXT * 4, "seed": 0, **changes}
    with pytest.raises(UsageError, match=message):
        BatchLoader(dataset, **fields)  # pyright: ignore[reportArgumentType]


def test_rows_not_divisible_by_the_world_size_are_rejected(dataset: Dataset) -> None:
    with pytest.raises(UsageError, match=r"8 rows.*3 processes"):
        BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0).row_range(0, 3)


def test_prefetcher_yields_the_loaders_batches(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 4, seed=7)
    with Prefetcher(batches, 0, "cpu") as prefetcher:
        got = [(step, inputs.numpy(), targets.numpy()) for step, inputs, targets in prefetcher]
    assert [step for step, _, _ in got] == list(range(batches.steps))
    for step, inputs, targets in got:
        assert np.array_equal(inputs, batches.at(step)[0])
        assert np.array_equal(targets, batches.at(step)[1])


@pytest.mark.parametrize("windows", ["recut", "fixed"])
def test_resuming_with_another_world_size_continues_the_same_batches(
    dataset: Dataset, windows: Windows
) -> None:
    options: Any = {"pool_tokens": 30 * (CONTEXT + 1), "epochs": 5, "windows": windows}  # 3 steps an epoch
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=8, **options)
    whole = {step: inputs.numpy() for step, inputs, _ in Prefetcher(batches, 0, "cpu", stop_step=12)}
    again = BatchLoader(Dataset.open(dataset.directory), CONTEXT, CONTEXT * 8, seed=8, **options)
    ranks = [
        {s: i.numpy() for s, i, _ in Prefetcher(again, 5, "cpu", stop_step=12, rank=rank, world_size=2)}
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
    assert not [each for each in threading.enumerate() if each.name.startswith("steepen-prefetch")]


def test_prefetcher_rejects_more_steps_than_there_are(dataset: Dataset) -> None:
    batches = BatchLoader(dataset, CONTEXT, CONTEXT * 8, seed=0)
    with pytest.raises(UsageError, match="prepare more data"):
        Prefetcher(batches, 0, "cpu", stop_step=batches.steps + 1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ids_beyond_the_vocabulary_are_rejected_naming_the_shard(
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
