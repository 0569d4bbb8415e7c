"""Write a bill of materials, CycloneDX 1.6 in JSON, of steepen and all that it needs here.

    .venv/bin/python tools/sbom.py > sbom.cdx.json

It is made from the metadata of what is installed, so it names the very build of torch and its CUDA libraries.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from email.message import Message
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

from hash_pins import needed, normalized, required


def component(name: str) -> dict[str, Any]:
    """One distribution: name, version, package URL, summary and licence."""
    found = importlib.metadata.distribution(name)
    told = cast("Message", found.metadata)
    purl = f"pkg:pypi/{normalized(name)}@{found.version}"
    listed = [line.rpartition(" :: ")[2] for line in told.get_all("Classifier", []) if "License ::" in line]
    short = [text for text in (told.get("License"), *listed) if text and len(text) < 60]
    expression = told.get("License-Expression")
    licences = [{"expression": expression}] if expression else [{"license": {"name": n}} for n in short[:1]]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": found.name,
        "version": found.version,
        "description": told.get("Summary") or "",
        "purl": purl,
        "licenses": licences,
    }


def installed(names: set[str]) -> list[str]:
    """Those of the distributions that are installed here, sorted."""
    present = {normalized(found.name) for found in importlib.metadata.distributions()}
    return sorted(names & present)


def main() -> None:
    """Print the bill of materials."""
    parts = {name: component(name) for name in installed(needed({"steepen"}))}
    root = parts.pop("steepen")
    depends = [
        {
            "ref": part["bom-ref"],
            "dependsOn": [parts[other]["bom-ref"] for other in installed(required(name))],
        }
        for name, part in [("steepen", root), *parts.items()]
    ]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**root, "type": "application"}},
        "components": list(parts.values()),
        "dependencies": depends,
    }
    print(json.dumps(bom, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
