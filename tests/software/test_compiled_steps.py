"""The profile of torch.compile against steps measured on one H200, and against its own rules."""

import csv
import json
from pathlib import Path

import pytest
from refusals import refusal

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import GraphLayer, GraphModel, GraphOperator, expanded, from_hf
from phaze_fast.planning import predict
from phaze_fast.software import load_software, planned_model

FILE = Path(__file__).parents[1] / "golden" / "h200_compiled_steps.csv"
ROWS = list(csv.DictReader(x for x in FILE.read_text().splitlines() if not x.startswith("#")))


def step(row, software):
    cluster = Cluster(devices=1, fabric="dgx-h100", chip=presets.chip("h200"))
    batch = int(row["mbs"])
    return predict(
        from_hf(json.loads(row["config"])),
        cluster,
        {
            "micro_batch": batch,
            "global_batch": batch,
            "seq": int(row["seq"]),
            "recompute": "none",
            "software": software,
            "optimizer": "adam-bf16",
        },
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_measured_compiled_steps(row):
    plan = step(row, "pytorch-compiled")
    assert 1e3 * plan.time_s == pytest.approx(float(row["step_ms"]), rel=0.08)
    assert plan.allocated_bytes == pytest.approx(float(row["peak_bytes"]), rel=0.05)
    model = from_hf(json.loads(row["config"]))
    graph = expanded(model, int(row["seq"]), True)
    stored = sum(
        layer.count * (int(row["mbs"]) * tensor.bytes + tensor.fixed_bytes)
        for layer in graph.layers
        for tensor in layer.saved
    )
    assert stored == pytest.approx(float(row["stored_bytes"]), rel=0.005)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_a_compiled_step_takes_less_than_an_eager_one(row):
    eager, compiled = (step(row, name) for name in ("huggingface-eager", "pytorch-compiled"))
    assert compiled.time_s < eager.time_s
    assert compiled.allocated_bytes < eager.allocated_bytes


def test_a_graph_without_compiled_kernels_is_refused():
    product = GraphOperator(name="fc", kind="gemm", m=4, k=8, n=8, flops=512.0, weights=64)
    layer = GraphLayer(name="0", count=1, parameters=64, forward=(product,))
    graph = GraphModel(name="mine", layers=(layer,), order=(0,))
    software = load_software("pytorch-compiled")
    message = refusal(planned_model, graph, software, error=InvalidInputError)
    assert "mine does not hold the kernels of torch.compile" in message
    whole = graph.replace(compiled=graph.replace(kernels="compiled", as_traced=True))
    planned = planned_model(whole, software)
    assert planned == whole.compiled
    assert planned_model(planned, software) == planned
    assert planned_model(whole, load_software("pytorch-eager")).kernels == "eager"
