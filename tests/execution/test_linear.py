"""GEMM accumulation in fp32: beta = 0 overwrites, beta = 1 adds."""

from __future__ import annotations

import pytest
import torch

from steepen.kernels.cublaslt_gemm import accumulate_gemm_

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operands", [torch.float64, torch.float32, torch.bfloat16])
def test_beta_zero_ignores_nan_in_output(operands: torch.dtype, device: str) -> None:
    total_dtype = torch.promote_types(operands, torch.float32)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).to(device, operands) for size in ((16, 32), (32, 8)))
    total = torch.full((16, 8), torch.nan, dtype=total_dtype, device=device)
    expected = 0.7 * (a.double() @ b.double())
    accumulate_gemm_(total, a, b, 0.7, 0.0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    accumulate_gemm_(total, a, b, 0.7)
    torch.testing.assert_close(total.double(), 2 * expected, rtol=1e-5, atol=1e-5)
