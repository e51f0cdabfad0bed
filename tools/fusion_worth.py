"""Print what buffer, cores and HBM bandwidth are worth with and without fusion, for docs/search.md.

``python tools/fusion_worth.py [MODEL...]`` searches the published space for each model with full
fusion and with none: for each size of the buffer with all else free, and for each HBM bandwidth.
Every row is proven.
"""

from __future__ import annotations

import sys

import numpy as np
from fusion_winners import write

from phaze_fast import ArchitectureSpace, Cluster, Training, models
from phaze_fast.explore import find_chips
from phaze_fast.hardware import area_batch
from phaze_fast.units import format_time

MODELS = ("bertlarge", "llama2", "megatrongpt3")
BUFFERS_MIB = (2, 4, 8, 16, 32, 64, 128)
BANDWIDTHS = (0.3e12, 0.6e12, 1.2e12, 2.4e12)
FUSIONS = ("none", "full")


def best(space: ArchitectureSpace, name: str, fusion: str) -> tuple[float, np.ndarray]:
    """Return the seconds of the best step of a space, and the record of its chip."""
    pod = Cluster(devices=1024, fabric="tpuv4-pod")
    step = Training(global_batch=4096, tp=(1, 2, 4, 8), zero=(0, 1), fusion=fusion)
    winner = find_chips([models.load(name)], space, pod, step, top=1).winners[0]
    return winner.time_s, space.chips[winner.chip : winner.chip + 1]


def by_buffer(name: str) -> None:
    """Print the best step for each size of the buffer."""
    space = ArchitectureSpace.published()
    sizes = space.column("buffer.capacity_bytes")
    for fusion in FUSIONS:
        cells = []
        for size in BUFFERS_MIB:
            seconds, chip = best(space[sizes == size * 2**20], name, fusion)
            macs = int(chip["tensor_cores"][0] * chip["tensor_width"][0] * chip["tensor_depth"][0])
            area = float(area_batch(chip)["total_mm2"][0])
            cells.append(f"{format_time(seconds)} ({macs // 1024}k, {area:.0f} mm2)")
        write(f"| {name} | {fusion} | {' | '.join(cells)} |")


def by_bandwidth(name: str) -> None:
    """Print the best step and its buffer for each HBM bandwidth."""
    spec = ArchitectureSpace.published().spec
    for fusion in FUSIONS:
        cells = []
        for rate in BANDWIDTHS:
            hbm = spec.base.hbm.replace(bandwidth_bytes_per_s=rate)
            space = ArchitectureSpace(spec.replace(base=spec.base.replace(hbm=hbm)))
            seconds, chip = best(space, name, fusion)
            cells.append(f"{format_time(seconds)} ({int(chip['buffer_bytes'][0]) >> 20} MiB)")
        write(f"| {name} | {fusion} | {' | '.join(cells)} |")


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:
        by_buffer(model)
        by_bandwidth(model)
