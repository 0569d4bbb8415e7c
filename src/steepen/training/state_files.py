"""Tensors of a checkpoint in one or more safetensors files: each in its global shape, whole or by rows.

Every rank writes one file with what it owns. A tensor is named section//parameter or
section//parameter//key; rows [first, last) of a larger tensor add @first-last/total. A reader asks for any
rows of any tensor, so a checkpoint does not depend on the number of ranks that wrote it or that read it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steepen.distributed.owners import Piece
from steepen.errors import SteepenError

SEPARATOR = "//"  # between section, parameter name and state key in a tensor's name
_ROWS = re.compile(r"(.*)@([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class UnreadableState(SteepenError):
    """A file of a checkpoint cannot be read, or lacks a tensor."""


def file_name(rank: int, size: int) -> str:
    """Name of the file that a rank writes."""
    return "state.safetensors" if size == 1 else f"state-{rank:05d}-of-{size:05d}.safetensors"


def tensor_key(section: str, name: str, part: str | None = None, piece: Piece | None = None) -> str:
    """Key of a tensor in a file; `piece` says which rows of the parameter it holds."""
    key = SEPARATOR.join(word for word in (section, name, part) if word is not None)
    return key if piece is None or piece.whole else f"{key}@{piece.first}-{piece.last}/{piece.shape[0]}"


def piece_tensors(piece: Piece, weight: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one owned piece by key: its weight and its optimizer state.

    State without rows (a step count) belongs to the whole parameter; every owner of rows has the same.
    """
    tensors = {tensor_key("model", piece.name, None, piece): weight}
    for part, value in state.items():
        tensors[tensor_key("optimizer", piece.name, part, piece if value.ndim else None)] = value
    return tensors


@dataclass(frozen=True)
class _Stored:
    """A tensor, or rows [first, last) of one, in a file."""

    file: int
    key: str
    first: int = 0
    last: int | None = None  # None: the whole tensor


class StateReader:
    """Reads tensors, or rows of them, from the files of a checkpoint. Use it in a `with` block."""

    def __init__(self, files: Iterable[Path], device: torch.device | str = "cpu") -> None:
        self._stack = contextlib.ExitStack()
        self._handles: list[Any] = []
        self._index: dict[str, list[_Stored]] = {}
        file = Path()
        try:
            for number, file in enumerate(files):
                handle = self._stack.enter_context(safe_open(file, framework="pt", device=str(device)))
                self._handles.append(handle)
                for key in handle.keys():  # noqa: SIM118
                    match = _ROWS.fullmatch(key)
                    name, first, last = (match[1], int(match[2]), int(match[3])) if match else (key, 0, None)
                    self._index.setdefault(name, []).append(_Stored(number, key, first, last))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise UnreadableState(f"{file} cannot be read ({error}).") from error

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def names(self, section: str) -> list[str]:
        """Tensors of a section, without its name: parameters, or parameter//key."""
        prefix = section + SEPARATOR
        return [key.removeprefix(prefix) for key in self._index if key.startswith(prefix)]

    def read(self, section: str, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A whole tensor, or rows [first, last) of it, whatever ranges it was stored in."""
        key = f"{section}{SEPARATOR}{name}"
        stored = sorted(self._index.get(key, ()), key=lambda each: each.first)
        if not stored:
            raise UnreadableState(f"the checkpoint has no tensor {key}.")
        try:
            if stored[0].last is None:
                handle = self._handles[stored[0].file]
                if rows is None:
                    return handle.get_tensor(stored[0].key)
                whole = handle.get_slice(stored[0].key)
                return whole[rows[0] : rows[1]] if whole.get_shape() else handle.get_tensor(stored[0].key)
            first, last = rows or (0, max(each.last or 0 for each in stored))
            parts: list[Tensor] = []
            position = first
            for each in stored:
                end = min(last, each.last or 0)
                if position < end and each.first <= position:
                    part = self._handles[each.file].get_slice(each.key)
                    parts.append(part[position - each.first : end - each.first])
                    position = end
            if position < last:
                raise UnreadableState(f"the checkpoint lacks rows {position} to {last - 1} of {key}.")
            return torch.cat(parts) if len(parts) != 1 else parts[0]
        except SafetensorError as error:
            raise UnreadableState(f"the tensor {key} cannot be read ({error}).") from error

    def read_state(self, name: str, piece: Piece | None = None) -> dict[str, Tensor]:
        """Optimizer state of a parameter, or of one piece of it, by key."""
        rows = None if piece is None or piece.whole else (piece.first, piece.last)
        prefix = name + SEPARATOR
        return {
            full.removeprefix(prefix): self.read("optimizer", full, rows)
            for full in self.names("optimizer")
            if full.startswith(prefix)
        }
