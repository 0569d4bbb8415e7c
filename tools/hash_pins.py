"""Write requirements.txt and requirements-dev.txt: the pins of constraints.txt with the hashes of the wheels.

    .venv/bin/python tools/hash_pins.py        (in an environment of `make setup-dev`, with the network)

requirements.txt has what steepen needs to run, requirements-dev.txt the rest; `make setup` installs nothing
else but torch. Hashes are those that the index states of every wheel for CPython 3.11 and later on Linux and
macOS. After a change of constraints.txt, install it first: pip install -c constraints.txt -e '.[dev]'.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[1]
INDEX = (os.environ.get("PIP_INDEX_URL") or PyPI.simple_url).rstrip("/")  # where pip looks
LINK = re.compile(r'href="[^"]*/([^"/#]+\.whl)#sha256=([0-9a-f]{64})"')
# Wheels for other systems, processors and interpreters, none of which steepen is used with.
OTHER = re.compile(
    r"-win\w*\.whl$|(?:i686|ppc64|ppc64le|s390x|armv[67]l|riscv64)\.whl$|-(?:pp|cp2|cp310-cp310-)|-cp3\d+t-"
)
MARKERS = {"triton": 'platform_system == "Linux"'}
HEAD = """\
# Made by tools/hash_pins.py from constraints.txt; do not edit. pip accepts these files and no others.
# torch is not here: its build, CPU or CUDA, depends on the index that pip is given, and each index has files
# of its own. pip compares torch and NVIDIA's libraries with the hashes that this index states.
"""


def normalized(name: str) -> str:
    """The name as an index spells it: PyYAML → pyyaml."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(names: set[str]) -> set[str]:
    """These distributions and all that they require, as installed here."""
    found: set[str] = set()
    while names := names - found:
        found |= names
        names = {other for name in names for other in required(name)}
    return found


def required(name: str) -> set[str]:
    """The distributions that one requires on this system, without its extras."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # of another system
        return set()
    plain = [line for line in lines if "extra ==" not in line]
    return {normalized(re.split(r"[ ;<>=!~\[(]", line)[0]) for line in plain}


def wheel_hashes(name: str, version: str) -> list[str]:
    """SHA-256 of the wheels of a version that the index lists."""
    with urllib.request.urlopen(f"{INDEX}/{name}/") as page:
        links = LINK.findall(page.read().decode())
    wanted = (name, version)
    of = {digest: file for file, digest in links if not OTHER.search(file)}
    found = sorted(digest for digest, file in of.items() if _identity(file) == wanted)
    assert found, f"{INDEX} has no wheel of {name} {version}"
    return found


def _identity(wheel: str) -> tuple[str, str]:
    name, version, *_ = wheel.split("-")
    return normalized(name), version


def main() -> None:
    """Look up every pin and write both files."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {normalized(name): version for name, version in pins.items()}
    del pins["torch"]
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(pins, pool.map(wheel_hashes, pins, pins.values()), strict=True))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    direct = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    runtime = needed({normalized(re.split("[<>=]", line)[0]) for line in direct})
    for file, names, first in (
        ("requirements.txt", [name for name in pins if name in runtime], ""),
        ("requirements-dev.txt", [name for name in pins if name not in runtime], "-r requirements.txt\n"),
    ):
        text = HEAD + first
        for name in sorted(names):
            marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
            text += " \\\n".join(
                [f"{name}=={pins[name]}{marker}", *(f"    --hash=sha256:{digest}" for digest in hashes[name])]
            )
            text += "\n"
        (ROOT / file).write_text(text)


if __name__ == "__main__":
    main()
