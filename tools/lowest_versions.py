"""Print the lowest versions that pyproject.toml allows, as requirements for pip; `make lowest` tests them.

    python tools/lowest_versions.py [--torch 2.13.0]

With the extras that need no other version of these: frames, excel, slurm.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

EXTRAS = ("frames", "excel", "slurm")


def main() -> None:
    """Print one line per requirement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", help="this version of torch instead of the lowest")
    chosen = parser.parse_args().torch
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for name in EXTRAS for line in project["optional-dependencies"][name]),
    ]
    for line in lines:
        name, lowest = re.split(">=|,", line)[:2]
        print(f"{name}=={chosen if chosen and name == 'torch' else lowest}")


if __name__ == "__main__":
    main()
