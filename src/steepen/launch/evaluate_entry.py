"""Evaluate the run that a launcher hands over (`python -m steepen.launch.evaluate_entry`).

It takes the arguments of a training command, whose run is finished, and passes the rest to `steepen eval`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from steepen.launch.subprocess_entry import terminate_with_parent


def eval_arguments(words: list[str]) -> list[str]:
    """The words of `steepen eval` for a command's `--spec`, `--data` and further options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs")
    parser.add_argument("--wait", action="store_true")
    known, rest = parser.parse_known_args(words)
    return ["eval", str(known.spec.parent), "--data", known.data, *rest]


if __name__ == "__main__":
    terminate_with_parent()
    sys.argv = ["steepen", *eval_arguments(sys.argv[1:])]
    runpy.run_module("steepen", run_name="__main__", alter_sys=True)
