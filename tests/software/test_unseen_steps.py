"""Steps of HuggingFace models that nothing was fitted on, against a measured H200."""

import json

import pytest
from golden_files import golden_rows

from phaze_fast import models
from phaze_fast.hardware import Cluster, presets
from phaze_fast.planning import PlanSpec, predict

H200 = Cluster(chip=presets.chip("h200"), devices=1, fabric=presets.fabric("dgx-h100"))
OPTIMIZERS = {"sgd": "sgd-momentum-bf16", "muon": "muon-bf16"}
ROWS = [(row, json.loads(row["spec"])) for row in golden_rows("h200_unseen_steps.csv")]


def errors(row, spec):
    """Relative errors of seconds and bytes."""
    model = models.from_hf({"model_type": spec["model_type"], **spec["config"]})
    if spec.get("lora"):
        model = model.replace(lora={"rank": spec["lora"], "targets": spec["targets"]})
    plan = PlanSpec(
        tp=1,
        pp=1,
        dp=1,
        seq=spec["seq"],
        micro_batch=spec["batch"],
        global_batch=spec["batch"],
        recompute="none",
        software="pytorch-compiled" if spec.get("compiled") else "huggingface-eager",
        optimizer=OPTIMIZERS.get(spec.get("optimizer"), "adam-bf16"),
    )
    found = predict(model, H200, plan)
    seconds = found.time_s / float(row["step_ms"]) * 1e3 - 1.0
    return abs(seconds), abs(found.memory_bytes / float(row["peak_bytes"]) - 1.0)


NOT_READ = "bart"  # by tracing alone, at another length


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "seconds", "share_of_bytes"),
    [("eager", 27, 0.06, 0.02), ("compiled", 9, 0.05, 0.05), ("lora", 4, 0.03, 0.01)],
)
def test_steps_that_nothing_was_fitted_on(kind, rows, seconds, share_of_bytes):
    of_kind = [
        errors(row, spec)
        for row, spec in ROWS
        if spec["kind"] == "hf"
        and spec["model_type"] != NOT_READ
        and kind == next((word for word in ("compiled", "lora") if spec.get(word)), "eager")
    ]
    assert len(of_kind) == rows
    assert sum(error for error, _ in of_kind) / rows < seconds
    assert sum(error for _, error in of_kind) / rows < share_of_bytes
