"""Files of recorded and measured figures."""

import csv
import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import yaml

from phaze_fast.documents import _OwnLoader

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_rows(name):
    """Return the rows of a CSV file by column; lines that begin with # are comments."""
    lines = (GOLDEN / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def golden_lines(name):
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def hf_entries():
    """Return configurations of HuggingFace models and their parameters as transformers counts."""
    return json.loads((GOLDEN / "hf_parameters.json").read_text())["models"]


def hf_config(name):
    """Return one of these configurations."""
    return next(entry["config"] for entry in hf_entries() if entry["name"] == name)


@cache
def golden_yaml(name):
    """Return the data of a file of our own, which needs no search for faults."""
    return yaml.load((GOLDEN / name).read_text("utf-8"), _OwnLoader)


def refused_calls(what):
    """Return rows of arguments that something refuses, each with what the message says."""
    return deepcopy(golden_yaml("refused_calls.yaml")[what])
