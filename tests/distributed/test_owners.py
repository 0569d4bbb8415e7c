"""Owners of parameters, and the place of a process from the variables of torchrun and srun."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepen.distributed.environment import first_host, process_environment
from steepen.distributed.owners import ROW_SHARDED, assign_owners, orthogonalization_cost, owned_by
from steepen.errors import UsageError
from steepen.model.arms import find_arm
from steepen.model.init import build_on_meta
from steepen.model.shape import SizeRule

Shapes = dict[str, tuple[int, ...]]
shape = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
table = st.tuples(st.integers(1, 40), st.integers(1, 8))


@given(st.dictionaries(st.text("abc", min_size=1), shape, max_size=8), table, st.integers(1, 9))
def test_every_element_has_exactly_one_owner(shapes: Shapes, rows: tuple[int, int], world: int) -> None:
    shapes = {"embedding": rows, **shapes, "head": rows}
    pieces = assign_owners(shapes, world)
    for name, size in shapes.items():
        found = sorted((p for p in pieces if p.name == name), key=lambda piece: piece.first)
        assert all(piece.elements for piece in found) or 0 in size
        if name in ROW_SHARDED:
            assert found[0].first == 0 and found[-1].last == size[0]
            assert all(a.last == b.first for a, b in itertools.pairwise(found))
        else:  # never split
            (piece,) = found
            assert piece.whole and piece.piece_shape == size
    for rank in range(world):
        assert all(piece.owner == rank for piece in owned_by(pieces, rank).values())


@pytest.mark.parametrize("world", [2, 8, 16])
def test_work_of_the_busiest_owner_is_near_the_mean(world: int) -> None:
    arm = find_arm("untied-grow")
    network = build_on_meta(arm.shape(26, SizeRule()), arm, passes=4)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    pieces = assign_owners(shapes, world)
    work = [
        sum(orthogonalization_cost(p.shape) for p in owned_by(pieces, rank).values() if p.whole)
        for rank in range(world)
    ]
    assert max(work) <= 1.1 * sum(work) / world


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0)),
        (
            {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            (3, 16, 3),
        ),
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}, (9, 16, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, (0, 1, 0)),  # a batch script without srun
    ],
)
def test_rank_is_read_from_torchrun_or_srun(variables: dict[str, str], expected: Any) -> None:
    found = process_environment(variables)
    assert (found.rank, found.size, found.local_rank) == expected


def test_ranks_of_a_slurm_step_meet_at_its_first_host() -> None:
    variables = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "1", "SLURM_JOB_ID": "77"}
    found = process_environment({**variables, "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1"})
    assert found.address == "gpu03" and found.port == 20_077
    assert [first_host(text) for text in ("n1", "n1,n2", "n[7]", "a[1-2]-ib")] == ["n1", "n1", "n7", "a1-ib"]
    with pytest.raises(UsageError):
        process_environment({"RANK": "x", "WORLD_SIZE": "2"})
