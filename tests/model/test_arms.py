"""Every arm of the table trains, and a user can add one outside the package."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from grown_networks import grow
from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import ARMS, MAIN_ARMS, PAPER_NAMES, arm_key, find_arm
from steepen.model.block import TransformerBlock
from steepen.model.boundary import Norm
from steepen.model.init import build_on_meta, materialize
from steepen.model.shape import Shape, SizeRule
from steepen.model.stages import StageSchedule
from steepen.recipe.flops import flops_per_token, stored_parameters
from steepen.studies.context import find_arms

SCALE = SizeRule(aspect=16, head_dim=16, mlp_multiple=16, context=16, vocabulary=64)


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_every_arm_learns_on_cpu_through_its_growth(arm: Arm) -> None:
    network = materialize(build_on_meta(arm.shape(6, SCALE), arm), embedding_std=0.1)
    generator = torch.Generator().manual_seed(0)
    # A sequence a model can learn: each token follows from the one before.
    first = torch.randint(0, 64, (8, 1), generator=generator)
    text = (first + 5 * torch.arange(17)) % 64
    losses: list[float] = []
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for step in range(12):
        if step == 6 and arm.passes.grows:
            grow(network, arm.passes.final)
            optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        loss = network(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item())  # the head starts at zero
    assert losses[-1] < losses[0] - 0.5


def test_table_has_the_papers_eight_arms_and_every_ablation() -> None:
    assert MAIN_ARMS == (
        "vanilla", "deep-vanilla", "operator-1", "loop-2", "untied-2",
        "loop-grow", "untied-grow", "deep-vanilla-grow",
    )  # fmt: skip
    for base in ("loop-2", "untied-2"):
        for ablation in ("norm-only", "inject-only", "no-coda-injection"):
            assert f"{base}-{ablation}" in ARMS
    assert ARMS["random-loop-grow"].passes.stages[1].passes == (2, 3, 4, 5, 6)
    assert ARMS["random-loop-grow"].passes.final == 4


@pytest.mark.parametrize(
    ("asked", "name", "passes"),
    [("loop", "loop-2", 2), ("loop-1", "loop-1", 1), ("untied-12", "untied-12", 12), ("Loop_2", "loop-2", 2)],
)
def test_any_number_of_passes_is_an_arm(asked: str, name: str, passes: int) -> None:
    arm = find_arm(asked)
    assert (arm.name, arm.passes.initial) == (name, passes)


@pytest.mark.parametrize(
    ("paper", "name"),
    [
        ("Deep Vanilla + norm", "untied-2-norm-only"),
        ("Deep Vanilla + injection", "untied-2-inject-only"),
        ("Loop-2-no-coda-inj", "loop-2-no-coda-injection"),
        ("Untied-2 NCI", "untied-2-no-coda-injection"),
        ("Loop-2 2/C/3", "loop-2-2-c-3"),
        ("loop-2-no-coda-injection-2c3", "loop-2-nci-2-c-3"),
        ("operator-1-1c2", "operator-1-1-c-2"),
        ("Deeper Operator-1", "deeper-operator-1"),
        ("Deep Vanilla Grow", "deep-vanilla-grow"),
        ("Untied Grow", "untied-grow"),
        ("loop-grow-random", "random-loop-grow"),
        ("untied-2-width-only", "width-only-untied-2"),
        ("Tied Vanilla", "tied-vanilla-2"),
    ],
)
def test_names_of_the_paper_and_of_its_authors_tables_are_accepted(paper: str, name: str) -> None:
    assert find_arm(paper).name == name


def test_other_names_lead_to_arms_and_hide_none() -> None:
    assert all(find_arm(other).name == name for other, name in PAPER_NAMES.items())
    assert not {arm_key(other) for other in PAPER_NAMES} & set(ARMS)


def test_passes_that_the_paper_did_not_tune_follow_operator_1() -> None:
    recipes = {
        f"{family}-{k}": find_arm(f"{family}-{k}").recipe
        for family in ("loop", "untied")
        for k in (1, 2, 3, 8)
    }
    assert recipes == {
        "loop-1": "operator-1", "loop-2": "loop-2", "loop-3": "operator-1", "loop-8": "operator-1",
        "untied-1": "operator-1", "untied-2": "untied-2", "untied-3": "operator-1", "untied-8": "operator-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong", ["lop-2", "loop-0", "loop-x", "", "no.such.module:arm", "json:dumps", "json:nothing"]
)
def test_error_for_a_wrong_arm_is_one_sentence(wrong: str) -> None:
    with pytest.raises(UsageError) as error:
        find_arm(wrong)
    assert "\n" not in str(error.value)


# An arm of the user's own: another block, another boundary, another schedule, in a few lines.
class ReluSquaredBlock(TransformerBlock):
    def __init__(self, shape: Shape, *rest: object) -> None:
        super().__init__(shape, *rest)  # type: ignore[arg-type]
        self.gate_up = nn.Parameter(torch.empty(1, 2 * shape.width, shape.width))
        self.down = nn.Parameter(torch.empty(shape.width, 2 * shape.width))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: a custom block may leave `mask` out
        self, x: Tensor, rotary: Tensor
    ) -> Tensor:
        x = x + self.residual * self.attention(self.norm(x), rotary)
        return x + (self.norm(x) @ self.gate_up[0].T).relu().square() @ self.down.T


def gated(h: Tensor | None, e: Tensor, alpha: float, norm: Norm) -> Tensor:
    return e if h is None else (1 - alpha) * norm(h) + alpha * e


MINE = Arm(
    "mine",
    core_boundary=f"{__name__}:gated",
    tied=False,
    passes=StageSchedule.staged((0, 1), (0.5, 2), (0.75, 3)),
    block=f"{__name__}:ReluSquaredBlock",
)


def test_user_can_add_an_arm_without_editing_the_package() -> None:
    arm = find_arm(f"{__name__}:MINE")
    shape = arm.shape(4, SCALE)
    network = materialize(build_on_meta(shape, arm), embedding_std=0.1)
    for passes in (2, 3):
        grow(network, passes)
    network(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    assert stored_parameters(arm, shape, 3) == sum(p.numel() for p in network.parameters())
    width = shape.width
    assert flops_per_token(arm, shape, 3).matmul == 6 * 8 * width**2 * shape.allocation.executed(3)


class BufferedBlock(TransformerBlock):
    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.register_buffer("slope", torch.ones(1))


@pytest.mark.parametrize(
    ("field", "name", "said"),
    [
        ("block", "BufferedBlock", "has a buffer"),
        ("block", "MINE", "not a torch module class"),
        ("core_boundary", "SCALE", "not a function"),
    ],
)
def test_invalid_block_or_boundary_is_rejected_at_construction(field: str, name: str, said: str) -> None:
    arm = replace(ARMS["untied-2"], **{field: f"{__name__}:{name}"})
    with pytest.raises(UsageError, match=said):
        build_on_meta(arm.shape(4, SCALE), arm)


def test_building_d26_on_meta_needs_no_memory() -> None:
    arm = ARMS["untied-grow"]
    network = build_on_meta(arm.shape(26), arm, passes=4)
    assert all(p.is_meta for p in network.parameters())
    assert sum(p.numel() for p in network.parameters()) == 7_424_049_152


def test_initial_weights_have_the_documented_distributions() -> None:
    arm = ARMS["operator-1"]
    scale = replace(SCALE, aspect=64, head_dim=64, vocabulary=512)
    network = materialize(build_on_meta(arm.shape(4, scale), arm), embedding_std=0.05, init_scale=0.5, seed=3)
    assert network.embedding.std().item() == pytest.approx(0.05, rel=0.02)
    assert network.head.count_nonzero() == 0
    for block in network.blocks():
        assert block.get_parameter("out").count_nonzero() == block.get_parameter("down").count_nonzero() == 0
        for name in ("qkv", "gate_up"):
            weight = block.get_parameter(name)
            assert weight.std().item() == pytest.approx(0.5 * (3 * 256) ** -0.5, rel=0.02)
            assert weight.abs().max().item() <= 0.5 * 256**-0.5


def test_initial_weight_does_not_depend_on_other_parameters() -> None:
    one = materialize(build_on_meta(ARMS["untied-2"].shape(6, SCALE), ARMS["untied-2"]), seed=5)
    other = materialize(build_on_meta(find_arm("untied-5").shape(6, SCALE), find_arm("untied-5")), seed=5)
    ours = dict(other.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in one.named_parameters())
    again = materialize(build_on_meta(ARMS["untied-2"].shape(6, SCALE), ARMS["untied-2"]), seed=6)
    assert not torch.equal(again.embedding, one.embedding)


def test_arm_made_from_another_is_titled_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(ARMS["vanilla"], name="mine")
    assert find_arm(mine).title == "mine" and find_arm(replace(mine, title="My arm")).title == "My arm"
    assert find_arms([mine, "vanilla"])[0].title == "mine"
    monkeypatch.setattr("steepen.model.arms.import_object", lambda *_, **__: mine)
    assert find_arm("mylab:MINE").title == "mine"
    assert all(find_arm(arm) is arm for arm in ARMS.values())
