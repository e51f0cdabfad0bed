"""What is installed is locked with hashes, listed in a bill of materials, and licensed freely."""

import re
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.checkout
sys.path.insert(0, str(ROOT / "tools"))


def test_the_lock_holds_every_requirement_with_hashes_and_names_no_host():
    release_check = pytest.importorskip("release_check")
    assert release_check.locked() == ""
    text = (ROOT / "tools" / "requirements.txt").read_text()
    assert not re.search(r"https?:|--(extra-)?index-url|--find-links|file:|@ ", text)
    assert len(re.findall(r"^[\w.-]+==", text, re.M)) > 60


def test_the_bill_of_materials_lists_all_that_runs():
    import sbom

    made = sbom.bill()
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    names = {row["name"] for row in made["components"]}
    assert {"numpy", "numba", "llvmlite", "highspy", "pydantic", "pyyaml", "rich", "typer"} <= names
    refs = {row["bom-ref"] for row in made["components"]} | {
        made["metadata"]["component"]["bom-ref"]
    }
    for row in made["dependencies"]:
        assert {row["ref"], *row["dependsOn"]} <= refs
    assert made == sbom.bill()


def test_licences_ask_for_a_notice_and_no_more():
    import release_check

    assert release_check.licences() == ""
    assert release_check.documents() == ""
    assert release_check.one_version() == ""
    for text in ("GPL-3.0-only", "GNU Affero General Public License v3", "AGPL"):
        assert release_check.COPYLEFT.search(text)


def test_every_dependency_stands_in_the_list_of_licences():
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = re.match(r"[A-Za-z0-9_-]+", text)[0]
        row = re.search(rf"^\| {name}\b[^|]*\| ([^|]+) \|", page, re.M)
        assert row, f"{name} stands in no row of docs/testing.md"
        own = metadata(name)
        classified = [line for line in own.get_all("Classifier") or [] if "License ::" in line]
        said = [own.get("License-Expression") or "", own.get("License") or "", *classified]
        assert row[1].split("-")[0].split()[0] in " ".join(said)
