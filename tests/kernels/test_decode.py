"""The decode kernels: linear layers with what lies around them, and the choice of a token without sorting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steepen.inference.decoding import Chooser, Sampling
from steepen.kernels.decode import DecodeChoice, decode_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Without a GPU the kernels run on Triton's interpreter, which multiplies fp16 but not bf16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("epilogue", ["store", "add", "swiglu", "relu2"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_linear_layer_with_its_epilogue(rows: int, epilogue: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs, outputs = 72, 50
    parts = 2 if epilogue == "swiglu" else 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight, residual = (random(parts * outputs, inputs) / 8).to(dtype), random(rows, outputs)
    x = random(rows, inputs)
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6).to(dtype)
    y = normed.float() @ weight.float().T
    expected = {
        "store": lambda: y,
        "add": lambda: residual + 0.5 * y,
        "swiglu": lambda: torch.nn.functional.silu(y[:, :outputs]) * y[:, outputs:],
        "relu2": lambda: y.relu().square(),
    }[epilogue]()
    added = residual.to(DEVICE) if epilogue == "add" else None
    found = decode_linear(
        x.to(DEVICE), weight.to(DEVICE), norm_eps=1e-6, epilogue=epilogue, residual=added, factor=0.5
    )
    assert found.dtype == (torch.float32 if epilogue == "add" else dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float().cpu(), expected, atol=tolerance, rtol=tolerance)
    first = decode_linear(normed.to(DEVICE), weight.to(DEVICE), outputs=20)
    torch.testing.assert_close(first.float().cpu(), y[:, :20], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(1.0, 1.0),
        Sampling(0.8, 0.95),
        Sampling(2.0, 0.5),
        Sampling(0.3, 0.02),
    ],
)
def test_a_token_is_chosen_as_by_sorting(sampling: Sampling, dtype: torch.dtype) -> None:
    rows, vocabulary = 10, 1_500
    generator = torch.Generator().manual_seed(5)
    raw = (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    raw[1] = raw[1].round()  # many equal logits
    raw[2] = 0.0
    raw[3] = torch.where(torch.arange(vocabulary) == 70, 30.0, 0.0)
    raw[4, 5:] = -100.0
    raw[5] = -raw[5].abs()
    uniforms = torch.rand(rows, 3, generator=generator)
    uniforms[6] = 0.0
    index = torch.full((rows,), 11, device=DEVICE)
    tokens = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    found = torch.zeros(rows, 3, dtype=torch.long, device=DEVICE)
    choose = DecodeChoice(
        uniforms.to(DEVICE), tokens, found, index, prompt=11, multiplier=1.0, softcap=None,
        temperature=sampling.temperature, top_p=sampling.top_p,
    )  # fmt: skip
    choose.BLOCK = 512  # more than one block of logits
    choose(raw.to(DEVICE))
    # Up to rounding of the masses: the token is in place between those of a bound a little lower and higher.
    chooser = Chooser(sampling, rows, 1, torch.device("cpu"))
    close = [
        chooser(raw.double(), (uniforms[:, 1].double() + shift).clamp(0, 1)) for shift in (-1e-6, 0, 1e-6)
    ]
    for row, token in enumerate(tokens.tolist()):
        assert token in [each[row] for each in close], row
    assert found[:, 1].equal(tokens) and index.tolist() == [12] * rows
