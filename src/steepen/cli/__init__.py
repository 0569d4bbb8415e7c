"""Command line: argument parsing and printing only. Commands import the packages they need when they run."""

from __future__ import annotations

from steepen.cli.app import main

__all__ = ["main"]
