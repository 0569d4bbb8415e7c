"""The command line's former place, for callers until every verb is a request."""

from __future__ import annotations

from steepen.requests.app import main

__all__ = ["main"]
