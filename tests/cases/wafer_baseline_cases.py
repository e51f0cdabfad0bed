"""Problems on small wafers that tests of other systems' plans and of the comparison share."""

from phaze_fast import models
from phaze_fast.wafer import Problem, WaferTraining, load_wafer
from phaze_fast.wafer.search.result import Effort

DRAM = load_wafer("dram-wafer")
DOJO = load_wafer("dojo-tile-like")
QUICK = Effort(seeds=1, steps=500, promising=1, budget_s=2.0)


def problem_of(wafer, name="bertlarge", batch=64):
    return Problem(models.load(name), wafer, WaferTraining(batch))


CASES = {
    "small": problem_of(DRAM.replace(columns=4, rows=2)),
    "odd": problem_of(DRAM.replace(columns=3, rows=2)),
    "tight": problem_of(DOJO, batch=16),
    "wide": problem_of(DRAM.replace(columns=8, rows=1)),
    "heads": problem_of(DRAM.replace(columns=3, rows=3), "gpt2"),
    "dead": problem_of(DRAM.replace(columns=4, rows=3, dead=((1, 1),))),
    "batch": problem_of(DOJO, batch=7),
    "one": problem_of(DRAM.replace(columns=1, rows=1)),
}


_ORDER = {"columns": 0, "inner": 0, "rows": 1, "copies": 1, "batch": 2}


def in_rank_order(op_mapping):
    """Tensor splits innermost, then rows and copies, then the batch."""
    order = [_ORDER[role] for role, _ in (*op_mapping.x, *op_mapping.y)]
    return order == sorted(order)
