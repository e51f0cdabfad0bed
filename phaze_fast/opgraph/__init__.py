"""Forward and backward operator graphs of a model under a parallel strategy."""

from phaze_fast.opgraph.attention import BESIDE_RING as BESIDE_RING
from phaze_fast.opgraph.attention import RING as RING
from phaze_fast.opgraph.builder import Tensor as Tensor
from phaze_fast.opgraph.graph import FORMATS as FORMATS
from phaze_fast.opgraph.graph import GROUPS as GROUPS
from phaze_fast.opgraph.graph import KINDS as KINDS
from phaze_fast.opgraph.graph import RECOMPUTE_SETS as RECOMPUTE_SETS
from phaze_fast.opgraph.graph import UNITS as UNITS
from phaze_fast.opgraph.graph import OpGraph as OpGraph
from phaze_fast.opgraph.graph import canonical_recompute as canonical_recompute
from phaze_fast.opgraph.graph import recompute_order as recompute_order
from phaze_fast.opgraph.layers import Layer as Layer
from phaze_fast.opgraph.layers import LayerGraph as LayerGraph
from phaze_fast.opgraph.layers import layer_graph as layer_graph
from phaze_fast.opgraph.rewrites import Fusion as Fusion
from phaze_fast.opgraph.rewrites import forms as forms
from phaze_fast.opgraph.strategy import CONTEXT_KINDS as CONTEXT_KINDS
from phaze_fast.opgraph.strategy import Strategy as Strategy
from phaze_fast.opgraph.strategy import reasons as reasons
