"""KL effective depth, passes at test time and validation loss, for any arm."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grown_networks import grow
from steepen.data import Dataset, ValidationSet
from steepen.errors import UsageError
from steepen.evaluation.kl_depth import effective_depth, measure_kl_depth
from steepen.evaluation.validation_loss import measure_test_time_passes, validate
from steepen.model.arms import find_arm
from steepen.model.growth import grown
from steepen.model.init import build_on_meta, materialize, name_seed
from steepen.model.network import Network
from steepen.model.shape import SizeRule

Make = Callable[..., Network]


@pytest.mark.parametrize(
    ("curve", "depth", "peak"),
    [
        ([3.0, 5.0, 2.5, 2.0, 1.0, 0.0], 4, 1),  # 2.0 is not below 2 nats
        ([1.0, 6.0, 3.0, 0.0], 3, 1),  # what comes before the peak does not count
        ([5.0, 1.0, 4.0, 0.0], 1, 0),  # the first index below, even where a later one is not
        ([0.5, 0.9, 0.1, 0.0], 2, 1),  # never far away: the index after the peak
        ([7.0, 7.0, 0.0], 2, 0),
        ([0.0, 0.0], 1, 0),
        ([-1e-9, 0.0], 1, 1),  # the peak is the last index
    ],
)
def test_effective_depth_of_known_curves(curve: list[float], depth: int, peak: int) -> None:
    assert effective_depth(curve) == (depth, peak)


def test_effective_depths_of_the_authors_curves_are_theirs(reference_data: Callable[[str], Path]) -> None:
    """15 networks that grew: KL before the first and after each block, and the depth that they publish."""
    file = reference_data("refdata/authors/growth_target_lens.csv")
    curves: dict[tuple[str, str, int], list[float]] = {}
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        key = (row["mean_passes"], row["target_passes"], int(row["kl_effective_depth"]))
        assert int(row["lens_index"]) == len(curves.setdefault(key, []))
        curves[key].append(float(row["kl_to_final"]))
    assert len(curves) == 15
    for (_, _, published), curve in curves.items():
        assert effective_depth(curve)[0] == published


@pytest.fixture(scope="module")
def validation(dataset: Dataset) -> ValidationSet:
    return ValidationSet(dataset, 32, 320)


@pytest.mark.parametrize(
    ("arm", "passes", "stages"),
    [
        ("vanilla", 1, ["prelude"] * 3),
        ("loop-2", 5, ["prelude", "core 1", "core 2", "core 3", "core 4", "core 5", "coda"]),
        ("untied-2", 1, ["prelude", "core 1", "coda"]),
        ("untied-2", 2, ["prelude", "core 1", "core 2", "coda"]),
    ],
)
def test_every_executed_block_is_decoded(
    arm: str, passes: int, stages: list[str], make_network: Make, validation: ValidationSet
) -> None:
    network = make_network(arm)
    found = measure_kl_depth(network, validation, passes)
    assert list(found.stages) == stages and len(found.curve) - 1 == found.executed == len(stages)
    assert found.curve[-1] == pytest.approx(0, abs=1e-9) and found.curve[0] > 0.1
    assert found.convention == "authors"
    # Divergences before and after the first block again, token by token in double precision.
    inputs, _ = validation.rows(0, validation.windows)
    first: list[torch.Tensor] = []
    with torch.no_grad():
        final = network(torch.from_numpy(inputs), passes=passes).double().log_softmax(-1)
        network.hidden_states(torch.from_numpy(inputs), passes, visit=first.append)
        block = network.logits(first[0]).double().log_softmax(-1)
        normed = torch.nn.functional.rms_norm(
            network.embedding[torch.from_numpy(inputs)], (network.shape.width,)
        )
        before = network.logits(normed).double().log_softmax(-1)
    assert found.curve[0] == pytest.approx(float((final.exp() * (final - before)).sum(-1).mean()), rel=1e-4)
    assert found.curve[1] == pytest.approx(float((final.exp() * (final - block)).sum(-1).mean()), rel=1e-4)
    other = measure_kl_depth(network, validation, passes, direction="block-to-final")
    assert other.curve[1] == pytest.approx(float((block.exp() * (block - final)).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize(
    "growth",
    ["blocks=1-all@0.5", "width=1/3-1@0.5", "context=0.25-1@0.5", "experts=1-4@0.5", "experts=2-4@0.5",
     "blocks=1-all@0.2+width=1/3-1@0.4+context=0.25-1@0.6+experts=1-4@0.8"],
)  # fmt: skip
def test_networks_that_grew_along_every_axis_have_a_depth(growth: str, validation: ValidationSet) -> None:
    arm = find_arm(f"vanilla+{growth}")
    rule = SizeRule(aspect=8, head_dim=8, mlp_multiple=8, context=128, vocabulary=384)
    first, *later = arm.networks(arm.shape(3, rule), arm.passes)
    network = materialize(build_on_meta(first.shape, first.arm), embedding_std=0.5)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(name_seed(0, name)))
        parameter.data.add_(parameter.shape[-1] ** -0.5 * noise)
    before = measure_kl_depth(network, validation)
    for after in later:
        network = grown(network, after, arm.passes)
    found = measure_kl_depth(network, validation)
    assert found.executed == 3 and list(found.stages) == ["prelude"] * 3 and 1 <= found.depth <= 3
    assert found.curve[-1] == pytest.approx(0, abs=1e-9) and found.curve[0] > 0.1
    new = found.executed - before.executed  # new blocks change nothing, and neither do width and experts
    if "experts=2" not in growth:
        assert found.curve == pytest.approx((*before.curve, *[before.curve[-1]] * new), abs=1e-4)


def test_untrained_network_has_depth_1(make_network: Make, validation: ValidationSet) -> None:
    network = make_network("loop-2")
    network.head.data.zero_()
    assert measure_kl_depth(network, validation).depth == 1


def test_bad_requests_are_rejected(make_network: Make, validation: ValidationSet) -> None:
    with pytest.raises(UsageError, match="direction 'up'"):
        measure_kl_depth(make_network(), validation, direction="up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="threshold 0"):
        measure_kl_depth(make_network(), validation, threshold=0)
    with pytest.raises(UsageError, match="passes 0"):
        measure_test_time_passes(make_network(), validation, [0, 1])


def test_tied_arms_run_beyond_their_passes_and_untied_ones_up_to_theirs(
    make_network: Make, validation: ValidationSet
) -> None:
    tied = measure_test_time_passes(make_network("loop-2"), validation)
    assert tied.passes == tuple(range(1, 9)) and tied.trained == 2
    assert tied.differences[1] == 0.0 and tied.differences[0] != 0.0
    grown = make_network("untied-grow")
    grow(grown, 4)
    assert measure_test_time_passes(grown, validation).passes == (1, 2, 3, 4)
    assert measure_test_time_passes(make_network("vanilla"), validation).passes == (1,)


def test_pass_curve_has_the_losses_of_validation(make_network: Make, validation: ValidationSet) -> None:
    network = make_network("loop-2")
    found = measure_test_time_passes(network, validation, (3, 1, 3), trained=2)
    assert found.passes == (1, 3)
    assert found.losses == (
        validate(network, validation, 1).loss,
        validate(network, validation, 3).loss,
    )
    assert found.trained_loss == validate(network, validation).loss
    assert found.identity == validation.identity


def test_validation_loss_equals_a_direct_computation(make_network: Make, validation: ValidationSet) -> None:
    network = make_network("vanilla")
    found = validate(network, validation)
    inputs, targets = validation.rows(0, validation.windows)
    with torch.no_grad():
        logs = network(torch.from_numpy(inputs)).double().log_softmax(-1)
    losses = -logs.gather(-1, torch.from_numpy(targets)[..., None])[..., 0]
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    text = torch.from_numpy(targets) != validation.end_of_text
    assert not text.all()  # <|endoftext|> is among the targets, and is no text
    bits = float(losses[text].sum()) / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / validation.target_bytes, rel=1e-5)
    assert found.tokens == 320
