"""A model as its graph: kinds of layers with counts, and their forward and backward operators.

Sizes are those of one sample (a sequence, an image) and grow with the samples of a micro-batch as
`scales` says; constant bytes, such as those of weights, have fields of their own. The JSON form of
these records is documented in docs/graphs.md and has the schema ``graph``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phaze_fast.models.transformer import MOST_BLOCKS
from phaze_fast.records import Count, Quantity, Record

_Whole = Annotated[int, Field(strict=True, ge=0, le=2**62)]
_Position = Annotated[int, Field(strict=True, ge=-1, le=2**31)]

OperatorKind = Literal[
    "gemm",
    "batched-gemm",
    "attention",
    "norm",
    "softmax",
    "activation",
    "multiply",
    "residual",
    "dropout",
    "rotary",
    "embedding",
    "cross-entropy",
    "gemm-input-gradient",
    "gemm-weight-gradient",
    "batched-gemm-gradient",
    "attention-backward",
    "norm-backward",
    "softmax-backward",
    "activation-backward",
    "multiply-backward",
    "dropout-backward",
    "rotary-backward",
    "embedding-backward",
    "cross-entropy-backward",
]
PRODUCTS = frozenset({"gemm", "batched-gemm", "attention"})
"""Forward kinds whose work is products."""

Split = Literal["no", "columns", "rows", "inside", "vocabulary"]


class GraphOperator(Record):
    """One operator of a layer, for one sample."""

    what: ClassVar[str] = "operator"
    name: str = Field(min_length=1)
    """Unique within its pass."""
    kind: OperatorKind
    """What it is; a convolution is the product it computes."""
    function: str = ""
    """What a norm, an activation or an element-wise operator computes, where that is known."""
    inputs: tuple[_Position, ...] = (-1,)
    """Positions of the operators of this pass it reads from; -1: what enters the layer's pass."""
    b: Count = 1
    """Number of independent products; of attention, heads."""
    m: _Whole = 0
    """Rows of the result; of attention, queries."""
    n: _Whole = 0
    """Columns of the result; of attention, keys."""
    k: _Whole = 0
    """Inner dimension of a product; of attention, the mean width of keys and values."""
    scales: Literal["b", "m", "n", "k", "none"] = "m"
    """Dimension that grows with the samples."""
    flops: Quantity = 0.0
    """Of products, two per multiply-accumulate."""
    read_bytes: Quantity = 0.0
    """Of activations."""
    write_bytes: Quantity = 0.0
    """Of activations."""
    fixed_read_bytes: Quantity = 0.0
    """Whatever the samples, such as weights."""
    fixed_write_bytes: Quantity = 0.0
    """Whatever the samples, such as weight gradients."""
    causal: bool = False
    """Whether attention leaves out what a causal mask hides; of an element-wise operator on scores,
    whether it lays such a mask over them."""
    window: _Whole = 0
    """Keys that a query sees at most, itself among them, where a causal mask hides those farther
    before it; 0: none are."""
    bias: bool = False
    """Whether a product adds a bias."""
    weights: _Whole = 0
    """Elements of the parameters that it reads."""
    forward: _Position = -1
    """Of a backward operator: the forward one it belongs to."""
    split: Split = "no"
    """How tensor-parallel devices share it: weights by columns or by rows, what lies between two
    such products, or a vocabulary."""


class SavedTensor(Record):
    """What the forward pass of a layer keeps for the backward pass."""

    what: ClassVar[str] = "tensor"
    name: str = Field(min_length=1)
    bytes: Quantity = 0.0
    """Of one sample."""
    fixed_bytes: Quantity = 0.0
    """Whatever the samples."""
    producer: _Position = -1
    """Forward operator that makes it; -1: what enters the layer."""
    split: bool = False
    """Whether tensor-parallel devices share it."""


class GraphLayer(Record):
    """One kind of layer."""

    what: ClassVar[str] = "layer"
    name: str = Field(min_length=1)
    """Path of the first such module, or ``embedding`` and ``head`` for what lies around them."""
    count: Count
    """How often the model has it."""
    parameters: _Whole
    """Of one; a parameter counts in the first layer that reads it."""
    forward: tuple[GraphOperator, ...]
    """In topological order."""
    backward: tuple[GraphOperator, ...] = ()
    """In topological order."""
    saved: tuple[SavedTensor, ...] = ()
    """Each storage once."""
    output_bytes: Quantity = 0.0
    """That later layers read, of one sample."""
    unsplit: str = ""
    """Why tensor-parallel devices cannot share it; empty where they can."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for operators in (self.forward, self.backward):
            for at, op in enumerate(operators):
                if any(source >= at for source in op.inputs):
                    raise ValueError(f"{op.name}: inputs: expected operators before it")
        if any(op.forward >= len(self.forward) for op in self.backward):
            raise ValueError(f"backward: expected positions below {len(self.forward)} in forward")
        return self

    @property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass through one such layer."""
        return float(sum(op.flops for op in self.forward))


class GraphModel(Record):
    """A model given by its operators; every stage takes it as it takes a transformer.

    Examples
    --------
    >>> fc = GraphOperator(name="fc", kind="gemm", m=4, k=8, n=8, flops=512.0, weights=64)
    >>> layer = GraphLayer(name="0", count=3, parameters=64, forward=(fc,))
    >>> model = GraphModel(name="mlp", layers=(layer,), order=(0, 0, 0), edges=((0, 1), (1, 2)))
    >>> model.gemms(), model.flops, model.parameters()
    ([(1, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 8)], 1536.0, 192)
    """

    what: ClassVar[str] = "graph"
    format: Literal["phaze-fast graph"] = "phaze-fast graph"
    """What the file is."""
    version: Literal[1] = 1
    """Of the format; a change that older readers would misread raises it."""
    name: str = Field(min_length=1)
    """What to call it."""
    seq: Count = 1
    """Tokens of a sample, as it was traced; 1 where samples are no sequences."""
    layers: tuple[GraphLayer, ...] = Field(min_length=1, max_length=MOST_BLOCKS + 2)
    """Each kind of layer once."""
    order: tuple[_Whole, ...] = Field(min_length=1, max_length=MOST_BLOCKS + 2)
    """Positions in `layers`, in order of execution."""
    edges: tuple[tuple[_Whole, _Whole], ...] = ()
    """Pairs of positions in `order`: the second reads what the first makes."""
    as_traced: bool = False
    """Whether to plan these operators as they are, also where they make up a transformer."""
    notes: str = ""
    """What a reader should know."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for at, layer in enumerate(self.layers):
            if self.order.count(at) != layer.count:
                raise ValueError(
                    f"order: {layer.name} stands there {self.order.count(at)} times; expected its "
                    f"count of {layer.count}"
                )
        if any(at >= len(self.layers) for at in self.order):
            raise ValueError(f"order: expected positions below {len(self.layers)}")
        if any(a >= b or b >= len(self.order) for a, b in self.edges):
            raise ValueError(f"edges: expected rising pairs below {len(self.order)}")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError("layers: expected names that differ")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the format and its version, and fields that hold no default."""
        return {"format": self.format, "version": self.version, **super().to_dict()}

    @property
    def blocks(self) -> int:
        """Layers that are neither the embedding nor the head."""
        return sum(x.count for x in self.layers if x.name not in ("embedding", "head"))

    @property
    def widest_split(self) -> int:
        """Tensor-parallel devices that may be tried; what does not divide evenly is refused."""
        return 2**20 if any(not layer.unsplit for layer in self.layers) else 1

    def parameters(self) -> int:
        """Distinct parameters of the model."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    def active_parameters(self) -> int:
        """All parameters: which of them a token visits is not known of a graph."""
        return self.parameters()

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each kind of layer, all layers of a kind together."""
        return {layer.name: layer.count * layer.parameters for layer in self.layers}

    def gemms(self) -> list[tuple[int, int, int, int]]:
        """(b, m, k, n) of every matrix product of one sample, in order of execution."""
        return [
            (op.b, op.m, op.k, op.n)
            for position in self.order
            for op in self.layers[position].forward
            if op.kind in ("gemm", "batched-gemm")
        ]

    @property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass."""
        return sum(layer.count * layer.flops for layer in self.layers)

    @property
    def is_chain(self) -> bool:
        """Whether every layer feeds only the next."""
        return all(b == a + 1 for a, b in self.edges)

    def __str__(self) -> str:
        kinds = ", ".join(f"{layer.count} x {layer.name}" for layer in self.layers)
        return f"{self.name}: {self.parameters() / 1e9:.4g} B parameters, {kinds}"
