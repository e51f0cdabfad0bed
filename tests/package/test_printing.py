"""What is printed of a result: the answer, its proof and how to see more, never pages of it."""

import numpy as np
import pytest

import phaze_fast as pf

SPACE = pf.ArchitectureSpace.published()[40_000:40_060]
POD = pf.Cluster(devices=8, fabric="tpuv4-pod")
NODE = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
STEP = pf.Training(global_batch=64, micro_batch=2)


def plans():
    return pf.plan("gpt2-small", NODE, STEP)


def found():
    return pf.search("bert-large", SPACE, POD, STEP, pareto=("time", "area"))


def swept():
    model = pf.models.load("gpt2-small")
    return pf.sweep([pf.Point(model, NODE, STEP.replace(global_batch=8 * n)) for n in range(1, 31)])


def layer_times():
    return pf.schedule_layers(costs())


def costs():
    return pf.estimate_costs(pf.layer_graph(pf.models.load("gpt2-small")), SPACE.chips[:3])


RESULTS = {
    "Plans": plans,
    "no plans": lambda: pf.plan("gpt3-175b", NODE, STEP),
    "Predictions": lambda: pf.predict_batch("gpt2-small", NODE, STEP, dp=[1, 2, 4], tp=[4, 2, 1]),
    "SearchResult": found,
    "Outcome": lambda: found().outcome,
    "ParetoFront": lambda: found().pareto(),
    "SweepTable": swept,
    "Evaluations": lambda: pf.evaluate_batch("bert-large", SPACE, POD, STEP),
    "LayerGraph": lambda: pf.layer_graph(pf.models.load("gpt2-small")),
    "Costs": costs,
    "LayerTimes": layer_times,
    "CollectiveTimes": lambda: pf.collective_batch(POD, "all-gather", np.ones(1000), ranks=8),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_in_at_most_forty_lines(name):
    result = RESULTS[name]()
    for text in (str(result), repr(result)):
        assert 1 <= len(text.splitlines()) <= 40
        assert max(map(len, text.splitlines())) <= 200


def test_what_is_printed_is_the_answer_the_proof_and_how_to_see_more():
    text = str(plans())
    assert text.startswith("gpt2-small on 4 x h100: optimal, no plan takes less than ")
    assert text.splitlines()[1].split()[:3] == ["tp", "pp", "dp"]
    assert "to_csv(path)" in text.splitlines()[-1]
    text = str(swept())
    assert "18 more rows" in text
    text = str(found())
    assert "optimal, proven over 240 points" in text
    assert "more: .top" in text
