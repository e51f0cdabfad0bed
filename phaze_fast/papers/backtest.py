"""The back-test: real chips compared with the best chips under the limits of their generation.

Each real chip is compared with a space of similar chips: cores, array sides, vector cores, buffer,
HBM stacks and links are halved and doubled, area is at most that of the real chip (both modelled
with every area term), and clocks are lowered until the modelled power is at most that of the real
chip. Published runs are planned on the real chip.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.explore import evaluate_batch
from phaze_fast.hardware import (
    EVERY_AREA,
    Accelerator,
    ArchitectureSpace,
    Cluster,
    Links,
    SpaceSpec,
    TieredFabric,
    area,
    power_batch,
    presets,
)
from phaze_fast.hardware.fabric import fabric_from_dict
from phaze_fast.hardware.space import AreaLimit
from phaze_fast.models import TransformerModel, load
from phaze_fast.planning import Training, plan
from phaze_fast.software import BF16, DEFAULT

_FACTORS = (0.5, 1.0, 2.0)
_WIDTHS = (1, 8)
_SAME = 1e-9
FEATURES = {
    **{name: name for name in ("array", "arrays", "multipliers")},
    "vector_cores": "vector cores",
    "buffer_mib": "buffer",
    "hbm_bytes_per_flop": "HBM/FLOP",
    "link_bytes_per_s": "links",
}
"""Features of chips whose changes between generations are compared, and their names in tables."""
_SIGN = 0.02
"""Relative changes of features up to this size count as none."""


_data = partial(package_data, __package__, "generations.yaml")


def generation_names() -> list[str]:
    """Names of the generations, family by family in the order of years.

    Examples
    --------
    >>> generation_names()[:3]
    ['TPU v2', 'TPU v3', 'TPU v4']
    """
    return [item["name"] for item in _data()["generations"]]


def _chip(item: Mapping[str, Any]) -> Accelerator:
    """Load the chip of a generation, with the links of its fabric."""
    chip_spec = item["chip"]
    chip = (
        presets.chip(chip_spec) if isinstance(chip_spec, str) else Accelerator.from_dict(chip_spec)
    )
    fabric: Any = _cluster(item, chip).fabric
    if isinstance(fabric, TieredFabric):
        rate = fabric.tiers[0].bandwidth_bytes_per_s / item["links"]
    else:
        rate = fabric.link_bandwidth_bytes_per_s
    return chip.replace(links=Links(count=item["links"], bandwidth_bytes_per_s=rate))


def _cluster(item: Mapping[str, Any], chip: Accelerator) -> Cluster:
    fabric = item.get("fabric", chip.usual_fabric)
    wired = fabric if isinstance(fabric, str) else fabric_from_dict(fabric)
    return Cluster(devices=item["devices"], fabric=wired, chip=chip)


def generation_space(chip: Accelerator) -> ArchitectureSpace:
    """Return the space around a chip: its sizes halved and doubled, within its own area and power.

    Examples
    --------
    >>> from phaze_fast.hardware import Links, presets
    >>> links = Links(count=6, bandwidth_bytes_per_s=50e9)
    >>> space = generation_space(presets.chip("tpuv4").replace(links=links))
    >>> space.grid_size, len(space) < space.grid_size
    (2187, True)
    """
    tensor, vector, hbm, links = chip.tensor_core, chip.vector_core, chip.hbm, chip.links
    if hbm is None or links is None:
        raise InvalidInputError(f"{chip.name}: no HBM or no links to vary")

    def around(value: float) -> tuple[float, ...]:
        values = {float(max(1, int(value * factor))) for factor in _FACTORS}
        return tuple(sorted(values))

    most = area(chip, EVERY_AREA).total_mm2
    return ArchitectureSpace(
        SpaceSpec(
            name=f"around-{chip.name}",
            base=chip,
            axes={
                "tensor_core.count": around(tensor.count),
                "tensor_core.width": around(tensor.width),
                "tensor_core.depth": around(tensor.depth),
                "vector_core.count": around(vector.count),
                "buffer.capacity_bytes": around(chip.buffer.capacity_bytes),
                "hbm.generation": ("base",),
                "hbm.stacks": around(hbm.stacks),
                "links.count": around(links.count),
            },
            area=AreaLimit(max_mm2=most * (1.0 + _SAME), terms=EVERY_AREA, follows_base=True),
            max_power_w=float(power_batch([chip], terms=EVERY_AREA)[0]) * (1.0 + _SAME),
            above_power="slow",
        )
    )


def _features(chip: Accelerator) -> dict[str, float]:
    """Return the features of a chip: those of `FEATURES`, and its clock."""
    tensor, hbm, links = chip.tensor_core, chip.hbm, chip.links
    rate = hbm.bandwidth_bytes_per_s if hbm is not None else 0.0
    return {
        "array": float(tensor.width * tensor.depth),
        "arrays": float(tensor.count),
        "multipliers": float(tensor.macs_per_cycle),
        "vector_cores": float(chip.vector_core.count),
        "buffer_mib": chip.buffer.capacity_bytes / 2**20,
        "hbm_bytes_per_flop": rate / chip.peak_flops(),
        "link_bytes_per_s": links.count * links.bandwidth_bytes_per_s if links is not None else 0.0,
        "clock_ghz": chip.clock_hz / 1e9,
    }


def _generation(item: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
    """Evaluate the chips around one real chip, and rank it among them."""
    chip = _chip(item)
    space, cluster = generation_space(chip), _cluster(item, chip)
    wires: Any = cluster.fabric
    model = load(item["model"])
    heads = model.heads if isinstance(model, TransformerModel) else 1
    widths = tuple(w for w in _WIDTHS if heads % w == 0)
    step = Training(global_batch=item["global_batch"], micro_batch=(1, 2), tp=widths, zero=(1, 3))
    times = evaluate_batch(item["model"], space, cluster, step, threads=threads).time_s
    own = _position(space, chip)
    if not np.isfinite(times).any():
        raise InvalidInputError(f"{item['name']}: no plan of {item['model']} fits")
    best = int(np.lexsort((space.area_mm2, times))[0])
    return {
        "name": item["name"],
        "family": item["family"],
        "year": item["year"],
        "model": item["model"],
        "devices": item["devices"],
        "chips": len(space),
        "area_mm2": float(space.area_mm2[own]),
        "time_s": float(times[own]),
        "best_time_s": float(times[best]),
        "regret": float(times[own] / times[best]),
        "rank": 1 + int((times < times[own] * (1.0 - _SAME)).sum()),
        "links": item["links"],
        "real": _features(chip),
        "best": _features(space[best]),
        "best_text": str(space[best]),
        "sources": [*item["sources"], *chip.sources, *wires.sources],
        "assumed": chip.notes,
    }


def _position(space: ArchitectureSpace, chip: Accelerator) -> int:
    """Find the position of the real chip in the space around it."""
    row = chip.to_row()
    same = np.ones(len(space), dtype=bool)
    cores = ("tensor_cores", "tensor_width", "tensor_depth", "vector_cores")
    for column in (*cores, "buffer_bytes", "hbm_stacks", "links"):
        same &= space.chips[column] == row[column]
    return int(np.flatnonzero(same)[0])


def _directions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the changes of real chips between generations with those of the best chips."""
    directions = []
    for before, after in itertools.pairwise(rows):
        if before["family"] != after["family"]:
            continue
        agree = {}
        for name in FEATURES:
            signs = [_sign(after[w][name] / before[w][name]) for w in ("real", "best")]
            agree[name] = signs[0] == signs[1]
        directions.append({"from": before["name"], "to": after["name"], "agree": agree})
    return directions


def _sign(ratio: float) -> int:
    """Return 1 for a rise, -1 for a fall and 0 for about the same."""
    return int(ratio > 1.0 + _SIGN) - int(ratio < 1.0 / (1.0 + _SIGN))


def _run(item: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a published run on the chip it ran on."""
    chip = presets.chip(item["chip"])
    cluster = _cluster(item, chip)
    free: dict[str, Any] = {"pp": item["pp"]} if "pp" in item else {}
    step = Training(
        global_batch=item["global_batch"],
        seq=item["seq"],
        micro_batch=item.get("micro_batch", (1, 2)),
        tp=item.get("tp", 1),
        zero=item["zero"],
        recompute=item.get("recompute", "auto"),
        software=item.get("software", DEFAULT),
        precision=item.get("precision", BF16),
        **free,
    )
    model = load(item["model"])
    if "attention" in item:
        model = model.replace(attention=item["attention"])
    plans = plan(model, cluster, step, top=1).plans
    ours = plans[0].mfu if plans else None
    published = item.get("mfu")
    if published is None and plans and ours is not None:
        published = ours * plans[0].time_s / item["step_s"]
    points = None if ours is None or published is None else 100.0 * (ours - published)
    return {
        "name": item["name"],
        "chip": chip.name,
        "devices": item["devices"],
        "mfu": ours,
        "published_mfu": published,
        "points": points,
        "within_15": points is not None and abs(points) <= 15.0,
        "source": item["source"],
        "note": item["note"],
    }


def _order(threads: int | None) -> dict[str, Any]:
    """Sequences per second of every TPU on one model, and speed-ups that were published."""
    speedup_data = _data()["speedups"]
    step = Training(global_batch=speedup_data["global_batch"], micro_batch=(1, 2), zero=(1, 3))
    rates = {}
    for item in _data()["generations"]:
        if item["family"] == "TPU":
            chip = _chip(item)
            cluster = _cluster({**item, "devices": speedup_data["devices"]}, chip)
            best = evaluate_batch(speedup_data["model"], chip, cluster, step, threads=threads)
            rates[item["name"]] = float(best.samples_per_s[0]) / speedup_data["devices"]
    pairs = [
        {**pair, "predicted": rates[pair["to"]] / rates[pair["from"]]}
        for pair in speedup_data["of"]
    ]
    return {"model": speedup_data["model"], "samples_per_s_per_chip": rates, "speedups": pairs}


def backtest(names: Sequence[str] = (), threads: int | None = None) -> dict[str, Any]:
    """Search under the limits of real generations, and predict published runs on their chips.

    Parameters
    ----------
    names
        Generations; by default all, with the published runs.
    threads
        At most this many, by default all cores.

    Returns
    -------
    dict
        ``generations`` (regret and rank of each real chip among those around it, and the best of
        them) and ``directions`` (whether the best chips change as the real ones do); by default
        also ``runs`` (predicted against published MFU) and ``order`` (TPUs on one model, against
        published speed-ups).

    Raises
    ------
    InvalidInputError
        Where a name is unknown.

    Examples
    --------
    >>> backtest(["TPU v2"])["generations"][0]["year"]
    2017
    """
    for name in names:
        if name not in generation_names():
            raise InvalidInputError(
                f"generation: {name!r} is unknown; {nearest(name, generation_names())}"
            )
    chosen = [item for item in _data()["generations"] if not names or item["name"] in names]
    rows = [_generation(item, threads) for item in chosen]
    results = {"generations": rows, "directions": _directions(rows)}
    if names:
        return results
    return {**results, "runs": [_run(item) for item in _data()["runs"]], "order": _order(threads)}
