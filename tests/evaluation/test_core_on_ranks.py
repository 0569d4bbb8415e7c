"""CORE on several ranks: the examples are shared out, and the scores are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks import on_ranks
from steepen.data import Tokenizer
from steepen.distributed.world import World
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core
from steepen.model.network import Network


@pytest.mark.parametrize("size", [2, 4])
def test_scores_of_several_ranks_are_those_of_one(
    size: int, make_network: Callable[..., Network], tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    network = make_network()
    options = CoreOptions((0, 1), examples=7)  # not a multiple of the ranks

    def score(world: World, folder: Path) -> dict[str, Any]:
        saved = folder if world.is_main else None
        return evaluate_core(network, tokenizer, bundle, options, folder=saved, world=world).to_dict()

    (expected,) = on_ranks(1, score, tmp_path / "one")
    for found in on_ranks(size, score, tmp_path / "ranks"):
        assert found["mean_centered"] == expected["mean_centered"]
        assert found["mean_nll"] == pytest.approx(expected["mean_nll"], abs=1e-6)
        for label, task in expected["tasks"].items():
            assert found["tasks"][label]["accuracy"] == task["accuracy"]
    one, ranks = (sorted((tmp_path / name).glob("*.jsonl")) for name in ("one", "ranks"))
    assert [file.name for file in one] == [file.name for file in ranks]
    assert [len(file.read_text().splitlines()) for file in ranks] == [7] * len(ranks)
    # Saved tasks are not scored again, whatever the number of ranks.
    (again,) = on_ranks(1, score, tmp_path / "ranks")
    assert again == on_ranks(size, score, tmp_path / "ranks")[-1]
