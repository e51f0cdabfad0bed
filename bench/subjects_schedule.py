"""Subjects of the schedule stage: layers over the published space, and HiGHS beside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import _core, models
from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.hardware import ArchitectureSpace, presets
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.schedule import (
    LayerInstance,
    LayerSchedule,
    LayerTimes,
    instance_from_dict,
    schedule_instances,
    schedule_layers,
)
from phaze_fast.schedule.highs import solve_with_highs

CHIPS = 2000
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "layer_golden.jsonl"


def _costs(name: str, which: str) -> Costs:
    """Forward or backward block of a model on chips spread over the published space."""
    chips = ArchitectureSpace.tpuv4_area().chips
    chosen = chips[:: len(chips) // CHIPS][:CHIPS]
    graph = layer_graph(models.load(name), Strategy())
    block = next(layer for layer in graph.layers if layer.kind == "block")
    return estimate_costs(getattr(block, which), chosen, presets.fabric("tpuv4-pod"))


def _check(costs: Costs, times: LayerTimes) -> None:
    """Proven, no worse than one operator after another, and the share of each proof shown."""
    assert times.proven.all()
    assert (times.makespan_s[0] <= costs.time_s(0).sum(axis=1) * (1 + 1e-12)).all()
    shares = [
        f"{name} {(times.proved_by == code).mean():.1%}"
        for code, name in enumerate(_core.PROVED_BY)
    ]
    sys.stderr.write(f"\n{costs.graphs[0].name}: {', '.join(shares)}\n")


for _name, _which, _target in (
    ("bertlarge", "forward", ">= 20,000/s"),
    ("gpt3-175b", "forward", ">= 20,000/s"),
    ("llama2-7b", "forward", ">= 20,000/s"),
    ("gpt3-175b", "backward", ""),
):
    register(
        Subject(
            name=f"{_name}-{_which}-{CHIPS}-chips",
            stage="schedule",
            items=CHIPS,
            build=lambda name=_name, which=_which: _costs(name, which),
            run=lambda costs: schedule_layers(costs, max_nodes=10**7),
            check=_check,
            target=_target,
        )
    )


def _golden() -> list[LayerInstance]:
    """Those that plain HiGHS proves in a moment."""
    with GOLDEN.open() as lines:
        layers = [instance_from_dict(json.loads(line)) for line in lines]
    return [layer for layer in layers if len(layer) <= 12]


def _check_golden(_: list[LayerInstance], found: list[LayerSchedule]) -> None:
    with GOLDEN.open() as lines:
        optima = {r["name"]: r["optimum"] for r in map(json.loads, lines)}
    for made in found:
        assert made.status == "optimal"
        assert np.isclose(made.makespan, optima[made.instance.name], rtol=1e-9)


def _plain_highs(layers: list[LayerInstance]) -> list[LayerSchedule]:
    rough = schedule_instances(layers, max_nodes=0, highs=False)
    loose = [_without_bound(made) for made in rough]
    return [solve_with_highs(made, 60.0) for made in loose]


def _without_bound(made: LayerSchedule) -> LayerSchedule:
    return LayerSchedule(**{**vars(made), "bound": 0.0, "status": "feasible"})


def _ours(layers: list[LayerInstance]) -> list[LayerSchedule]:
    return schedule_instances(layers, highs=False)


_RUNS: tuple[tuple[str, Any], ...] = (("golden-ours", _ours), ("golden-plain-highs", _plain_highs))
for _label, _run in _RUNS:
    register(
        Subject(
            name=_label,
            stage="schedule",
            items=len(_golden()),
            build=_golden,
            run=_run,
            check=_check_golden,
            target="ours >= 100x the rate of plain HiGHS" if _run is _ours else "",
        )
    )
