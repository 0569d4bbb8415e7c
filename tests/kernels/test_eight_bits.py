"""Every kernel that rounds to eight bits does what its plain twin does, and the twins round as they say."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from steepen.kernels import eager, eager8
from steepen.kernels.fp8 import ACTIVATION, GRADIENT, LOGITS, RowwiseFp8, exact, most

pytest.importorskip("triton", reason="needs Triton (its interpreter runs on a CPU)")
from steepen.kernels import fused8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
able = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not able, reason="needs a GPU with eight-bit products, or none")
EPS = 1.2e-7
ROUNDING = {ACTIVATION: 2.0**-4, LOGITS: 2.0**-3}  # of a number, at most, where it is not tiny


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Rows of sizes that differ a thousandfold, as gradients' do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    sizes = 10 ** (3 * torch.rand((shape[0],) + (1,) * (len(shape) - 1), generator=generator))
    return (x * sizes).to(DEVICE, torch.bfloat16)


def nearly_equal(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for a tie here and there: the last bit of a row's factor decides which way it is broken."""
    one, two = ours.float(), theirs.float()
    torch.testing.assert_close(one, two, rtol=2 * ROUNDING[ours.dtype], atol=2.0**-9)
    assert (one != two).float().mean() < 0.01


def check(ours: RowwiseFp8, theirs: RowwiseFp8, dtype: torch.dtype, largest: Tensor | None = None) -> None:
    """The exact parts agree, and the small part is the exact one rounded as the twin rounds."""
    assert ours.small.dtype == theirs.small.dtype == dtype
    assert ours.small.shape == theirs.small.shape and ours.scale.shape == theirs.scale.shape
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2**-6, atol=0)
    if theirs.exact is not None:
        size = theirs.exact.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert (exact(ours).float() - theirs.exact.float()).abs().div(size).max() <= 2**-6
        small, scale = eager8.rounded(exact(ours), dtype, largest)
        torch.testing.assert_close(ours.scale, scale, rtol=1e-6 if largest is None else 1e-3, atol=0)
        if largest is None:
            nearly_equal(ours.small, small)
    values, wanted = (t.small.float() * t.scale for t in (ours, theirs))
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert (values - wanted).abs().div(size).max() <= 2 * ROUNDING[dtype]
    assert (values - wanted).norm() <= 0.1 * wanted.norm()  # here and there the other neighbour


@pytest.mark.parametrize("dtype", [ACTIVATION, LOGITS], ids=str)
def test_rounding_keeps_each_number_to_its_bits_whatever_its_row(dtype: torch.dtype) -> None:
    x = draw(40, 96).float()
    x[3] = 0
    small, scale = eager8.rounded(x, dtype)
    back = small.float() * scale
    assert torch.isfinite(back).all() and (back[3] == 0).all()
    largest = small.float().abs().amax(-1)
    assert (largest >= most(dtype) / 2).sum() == 39 and largest[3] == 0  # all but the row of zeros
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))  # powers of two
    large = x.abs() > 2e-5 * x.abs().amax(-1, keepdim=True) * (1000 if dtype == ACTIVATION else 1)
    assert ((back - x).abs()[large] / x.abs()[large]).max() <= ROUNDING[dtype] * 1.001


@pytest.mark.parametrize("width", [64, 384, 80])
def test_norms_equal_their_twins(width: int) -> None:
    x, y, d = (draw(5, width, seed=seed) for seed in range(3))
    (n, rstd), (want, want_rstd) = (k.rms_norm(x, EPS) for k in (fused8, eager8))
    check(n, want, ACTIVATION)
    torch.testing.assert_close(rstd, want_rstd)
    (total, n, rstd), (want_total, want, want_rstd) = (k.add_rms_norm(x, y, EPS) for k in (fused8, eager8))
    check(n, want, ACTIVATION)
    torch.testing.assert_close(total, want_total, rtol=2**-7, atol=0)
    torch.testing.assert_close(rstd, want_rstd, rtol=2**-6, atol=0)
    plain = exact(want)
    for skip in (None, y):
        check(*(k.rms_norm_backward(d, plain, rstd, skip) for k in (fused8, eager8)), GRADIENT)


@pytest.mark.parametrize("width", [48, 1536])
def test_rounding_alone_equals_its_twin(width: int) -> None:
    x = draw(7, width)
    x[2] = 0
    check(fused8.quantise_activation(x), eager8.quantise_activation(x), ACTIVATION)
    check(fused8.quantise_gradient(x), eager8.quantise_gradient(x), GRADIENT)


@pytest.mark.parametrize("hidden", [256, 304])
def test_swiglu_equals_its_twin(hidden: int) -> None:
    gate_up, dh = draw(11, 2 * hidden), draw(11, hidden, seed=1)
    check(fused8.swiglu(gate_up), eager8.swiglu(gate_up), ACTIVATION)
    results: list[tuple[RowwiseFp8, RowwiseFp8]] = []
    for kernels in (fused8, eager8):
        results.append(kernels.swiglu_backward_(gate_up.clone(), dh.clone()))
    check(results[0][0], results[1][0], GRADIENT)
    check(results[0][1], results[1][1], ACTIVATION)
    assert torch.equal(
        results[0][1].small.float(), fused8.swiglu(gate_up).small.float()
    )  # as forward made it


@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 32)])
def test_rotation_equals_its_twin(heads: int, size: int) -> None:
    batch, time = 2, 7
    angle = draw(time, size // 2).float()
    table = torch.stack([angle.cos(), angle.sin()])
    qkv = draw(batch, time, 3, heads, size)
    rstd = eager.rotate_norm_(qkv, table, EPS)
    dq, dv = (draw(batch, heads, time, size, seed=seed).transpose(1, 2) for seed in (1, 2))
    dk = draw(batch, heads, size, time, seed=3).permute(0, 3, 1, 2)  # as plain products make the keys'
    ours, theirs = (k.rotate_norm_backward(dq, dk, dv, qkv, rstd, table) for k in (fused8, eager8))
    check(ours, theirs, GRADIENT)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("vocabulary", [256, 1008, 19_312])
def test_cross_entropy_equals_its_twin(vocabulary: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, vocabulary, generator=generator)).to(DEVICE, torch.bfloat16)
    targets = torch.randint(0, vocabulary, (6,), generator=generator).to(DEVICE)
    logits[0, targets[0]] = 40  # a sure one: its gradient is almost nothing
    logits[1, (targets[1] + 1) % vocabulary] = 40  # surely wrong
    share = 1 / 3000
    found: list[tuple[Tensor, RowwiseFp8]] = []
    for kernels in (fused8, eager8):
        x = logits.clone()
        found.append(kernels.cross_entropy_(x, targets, share, softcap))
        assert exact(found[-1][1]).data_ptr() == x.data_ptr()
    (losses, ours), (want, theirs) = found
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-5)
    check(ours, theirs, LOGITS, share * (eager8.MARGIN - torch.expm1(-want)))
    # The bound holds, and where nothing is capped it is met.
    assert ours.small.float().abs().max() <= most(LOGITS) and torch.isfinite(ours.small.float()).all()
    if softcap is None:
        assert (ours.small.float().abs().amax(-1)[1:] > 0.45 * most(LOGITS)).all()


@pytest.mark.parametrize("shape", [(128, 64), (40, 80), (300, 48)])
@pytest.mark.parametrize("kind", [GRADIENT, None], ids=str)
def test_a_matrix_turned_on_its_side_equals_its_twin(
    kind: torch.dtype | None, shape: tuple[int, int]
) -> None:
    x = draw(*shape)
    if kind is None:
        given = eager8.normed(eager.rms_norm(x, EPS)[0])
        size, bound = given.size, ROUNDING[ACTIVATION]
        wanted = given.exact.float()
    else:
        given = RowwiseFp8(None, *eager8.rounded(x, kind))
        size, bound = eager8.size_of(given), 0.0  # from one power of two to another
        wanted = given.small.float() * given.scale
    ours, theirs = (k.turn(given, size) for k in (fused8, eager8))
    assert ours.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(ours.float(), theirs.float()) and (ours[:, shape[0] :].float() == 0).all()
    back = ours[:, : shape[0]].float().t() * size
    large = wanted.abs() > 2.0**-6 * size  # below there are fewer bits
    assert ((back - wanted).abs()[large] <= bound * 1.001 * wanted.abs()[large]).all()
    assert torch.isfinite(back).all() and (back - wanted).abs().max() <= max(bound * wanted.abs().max(), size)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the product is its library's")
def test_the_sum_over_tokens_equals_its_twin() -> None:
    d, x = eager8.quantise_gradient(draw(130, 96)), eager8.quantise_activation(draw(130, 48, seed=1))
    sizes = eager8.size_of(d), eager8.size_of(x)
    turned = eager8.turn(d, sizes[0]), eager8.turn(x, sizes[1])
    want = eager8.multiply_turned(*turned, *sizes)
    found = fused8.multiply_turned(*turned, *sizes)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def weights(kernels: ModuleType, weight: Tensor) -> list[Tensor]:
    rows, columns = weight.shape
    found = [
        torch.empty(rows, columns, dtype=ACTIVATION, device=DEVICE),
        torch.empty(1, rows, device=DEVICE),
        torch.empty(columns, rows, dtype=ACTIVATION, device=DEVICE),
        torch.empty(1, columns, device=DEVICE),
    ]
    largest = torch.full((rows + columns,), 2**30, dtype=torch.int32, device=DEVICE)
    kernels.quantise_weight_(*found, largest, weight)
    return found


@pytest.mark.parametrize("shape", [(64, 128), (96, 80), (48, 200)])
def test_a_weight_and_its_transpose_are_rounded_each_with_its_own_scales(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    weight[5] = 0
    ours, theirs = weights(fused8, weight), weights(eager8, weight)
    for index in (0, 2):
        nearly_equal(ours[index], theirs[index])
        torch.testing.assert_close(ours[index + 1], theirs[index + 1])
    small, scale, turned, turned_scale = (t.float() for t in ours)
    for back in (small * scale.t(), (turned * turned_scale.t()).t()):
        assert (back - weight.float()).norm() <= 0.04 * weight.float().norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the product is its library's")
def test_the_product_equals_its_twin() -> None:
    for dtype in (ACTIVATION, LOGITS):
        x = RowwiseFp8(None, *eager8.rounded(draw(130, 96), dtype))
        small, scale, _, _ = weights(eager8, draw(48, 96, seed=1))
        want = eager8.multiply(x, small, scale, torch.bfloat16, fast=False)
        for fast in (False, True):
            found = fused8.multiply(x, small, scale, torch.bfloat16, fast=fast)
            torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())
