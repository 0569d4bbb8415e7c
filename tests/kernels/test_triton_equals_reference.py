"""Every bf16 and fp32 Triton kernel equals its reference: on a GPU, or on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton (its interpreter runs on a CPU)")
from steepen.kernels.dispatch import REFERENCE, TRITON
from steepen.kernels.split_fp32 import SplitFp32

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
# Where there is a GPU Triton compiles, and compiled kernels do not accept CPU tensors.
if torch.cuda.is_available():
    DEVICES = ["cuda"]
TYPES = [torch.float32, torch.bfloat16]
# A power of two, a multiple of 128 as in the paper, and a size that fills no block.
WIDTHS = [64, 384, 100]
EPS = 1.2e-7


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def agree(self, ours: Tensor, theirs: Tensor) -> None:
        """Equal up to two roundings to bf16; the interpreter rounds towards zero."""
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        tolerance = 2**-6 if self.dtype == torch.bfloat16 else 2e-5
        largest = theirs.double().abs().max().item()
        assert (ours.double() - theirs.double()).abs().max().item() <= tolerance * max(largest, 1e-30)


@pytest.fixture(params=TYPES, ids=str)
def draw(request: pytest.FixtureRequest, device: str) -> Draw:
    return Draw(device, request.param)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_reference(draw: Draw, width: int) -> None:
    x, y, d = draw(5, width), draw(5, width), draw(5, width)
    for name, arguments in {
        "rms_norm": (x, EPS),
        "add_rms_norm": (x, (y,), EPS),
        "norm_inject": (x, y, 0.7, EPS),
    }.items():
        for ours, theirs in zip(
            getattr(TRITON, name)(*arguments), getattr(REFERENCE, name)(*arguments), strict=True
        ):
            draw.agree(ours, theirs)
    n, rstd = REFERENCE.rms_norm(x, EPS)
    for skip in (None, y):
        draw.agree(TRITON.rms_norm_backward(d, n, rstd, skip), REFERENCE.rms_norm_backward(d, n, rstd, skip))
    row_factor = draw(5).float()
    expected = REFERENCE.rms_norm_backward(d, n, rstd, row_factor=row_factor)
    result = TRITON.rms_norm_backward(d, n, rstd, row_factor=row_factor, out=n)
    assert result is n
    draw.agree(n, expected)
    for ours, theirs in zip(
        TRITON.norm_inject_backward(d, x, rstd, 0.7),
        REFERENCE.norm_inject_backward(d, x, rstd, 0.7),
        strict=True,
    ):
        draw.agree(ours, theirs)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_an_fp32_residual_stream_equal_reference(device: str, width: int) -> None:
    """The stream and its gradient are fp32; branches and GEMM operands are bf16."""
    branch, stream = Draw(device, torch.bfloat16), Draw(device, torch.float32, seed=1)
    x, residual, y, dn = stream(5, width), stream(5, width), branch(5, width), branch(5, width)
    for ours, theirs in zip(
        (*TRITON.rms_norm(x, EPS, torch.bfloat16), *TRITON.add_rms_norm(x, (y,), EPS, torch.bfloat16)),
        (*REFERENCE.rms_norm(x, EPS, torch.bfloat16), *REFERENCE.add_rms_norm(x, (y,), EPS, torch.bfloat16)),
        strict=True,
    ):
        (branch if theirs.dtype == torch.bfloat16 else stream).agree(ours, theirs)
    n, rstd = REFERENCE.rms_norm(x, EPS, torch.bfloat16)
    want = REFERENCE.rms_norm_backward(dn, n, rstd, residual)
    for given in (residual, SplitFp32.split(residual)):
        ours = TRITON.rms_norm_backward(dn, n, rstd, given)
        stream.agree(ours, want)
        for kernels, exact in ((TRITON, ours), (REFERENCE, want)):
            dx, rounded = kernels.rms_norm_backward_split(dn, n, rstd, given)
            assert isinstance(dx, SplitFp32) and rounded.data_ptr() == dx.halves.data_ptr()
            assert torch.equal(dx.join(), exact)
            torch.testing.assert_close(rounded, exact.bfloat16(), rtol=2**-8, atol=0)
    out = torch.empty_like(x)
    row_factor = stream(5)
    TRITON.rms_norm_backward(dn, n, rstd, row_factor=row_factor, out=out)
    wide = REFERENCE.rms_norm_backward(dn.float(), n, rstd, row_factor=row_factor)
    stream.agree(out, wide)


def test_gradient_of_a_stream_in_the_compute_dtype_is_its_own_gemm_operand(draw: Draw) -> None:
    d, n = draw(5, 64), draw(5, 64)
    for kernels in (TRITON, REFERENCE):
        dx, rounded = kernels.rms_norm_backward_split(d, n, draw(5).float(), d)
        assert dx is rounded


@pytest.mark.parametrize("keep_sum", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_of_three_terms_equals_reference(device: str, width: int, keep_sum: bool) -> None:
    branch, stream = Draw(device, torch.bfloat16), Draw(device, torch.float32, seed=1)
    x, addends = stream(5, width), (branch(5, width), branch(5, width))
    ours, theirs = (
        k.add_rms_norm(x, addends, EPS, torch.bfloat16, keep_sum=keep_sum) for k in (TRITON, REFERENCE)
    )
    branch.agree(ours[1], theirs[1])
    stream.agree(ours[2], theirs[2])
    # To the bit what two additions of fp32 give, or nothing.
    expected = x + addends[0] + addends[1] if keep_sum else x
    assert torch.equal(ours[0], expected) and torch.equal(theirs[0], expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_boundary_with_the_norm_after_it_equals_reference(device: str, width: int) -> None:
    branch, stream = Draw(device, torch.bfloat16), Draw(device, torch.float32, seed=1)
    h, e, residual, dn = stream(5, width), stream(5, width), stream(5, width), branch(5, width)
    ours, theirs = (k.inject_norm(h, e, 0.7, EPS, torch.bfloat16) for k in (TRITON, REFERENCE))
    for one, two in zip(ours, theirs, strict=True):
        (branch if two.dtype == torch.bfloat16 else stream).agree(one, two)
    _, h_rstd, n, rstd = theirs
    for given in (residual, SplitFp32.split(residual)):
        (dh, rounded, de), (want, _, want_de) = (
            k.inject_norm_backward(dn, n, rstd, given, h, h_rstd, 0.7) for k in (TRITON, REFERENCE)
        )
        assert isinstance(dh, SplitFp32) and isinstance(want, SplitFp32)
        assert torch.equal(rounded, dh.rounded)
        stream.agree(dh.join(), want.join())
        stream.agree(de, want_de)


def test_two_halves_keep_every_bit(device: str) -> None:
    """Of subnormal numbers, ties, infinities and the largest too; NaN stays NaN in both halves."""
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 63), generator=torch.Generator().manual_seed(0))
    bits[:3, 0] = torch.tensor([0x3F808000, -0x407F8000, 0x7FFFFFFF])  # two ties, CUDA's NaN
    x = bits.int().view(torch.float32).to(device)
    x[3, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45])
    n, zero = torch.zeros_like(x, dtype=torch.bfloat16), torch.zeros(64, device=device)
    for split in (SplitFp32.split(x), TRITON.rms_norm_backward_split(n, n, zero, x)[0]):
        assert isinstance(split, SplitFp32)
        joined, number = split.join(), ~x.isnan()
        assert torch.equal(joined[number], x[number])
        assert joined[~number].isnan().all() and split.rounded[~number].isnan().all()
        rounded, tie = split.rounded.float(), (x.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(rounded[number & ~tie], x.bfloat16().float()[number & ~tie])
        torch.testing.assert_close(rounded[number & tie], x[number & tie], rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize("width", WIDTHS)
def test_embedding_equals_reference(draw: Draw, width: int) -> None:
    table, tokens = draw(11, width).float(), draw.integers(11, 9)
    ours, theirs = (k.embed_norm(tokens, table, EPS, draw.dtype) for k in (TRITON, REFERENCE))
    draw.agree(ours[0], theirs[0])
    draw.agree(ours[1], theirs[1])
    d, start = draw(9, width), draw(11, width).float()
    grads = [start.clone(), start.clone()]
    TRITON.embed_norm_backward_(grads[0], tokens, d, *theirs)
    # The reference rounds each row's gradient to its dtype before adding, so it gets fp32.
    REFERENCE.embed_norm_backward_(grads[1], tokens, d.float(), theirs[0].float(), theirs[1])
    draw.agree(*grads)


@pytest.mark.parametrize(
    ("heads", "kv", "size"), [(2, 2, 16), (3, 3, 32), (3, 3, 24), (4, 2, 16), (6, 1, 24)]
)
def test_rope_and_qk_norm_equal_reference(draw: Draw, heads: int, kv: int, size: int) -> None:
    batch, time = 2, 7
    angle = draw(time, size // 2).float()
    table = torch.stack([angle.cos(), angle.sin()]).to(draw.dtype)
    qkv = draw(batch, time, heads + 2 * kv, size)
    ours, theirs = qkv.clone(), qkv.clone()
    rstd = REFERENCE.rotate_norm_(theirs, table, EPS, kv)
    draw.agree(TRITON.rotate_norm_(ours, table, EPS, kv), rstd)
    draw.agree(ours, theirs)
    assert torch.equal(ours[:, :, -kv:], qkv[:, :, -kv:])
    # Gradients have the strides attention gives them: (batch, heads, time, size) transposed.
    dq, dv = (draw(batch, count, time, size).transpose(1, 2) for count in (heads, kv))
    dk = draw(batch, kv, size, time).permute(0, 3, 1, 2)  # as attention's math backend returns it
    draw.agree(
        TRITON.rotate_norm_backward(dq, dk, dv, theirs, rstd, table),
        REFERENCE.rotate_norm_backward(dq, dk, dv, theirs, rstd, table),
    )


@pytest.mark.parametrize("hidden", [256, 300])
def test_swiglu_equals_reference(draw: Draw, hidden: int) -> None:
    gate_up, dh = draw(11, 2 * hidden), draw(11, hidden)
    draw.agree(TRITON.swiglu(gate_up), REFERENCE.swiglu(gate_up))
    ours, theirs = gate_up.clone(), gate_up.clone()
    assert TRITON.swiglu_backward_(ours, dh) is ours
    draw.agree(ours, REFERENCE.swiglu_backward_(theirs, dh))


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("vocabulary", [256, 1000, 19_300])
def test_cross_entropy_equals_reference(draw: Draw, vocabulary: int, softcap: float | None) -> None:
    logits, targets = 4 * draw(6, vocabulary), draw.integers(vocabulary, 6)
    logits[0, targets[0]] = 40  # a confident prediction, whose gradient is almost zero
    ours, theirs = logits.clone(), logits.clone()
    losses = [
        k.cross_entropy_(x, targets, 0.25, softcap)[0] for k, x in ((TRITON, ours), (REFERENCE, theirs))
    ]
    draw.agree(*losses)
    for row in range(6):
        draw.agree(ours[row], theirs[row])


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("real", "padded"), [(250, 256), (2, 128), (19_257, 19_328), (16_400, 19_328)])
def test_cross_entropy_leaves_padding_out(draw: Draw, real: int, padded: int, softcap: float | None) -> None:
    logits, targets = 4 * draw(6, padded), draw.integers(real, 6)
    logits[:, real:] = 50  # would dominate the softmax
    ours, theirs, unpadded = logits.clone(), logits.clone(), logits[:, :real].clone()
    losses = [
        kernels.cross_entropy_(x, targets, 0.25, softcap, real)[0]
        for kernels, x in ((TRITON, ours), (REFERENCE, theirs))
    ]
    expected, gradient = REFERENCE.cross_entropy_(unpadded, targets, 0.25, softcap)
    draw.agree(losses[0], expected)
    draw.agree(losses[1], expected)
    for found in (ours, theirs):
        assert not found[:, real:].any()
        draw.agree(found[:, :real], gradient)


@pytest.mark.parametrize("vocabulary", [1000])
def test_cross_entropy_of_equal_logits_is_log_vocabulary(draw: Draw, vocabulary: int) -> None:
    """All logits are zero at initialization; large ones must not overflow."""
    targets = draw.integers(vocabulary, 2)
    for value in (0.0, 3e4, -3e4):
        logits = torch.full((2, vocabulary), value, dtype=draw.dtype, device=draw.device)
        losses, _ = TRITON.cross_entropy_(logits, targets, 1.0, None)
        torch.testing.assert_close(losses.cpu(), torch.full((2,), vocabulary).log(), rtol=1e-4, atol=2e-3)
        assert torch.isfinite(logits).all()
