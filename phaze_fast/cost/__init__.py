"""The cost model: seconds and joules of operators and collectives on chips and interconnects."""

from phaze_fast.cost.collectives import (
    CollectiveCost,
    CollectiveTimes,
    collective,
    collective_batch,
    message_batch,
)
from phaze_fast.cost.engine import (
    CacheInfo,
    Costs,
    cost_cache_clear,
    cost_cache_info,
    estimate_costs,
    roofline_work_s,
)
from phaze_fast.cost.operators import (
    OperatorCost,
    array_cycles,
    attention_ops,
    gemm,
    operator_costs,
    product_ops,
    vector_ops,
)
from phaze_fast.cost.validation import ColumnError, Validation, validate

__all__ = [
    "CacheInfo",
    "CollectiveCost",
    "CollectiveTimes",
    "ColumnError",
    "Costs",
    "OperatorCost",
    "Validation",
    "array_cycles",
    "attention_ops",
    "collective",
    "collective_batch",
    "cost_cache_clear",
    "cost_cache_info",
    "estimate_costs",
    "gemm",
    "message_batch",
    "operator_costs",
    "product_ops",
    "roofline_work_s",
    "validate",
    "vector_ops",
]
