"""Small spaces and boxes of constants, and regrets by trying every chip at many points."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np

import phaze_fast as pf
from phaze_fast.hardware.space import AreaLimit
from phaze_fast.models import TransformerModel

CLUSTER = pf.Cluster(devices=4, fabric="tpuv4-pod")
STEP = pf.Training(
    global_batch=8, micro_batch=1, tp=1, pp=1, zero=0, schedule="1f1b", recompute="none"
)
MODEL = TransformerModel(
    name="tiny", layers=2, hidden=256, heads=4, ffn=1024, vocab=1000, seq=128, max_positions=128
)
BASE = pf.presets.chip("phaze-tpuv4")
TERMS = ("tensor", "vector", "buffer")


class Case(NamedTuple):
    space: pf.ArchitectureSpace
    box: dict[str, list[float]]


def case(seed: int) -> Case:
    """A space of at most a dozen chips, and a box of one to three rates and one or two areas."""
    rng = np.random.default_rng(seed)

    def some(values: list[float]) -> tuple[float, ...]:
        return tuple(sorted(rng.choice(values, 2, replace=False).tolist()))

    axes = {
        "tensor_core.count": some([2, 4, 8, 16]),
        "vector_core.count": some([2, 8, 32]),
        "tensor_core.width": some([32, 64, 128]),
    }
    terms = pf.hardware.FULL_AREA if rng.random() < 0.3 else pf.hardware.PUBLISHED_AREA
    base = BASE.replace(buffer=BASE.buffer.replace(capacity_bytes=int(rng.choice([2**22, 2**25]))))
    base = base.replace(vector_core=base.vector_core.replace(count=8))
    whole = pf.ArchitectureSpace(pf.hardware.SpaceSpec(name="small", base=base, axes=axes))
    sizes = np.sort(pf.hardware.area_batch(whole.chips, terms)["total_mm2"])
    most = float(sizes[int(rng.integers(2, 7))]) * float(rng.uniform(1.0, 1.02))
    limit = AreaLimit(max_mm2=most, terms=terms, follows_base=bool(rng.random() < 0.5))
    spec = whole.spec.replace(area=limit)
    box: dict[str, list[float]] = {}
    rates = ["matrix_rate", "vector_rate", "hbm_bandwidth", "fabric_bandwidth", "clock"]
    for name in rng.choice(rates, int(rng.integers(1, 3)), replace=False):
        box[str(name)] = [float(rng.uniform(0.8, 0.95)), 1.0]
    for name in rng.choice(TERMS, int(rng.integers(1, 3)), replace=False):
        box[f"{name}_area"] = [float(rng.uniform(0.7, 1.0)), float(rng.uniform(1.0, 1.4))]
    return Case(pf.ArchitectureSpace(spec), box)


def _chip(chip: pf.Accelerator, at: dict[str, float]) -> pf.Accelerator:
    """A chip with its constants at a point, written out field by field."""
    tuning = chip.tuning
    if "matrix_rate" in at:
        rate = at["matrix_rate"]
        attention = tuning.attention.replace(efficiency=rate, backward_efficiency=rate)
        tuning = tuning.replace(efficiency=rate, attention=attention)
    if "vector_rate" in at:
        tuning = tuning.with_vector_rate(at["vector_rate"])
    hbm = chip.hbm.replace(
        bandwidth_bytes_per_s=chip.hbm.bandwidth_bytes_per_s * at.get("hbm_bandwidth", 1.0)
    )
    return chip.replace(tuning=tuning, hbm=hbm, clock_hz=chip.clock_hz * at.get("clock", 1.0))


def _cluster(at: dict[str, float]) -> pf.Cluster:
    fabric = CLUSTER.fabric
    rate = fabric.link_bandwidth_bytes_per_s * at.get("fabric_bandwidth", 1.0)
    return CLUSTER.replace(fabric=fabric.replace(link_bandwidth_bytes_per_s=rate))


def _areas(
    chips: list[pf.Accelerator], base: pf.Accelerator, limit: AreaLimit, at: dict[str, float]
) -> Any:
    """Areas over the limit at a point; local SRAM is a term of its own and stays as it is."""
    unit = {"tensor": 760.041386e-6, "vector": 759.823853e-6}

    def total(chip: pf.Accelerator) -> float:
        parts = pf.area(chip, limit.terms)
        tensor, vector = chip.tensor_core, chip.vector_core
        plain = {
            "tensor": tensor.count * tensor.width * tensor.depth * unit["tensor"],
            "vector": vector.count * vector.lanes * unit["vector"],
            "buffer": parts.buffer_mm2,
        }
        more = sum((at.get(f"{t}_area", 1.0) - 1.0) * mm2 for t, mm2 in plain.items())
        return parts.total_mm2 + more

    most = limit.max_mm2
    if limit.follows_base:
        most *= total(base) / pf.area(base, limit.terms).total_mm2
    return np.array([total(chip) for chip in chips]) / most


def brute_force(given: Case, steps: int = 2) -> tuple[list[pf.Accelerator], Any, Any]:
    """Every chip of the grid at every point of a grid over the box.

    Returns the chips, whether each is in the space at the nominal constants, and its largest regret
    over the points.
    """
    spec = given.space.spec
    grid = pf.ArchitectureSpace(spec.replace(area=None))
    chips = [grid[i] for i in range(len(grid))]
    nominal = np.isin(grid.index, given.space.index)
    areas = [name for name in given.box if name.endswith("_area")]
    rates = [name for name in given.box if name not in areas]
    lines = {name: np.linspace(*ends, steps) for name, ends in given.box.items()}
    worst = np.zeros(len(chips))
    for values in product(*(lines[name] for name in rates)):
        at = dict(zip(rates, map(float, values), strict=True))
        made = [_chip(chip, at) for chip in chips]
        times = pf.evaluate_batch(MODEL, made, _cluster(at), STEP, threads=1).time_s
        for factors in product(*(lines[name] for name in areas)):
            there = dict(zip(areas, map(float, factors), strict=True))
            over = _areas(chips, spec.base, spec.area, there)
            fits = over <= 1.0 + 1e-12
            if fits.any():
                regret = times * np.maximum(over, 1.0) / times[fits].min()
                worst = np.maximum(worst, regret)
    return chips, nominal, worst
