"""Answers to figures, tables and one HTML page that opens offline; and to a terminal.

The package itself is callable: `steepen.report("ladder-tiny", "page")` writes the report of a study.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The package as a function.

    A function `steepen.report` in `steepen/__init__.py` would be replaced by this package as soon as any of
    its modules is imported, because Python sets a subpackage as an attribute of its parent.
    """

    def __call__(self, study: Any, out: str | Path, **options: Any) -> Path:
        """Write the report of a study (or of several) to a directory; see `report.write.make_report`."""
        from steepen.report.write import make_report

        return make_report(getattr(study, "folder", study), out, **options)


sys.modules[__name__].__class__ = _Callable
