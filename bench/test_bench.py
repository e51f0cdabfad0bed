"""Runs every registered subject, and the ratio of a call's cost to its kernel's."""

import time

import numpy as np
import pytest
import subjects_cost
import subjects_hardware
import subjects_memory
import subjects_operators
import subjects_opgraph
import subjects_placement
import subjects_schedule
import subjects_search
import subjects_wafer
from registry import SUBJECTS

from phaze_fast import _core
from phaze_fast.hardware import PUBLISHED_AREA, chip_records, fabric_record, presets

# imported for what they register
STAGES = (
    subjects_hardware,
    subjects_opgraph,
    subjects_cost,
    subjects_operators,
    subjects_memory,
    subjects_schedule,
    subjects_placement,
    subjects_search,
    subjects_wafer,
)


def test_every_stage_is_registered():
    assert {subject.stage for subject in SUBJECTS} == {
        stage.__name__.removeprefix("subjects_") for stage in STAGES
    }


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.id)
def test_subject(benchmark, subject):
    benchmark.group = subject.stage
    build = subject.build if benchmark.enabled or subject.smoke is None else subject.smoke
    made = build()
    if subject.rounds is None:
        answer = benchmark(subject.run, made)
    else:
        answer = benchmark.pedantic(subject.run, args=(made,), rounds=subject.rounds)
    subject.check(made, answer)
    benchmark.extra_info.update(items=subject.items, target=subject.target)


def _best_s(call, repeat):
    taken = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


@pytest.mark.parametrize(
    "name", ["collective", "collective-6-fabrics", "collective-core", "area-core"]
)
def test_call_overhead(benchmark, name):
    """One call on 1,000 points against the kernel's own time for as many.

    The kernel's own time is the slope between 1,000 and 101,000 points, in which whatever a call
    costs once has no part.
    """
    small, large, run, check = _overhead_case(name)
    benchmark.group = "overhead"
    answer = benchmark(run, small)
    check(small, answer)
    if not benchmark.enabled:
        return
    once = _best_s(lambda: run(small), 200)
    many = _best_s(lambda: run(large), 20)
    kernel = (many - once) / 100
    benchmark.extra_info.update(
        items=1000, kernel_us=kernel * 1e6, ratio=once / kernel, target="ratio <= 3"
    )


def _overhead_case(name):
    if name == "area-core":
        chips = np.repeat(chip_records([presets.chip("phaze-tpuv4")]), 101_000)
        chips["tensor_cores"] = np.arange(101_000) % 512 + 1

        def run_area(rows):
            return _core.chip_area_total(rows, PUBLISHED_AREA.rates, 1)

        def check_area(rows, found):
            assert found[7] == _core.chip_area_total(rows[7:8], PUBLISHED_AREA.rates, 1)[0]

        return chips[:1000].copy(), chips, run_area, check_area
    names = presets.fabric_names() if name.endswith("fabrics") else ("dgx-a100-peak",)
    questions = [subjects_cost._question(names, n, None) for n in (1000, 101_000)]
    if name != "collective-core":
        return *questions, subjects_cost._ask, subjects_cost._check
    record = fabric_record(presets.fabric("dgx-a100-peak"))
    order = ("fabric", "op", "payload_bytes", "ranks", "stride", "threads")
    columns = [[q[key] for key in order] for q in questions]

    def run_core(arguments):
        return _core.collective_batch(record, *arguments)

    def check_core(arguments, found):
        assert not found[2].any()
        one = [a[3:4] for a in arguments[:-1]]
        assert found[0][3] == _core.collective_batch(record, *one, 1)[0][0]

    return *columns, run_core, check_core
