"""Extension points by name: "module:attribute" to an object, and an object back to its name."""

from __future__ import annotations

import importlib

from steepen.errors import UsageError


def import_object(name: str, what: str) -> object:
    """Import the object "module:attribute"; `what` ("arm", "block", …) is used in the error message."""
    module, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    except Exception as error:  # whatever the user's module does when it is imported
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the {what} {name!r} could not be loaded: {reason}.") from error


def object_name(value: object, what: str) -> str:
    """The "module:attribute" name of a class or function, for use in specs and on the command line.

    A name is returned unchanged. Raises UsageError for an object that cannot be imported by name (a lambda, a
    local class).
    """
    if isinstance(value, str):
        return value
    module = getattr(value, "__module__", None)
    attribute = getattr(value, "__qualname__", None)
    if not module or not attribute or "<" in attribute or module == "__main__":
        raise UsageError(
            f"the {what} {value!r} cannot be imported by name: define it at the top level of a module "
            "that can be imported."
        )
    return f"{module}:{attribute}"
