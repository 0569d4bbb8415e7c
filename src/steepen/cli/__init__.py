"""The front door: one module of short commands per room; rooms are imported when a command runs."""

from __future__ import annotations

import sys

from steepen.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
