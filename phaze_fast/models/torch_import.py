"""Operators and layers of a PyTorch module, traced with example inputs; what is unknown is refused.

The module is exported with torch.export and its ATen graph walked once. A value is either data
(floating-point inputs, and all that operators make), weights, or neither: masks, positions and
constants, whose arithmetic is no operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phaze_fast.errors import InvalidInputError, InvalidTypeError, MissingExtraError
from phaze_fast.models.aten import (
    ATTENTION,
    COPIES,
    CREATORS,
    FREE,
    PRODUCT_OPERANDS,
    REDUCTIONS,
    VECTORS,
    Sizes,
    attention_sizes,
    product_sizes,
    vector_sizes,
)
from phaze_fast.models.torch_layers import CalledOp, Module, fuse_leaves, layered
from phaze_fast.models.traced import TracedModel, TracedOp

__all__ = ["from_torch"]


class _Value(NamedTuple):
    """What is known of a tensor in the graph; neither sources nor weights: a constant."""

    sources: tuple[int, ...] = ()
    """Operators it comes from; -1 for an input of the module."""
    weights: int = 0
    """Elements of the parameters it is a view of."""

    @property
    def counts(self) -> bool:
        """Whether arithmetic on it is an operator."""
        return bool(self.sources or self.weights)


_CONSTANT = _Value()


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "reading a PyTorch module needs: pip install 'phaze-fast[torch]'"
        ) from None
    return torch


def _base(node: Any) -> str:
    """Name of the operator a node calls, without namespace, overload and mark of writing."""
    packet = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(packet, "__name__", packet))
    return name.removesuffix("_") if _writes(node) else name


def _writes(node: Any) -> bool:
    """Whether a node changes its first argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _is_aten(node: Any) -> bool:
    return getattr(node.target, "namespace", "") == "aten"


def _stack(node: Any) -> tuple[tuple[str, str], ...]:
    """Modules a node runs in: the call, and the path."""
    return tuple((call, entry[0]) for call, entry in node.meta.get("nn_module_stack", {}).items())


class _Walk:
    """Operators of a graph, collected node by node."""

    def __init__(self, name: str, program: Any) -> None:
        self.name, self.root = name, program.graph_module
        self.ops: list[CalledOp] = []
        self.values: dict[Any, Any] = {}
        self.viewed: dict[Any, Any] = {}
        self.around: tuple[tuple[str, str], ...] = ()
        signature = program.graph_signature
        self.parameters = frozenset(signature.inputs_to_parameters)
        self.inputs = frozenset(str(name) for name in signature.user_inputs)

    def refuse(self, node: Any, reason: str) -> InvalidInputError:
        where = _stack(node)[-1:]
        place = f" of {where[0][1]}" if where and where[0][1] else ""
        return InvalidInputError(
            f"{self.name}: {node.target} (node {node.name}{place}) is not modelled; {reason}"
        )

    # ---- tensors ----

    def shape(self, node: Any, of: Any) -> tuple[int, ...]:
        """Shape of the first tensor a node gives."""
        made = of.meta.get("val")
        first = made[0] if isinstance(made, tuple | list) and made else made
        sizes = tuple(getattr(first, "shape", ()))
        if not all(isinstance(size, int) for size in sizes):
            raise self.refuse(node, f"its shape {list(sizes)} depends on data")
        return sizes

    def entering(self, node: Any) -> _Value:
        """Value of a placeholder of the outermost graph."""
        if node.name in self.parameters:
            return _Value(weights=math.prod(self.shape(node, node)))
        dtype = getattr(node.meta.get("val"), "dtype", None)
        floating = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        return _Value((-1,)) if node.name in self.inputs and floating else _CONSTANT

    # ---- operators ----

    def add(self, node: Any, kind: str, sizes: Sizes, elements: int, flops: float) -> _Value:
        """Note an operator that reads every tensor a node reads."""
        sources: list[int] = []
        weights = 0
        for read in node.all_input_nodes:
            value = self.values[read]
            sources += value.sources
            weights += min(value.weights, math.prod(self.shape(node, read)))
        inputs = tuple(dict.fromkeys(sources)) or (-1,)
        op = TracedOp(_base(node), kind, inputs, *sizes, elements, flops, weights)
        self.ops.append(CalledOp(op, _stack(node) or self.around))
        # Weights that are only scaled or shifted remain weights for the product they enter.
        still = weights if kind == "elementwise" and not sources else 0
        return _Value((len(self.ops) - 1,), still)

    def product(self, node: Any) -> _Value:
        left, right = (node.args[at] for at in PRODUCT_OPERANDS[_base(node)])
        shapes = [self.shape(node, operand) for operand in (left, right)]
        if _base(node) == "linear":
            shapes[1] = shapes[1][::-1]
        held = [bool(self.values[operand].weights) for operand in (left, right)]
        b, m, k, n = product_sizes(shapes[0], shapes[1], weights_left=held == [True, False])
        if k == 1 and not any(self.values[read].counts for read in node.all_input_nodes):
            return _CONSTANT  # an outer product of positions and frequencies
        kind = "gemm" if any(held) else "batched-gemm"
        return self.add(node, kind, (b, m, k, n), b * m * n, 2.0 * b * m * k * n)

    def attention(self, node: Any) -> _Value:
        query, key, value = (self.shape(node, operand) for operand in node.args[:3])
        sizes, flops = attention_sizes(query, key, value)
        return self.add(node, "attention", sizes, math.prod(self.shape(node, node)), flops)

    def vector(self, node: Any) -> _Value:
        shape = self.shape(node, node)
        if _base(node) in REDUCTIONS:
            shape = max((self.shape(node, read) for read in node.all_input_nodes), key=math.prod)
        return self.add(node, VECTORS[_base(node)], vector_sizes(shape), math.prod(shape), 0.0)

    def called(self, node: Any) -> Any:
        """Value of a node that calls a function; what it writes in place has a new value too."""
        value = self.call(node)
        reads = node.all_input_nodes
        if not reads:
            return value
        base = self.viewed.get(reads[0], reads[0])
        if _writes(node) and value.counts:
            if self.around and base.op == "placeholder":
                raise self.refuse(node, "it changes an array made outside its region")
            for view in [view for view in self.values if self.viewed.get(view, view) is base]:
                self.values[view] = value
        if _writes(node) or _base(node) in FREE - COPIES:
            self.viewed[node] = base
        return value

    def call(self, node: Any) -> Any:
        """Value of a node that calls a function."""
        name, reads = _base(node), [self.values[read] for read in node.all_input_nodes]
        if name == "getitem":
            taken = self.values[node.args[0]]
            return taken if isinstance(taken, _Value) else taken[node.args[1]]
        if name.startswith("wrap_with_"):  # a region without gradients, or of another precision
            return self.region(node)
        if _is_aten(node) and name in PRODUCT_OPERANDS:
            return self.product(node)
        counts = any(isinstance(value, _Value) and value.counts for value in reads)
        if not counts or (_is_aten(node) and name in CREATORS):
            return _CONSTANT
        if not _is_aten(node):
            raise self.refuse(node, "only ATen operators are")
        if name == ATTENTION:
            return self.attention(node)
        if name == "dropout" and node.args[2]:
            raise self.refuse(node, "dropout is accepted outside training only")
        if name in FREE:
            return reads[0]
        if name in VECTORS:
            return self.vector(node)
        raise self.refuse(node, "it is known neither as an operator nor as free")

    def region(self, node: Any) -> tuple[_Value, ...]:
        """Walk a graph within the graph."""
        inner = next(at for at, arg in enumerate(node.args) if getattr(arg, "op", "") == "get_attr")
        given = [self.values.get(arg, _CONSTANT) for arg in node.args[inner + 1 :]]
        outer = self.values, self.around
        self.around = _stack(node) or self.around
        made = self.run(self.root.get_submodule(node.args[inner].target).graph, given)
        self.values, self.around = outer
        return made

    def run(self, graph: Any, given: Sequence[_Value] | None = None) -> tuple[_Value, ...]:
        """Walk a graph; give the values it returns."""
        self.values = {}
        remaining = None if given is None else iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.entering(node) if remaining is None else next(remaining)
            elif node.op == "call_function":
                self.values[node] = self.called(node)
            elif node.op == "get_attr":
                self.values[node] = _CONSTANT
            else:
                returned = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
                return tuple(self.values.get(one, _CONSTANT) for one in returned)
        return ()


def _exported(module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Export a module as it runs outside training, and leave it as it was."""
    torch = _torch()
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, kwargs, strict=False)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"{type(module).__name__}: torch.export cannot follow it: {reason}"
        ) from error
    finally:
        for part, training in modes.items():
            part.training = training


def from_torch(
    module: Any, example_inputs: Sequence[Any], example_kwargs: Mapping[str, Any] | None = None
) -> TracedModel:
    """Read a PyTorch module: its operators, its layers, and how data passes them.

    Sizes are those of the example inputs, on one device, forward, outside training. No weight is
    read, so a module on the ``meta`` device is as good as a real one. A norm or an activation that
    a module spells out in elementwise operators is one operator.

    Parameters
    ----------
    module
        A ``torch.nn.Module`` that torch.export can follow.
    example_inputs
        Positional arguments of its ``forward``.
    example_kwargs
        Arguments by name; for a HuggingFace decoder ``{"use_cache": False}``.

    Returns
    -------
    TracedModel
        Each kind of layer once. Layers are the numbered children of the outermost container that
        has them; what runs before, between and after them is a layer of its own.

    Raises
    ------
    InvalidInputError
        Where an operator is not modelled, or torch.export fails; the message names it.
    MissingExtraError
        Where PyTorch is not installed.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())  # doctest: +SKIP
    >>> traced = from_torch(mlp, (torch.zeros(32, 64),))  # doctest: +SKIP
    >>> traced.gemms(), traced.flops, traced.parameters  # doctest: +SKIP
    ([(1, 32, 64, 256)], 1048576.0, 16640)
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise InvalidTypeError(
            f"module: {type(module).__name__} is not accepted; expected a torch.nn.Module"
        )
    if not isinstance(example_inputs, tuple | list):
        raise InvalidTypeError(
            f"example_inputs: {type(example_inputs).__name__} is not accepted; expected a tuple"
        )
    name = type(module).__name__
    walk = _Walk(name, _exported(module, tuple(example_inputs), dict(example_kwargs or {})))
    walk.run(walk.root.graph)
    modules = {
        path: Module(type(part).__name__, tuple(child for child, _ in part.named_children()))
        for path, part in module.named_modules(remove_duplicate=False)
    }
    parameters = sum(part.numel() for part in module.parameters())
    return layered(name, fuse_leaves(walk.ops, modules), modules, parameters)
