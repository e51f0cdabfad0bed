"""Plans exported and read back: the same seconds wherever the format says all of the plan."""

import random

import pytest
from export_cases import SUFFIX, random_plan

import phaze_fast as pf
from phaze_fast import export

SOME = (25, 60)  # seed and number of the plans of every run
MORE = (23, 140)  # of the full one


@pytest.fixture(scope="module", params=[SOME, pytest.param(MORE, marks=pytest.mark.slow)])
def plans(request):
    seed, count = request.param
    rng = random.Random(seed)
    return [random_plan(rng) for _ in range(count)]


@pytest.mark.parametrize("format_", export.FORMATS)
def test_what_a_file_says_predicts_the_same_seconds(format_, plans, tmp_path):
    path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
    complete = differ = 0
    for model, cluster, plan in plans:
        written = export.export_plan(plan, model, format_)
        path.write_text(written.text)
        read = export.read_plan(path, model, cluster.devices)
        again = pf.predict(model, cluster, read.spec)
        complete += written.complete
        differ += again.time_s != pytest.approx(plan.time_s, rel=1e-9)
        named = plan.software != "megatron-core"
        assert any(item.what.startswith("--software") for item in written.unexpressed) == named
        if written.complete:
            assert again.time_s == pytest.approx(plan.time_s, rel=1e-12), written.text
            assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)
        for item in written.unexpressed:
            assert item.what
            assert item.why
            assert format_ == "deepspeed" or str(item) in written.text
    assert complete >= {"megatron": 15, "bridge": 15}.get(format_, 1)
    assert differ  # some plans cannot be said, and are not hidden
