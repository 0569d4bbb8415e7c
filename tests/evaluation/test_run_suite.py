"""CORE evaluation: outcomes are saved per task, interrupted evaluations resume, subsets are fixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from steepen.data import Tokenizer
from steepen.errors import UsageError
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core, settings_key
from steepen.model.network import Network

Make = Callable[..., Network]


@pytest.fixture
def network(make_network: Make) -> Network:
    return make_network()


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_every_examples_outcome_is_saved(
    network: Network, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    found = evaluate_core(network, tokenizer, bundle, folder=tmp_path)
    # Without demonstrations seeds change nothing: the zero-shot task is scored once.
    assert files(tmp_path) == sorted(
        ["choose.seed0.jsonl"]
        + [f"{name}.seed{seed}.jsonl" for name in ("choose_shots", "ending", "complete") for seed in range(3)]
    )
    lines = [json.loads(line) for line in (tmp_path / "ending.seed1.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(9))
    assert sorted(line["line"] for line in lines) == list(range(1, 10))
    by_hand = sum(line["correct"] for line in lines) / 9
    ending = next(task for task in found.tasks if task.label == "ending")
    assert next(seed.accuracy for seed in ending.seeds if seed.seed == 1) == by_hand
    assert next(seed.nll for seed in ending.seeds if seed.seed == 1) == pytest.approx(
        sum(line["nll"] for line in lines) / 9
    )


def test_seeds_change_the_demonstrations_only(network: Network, tokenizer: Tokenizer, bundle: Bundle) -> None:
    found = evaluate_core(network, tokenizer, bundle)
    for task in found.tasks:
        assert len({seed.nll for seed in task.seeds}) == (3 if task.shots else 1)


def test_interrupted_evaluation_resumes(
    network: Network,
    tokenizer: Tokenizer,
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = evaluate_core(network, tokenizer, bundle)

    def stop(stage: str, done: float, total: float, *, detail: str = "", tokens: int | None = None) -> None:
        if detail.startswith("ending"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_core(network, tokenizer, bundle, folder=tmp_path, progress=stop)
    done = files(tmp_path)
    assert done == [
        "choose.seed0.jsonl",
        "choose_shots.seed0.jsonl",
        "choose_shots.seed1.jsonl",
        "choose_shots.seed2.jsonl",
    ]
    seen: list[str] = []

    def see(stage: str, done: float, total: float, *, detail: str = "", tokens: int | None = None) -> None:
        seen.append(detail)

    again = evaluate_core(network, tokenizer, bundle, folder=tmp_path, progress=see)
    assert again == whole
    assert {what.split(",")[0] for what in seen} == {"ending", "complete"}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished suite was scored again")

    monkeypatch.setattr(Network, "hidden_states", never)
    assert evaluate_core(network, tokenizer, bundle, folder=tmp_path) == whole


@pytest.mark.parametrize("damage", ["", "{", '{"index": 0}\n'])
def test_damaged_outcomes_are_evaluated_again(
    damage: str, network: Network, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    whole = evaluate_core(network, tokenizer, bundle, CoreOptions((0,)), folder=tmp_path)
    (tmp_path / "ending.seed0.jsonl").write_text(damage)
    assert evaluate_core(network, tokenizer, bundle, CoreOptions((0,)), folder=tmp_path) == whole


def test_altered_outcome_is_evaluated_again(
    network: Network, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    whole = evaluate_core(network, tokenizer, bundle, CoreOptions((0,)), folder=tmp_path)
    file = tmp_path / "choose.seed0.jsonl"
    text = file.read_text()
    wrong = text.replace('"correct": true', '"correct": false').replace('"correct": 1', '"correct": 0')
    assert wrong != text
    file.write_text(wrong)
    assert evaluate_core(network, tokenizer, bundle, CoreOptions((0,)), folder=tmp_path) == whole
    assert file.read_text() == text


def test_subset_is_a_prefix_of_any_larger_subset(
    network: Network, tokenizer: Tokenizer, bundle: Bundle, tmp_path: Path
) -> None:
    for examples in (1, 4, 10_000):
        evaluate_core(
            network, tokenizer, bundle, CoreOptions((1,), examples), folder=tmp_path / str(examples)
        )
    for file in (tmp_path / "4").iterdir():
        small = [json.loads(line) for line in file.read_text().splitlines()]
        large = [json.loads(line) for line in (tmp_path / "10000" / file.name).read_text().splitlines()]
        assert len(small) == 4 and len(large) > 4
        for a, b in zip(small, large, strict=False):
            assert (a["line"], a["chosen"], a["correct"]) == (b["line"], b["chosen"], b["correct"])
            assert a["nll"] == pytest.approx(b["nll"], abs=2e-5)


def test_tasks_can_be_chosen(network: Network, tokenizer: Tokenizer, bundle: Bundle) -> None:
    found = evaluate_core(network, tokenizer, bundle, CoreOptions((0,), 2, ("complete", "choose")))
    assert [task.label for task in found.tasks] == ["complete", "choose"]
    with pytest.raises(UsageError, match="no task 'chose'"):
        evaluate_core(network, tokenizer, bundle, CoreOptions(tasks=("chose",)))


def test_progress_increases_to_the_total(network: Network, tokenizer: Tokenizer, bundle: Bundle) -> None:
    shares: list[float] = []

    def see(stage: str, done: float, total: float, *, detail: str = "", tokens: int | None = None) -> None:
        shares.append(done / total)

    evaluate_core(network, tokenizer, bundle, CoreOptions(token_budget=200), progress=see)
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "bad",
    [{"seeds": ()}, {"seeds": (0, 0)}, {"seeds": (-1,)}, {"tasks": ()}],
)
def test_bad_options_are_rejected(bad: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError):
        CoreOptions(**bad)  # pyright: ignore[reportArgumentType]


def test_other_settings_have_another_folder() -> None:
    assert settings_key({"a": 1, "b": 2}) == settings_key({"b": 2, "a": 1}) != settings_key({"a": 1, "b": 3})
