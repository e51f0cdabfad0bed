"""Presets against training throughput that was measured on the machines they are like."""

import csv
from pathlib import Path

import pytest

from phaze_fast import models
from phaze_fast.wafer import Layout, Problem, WaferTraining
from phaze_fast.wafer.search.baselines import best_candidate, megatron_candidates

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cerebras_throughput.csv"
WAFERS = {"CS-2": "wse2-like", "CS-3": "wse3-like"}
# docs/wafer.md: predicted over measured, weights streamed as these systems do, and the layout in
# which that is fastest of all.
EXPECTED = {
    ("CS-2", "bert-large"): (3.56, Layout(74, 1, 1, 518)),
    ("CS-2", "gpt-j-6b"): (1.37, Layout(80, 1, 1, 10)),
    ("CS-3", "gpt-j-6b"): (1.17, Layout(80, 1, 1, 15)),
}


def measured():
    lines = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def model_of(name):
    if name == "bert-large":
        return models.load("bertlarge")
    sizes = models.load("gpt-7.5b").to_dict()  # of GPT-J: the public configuration's
    for each in ("published_parameters", "published_digits", "sources"):
        sizes.pop(each)
    return models.TransformerModel(
        **sizes | {"name": name, "layers": 28, "heads": 16, "vocab": 50257, "dropout": False}
    )


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['system']}-{row['model']}")
def test_weight_streaming_beside_what_was_measured(row):
    systems = int(row["systems"])
    training = WaferTraining(int(row["batch"]) // systems, seq=int(row["sequence"]))
    problem = Problem(model_of(row["model"]), WAFERS[row["system"]], training)
    expected, layout = EXPECTED[row["system"], row["model"]]
    best = best_candidate(problem, [layout], megatron_candidates(problem, False, ("stream",)))
    assert best is not None
    assert best.fits
    rate = systems * training.global_batch / best.time_s
    assert rate / float(row["samples_per_s"]) == pytest.approx(expected, rel=0.01)
