"""What is installed is locked with hashes, listed in a bill of materials, and licensed freely."""

import re
import sys
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


@pytest.mark.parametrize("text", ["GPL-3.0-only", "GNU Affero General Public License v3", "AGPL"])
def test_copyleft_would_be_noticed(text):
    import release_check

    assert release_check.COPYLEFT.search(text)
