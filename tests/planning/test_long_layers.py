"""Layers of more than 64 operators are scheduled and planned as any other."""

import pytest
from plan_cases import h100

import phaze_fast as pf
from phaze_fast.opgraph import layer_graph
from phaze_fast.software import load_precision, load_software, model_as_run


@pytest.mark.parametrize("precision", ["fp8", "fp8-block"])
def test_shared_experts_with_eager_attention_in_fp8(precision):
    mixtral = pf.models.load("mixtral-8x7b")
    experts = mixtral.moe.replace(shared_experts=1, shared_gate=True)
    model = mixtral.replace(name="long", attention="eager", layers=4, moe=experts, dropout=True)
    software = load_software("fsdp-torchtitan")
    strategy = pf.Strategy(tp=2, ep=2, sequence_parallel=True)
    as_run = model_as_run(model, software, 2)
    graph = layer_graph(as_run, strategy, precision=load_precision(precision))
    assert max(len(layer.backward) for layer in graph.layers) > 64
    step = pf.Training(global_batch=16, precision=precision, micro_batch=1, tp=2, ep=2, pp=1)
    step = step.replace(software=software)
    plans = pf.plan(model, h100(8), step, top=1)
    assert plans.status == "optimal"
    assert plans.best.ep == 2
    assert plans.best.time_s == pf.predict(model, h100(8), plans.best).time_s
