"""FlashAttention-3 is used where it is installed, and cuDNN attention elsewhere."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import attention

from steepen.training import device as devices

CUDA = torch.device("cuda")


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend that SDPA is told to try first, and what is activated and restored; no GPU is needed."""
    said: list[str] = []

    class Kernel:
        def __init__(self, order: list[Any], set_priority: bool) -> None:
            said.append(order[0].name)
            assert set_priority and len(set(order)) == 4

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(devices, "sdpa_kernel", Kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", said.append, raising=False)
    restored = lambda: said.append("restored")  # noqa: E731
    monkeypatch.setattr(attention, "restore_flash_attention_impl", restored, raising=False)
    return said


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    name = "flash_attn_interface"
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *r: object() if n == name else find(n, *r))


def test_without_the_package_cudnn_comes_first(orders: list[str]) -> None:
    with devices.configure_backends(CUDA):
        pass
    assert orders == ["CUDNN_ATTENTION"]


def test_where_it_is_installed_flash_attention_comes_first_and_is_restored_after_an_error(
    orders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(KeyError), devices.configure_backends(CUDA):
        raise KeyError
    assert orders == ["FA3", "FLASH_ATTENTION", "restored"]


def test_a_package_that_does_not_load_and_another_gpu_leave_cudnn_first(
    orders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)

    def broken(_: str) -> None:
        raise OSError("undefined symbol")

    with monkeypatch.context() as patch:
        patch.setattr(attention, "activate_flash_attention_impl", broken)
        with devices.configure_backends(CUDA):
            pass
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with devices.configure_backends(CUDA):
        pass
    assert orders == ["CUDNN_ATTENTION", "CUDNN_ATTENTION"]
