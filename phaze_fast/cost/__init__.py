"""The cost model: seconds and joules of operators and collectives on chips and interconnects."""

from phaze_fast.cost.collectives import CollectiveCost as CollectiveCost
from phaze_fast.cost.collectives import CollectiveTimes as CollectiveTimes
from phaze_fast.cost.collectives import collective as collective
from phaze_fast.cost.collectives import collective_batch as collective_batch
from phaze_fast.cost.collectives import message_batch as message_batch
from phaze_fast.cost.engine import CacheInfo as CacheInfo
from phaze_fast.cost.engine import Costs as Costs
from phaze_fast.cost.engine import cost_cache_clear as cost_cache_clear
from phaze_fast.cost.engine import cost_cache_info as cost_cache_info
from phaze_fast.cost.engine import estimate_costs as estimate_costs
from phaze_fast.cost.engine import roofline_work_s as roofline_work_s
from phaze_fast.cost.operators import OperatorCost as OperatorCost
from phaze_fast.cost.operators import array_cycles as array_cycles
from phaze_fast.cost.operators import attention_ops as attention_ops
from phaze_fast.cost.operators import gemm as gemm
from phaze_fast.cost.operators import operator_costs as operator_costs
from phaze_fast.cost.operators import product_ops as product_ops
from phaze_fast.cost.operators import vector_ops as vector_ops
from phaze_fast.cost.validation import ColumnError as ColumnError
from phaze_fast.cost.validation import Validation as Validation
from phaze_fast.cost.validation import validate as validate
