"""Every Triton kernel computes what its plain twin does: on a GPU, or on the interpreter without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steepen.kernels import eager

pytest.importorskip("triton", reason="needs Triton (its interpreter runs on a CPU)")
from steepen.kernels import fused

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
# On a machine with a GPU Triton compiles, and its kernels cannot take tensors of the CPU.
if torch.cuda.is_available():
    DEVICES = ["cuda"]
TYPES = [torch.float32, torch.bfloat16]
# A power of two, the paper's multiples of 128, and sizes that fill no block.
WIDTHS = [64, 384, 100]
EPS = 1.2e-7


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Draw:
    """Fresh random tensors of one device and type."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def whole(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.generator).to(self.device)

    def agree(self, ours: Tensor, theirs: Tensor) -> None:
        """Equal up to rounding to bf16's eight bits, once or twice; the interpreter rounds towards zero."""
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        tolerance = 2**-6 if self.dtype == torch.bfloat16 else 2e-5
        size = theirs.double().abs().max().item()
        assert (ours.double() - theirs.double()).abs().max().item() <= tolerance * max(size, 1e-30)


@pytest.fixture(params=TYPES, ids=str)
def draw(request: pytest.FixtureRequest, device: str) -> Draw:
    return Draw(device, request.param)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_their_twins(draw: Draw, width: int) -> None:
    x, y, d = draw(5, width), draw(5, width), draw(5, width)
    for name, arguments in {
        "rms_norm": (x, EPS),
        "add_rms_norm": (x, y, EPS),
        "norm_inject": (x, y, 0.7, EPS),
    }.items():
        for ours, theirs in zip(
            getattr(fused, name)(*arguments), getattr(eager, name)(*arguments), strict=True
        ):
            draw.agree(ours, theirs)
    n, rstd = eager.rms_norm(x, EPS)
    for skip in (None, y):
        draw.agree(fused.rms_norm_backward(d, n, rstd, skip), eager.rms_norm_backward(d, n, rstd, skip))
    factor = draw(5).float()
    expected = eager.rms_norm_backward(d, n, rstd, factor=factor)
    result = fused.rms_norm_backward(d, n, rstd, factor=factor, out=n)  # where n was
    assert result is n
    draw.agree(n, expected)
    for ours, theirs in zip(
        fused.norm_inject_backward(d, x, rstd, 0.7),
        eager.norm_inject_backward(d, x, rstd, 0.7),
        strict=True,
    ):
        draw.agree(ours, theirs)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_embedding_equals_its_twin(draw: Draw, width: int) -> None:
    table, tokens = draw(11, width).float(), draw.whole(11, 9)
    ours, theirs = (k.embed_norm(tokens, table, EPS, draw.dtype) for k in (fused, eager))
    draw.agree(ours[0], theirs[0])
    draw.agree(ours[1], theirs[1])
    d, start = draw(9, width), draw(11, width).float()
    grads = [start.clone(), start.clone()]
    fused.embed_norm_backward_(grads[0], tokens, d, *theirs)
    # The twin rounds each row's gradient before it adds; in fp32 there is nothing to round.
    eager.embed_norm_backward_(grads[1], tokens, d.float(), theirs[0].float(), theirs[1])
    draw.agree(*grads)


@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 32), (3, 24)])
def test_rotation_equals_its_twin(draw: Draw, heads: int, size: int) -> None:
    batch, time = 2, 7
    angle = draw(time, size // 2).float()
    table = torch.stack([angle.cos(), angle.sin()]).to(draw.dtype)
    qkv = draw(batch, time, 3, heads, size)
    ours, theirs = qkv.clone(), qkv.clone()
    draw.agree(fused.rotate_norm_(ours, table, EPS), (rstd := eager.rotate_norm_(theirs, table, EPS)))
    draw.agree(ours, theirs)
    assert torch.equal(ours[:, :, 2], qkv[:, :, 2])
    # Gradients come with the strides of attention: (batch, heads, time, size) seen from (batch, time, heads).
    dq, dv = (draw(batch, heads, time, size).transpose(1, 2) for _ in range(2))
    dk = draw(batch, heads, size, time).permute(0, 3, 1, 2)  # as plain products make the keys'
    draw.agree(
        fused.rotate_norm_backward(dq, dk, dv, theirs, rstd, table),
        eager.rotate_norm_backward(dq, dk, dv, theirs, rstd, table),
    )


@pytest.mark.parametrize("hidden", [256, 300])
def test_swiglu_equals_its_twin(draw: Draw, hidden: int) -> None:
    gate_up, dh = draw(11, 2 * hidden), draw(11, hidden)
    draw.agree(fused.swiglu(gate_up), eager.swiglu(gate_up))
    results = []
    for kernels in (fused, eager):
        x, d = gate_up.clone(), dh.clone()
        kernels.swiglu_backward_(x, d)
        results.append((x, d))
    draw.agree(results[0][0], results[1][0])
    draw.agree(results[0][1], results[1][1])


def test_swiglu_gives_back_what_was_kept(draw: Draw) -> None:
    gate_up, dh, h = draw(9, 512), draw(9, 256), draw(9, 256)
    both = [k.swiglu_backward_(gate_up.clone(), dh.clone(), h) for k in (fused, eager)]
    assert all(given is h for _, given in both)
    draw.agree(both[0][0], both[1][0])


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("vocabulary", [256, 1000, 19_300])
def test_cross_entropy_equals_its_twin(draw: Draw, vocabulary: int, softcap: float | None) -> None:
    logits, targets = 4 * draw(6, vocabulary), draw.whole(vocabulary, 6)
    logits[0, targets[0]] = 40  # a sure one: its gradient is almost nothing
    ours, theirs = logits.clone(), logits.clone()
    losses = [k.cross_entropy_(x, targets, 0.25, softcap)[0] for k, x in ((fused, ours), (eager, theirs))]
    draw.agree(*losses)
    for row in range(6):
        draw.agree(ours[row], theirs[row])


@pytest.mark.parametrize("vocabulary", [1000])
def test_cross_entropy_takes_the_same_logits_everywhere(draw: Draw, vocabulary: int) -> None:
    """Logits of zero are where training begins; far-off ones must not overflow."""
    targets = draw.whole(vocabulary, 2)
    for value in (0.0, 3e4, -3e4):
        logits = torch.full((2, vocabulary), value, dtype=draw.dtype, device=draw.device)
        losses, _ = fused.cross_entropy_(logits, targets, 1.0, None)
        torch.testing.assert_close(losses.cpu(), torch.full((2,), vocabulary).log(), rtol=1e-4, atol=2e-3)
        assert torch.isfinite(logits).all()
