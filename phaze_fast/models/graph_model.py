"""A model as its graph: kinds of layers with counts, and their forward and backward operators.

Sizes are those of one sample (a sequence, an image) and grow with the samples of a micro-batch as
`scales` says; constant bytes, such as those of weights, have fields of their own. The JSON form of
these records is documented in docs/graphs.md and has the schema ``graph``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phaze_fast.errors import not_accepted
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
WIDE = "product-fp32"
"""Function of a product in fp32 without tensor cores, in a model of 16-bit weights."""
PRODUCTS = frozenset({"gemm", "batched-gemm", "attention"})
"""Forward kinds that compute products."""

Kernels = Literal["eager", "compiled"]
Split = Literal["no", "columns", "rows", "inside", "vocabulary"]


class GraphOperator(Record):
    """One operator of a layer, for one sample."""

    what: ClassVar[str] = "operator"
    name: str = Field(min_length=1)
    """Name, unique within its pass."""
    kind: OperatorKind
    """Kind of operator; a convolution has the kind of the product that it computes."""
    function: str = ""
    """Function of a norm, an activation or an element-wise operator, if known."""
    inputs: tuple[_Position, ...] = (-1,)
    """Positions, in this pass, of the operators that it reads from; -1: the input of the pass."""
    b: Count = 1
    """Number of independent products; for attention, heads."""
    m: _Whole = 0
    """Rows of the result; for attention, queries."""
    n: _Whole = 0
    """Columns of the result; for attention, keys."""
    k: _Whole = 0
    """Inner dimension of a product; for attention, the mean width of keys and values."""
    scales: Literal["b", "m", "n", "k", "none"] = "m"
    """Dimension that grows with the number of samples."""
    flops: Quantity = 0.0
    """FLOPs of products per sample, two per multiply-accumulate."""
    read_bytes: Quantity = 0.0
    """Bytes of activations that the operator reads, per sample."""
    write_bytes: Quantity = 0.0
    """Bytes of activations that the operator writes, per sample."""
    fixed_read_bytes: Quantity = 0.0
    """Bytes read independently of the number of samples, such as weights."""
    fixed_write_bytes: Quantity = 0.0
    """Bytes written independently of the number of samples, such as weight gradients."""
    causal: bool = False
    """Whether attention skips the scores that a causal mask hides; for an element-wise operator on
    scores, whether it applies such a mask."""
    window: _Whole = 0
    """Window of a causal mask: the most keys that a query sees, its own included; 0: no window."""
    bias: bool = False
    """Whether a product adds a bias."""
    weights: _Whole = 0
    """Number of elements of the parameters that the operator reads."""
    frozen: _Whole = 0
    """Number of the elements in `weights` that are not trained."""
    forward: _Position = -1
    """For a backward operator, the position of its forward operator."""
    split: Split = "no"
    """Role in a tensor-parallel split: a product with weights split by columns or by rows, an
    operator inside, between two such products, or one that is split by the vocabulary."""


class SavedTensor(Record):
    """A tensor that the forward pass of a layer stores for the backward pass."""

    what: ClassVar[str] = "tensor"
    name: str = Field(min_length=1)
    bytes: Quantity = 0.0
    """Bytes per sample."""
    fixed_bytes: Quantity = 0.0
    """Bytes that do not depend on the number of samples."""
    producer: _Position = -1
    """Forward operator that produces the tensor; -1: it is the input of the layer."""
    split: bool = False
    """Whether the tensor is sharded over tensor-parallel devices."""


class HeldTensor(SavedTensor):
    """A tensor that is allocated at the peak of a layer and is not stored for the backward pass.

    Its name is that of the operator that writes it, or ``input`` or ``output gradient`` where
    another layer writes it. Its producer is the forward operator that writes it or whose gradient
    operator does; -1: another layer writes it.
    """

    backward: bool = False
    """Whether the backward pass writes the tensor."""
    gradient: bool = False
    """Whether the tensor is the gradient of parameters of the layer."""


class LayerPeak(Record):
    """An instant at which a layer has the most memory allocated, at some number of samples."""

    what: ClassVar[str] = "peak"
    operator: str = Field(min_length=1)
    """Name of the operator that runs at this instant."""
    backward: bool = False
    """Whether that operator runs in the backward pass."""
    tensors: tuple[HeldTensor, ...] = ()
    """Tensors that are allocated then besides those stored for the backward pass."""
    absent: tuple[_Whole, ...] = ()
    """Positions in `saved` of tensors that are not allocated then: not yet, or no longer."""


class GraphLayer(Record):
    """One kind of layer: layers with the same operators and parameters."""

    what: ClassVar[str] = "layer"
    name: str = Field(min_length=1)
    """Path of its first module, or ``embedding`` and ``head`` before and after the blocks."""
    count: Count
    """Number of layers of this kind in the model."""
    parameters: _Whole
    """Parameters of one such layer; a parameter counts in the first layer that reads it."""
    frozen_parameters: _Whole = 0
    """Number of `parameters` that are not trained, without gradients or optimiser state."""
    forward: tuple[GraphOperator, ...]
    """Forward operators in topological order."""
    backward: tuple[GraphOperator, ...] = ()
    """Backward operators in topological order."""
    saved: tuple[SavedTensor, ...] = ()
    """Saved tensors, each storage once."""
    peaks: tuple[LayerPeak, ...] = ()
    """Peaks of the forward and of the backward pass; empty: they are estimated from the operators.
    Tensors that earlier layers save, and gradients of later layers, are not counted."""
    input_bytes: Quantity = 0.0
    """Bytes per sample of its input that it does not save, but stores if it is recomputed."""
    output_bytes: Quantity = 0.0
    """Bytes per sample of the layer's results that later layers read."""
    unsplit: str = ""
    """Why the layer cannot be split over tensor-parallel devices; empty if it can."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for operators in (self.forward, self.backward):
            for at, op in enumerate(operators):
                if any(source >= at for source in op.inputs):
                    raise ValueError(f"{op.name}: inputs: expected operators before it")
        if any(op.forward >= len(self.forward) for op in self.backward):
            raise ValueError(f"backward: expected positions below {len(self.forward)} in forward")
        if self.frozen_parameters > self.parameters:
            raise not_accepted(
                "frozen_parameters", self.frozen_parameters, f"at most {self.parameters}"
            )
        if any(at >= len(self.saved) for peak in self.peaks for at in peak.absent):
            raise ValueError(f"peaks: absent: expected positions below {len(self.saved)} in saved")
        if any(x.producer >= len(self.forward) for peak in self.peaks for x in peak.tensors):
            raise ValueError(f"peaks: tensors: producer: expected below {len(self.forward)}")
        return self

    @property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass through one layer of this kind."""
        return float(sum(op.flops for op in self.forward))


def held_bytes(tensor: SavedTensor, samples: int, width: int = 1, rows: bool = False) -> float:
    """Return the bytes of a tensor on one device; arguments as `peak_bytes`.

    Examples
    --------
    >>> held_bytes(SavedTensor(name="x#0", bytes=8.0, fixed_bytes=2.0, split=True), 3, width=2)
    13.0
    """
    size = int(tensor.fixed_bytes + tensor.bytes * samples)
    return float(size // (width if tensor.split or rows else 1))


def peak_bytes(
    layer: GraphLayer, peak: LayerPeak, samples: int, width: int = 1, rows: bool = False
) -> float:
    """Return the bytes of a layer at one of its peaks on one device, stored tensors included.

    Parameters
    ----------
    layer, peak
        A layer and one of its peaks.
    samples
        Samples of a micro-batch.
    width
        Tensor-parallel devices.
    rows
        Whether these devices also shard all other tensors by rows, as sequence parallelism does.

    Examples
    --------
    >>> saved = SavedTensor(name="x#0", bytes=8.0)
    >>> held = HeldTensor(name="d-fc", bytes=4.0, fixed_bytes=6.0)
    >>> peak = LayerPeak(operator="d-fc", backward=True, tensors=(held,))
    >>> fc = GraphOperator(name="fc", kind="gemm")
    >>> layer = GraphLayer(
    ...     name="0", count=1, parameters=0, forward=(fc,), saved=(saved,), peaks=(peak,)
    ... )
    >>> peak_bytes(layer, peak, 2)
    30.0
    """
    absent = frozenset(peak.absent)
    tensors: list[SavedTensor] = [*peak.tensors]
    tensors += [tensor for at, tensor in enumerate(layer.saved) if at not in absent]
    return float(sum(held_bytes(tensor, samples, width, rows) for tensor in tensors))


class GraphModel(Record):
    """A model given by its operators; accepted wherever a transformer is.

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
    """Identifier of the file format."""
    version: Literal[1] = 1
    """Version of the format; raised by changes that older readers would misread."""
    name: str = Field(min_length=1)
    """Name of the model."""
    seq: Count = 1
    """Tokens per sample as traced; 1 if samples are not sequences."""
    sample: Literal["sequence", "image"] = "sequence"
    """What one sample is."""
    layers: tuple[GraphLayer, ...] = Field(min_length=1, max_length=MOST_BLOCKS + 2)
    """Each kind of layer once."""
    order: tuple[_Whole, ...] = Field(min_length=1, max_length=MOST_BLOCKS + 2)
    """Positions in `layers`, in order of execution."""
    edges: tuple[tuple[_Whole, _Whole], ...] = ()
    """Pairs of positions in `order`: the second layer reads the output of the first."""
    as_traced: bool = False
    """Whether to plan these operators as they are, even if they form a transformer."""
    kernels: Kernels = "eager"
    """Whether the operators are those of the module's code, or the kernels that torch.compile makes
    of them."""
    compiled: GraphModel | None = None
    """The graph of this model as torch.compile runs it, for software that compiles."""
    notes: str = ""
    """Remarks on the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for at, layer in enumerate(self.layers):
            if self.order.count(at) != layer.count:
                raise ValueError(
                    f"order: {layer.name} occurs {self.order.count(at)} times; expected its "
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
        """Return plain data: the format, its version, and fields that differ from their default."""
        return {"format": self.format, "version": self.version, **super().to_dict()}

    @property
    def blocks(self) -> int:
        """Number of layers that are neither the embedding nor the head."""
        return sum(x.count for x in self.layers if x.name not in ("embedding", "head"))

    @property
    def widest_split(self) -> int:
        """Largest tensor-parallel width to try; `opgraph.strategy.reasons` refuses others."""
        return 2**20 if any(not layer.unsplit for layer in self.layers) else 1

    def parameters(self) -> int:
        """Distinct parameters of the model."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    def trained_parameters(self) -> int:
        """Parameters that have gradients and optimiser state."""
        frozen = sum(layer.count * layer.frozen_parameters for layer in self.layers)
        return self.parameters() - frozen

    def active_parameters(self) -> int:
        """All parameters, since a graph does not show which experts a token uses."""
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
        """Whether every layer feeds only the next layer."""
        return all(b == a + 1 for a, b in self.edges)

    def __str__(self) -> str:
        kinds = ", ".join(f"{layer.count} x {layer.name}" for layer in self.layers)
        return f"{self.name}: {self.parameters() / 1e9:.4g} B parameters, {kinds}"
