"""Errors meant for users, one sentence that says what is wrong and what to do; and checks that raise them."""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

MAX_SHOWN = 200  # characters of a value in an error sentence
MAX_SENTENCE = 1500  # characters of a message, whatever was put into it


class SteepenError(Exception):
    """A failure that the user can act on. The command line prints the message and exits with `exit_code`.

    The middle of a very long message is left out: it quotes what a user or a file has given.
    """

    exit_code = 1
    transient = False  # another attempt may succeed

    def __init__(self, message: str = "") -> None:
        half = MAX_SENTENCE // 2
        super().__init__(message if len(message) <= MAX_SENTENCE else f"{message[:half]} … {message[-half:]}")


class UsageError(SteepenError):
    """An invalid request (a field, an option, a combination), rejected before anything was started."""

    exit_code = 2


INTERNAL = 70  # exit code of an error that is a defect of steepen


@dataclass(frozen=True)
class Failure:
    """Why a request has no result: what a worker returns, a rank leaves and failure.json holds, as JSON."""

    kind: str  # the name of the error: Diverged, OutOfMemory, UsageError, Killed, WorkerLost, …
    message: str  # one sentence
    exit_code: int = 1
    transient: bool = False  # another attempt may succeed (a lost worker, a kill)


class RemoteError(SteepenError):
    """A failure in another process, with the kind and the exit code that it had there."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure, self.exit_code, self.transient = failure, failure.exit_code, failure.transient


def failure_of(error: BaseException) -> Failure:
    """An error as one sentence and an exit code, whoever raised it."""
    kind = type(error).__name__
    if isinstance(error, RemoteError):
        return error.failure
    if isinstance(error, SteepenError):
        return Failure(kind, str(error), error.exit_code, error.transient)
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind, "stopped by the user.", 130, transient=True)
    from steepen.utils.files import disk_full

    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    if full := disk_full(str(error)):  # safetensors has errors of its own
        return Failure(kind, f"{full}{where}; free some space and run the same command again.")
    if isinstance(error, OSError):
        return Failure(kind, f"{error.strerror or error}{where}.")
    if isinstance(error, UnicodeEncodeError):  # pyarrow and other libraries take names in UTF-8 only
        return Failure(kind, f"{shorten(str(error.object))!r} is not UTF-8; rename it, or write it in UTF-8.")
    if is_out_of_memory(error):
        return Failure("OutOfMemory", "out of memory; use smaller sizes, or a machine with more.")
    reason = shorten(str(error))
    return Failure(kind, f"internal error: {kind}: {reason}.", INTERNAL)


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """The text, or its beginning and "…" if it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none: other libraries print pages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def show(value: object) -> str:
    """A value for an error sentence, as repr prints it but bounded in depth, items and length."""
    return shorten(_repr.repr(value))


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxtuple = 3, 8, 8, 8
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_SHOWN


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory; a limit of the address space counts too."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    signs = {
        RuntimeError: ("can't allocate memory", "could not create a primitive"),  # torch, oneDNN
        ImportError: ("failed to map segment", "Cannot allocate memory"),  # a shared library
    }
    return any(
        isinstance(error, kind) and any(sign in str(error) for sign in texts) for kind, texts in signs.items()
    )


def nearest(word: str, choices: Iterable[str], count: int = 3) -> str:
    """Return up to `count` choices similar to `word`, comma-separated, for the end of an error sentence."""
    options, word = list(choices), word[:MAX_SHOWN]
    close = difflib.get_close_matches(word, options, n=count, cutoff=0.4)
    return ", ".join(close or options[: 2 * count])


def require_reference(reference: str, arms: Iterable[str]) -> None:
    """Raise UsageError for a reference that is not among the arms."""
    if reference not in (known := list(arms)):
        meant = nearest(reference, known)
        raise UsageError(f"the reference '{reference}' is not among the arms; did you mean {meant}?")


def require_one_of(name: str, value: object, options: Iterable[str]) -> None:
    """Raise UsageError for a value that is not among the options."""
    if value not in (known := list(options)):
        raise UsageError(f"{name} is {value!r}; choose one of {', '.join(known)}.")


def require(holds: bool, owner: str, field: str, value: object, accepted: str) -> None:
    """Raise UsageError unless `holds`: "owner.field = value is not valid: it must be …"."""
    if not holds:
        raise UsageError(f"{owner}.{field} = {show(value)} is not valid: it must be {accepted}.")


MAX_WHOLE = 10**15  # of any count in a spec: tokens, steps, widths


def require_positive(instance: object, names: tuple[str, ...], maximum: int = MAX_WHOLE) -> None:
    """Require every named field of a dataclass to be an integer from 1 to `maximum`."""
    for name in names:
        value = getattr(instance, name)
        good = is_whole(value) and 1 <= value <= maximum
        require(good, type(instance).__name__, name, value, f"a whole number from 1 to {maximum:,}")


def require_count(owner: str, field: str, value: object, low: int = 1, maximum: int = MAX_WHOLE) -> None:
    """Require null or an integer from `low` to `maximum`."""
    good = value is None or (is_whole(value) and low <= value <= maximum)
    require(good, owner, field, value, f"a whole number from {low} to {maximum:,}, or null")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)
