"""The bones of a traced layer: its products, attentions, norms and non-linearities.

What lies between them (casts, copies, sums, rotations) is passed through. Names of modules are not
read, only which ATen operator each one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phaze_fast.models.graph_model import GraphLayer, GraphOperator

__all__ = ["Attention", "FeedForward", "Norm", "NotATransformerError", "Skeleton"]

_PASSES = """
    _to_copy clone copy mul div add sub rsub neg cat stack index index_select where masked_fill pow
    mean native_dropout dropout view_as_complex complex square sqrt constant_pad_nd repeat slice
    repeat_interleave tril triu
    """
_PASSED = frozenset(_PASSES.split())
_ROUTES = """
    topk sort scatter gather histc cumsum floor_divide sum index_put bitwise_not index_add clamp
    argsort zeros_like bincount eq ge lt one_hot div max masked_fill scatter_add clamp_min
    logical_not bitwise_and le gt fill zero
    """
_ROUTING = frozenset(_ROUTES.split())
_ROTATES = frozenset({"cat", "stack", "neg", "view_as_complex", "complex"})
_CHOICES = frozenset({"topk", "sort", "argsort", "histc", "bincount", "one_hot", "cumsum"})
ENTERS = -1
"""Stands for what enters a layer."""


class NotATransformerError(Exception):
    """A layer that no field of a transformer describes; the text says why."""


@dataclass(frozen=True)
class Norm:
    """A norm: one operator, or the row of them that it is written as."""

    last: int
    """Operator that makes its rows."""
    above: frozenset[int]
    """What it normalises."""
    width: int
    function: str


@dataclass(frozen=True)
class Attention:
    """Attention, fused or written as scores, softmax and mix."""

    last: int
    """Operator that makes its result."""
    queries: tuple[int, ...]
    """Products that make queries; likewise keys and values."""
    keys: tuple[int, ...]
    values: tuple[int, ...]
    heads: int
    width: int
    """Of a head; the mean of keys' and values' where they differ."""
    length: int
    causal: bool
    window: int
    rotated: bool
    capped: bool = False
    explicit: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Products up, a non-linearity, a product down."""

    ups: tuple[int, ...]
    down: int
    curve: str
    by_steps: bool
    rows: int
    """Rows that the non-linearity works on."""


def aten(op: GraphOperator) -> str:
    """Name of the ATen operator, which ends an operator's name."""
    return op.name.rsplit(".", 1)[-1].split("-")[0]


class Skeleton:
    """A layer's products, attentions, norms and non-linearities, and what feeds each."""

    def __init__(self, layer: GraphLayer) -> None:
        self.layer, self.ops = layer, layer.forward
        self.names = [aten(op) for op in self.ops]
        self.gemms = [at for at, op in enumerate(self.ops) if op.kind == "gemm"]
        self.norms = self._norms()
        self._stops = {at: at for at in self.gemms}
        self._stops |= {at: at for at, op in enumerate(self.ops) if op.kind == "attention"}
        self._stops |= {at: at for at, op in enumerate(self.ops) if op.kind == "batched-gemm"}
        self._stops |= {norm.last: norm.last for norm in self.norms}
        self.norms = [self._with_source(norm) for norm in self.norms]
        self._explained: set[int] = set()

    # ---- walking up ----

    def _walk(self, start: Iterable[int], stops: Iterable[int]) -> tuple[frozenset[int], list[int]]:
        """Walk against the data; give the operators at which that stops, and those passed."""
        ends, passed, found = frozenset(stops), [], set()
        waiting = list(start)
        while waiting:
            at = waiting.pop()
            if at < 0 or at in ends:
                found.add(at)
            elif at not in passed and not self._is_constant(at) and not self._chooses(at):
                passed.append(at)
                waiting += self.ops[at].inputs
        return frozenset(found), passed

    def _is_constant(self, at: int) -> bool:
        """Whether an operator works on parameters and constants alone."""
        op = self.ops[at]
        return op.scales == "none" and op.kind != "embedding" and not op.flops

    def _chooses(self, at: int) -> bool:
        """Whether an operator makes positions rather than rows."""
        return self.names[at] in _CHOICES

    def above(self, at: int) -> frozenset[int]:
        """Products, attentions and norms that feed an operator; `ENTERS` for the layer's input."""
        return self._walk(self.ops[at].inputs, self._stops)[0]

    def products_above(self, at: int) -> tuple[int, ...]:
        """Products with weights that feed an operator, norms passed."""
        return tuple(sorted(self._walk([at], self.gemms)[0]))

    def depends(self, at: int, on: int) -> bool:
        """Whether an operator's result depends on another's."""
        return on in self._walk([at], [on])[0]

    # ---- norms ----

    def _norms(self) -> list[Norm]:
        found = []
        for at, op in enumerate(self.ops):
            if op.kind == "norm":
                found.append(Norm(at, frozenset(), op.n, op.function))
            elif self.names[at] == "rsqrt":
                found.append(self._written_out(at))
        return found

    def _written_out(self, root: int) -> Norm:
        """Read a norm that is a row of operators around a reciprocal root of a mean of squares."""
        mean = root
        while self.names[mean] != "mean":
            mean = max(self.ops[mean].inputs)
            if mean < 0 or self.names[mean] not in ("mean", "add", "_to_copy"):
                raise NotATransformerError("a reciprocal root that is no norm's")
        squares = max(self.ops[mean].inputs)
        if squares < 0 or self.names[squares] not in ("pow", "square", "mul"):
            raise NotATransformerError("a mean that is no norm's")
        centred = any(
            at >= 0 and self.names[at] == "sub" and self.ops[at].n == self.ops[squares].n
            for at in self.ops[squares].inputs
        )
        last = next((at for at, op in enumerate(self.ops) if root in op.inputs), None)
        if last is None:
            raise NotATransformerError("a norm that nothing reads")
        function = "layernorm" if centred else "rmsnorm"
        return Norm(last, frozenset({squares}), self.ops[squares].n, function)

    def _with_source(self, norm: Norm) -> Norm:
        if norm.above:
            (squares,) = norm.above
            return Norm(norm.last, self.above(squares), norm.width, norm.function)
        return Norm(norm.last, self.above(norm.last), norm.width, norm.function)

    def norm_at(self, labels: frozenset[int]) -> Norm | None:
        """Give the norm that is all of what feeds an operator."""
        return next((n for n in self.norms if labels == {n.last}), None)

    # ---- attention ----

    def attentions(self) -> list[Attention]:
        """Attentions in order."""
        found = []
        for at, op in enumerate(self.ops):
            if op.kind == "attention":
                found.append(self._fused(at))
            elif op.kind == "softmax" and self._scores_above(at) is not None:
                found.append(self._explicit(at))
        return found

    def _scores_above(self, at: int) -> int | None:
        labels = {x for x in self.above(at) if x >= 0}
        scores = {x for x in labels if self.ops[x].kind == "batched-gemm"}
        return scores.pop() if len(scores) == 1 and len(labels) == 1 else None

    def _fused(self, at: int) -> Attention:
        op = self.ops[at]
        sides = [self.products_above(source) for source in op.inputs]
        if len(set(sides)) == 1:
            sides = [sides[0]] * 3
        return self._attention(at, sides, op, op.inputs[:1], op)

    def _explicit(self, softmax: int) -> Attention:
        scores = self._scores_above(softmax)
        mixes = [
            at
            for at, op in enumerate(self.ops)
            if op.kind == "batched-gemm"
            and softmax in self._walk(op.inputs, [softmax, *self.gemms])[0]
        ]
        if scores is None or len(mixes) != 1:
            raise NotATransformerError("scores without a mix of values")
        mix, op = self.ops[mixes[0]], self.ops[scores]
        between = self._walk(self.ops[softmax].inputs, [scores])[1]
        caps = [at for at in between if self.names[at] == "tanh"]
        self._explained |= {softmax, *caps}
        mask = next((self.ops[at] for at in between if self.ops[at].causal), op)
        values = self._walk(mix.inputs, [softmax, *self.gemms])[0] - {softmax}
        sides = [self.products_above(source) for source in op.inputs[:2]]
        if len(sides) == 1:
            sides *= 2
        sides.append(tuple(sorted(values)))
        found = self._attention(mixes[0], sides, op, op.inputs[:2], mask)
        return replace(found, capped=bool(caps), explicit=True)

    def _attention(
        self,
        last: int,
        sides: list[tuple[int, ...]],
        op: GraphOperator,
        starts: tuple[int, ...],
        mask: GraphOperator,
    ) -> Attention:
        if len(sides) != 3 or not all(sides) or any(ENTERS in side for side in sides):
            raise NotATransformerError("attention whose queries, keys and values are not products")
        passed = self._walk(starts, self.gemms)[1]
        queries, keys, values = sides
        return Attention(
            last=last,
            queries=queries,
            keys=keys,
            values=values,
            heads=op.b,
            width=op.k,
            length=op.m,
            causal=mask.causal or mask.window > 0,
            window=mask.window,
            rotated=any(self.names[at] in _ROTATES for at in passed),
        )

    def biased(self, at: int) -> bool:
        """Whether a bias is added to a product, by the product itself or right after it."""
        width = self.ops[at].n
        return self.ops[at].bias or any(
            self.names[i] == "add" and op.inputs == (at,) and op.weights == width
            for i, op in enumerate(self.ops)
        )

    # ---- feed-forward ----

    def feed_forward(self, down: int) -> FeedForward:
        """Read what stands before a product down."""
        ends, passed = self._walk(self.ops[down].inputs, self.gemms)
        curves = [at for at in passed if self.ops[at].kind == "activation"]
        if not curves or ENTERS in ends:
            raise NotATransformerError("a product that follows no non-linearity")
        if len(curves) != 1:
            raise NotATransformerError("several non-linearities before a product")
        name = self.names[curves[0]]
        (before,) = self.ops[curves[0]].inputs[:1]
        by_steps = name == "tanh"
        scaled = before >= 0 and self.names[before] == "mul"
        plain = scaled and sum(self.ops[at].n for at in ends) == self.ops[down].k
        curve = {"tanh": "gelu", "sigmoid": "gelu" if plain else "silu"}.get(name, name)
        if curve not in ("gelu", "relu", "silu"):
            raise NotATransformerError(f"the non-linearity {name}")
        self._explained |= set(curves)
        return FeedForward(tuple(sorted(ends)), down, curve, by_steps, self.ops[curves[0]].m)

    # ---- what is left ----

    def explain(self, operators: Iterable[int]) -> None:
        """Note operators that are accounted for."""
        self._explained |= set(operators)

    @property
    def drops(self) -> bool:
        """Whether anything is dropped at random."""
        return any(op.kind == "dropout" for op in self.ops)

    def check(self, routed: bool = False) -> None:
        """Refuse a layer with an operator that nothing accounts for."""
        known = _PASSED | (_ROUTING if routed else frozenset())
        norms = {"rsqrt"}
        for at, op in enumerate(self.ops):
            if at in self._explained or op.kind in ("norm", "attention", "batched-gemm"):
                continue
            if op.kind == "gemm" or (self.names[at] not in known | norms):
                raise NotATransformerError(f"{op.name} is no part of a transformer's block")
        used = {at for at, op in enumerate(self.ops) if op.kind == "batched-gemm"}
        explicit = 2 * sum(a.explicit for a in self.attentions())
        if len(used) != explicit:
            raise NotATransformerError("products of activations outside of attention")
