"""Every dependency stands in the list of licences, and its own metadata names no other."""

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
NAMES = [
    re.match(r"[A-Za-z0-9_-]+", text)[0]
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


@pytest.mark.parametrize("name", NAMES)
def test_licences_are_listed(name):
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    row = re.search(rf"^\| {name}\b[^|]*\| ([^|]+) \|", page, re.M)
    assert row, f"{name} stands in no row of docs/testing.md"
    found = metadata(name)
    classified = [each for each in found.get_all("Classifier") or [] if "License ::" in each]
    said = " ".join(
        [found.get("License-Expression") or "", found.get("License") or "", *classified]
    )
    family = row[1].split("-")[0].split()[0]
    assert family in said
    assert not re.search(r"\bA?GPL", said)
