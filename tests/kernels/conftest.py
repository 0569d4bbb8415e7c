"""Triton's interpreter, made to run on today's numpy."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def loops_of_variable_length() -> None:
    """Triton 3.6 reads a loop's bound with int() of a one-element array, which numpy 2.4 refuses."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


@pytest.fixture(scope="session", autouse=True)
def eight_bits_rounded_to_the_nearest() -> None:
    """Triton 3.6's interpreter loses the carry when it rounds to eight bits: 126 becomes 64, not 128."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        return
    convert = interpreter._convert_float
    kinds = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in kinds:
            return convert(values, source, target, rounding)
        small = torch.from_numpy(values.copy()).to(kinds[target.name])
        return small.view(torch.uint8).numpy()

    interpreter._convert_float = converted
