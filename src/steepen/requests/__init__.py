"""One file per verb: what can be asked, in Python, on the command line and as JSON (see `request.py`)."""

from __future__ import annotations

from steepen.requests.request import Request, decode

__all__ = ["Request", "decode"]
