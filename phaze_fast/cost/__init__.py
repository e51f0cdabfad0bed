"""Takes operators, collectives, chips and fabrics, gives seconds and joules."""

from phaze_fast.cost.collectives import (
    CollectiveCost,
    CollectiveTimes,
    collective,
    collective_batch,
)

__all__ = ["CollectiveCost", "CollectiveTimes", "collective", "collective_batch"]
