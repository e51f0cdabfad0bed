"""Forward and backward operator graphs of a model under a parallel strategy."""

from phaze_fast.opgraph.attention import BESIDE_RING as BESIDE_RING
from phaze_fast.opgraph.attention import RING as RING
from phaze_fast.opgraph.builder import Tensor as Tensor
from phaze_fast.opgraph.graph import EXCHANGES as EXCHANGES
from phaze_fast.opgraph.graph import FORMATS as FORMATS
from phaze_fast.opgraph.graph import GROUPS as GROUPS
from phaze_fast.opgraph.graph import KINDS as KINDS
from phaze_fast.opgraph.graph import OFFLOAD as OFFLOAD
from phaze_fast.opgraph.graph import RECOMPUTE_SETS as RECOMPUTE_SETS
from phaze_fast.opgraph.graph import UNITS as UNITS
from phaze_fast.opgraph.graph import OpGraph as OpGraph
from phaze_fast.opgraph.graph import canonical_recompute as canonical_recompute
from phaze_fast.opgraph.graph import recompute_order as recompute_order
from phaze_fast.opgraph.layers import Layer as Layer
from phaze_fast.opgraph.layers import LayerGraph as LayerGraph
from phaze_fast.opgraph.layers import layer_graph as layer_graph
from phaze_fast.opgraph.rewrites import Fusion as Fusion
from phaze_fast.opgraph.strategy import CONTEXT_KINDS as CONTEXT_KINDS
from phaze_fast.opgraph.strategy import DISPATCHERS as DISPATCHERS
from phaze_fast.opgraph.strategy import ContextKind as ContextKind
from phaze_fast.opgraph.strategy import Strategy as Strategy
from phaze_fast.opgraph.strategy import check_context_kind as check_context_kind
from phaze_fast.opgraph.strategy import context_code as context_code
from phaze_fast.opgraph.strategy import context_kind as context_kind
from phaze_fast.opgraph.strategy import context_widths as context_widths
from phaze_fast.opgraph.strategy import reasons as reasons
