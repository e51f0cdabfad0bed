"""Print the best chips of a space with and without fusion, as tables for docs/search.md.

``python tools/fusion_winners.py [published|full-area] [MODEL...]`` searches the space for each
model with every kind of fusion; each row is proven. The first table gives the least off-chip bytes
of two feed-forward layers by size of the buffer, and what the rules of the buffer add.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from phaze_fast import ArchitectureSpace, Cluster, Training, _core, models
from phaze_fast.cost import BufferRules, FusedGroup, group_traffic, product_bytes
from phaze_fast.cost.machines import Streams
from phaze_fast.cost.operators import product_ops
from phaze_fast.explore import find_chips
from phaze_fast.units import format_time

MODELS = (
    *("bertlarge", "megatronbert", "opt", "gpt2", "megatrongpt2-54", "megatrongpt2-72"),
    *("llama2", "megatrongpt3"),
)
LAYERS = {"BERT-large": (1024, 4096), "GPT-3": (12288, 49152)}
ROWS = 2048
BF16 = Streams(2.0, 2.0, 4.0, 1.0)
NARROW = BufferRules(sum_bytes=2.0, strip_depth=1.0, strip_copies=1.0)
RULES = {
    "least": NARROW,
    "sums in fp32": BufferRules(sum_bytes=4.0, strip_depth=1.0, strip_copies=1.0),
    "strips of 64": BufferRules(sum_bytes=4.0, strip_depth=64.0, strip_copies=1.0),
    "two of each": BufferRules(),
}


def write(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def winners(space: ArchitectureSpace, names: tuple[str, ...]) -> None:
    """Print the winner of each model and kind of fusion."""
    pod = Cluster(devices=1024, fabric="tpuv4-pod")
    write("| model | fusion | best chip | step | joules | search |\n|---|---|---|---|---|---|")
    for name in names:
        for fusion in ("none", "epilogues", "full"):
            step = Training(global_batch=4096, tp=(1, 2, 4, 8), zero=(0, 1), fusion=fusion)
            begin = time.perf_counter()
            found = find_chips([models.load(name)], space, pod, step, top=1)
            seconds = time.perf_counter() - begin
            best = found.winners[0]
            chip, plan = space.chips[best.chip], best.plans[0]
            sizes = (
                f"{chip['tensor_cores']} x {chip['tensor_width']}x{chip['tensor_depth']}, "
                f"{chip['vector_cores']} x {chip['vector_lanes']}, {chip['buffer_bytes'] >> 20} MiB"
            )
            widths = f"t {plan.tp}, p {plan.pp}, d {plan.dp}, micro-batch {plan.micro_batch}"
            write(
                f"| {name} | {fusion} | {sizes}; {widths} | {format_time(best.time_s)} | "
                f"{best.energy_j:,.0f} | {seconds:.1f} s, {found.status} |"
            )


def traffic() -> None:
    """Print off-chip MiB of feed-forward layers by size of the buffer."""
    sizes = 2.0**20 * np.array([1.0, 8.0, 64.0])
    write(f"\n| layer, buffer | fused | {' | '.join(RULES)} | `gemm` |")
    write("|---|---|" + "---|" * (len(RULES) + 1))
    for name, (hidden, wide) in LAYERS.items():
        shapes = ((ROWS, hidden, wide), (ROWS, wide, hidden))
        alone = [sum(product_bytes(*s, sizes, rules) for s in shapes) for rules in RULES.values()]
        fused = group_traffic(FusedGroup(ROWS, hidden, wide, hidden), sizes, NARROW).hbm_bytes
        ops = product_ops([(1, *shape) for shape in shapes])
        ours = _core.op_hbm_bytes(ops, sizes, BF16, False).reshape(len(sizes), -1).sum(1)
        for i, size in enumerate(sizes):
            figures = (min(fused[i], alone[0][i]), *(least[i] for least in alone), ours[i])
            text = " | ".join(f"{figure / 2**20:,.0f}" for figure in figures)
            write(f"| {name}, {size / 2**20:g} MiB | {text} |")


if __name__ == "__main__":
    spaces = {"published": ArchitectureSpace.published, "full-area": ArchitectureSpace.full_area}
    which, *names = sys.argv[1:] or ["published"]
    traffic()
    winners(spaces[which](), tuple(names) or MODELS)
