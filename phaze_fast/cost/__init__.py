"""The cost model: seconds and joules of operators and collectives on chips and fabrics."""

from phaze_fast.cost.cache import CacheInfo, cost_cache_clear, cost_cache_info
from phaze_fast.cost.collectives import (
    CollectiveCost,
    CollectiveTimes,
    collective,
    collective_batch,
    message_batch,
)
from phaze_fast.cost.costs import Costs
from phaze_fast.cost.engine import estimate_costs
from phaze_fast.cost.operators import attention_ops, product_ops, vector_ops
from phaze_fast.cost.single import OperatorCost, array_cycles, gemm, operator_costs
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
    "validate",
    "vector_ops",
]
