"""Forward and backward operator graphs of a model under a parallel strategy."""

from phaze_fast.opgraph.attention import BESIDE_RING, RING
from phaze_fast.opgraph.builder import Tensor
from phaze_fast.opgraph.graph import (
    FORMATS,
    GROUPS,
    KINDS,
    RECOMPUTE_SETS,
    UNITS,
    OpGraph,
    canonical_recompute,
    recompute_order,
)
from phaze_fast.opgraph.layers import Layer, LayerGraph, build_op_graphs, layer_graph
from phaze_fast.opgraph.strategy import CONTEXT_KINDS, RULES, Rule, Strategy, reasons

__all__ = [
    "BESIDE_RING",
    "CONTEXT_KINDS",
    "FORMATS",
    "GROUPS",
    "KINDS",
    "RECOMPUTE_SETS",
    "RING",
    "RULES",
    "UNITS",
    "Layer",
    "LayerGraph",
    "OpGraph",
    "Rule",
    "Strategy",
    "Tensor",
    "build_op_graphs",
    "canonical_recompute",
    "layer_graph",
    "reasons",
    "recompute_order",
]
