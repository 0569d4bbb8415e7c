"""Answers to figures, tables and one HTML page that opens offline; and to a terminal.

The package itself is callable: `steepen.report("ladder-tiny", "page")` writes the report of a study.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The package as a function.

    A function `steepen.report` in `steepen/__init__.py` would be replaced by this package as soon as any of
    its modules is imported, because Python sets a subpackage as an attribute of its parent.
    """

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Write the report of a study (or of several) to a directory; see `requests.report`."""
        from steepen.requests.report import report

        return report(*args, **settings)


sys.modules[__name__].__class__ = _Callable
