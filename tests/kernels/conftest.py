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
