"""Operator graphs as arrays: operators, CSR edges, stored tensors, sets of recomputed operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.models.graph_model import WIDE, OperatorKind
from phaze_fast.opgraph.builder import OperatorSpec, Tensor
from phaze_fast.opgraph.family import Each
from phaze_fast.records import FrozenDict, changed
from phaze_fast.tables import Array, Brief

FUNCTIONS: tuple[str, ...] = _core.FUNCTIONS
"""Names of functions by code; the first four are not functions of the vector units."""

_CODES = {name: code for code, name in enumerate(FUNCTIONS)}
_DIRECTIONS = {"gemm-input-gradient": "-input", "gemm-weight-gradient": "-weight"}
_OF_KIND = {"residual": "add", "norm": "layernorm", "activation": "gelu"}


@lru_cache(maxsize=1024)
def function_code(kind: str, function: str = "") -> int:
    """Return the code of an operator's function, by default that of its kind.

    Examples
    --------
    >>> FUNCTIONS[function_code("norm-backward", "rmsnorm")]
    'rmsnorm-backward'
    >>> FUNCTIONS[function_code("gemm-weight-gradient")]
    'product'
    >>> FUNCTIONS[function_code("gemm-weight-gradient", "convolution-nchw")]
    'convolution-nchw-weight'
    """
    base = kind.removesuffix("-backward")
    if "gemm" in base and function != WIDE:
        return _CODES[function + _DIRECTIONS.get(kind, "") if function else "product"]
    name = function or _OF_KIND.get(base, base)
    if function == WIDE:
        return _CODES[name]
    return _CODES[name + kind.removeprefix(base)]


_IS_PRODUCT = np.array(
    [name.startswith(("product", "attention", "convolution", "depthwise")) for name in FUNCTIONS]
)


_COMPUTED: tuple[str, ...] = get_args(OperatorKind)
_BACKWARD_FROM = _COMPUTED.index("gemm-input-gradient")
KINDS = (*_COMPUTED[:_BACKWARD_FROM], "collective", *_COMPUTED[_BACKWARD_FROM:])
"""Kinds of operators: forward kinds, collectives, backward kinds."""
UNITS = ("TC", "VC", "TC+VC", "NET")
GROUPS = (
    *("none", "tensor", "context", "expert", "expert-tensor"),
    *("context-heads", "context-ring", "expert-mesh"),
)
"""Groups of devices that communicate: those of `Strategy`; of a context group, the neighbours that
exchange rows for heads and those that pass keys and values round a ring; all devices that together
have one copy of the experts."""
EXCHANGES = ("expert", "expert-mesh")
"""The groups of `GROUPS` in which rows are sent to experts and back."""
FORMATS = ("", "fp8", "fp4", "int8")
"""Number formats of a product's operands; the first, empty one is that of activations."""
AGAIN = "-again"
"""Suffix of the names of operators that the backward pass repeats."""
CAST = "-cast"
"""Suffix of the names of casts to a low format."""
PASSING_CAST = f"-pass{CAST}"
"""Suffix of the names of casts that are freed after the product that reads them."""
_CODE_OF_KIND, _CODE_OF_UNIT, _CODE_OF_GROUP, _CODE_OF_FORMAT = (
    {name: code for code, name in enumerate(names)} for names in (KINDS, UNITS, GROUPS, FORMATS)
)
_COLLECTIVE = {name: code for code, name in enumerate(_core.COLLECTIVE_OPS)}


@dataclass(frozen=True)
class OpGraph(Brief):
    """Operators of one layer on one device, in topological order.

    Attributes
    ----------
    ops
        One record per operator, dtype ``_core.OPERATOR_DTYPE``.
    names
        One name per operator.
    indptr, indices
        Edges in CSR form: successors of i are ``indices[indptr[i]:indptr[i + 1]]``.
    tensors
        Tensors that the forward pass stores; empty in a backward graph.
    """

    name: str
    ops: Array
    names: tuple[str, ...]
    indptr: Array
    indices: Array
    tensors: tuple[Tensor, ...] = ()
    in_order: bool = False
    """Whether operators run one after another in graph order, each on all cores, as in a traced
    program; else a schedule is searched."""
    resident: bool = False
    """Whether arrays between products may stay on chip, as far as a chip's buffer allows."""
    weight_bytes: float = 0.0
    """Bytes of the weights of all layers of the device if these stay on chip too; else 0."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def family(self) -> OpGraph:
        """The graph with the sizes of all members of its family, see `opgraph.family`."""
        return self

    @property
    def place(self) -> int:
        """The number of the graph among the members of its family."""
        return 0

    @cached_property
    def products(self) -> Array:
        """Whether each operator is a product, a convolution or attention."""
        function = self.ops["function"]
        products: Array = _IS_PRODUCT[function if function.ndim == 1 else function[0]]
        return products

    @cached_property
    def edge_ends(self) -> tuple[Array, Array]:
        """Where each edge begins and ends."""
        begins = np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.indptr))
        return begins, self.indices.astype(np.int32)

    @cached_property
    def most_at_once(self) -> Array:
        """Most operators that can run at once where each operator does, itself included."""
        if self.in_order:
            return np.ones(len(self))
        return _most_at_once(self.indptr.tobytes(), self.indices.tobytes())

    @cached_property
    def _largest_payloads(self) -> dict[int, list[float]]:
        """Most bytes of a collective of each group of `GROUPS`, for each member of a family."""
        ops = np.atleast_2d(self.ops)
        groups, payloads = ops["group"][0], ops["payload_bytes"]
        found = np.unique(groups).tolist()
        return {group: payloads[:, groups == group].max(axis=1).tolist() for group in found}

    def largest_payload(self, group: str) -> float:
        """Most bytes of a collective of a group of `GROUPS`; 0 if there is none."""
        by_member = self.family._largest_payloads.get(_CODE_OF_GROUP[group], [0.0])
        return by_member[self.place if len(by_member) > 1 else 0]

    @property
    def flops(self) -> float:
        """FLOPs of all operators."""
        return float(self.ops["flops"].sum())

    def edges(self) -> list[tuple[int, int]]:
        """Edges as pairs."""
        begins, ends = self.edge_ends
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def gemms(self) -> list[tuple[int, int, int, int]]:
        """(b, m, k, n) of every matrix product, in order."""
        wanted = np.isin(self.ops["kind"], [KINDS.index("gemm"), KINDS.index("batched-gemm")])
        return [tuple(int(op[d]) for d in "bmkn") for op in self.ops[wanted]]  # type: ignore[misc]

    def stashed_bytes(
        self, recompute: str | Iterable[str] = "none", statistics: bool = True
    ) -> int:
        """Bytes stored for the backward pass of one micro-batch.

        Parameters
        ----------
        recompute
            ``none``, ``selective`` (the attention scores), ``full`` (all but the input), ``needed``
            (as full, without operators whose outputs the backward pass does not need), sets of
            `RECOMPUTE_SETS` joined by ``+``, or names of operators whose outputs are computed again
            instead of stored.
        statistics
            Whether to count row statistics, random states and masks shared by all heads.
        """
        if isinstance(recompute, str) and OFFLOAD in recompute.split("+"):
            return 0
        again = self.recomputed(recompute)
        return sum(
            tensor.bytes
            for tensor in self.tensors
            if tensor.producer not in again
            and (not tensor.instead_of or tensor.instead_of in again)
            and (statistics or not tensor.statistic)
        )

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of the operators that lead to a tensor which the backward pass reads."""
        wanted = {tensor.producer for tensor in self.tensors}
        needed = [name in wanted for name in self.names]
        for i in reversed(range(len(self))):
            after = self.indices[self.indptr[i] : self.indptr[i + 1]]
            needed[i] = needed[i] or any(needed[j] for j in after)
        return frozenset(name for name, is_so in zip(self.names, needed, strict=True) if is_so)

    @cached_property
    def casts(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """Map each cast to the operators whose recomputation repeats the cast."""
        casts: list[tuple[str, frozenset[str]]] = []
        for i, name in enumerate(self.names):
            if not name.endswith(CAST):
                continue
            others = {name.removesuffix(CAST).removesuffix("-pass")}
            if name.endswith(PASSING_CAST):
                after = self.indices[self.indptr[i] : self.indptr[i + 1]]
                others |= {self.names[j] for j in after}
            casts.append((name, frozenset(others)))
        return tuple(casts)

    def offloaded_bytes(self, recompute: str) -> int:
        """Bytes that a mode copies to the host for the backward pass of one micro-batch."""
        sets = recompute.split("+")
        if OFFLOAD not in sets:
            return 0
        return self.stashed_bytes("+".join(name for name in sets if name != OFFLOAD) or "none")

    def recomputed(self, recompute: str | Iterable[str]) -> frozenset[str]:
        """Names of the operators that a mode, or a list of names, computes again."""
        if recompute == "none":
            return frozenset()
        if recompute == "full":
            return frozenset(self.names)
        if recompute == "needed":
            return self.needed
        if recompute == "selective":
            return frozenset(self.names) & SELECTIVE
        if isinstance(recompute, str):
            return _in_sets(self.names, recompute, self.casts)
        chosen = frozenset(recompute)
        for name in sorted(chosen - frozenset(self.names)):
            raise InvalidInputError(f"recompute: {name!r} is unknown; {nearest(name, self.names)}")
        return chosen


class MemberGraph(OpGraph):
    """The graph of one member of a family, whose tensors are split from the others' when read."""

    _family: OpGraph
    _place: int

    @classmethod
    def split(cls, graph: OpGraph, count: int) -> list[OpGraph]:
        """Split the graph of a family into those of its `count` members."""
        every = list(graph.ops) if graph.ops.ndim > 1 else [graph.ops] * count
        shared = {**vars(graph), "_family": graph}
        same = ("casts", "products", "edge_ends")
        shared |= {name: getattr(graph, name) for name in same}
        del shared["tensors"]
        members = []
        for at, ops in enumerate(every):
            member = object.__new__(cls)
            vars(member).update(shared, ops=ops, _place=at)
            members.append(member)
        return list(members)

    @property
    def family(self) -> OpGraph:
        """The graph with the sizes of all members."""
        return self._family

    @property
    def place(self) -> int:
        """The number of the graph among the members of its family."""
        return self._place

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that the forward pass stores."""
        bytes_ = [np.asarray(one.bytes) for one in self._family.tensors]
        own = [(size if size.ndim == 0 else size[self._place]).item() for size in bytes_]
        sized = zip(self._family.tensors, own, strict=True)
        return tuple(changed(one, bytes=size) for one, size in sized)

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of the operators that lead to a tensor which the backward pass reads."""
        return self._family.needed


@lru_cache(maxsize=4096)  # called again for every batch of chips
def _in_sets(
    names: tuple[str, ...], recompute: str, casts: tuple[tuple[str, frozenset[str]], ...]
) -> frozenset[str]:
    """Names of operators that belong to sets of `RECOMPUTE_SETS` joined by ``+``.

    A cast to a low format is repeated if its input is recomputed and, if the cast was not stored,
    if a product that reads it is recomputed.
    """
    canonical_recompute(recompute)
    sets = [RECOMPUTE_SETS[name] for name in recompute.split("+")]
    again = frozenset(name for name in names if any(_without_part(name) in s for s in sets))
    return again | {name for name, others in casts if others & again}


def _without_part(name: str) -> str:
    """Return an operator's name without the prefix of its part of the layer.

    A suffix after ``+`` is removed too: adapters and restored weights are named product+suffix.
    """
    name = name.partition("+")[0]
    for part in ("cross-", "expert-", "shared-"):
        if name.startswith(part):
            return name.removeprefix(part)
    return name


SELECTIVE = frozenset(
    {"scores", "score-cap", "softmax", "score-dropout"}
    | {"scores-to-fp32", "score-scale", "score-mask", "weights-from-fp32"}
)
"""Operators of explicit attention that selective recomputation runs again (Korthikanti 2022)."""

RECOMPUTE_SETS = FrozenDict(
    {
        "norms": frozenset(
            {"attention-norm", "cross-norm", "norm", "ffn-norm", "attention-output-norm"}
            | {"ffn-output-norm", "q-norm", "k-norm", "kv-norm"}
        ),
        "activations": frozenset({"activation"}),
        "gated-product": frozenset({"multiply"}),
        "up-projection": frozenset({"up", "gate", "gate-up"}),
        "output-projection": frozenset({"proj", "attention-residual"}),
        "alternate-products": frozenset({"k", "rotate-k", "proj", "attention-residual", "up"}),
        "attention": SELECTIVE | {"attention", "attention-early"},
        "offload": frozenset(),
    }
)
"""Operators of a block that are recomputed together, as training frameworks name such sets: the
norms' outputs; those of the activation function; those of a gated feed-forward's product; those of
its projections up; those of the projection after attention; every second product (keys, the
projection after attention, one projection up), as torchtitan's policy by operators has it; the
attention scores, or all of a fused attention. ``offload`` recomputes nothing: what a block would
store is copied to the host's memory and back."""
OFFLOAD = "offload"


_MODES = ("none", "selective", "needed", "full")


def canonical_recompute(mode: str) -> str:
    """Return the canonical spelling of a recompute mode: its sets of operators in fixed order.

    Raises
    ------
    InvalidInputError
        Where the mode is neither ``none``, ``selective``, ``needed`` nor ``full``, nor sets joined
        by ``+``.

    Examples
    --------
    >>> canonical_recompute("activations+norms")
    'norms+activations'
    """
    if mode in _MODES:
        return mode
    names = mode.split("+")
    for name in names:
        if name not in RECOMPUTE_SETS:
            known = [*_MODES, *RECOMPUTE_SETS]
            raise InvalidInputError(
                f"recompute: {name!r} is not accepted; {nearest(name, known)}; sets may be joined "
                "by +"
            )
    return "+".join(name for name in RECOMPUTE_SETS if name in names)


def recompute_order(mode: str) -> tuple[int, int, tuple[int, ...]]:
    """Return a key that sorts canonical modes by what they store, most first.

    The order is: none, selective, sets by their number, needed, full, sets with ``offload``.
    """
    if mode in _MODES:
        return 2 * (mode in ("needed", "full")), _MODES.index(mode), ()
    positions = tuple(list(RECOMPUTE_SETS).index(name) for name in mode.split("+"))
    return 1 + 2 * (OFFLOAD in mode.split("+")), len(positions), positions


_NO_EPILOGUES = (0,) * _core.MAX_EPILOGUES


def _epilogue_codes(spec: OperatorSpec) -> tuple[int, ...]:
    """Return the codes of the functions fused onto a product, and zeros."""
    if not spec.epilogue_functions:
        return _NO_EPILOGUES
    codes = [function_code(kind, function) for kind, function in spec.epilogue_functions]
    return (*codes, *[0] * (_core.MAX_EPILOGUES - len(codes)))


def figures(spec: OperatorSpec) -> tuple[Any, ...]:
    """Return an operator spec as the fields of ``_core.OPERATOR_DTYPE``, in their order."""
    return (
        _CODE_OF_KIND[spec.kind],
        _CODE_OF_UNIT[spec.unit],
        spec.b,
        spec.m,
        spec.n,
        spec.k,
        spec.flops,
        spec.read_bytes,
        spec.write_bytes,
        spec.payload_bytes,
        _COLLECTIVE.get(spec.collective, -1),
        _CODE_OF_GROUP[spec.group],
        spec.causal,
        spec.epilogue,
        function_code(spec.kind, spec.function),
        _CODE_OF_FORMAT[spec.format],
        _epilogue_codes(spec),
        0.0,  # nothing is kept on chip
    )


def loose(name: str, parts: Sequence[tuple[OperatorSpec, int]]) -> OpGraph:
    """Return a graph without edges; a spec whose sizes are arrays stands for many operators.

    Parameters
    ----------
    name
        Name of the graph.
    parts
        Operator specs, and how many operators each describes.
    """
    ops = np.zeros(sum(count for _, count in parts), dtype=_core.OPERATOR_DTYPE)
    at = 0
    for spec, count in parts:
        for field, value in zip(ops.dtype.names or (), figures(spec), strict=True):
            ops[field][at : at + count] = value
        at += count
    ops.setflags(write=False)
    nothing = np.zeros(0, dtype=np.int32)
    return OpGraph(name, ops, ("",) * at, np.zeros(at + 1, dtype=np.int32), nothing)


_NUMBERS = slice(2, 10)
"""Positions in `figures` of the numbers in which members of a family may differ."""


def _records(rows: list[tuple[Any, ...]]) -> Array:
    """Return operators as records; for a family, of shape (members, operators)."""
    columns = dict(zip(_core.OPERATOR_DTYPE.names or (), zip(*rows, strict=True), strict=False))
    varied = {
        name: [at for at, value in enumerate(columns[name]) if type(value) is Each]
        for name in list(columns)[_NUMBERS]
    }
    members = {len(columns[name][at]) for name, some in varied.items() for at in some[:1]}
    ops: Array = np.zeros((*members, len(rows)), dtype=_core.OPERATOR_DTYPE)
    for name, values in columns.items():
        column, some = ops[name], varied.get(name)
        if not some:
            column[...] = values
            continue
        column[...] = [0 if type(value) is Each else value for value in values]
        for at in some:
            column[:, at] = values[at]
    return ops


def lay_out(
    name: str,
    specs: list[OperatorSpec],
    tensors: tuple[Tensor, ...],
    in_order: bool = False,
    resident: bool = False,
) -> OpGraph:
    """Return the operators as arrays, without the virtual ones; see `_records` for families."""
    names: list[str] = []
    rows: list[tuple[Any, ...]] = []
    successors: list[list[int]] = []
    at: list[tuple[int, ...]] = []  # of each spec: its position, or of what a virtual one reads
    for spec in specs:
        read: tuple[int, ...] = tuple(sorted({j for i in spec.inputs if i >= 0 for j in at[i]}))
        if spec.virtual:
            at.append(read)
            continue
        at.append((len(names),))
        for source in read:
            successors[source].append(len(names))
        names.append(spec.name)
        rows.append(figures(spec))
        successors.append([])
    ops = _records(rows)
    indptr = np.cumsum([0, *(len(s) for s in successors)]).astype(np.int32)
    indices = np.array([j for s in successors for j in s], dtype=np.int32)
    for array in (ops, indptr, indices):
        array.setflags(write=False)
    return OpGraph(name, ops, tuple(names), indptr, indices, tensors, in_order, resident)


@lru_cache(maxsize=1024)
def _most_at_once(indptr: bytes, indices: bytes) -> Array:
    """Return `OpGraph.most_at_once` by Dilworth's theorem, for edges in CSR form."""
    begins, ends = np.frombuffer(indptr, np.int32), np.frombuffer(indices, np.int32).tolist()
    after: list[set[int]] = [set() for _ in begins[1:]]
    for i in reversed(range(len(after))):
        for j in ends[begins[i] : begins[i + 1]]:
            after[i] |= {j} | after[j]
    most = []
    for i in range(len(after)):
        others = {j for j in range(len(after)) if j not in after[i] and i not in after[j]}
        before: dict[int, int] = {}  # by operator, the one before it in its chain
        chained = sum(_chain(j, after, others, before, set()) for j in others)
        most.append(len(others) - chained)
    return np.array(most, dtype=float)


def _chain(
    i: int, after: list[set[int]], others: set[int], before: dict[int, int], tried: set[int]
) -> bool:
    """Put an operator before a later one in a chain, moving others if needed; whether it worked."""
    for j in after[i] & others - tried:
        tried.add(j)
        if j not in before or _chain(before[j], after, others, before, tried):
            before[j] = i
            return True
    return False
