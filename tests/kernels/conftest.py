"""Fixes to Triton 3.6's interpreter, which runs the kernels where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def interpret_loops_of_variable_length() -> None:
    """Triton 3.6 reads a loop's bound with int() of a one-element array, which numpy 2.4 rejects."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


@pytest.fixture(scope="session", autouse=True)
def round_fp8_to_nearest() -> None:
    """Triton 3.6's interpreter loses the carry when it rounds to fp8: 126 becomes 64, not 128."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        return
    convert = interpreter._convert_float
    dtypes = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in dtypes:
            return convert(values, source, target, rounding)
        rounded = torch.from_numpy(values.copy()).to(dtypes[target.name])
        return rounded.view(torch.uint8).numpy()

    interpreter._convert_float = converted
