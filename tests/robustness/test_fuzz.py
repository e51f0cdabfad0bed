"""Cases that once broke the program, and some random ones: exit 0, 1, 2 or 130, one message."""

import json
import os
import random
from pathlib import Path

import pytest
from case_counts import some_or_many
from robustness.fuzz import Case, finding, random_case

CORPUS = Path(__file__).parent / "corpus.jsonl"
KEPT = [json.loads(line) for line in CORPUS.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _same_folder():
    before = Path.cwd()
    yield
    os.chdir(before)


@pytest.mark.parametrize("case", KEPT, ids=lambda case: " ".join(case["words"])[:60])
def test_what_was_found_stays_mended(case):
    assert finding(Case(**case)) == ""


@some_or_many(20, 100)
def test_random_files_and_words(cases):
    rng = random.Random(2)
    for _ in range(cases):
        case = random_case(rng)
        assert finding(case) == "", case.to_json()
