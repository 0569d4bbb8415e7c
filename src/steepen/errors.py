"""The errors a user is meant to read: one sentence that says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SteepenError(Exception):
    """Something went wrong that the user can act on; the front door prints the sentence and exits."""

    exit_code = 1


class UsageError(SteepenError):
    """The request itself is wrong (a field, an option, a combination); nothing was started."""

    exit_code = 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a device's or the host allocator's refusal."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def nearest(word: str, choices: Iterable[str], count: int = 3) -> str:
    """The valid choices most like `word`, as prose for the end of an error sentence."""
    options = list(choices)
    close = difflib.get_close_matches(word, options, n=count, cutoff=0.4)
    return ", ".join(close or options[: 2 * count])
