"""A software bill of materials of what an installed phaze_fast runs on, as CycloneDX 1.5 JSON.

python3 dev.py sbom [FILE]          # build/sbom.cdx.json by default
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "phaze-fast"


def key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(found: Distribution) -> list[str]:
    """Names that a distribution requires here; extras and other systems' are left out."""
    from packaging.requirements import Requirement

    needed = []
    for text in found.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed.append(key(requirement.name))
    return sorted(set(needed))


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and all that it needs, installed here, by name."""
    found: dict[str, Distribution] = {}
    waiting = [key(name)]
    while waiting:
        own = waiting.pop()
        if own in found:
            continue
        try:
            found[own] = distribution(own)
        except PackageNotFoundError:
            sys.exit(f"{own} is not installed here; python3 dev.py installs it")
        waiting += needs(found[own])
    return dict(sorted(found.items()))


def licence(found: Distribution) -> str:
    """What the distribution's own metadata says, in a few words."""
    data = found.metadata
    if data.get("License-Expression"):
        return str(data["License-Expression"])
    named = [
        each.rpartition(" :: ")[2]
        for each in data.get_all("Classifier") or []
        if each.startswith("License :: OSI Approved :: ")
    ]
    if named:
        return " AND ".join(sorted(set(named)))
    return " ".join(str(data.get("License") or "").split())[:80]


def component(name: str, found: Distribution, kind: str = "library") -> dict[str, Any]:
    said = licence(found)
    expression = bool(re.fullmatch(r"[\w.+-]+( (AND|OR|WITH) [\w.+-]+)*", said))
    return {
        "type": kind,
        "bom-ref": f"pkg:pypi/{name}@{found.version}",
        "name": name,
        "version": found.version,
        "purl": f"pkg:pypi/{name}@{found.version}",
        "licenses": [{"expression": said} if expression else {"license": {"name": said}}],
    }


def bill() -> dict[str, Any]:
    """The bill, the same for the same packages."""
    parts = closure(NAME)
    rows = {name: component(name, found) for name, found in parts.items()}
    own = rows.pop(NAME) | {"type": "application"}
    refs = {name: row["bom-ref"] for name, row in {NAME: own, **rows}.items()}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": list(rows.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": [refs[need] for need in needs(parts[name])]}
            for name in refs
        ],
    }


def main() -> int:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "sbom.cdx.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    made = bill()
    file.write_text(json.dumps(made, indent=2) + "\n")
    sys.stdout.write(f"{len(made['components'])} components: {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
