"""Rewrites of a layer's operators: fusion of element-wise operators, products in low precision.

An element-wise operator is fused where the product it follows has no other consumer: it then works
on the product's tile before that is written. A collective in between prevents fusion. Results of
the product, or of operators fused before, that the backward pass reads are written all the same.

Each tensor that products in a format of fewer bits read is cast once, in one kernel that also
writes the transpose where a product of the backward pass reads one; a gather of the tensor comes
after the cast and moves the smaller format. Where a precision transposes late, a kernel of the
backward pass does so; where it casts weights in every pass, an operator before each product does.
Outputs, attention and everything element-wise stay in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from phaze_fast import _core
from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec, Tensor, vector_spec
from phaze_fast.opgraph.graph import AGAIN, CAST, PASSING_CAST
from phaze_fast.records import changed
from phaze_fast.software import Precision

Fusion = Literal[
    "none",
    "epilogues",
    "full",
    "full+activations",
    "full+projections",
    "full+weights",
    "full+any",
]
"""What is fused: nothing; element-wise operators onto the product before them; also products with
one another, whose arrays then stay on chip as far as the buffer allows. With ``+activations``, the
outputs of a feed-forward's element-wise operators are not stored but computed again inside the
fused groups of the backward pass; with ``+projections``, their inputs are as well. With
``+weights``, the weights of all layers of a device stay on chip from one micro-batch to the next,
where the buffer holds them twice. ``full+any`` chooses the fastest of these four per strategy."""

ANY_FORM = "full+any"


def forms(fusion: Fusion) -> tuple[Fusion, ...]:
    """List the forms of fusion that a search chooses from.

    Examples
    --------
    >>> forms("epilogues"), len(forms("full+any"))
    (('epilogues',), 4)
    """
    if fusion == ANY_FORM:
        return "full", "full+activations", "full+projections", "full+weights"
    return (fusion,)


_PRODUCTS = frozenset({"gemm", "gemm-input-gradient", "batched-gemm"})
_BOTH_WAYS = ("activation", "dropout", "multiply", "rotary")
_EPILOGUES = {"residual", *_BOTH_WAYS, *(f"{kind}-backward" for kind in _BOTH_WAYS)}


def fuse(
    specs: list[OperatorSpec], tensors: tuple[Tensor, ...]
) -> tuple[list[OperatorSpec], tuple[Tensor, ...]]:
    """Fuse operators where possible; stored tensors of fused ones name the product as producer."""
    consumers: dict[int, int] = {}
    stashed: dict[str, float] = {}  # bytes of each operator's output that the backward pass reads
    for tensor in tensors:
        if not tensor.instead_of:
            stashed[tensor.producer] = stashed.get(tensor.producer, 0.0) + tensor.bytes
    result_bytes = [spec.write_bytes for spec in specs]  # without what the backward pass keeps
    last_stage = [spec.name for spec in specs]
    for spec in specs:
        for source in set(spec.inputs):
            consumers[source] = consumers.get(source, 0) + 1
    fused = list(specs)
    fused_into: dict[int, int] = {}  # a fused operator -> the product it became part of
    renamed: dict[str, str] = {}
    for i, spec in enumerate(specs):
        inputs = tuple(fused_into.get(source, source) for source in spec.inputs)
        fused[i] = changed(spec, inputs=inputs)
        host = inputs[0]
        original = spec.inputs[0]
        if host < 0 or spec.virtual or spec.kind not in _EPILOGUES:
            continue
        if fused[host].kind not in _PRODUCTS or consumers[original] != 1:
            continue
        if len(fused[host].epilogue_functions) == _core.MAX_EPILOGUES:
            continue
        others = tuple(source for source in inputs[1:] if source != host)
        if any(source > host for source in others):
            continue  # another input is computed after the product
        kept_bytes = stashed.get(last_stage[host], 0.0)
        fused[host] = _with_epilogue(fused[host], spec, others, result_bytes[host], kept_bytes)
        # An epilogue on some columns, such as a rotary embedding, leaves the others as they are.
        result_bytes[host] = max(result_bytes[host], spec.write_bytes)
        last_stage[host] = spec.name
        fused[i] = changed(fused[i], virtual=True, inputs=(host,))
        fused_into[i] = host
        renamed[spec.name] = fused[host].name
    kept_tensors = tuple(changed(t, producer=renamed.get(t.producer, t.producer)) for t in tensors)
    return fused, kept_tensors


def _with_epilogue(
    product: OperatorSpec,
    epilogue: OperatorSpec,
    others: tuple[int, ...],
    result_bytes: float,
    stashed_bytes: float,
) -> OperatorSpec:
    """Fuse an element-wise operator onto a product, whose result it then does not read from memory.

    Of that result (`result_bytes`), only what the backward pass reads is written.
    """
    extra = max(epilogue.read_bytes - result_bytes, 0.0)
    return changed(
        product,
        unit="TC+VC",
        epilogue=product.epilogue + 1,
        epilogue_functions=(
            *product.epilogue_functions,
            (epilogue.kind, epilogue.function),
        ),
        inputs=(*product.inputs, *others),
        read_bytes=product.read_bytes + extra,
        write_bytes=product.write_bytes
        - result_bytes
        + stashed_bytes
        + max(result_bytes, epilogue.write_bytes),
    )


# ---- recomputation inside fused groups ----


def recomputed_in_groups(
    forward: Sequence[OperatorSpec],
    backward: Sequence[OperatorSpec],
    tensors: tuple[Tensor, ...],
    projections: bool,
) -> tuple[list[OperatorSpec], tuple[Tensor, ...]] | None:
    """Repeat operators of dense feed-forwards in the backward pass in place of storing outputs.

    The gradient of the last projection's weights reads the output of activation and gate, which are
    repeated from their own inputs. For the gradient of the gate, the activation is repeated on the
    tile of the product before.

    Parameters
    ----------
    forward, backward, tensors
        Operators of both passes before any are fused, and what is stored.
    projections
        Whether to repeat the first projections too, which then store nothing but their input.

    Returns
    -------
    tuple or None
        The backward pass and what is stored; None where nothing can be repeated in this manner.
    """
    at = {spec.name: i for i, spec in enumerate(forward)}
    repeated: list[OperatorSpec] = []
    places: dict[str, int] = {}
    readers: dict[str, list[str]] = {}  # backward operators -> repeated operators they read
    on_tile: dict[str, OperatorSpec] = {}  # products -> activation repeated on their tile

    def repeat(name: str, *reading: str) -> None:
        spec = forward[at[name]]
        sources = [places.get(forward[i].name, -1) for i in spec.inputs if i >= 0]
        inputs = tuple(source for source in sources if source >= 0) or (-1,)
        repeated.append(changed(spec, name=name + AGAIN, inputs=inputs))
        places[name] = len(repeated) - 1
        for reader in reading:
            readers.setdefault(reader, []).append(name)

    dropped: set[str] = set()
    for part in ("", "shared-"):
        gated = f"{part}multiply" in at
        made = f"{part}gated" if gated else f"{part}activation-output"
        if not any(tensor.name == made and tensor.operand == "only" for tensor in tensors):
            continue
        if projections:
            first = [f"{part}{name}" for name in ("up", "gate", "gate-up") if f"{part}{name}" in at]
            if any(_is_gathered(forward, at[name]) for name in first):
                continue
            for name in first:
                bent = not gated or not name.endswith("up") or name.endswith("gate-up")
                slopes = [f"d-{part}activation"] * bent + [f"d-{part}multiply"] * gated
                repeat(name, *slopes)
            dropped |= {f"{part}activation-input", f"{part}up-output"}
        repeat(f"{part}activation", *([] if gated else [f"d-{part}down-w"]))
        if gated:
            repeat(f"{part}multiply", f"d-{part}down-w")
            on_tile[f"d-{part}down-x"] = forward[at[f"{part}activation"]]
        dropped |= {made, f"{part}activation-output"}
    if not repeated:
        return None
    kept = tuple(tensor for tensor in tensors if tensor.name not in dropped)
    return _with_repeats(backward, repeated, places, readers, on_tile), kept


def _is_gathered(specs: Sequence[OperatorSpec], i: int) -> bool:
    """Whether an operator reads gathered rows, or weights that are not trained."""
    spec = specs[i]
    return spec.frozen or any(j >= 0 and specs[j].regather for j in spec.inputs)


def _with_repeats(
    backward: Sequence[OperatorSpec],
    repeated: list[OperatorSpec],
    places: dict[str, int],
    readers: dict[str, list[str]],
    on_tile: dict[str, OperatorSpec],
) -> list[OperatorSpec]:
    """Place repeated operators first in a backward pass, and each activation after its product."""
    new = list(repeated)
    moved = {-1: -1}
    for i, spec in enumerate(backward):
        inputs = [moved[source] for source in spec.inputs]
        inputs += [places[name] for name in readers.get(spec.name, ())]
        new.append(changed(spec, inputs=tuple(inputs)))
        moved[i] = len(new) - 1
        if spec.name in on_tile:
            active, tile = on_tile[spec.name], spec.write_bytes
            name = f"{active.name}{AGAIN}-x"
            source = (moved[i],)
            new.append(changed(active, name=name, inputs=source, read_bytes=tile, write_bytes=tile))
            moved[i] = len(new) - 1
    return new


# ---- products in low precision ----


_PRODUCT_OF_KIND = {
    "gemm": "forward",
    "gemm-input-gradient": "input-gradient",
    "gemm-weight-gradient": "weight-gradient",
}
_WHOLE = ("router", "shared-router")  # products that stay in bf16


def _linear_name(spec: OperatorSpec) -> str:
    """Return the name of the forward product that a product belongs to."""
    return spec.name.removeprefix("d-").removesuffix("-x").removesuffix("-w")


def _is_low(spec: OperatorSpec, precision: Precision) -> bool:
    product = _PRODUCT_OF_KIND.get(spec.kind)
    name = _linear_name(spec)
    return product in precision.products and name not in _WHOLE and "+" not in name


def _arriving(spec: OperatorSpec) -> tuple[int, float]:
    """Return the slot of the input of a product that is cast (-1: none), and its elements.

    A forward product casts its input, an input gradient the output gradient. A weight gradient
    reads both casts again.
    """
    if spec.kind == "gemm-weight-gradient":
        return -1, 0.0
    return 0, spec.b * spec.m * spec.k


def _kernel(
    name: str, inputs: tuple[int, ...], elements: float, read: float, write: float
) -> OperatorSpec:
    """Return a kernel that reads and writes `read` and `write` bytes for each element."""
    rows, moved = max(1, math.trunc(elements)), (read * elements, write * elements)
    return vector_spec(name, "multiply", inputs, rows, 1, *moved, function="copy")


class _Pass:
    """The operators of one pass of a layer, to which casts and transposes are added."""

    def __init__(
        self, specs: Sequence[OperatorSpec], precision: Precision, forward: Sequence[OperatorSpec]
    ) -> None:
        self.specs, self.precision, self.backward = specs, precision, bool(forward)
        self.low = [_is_low(spec, precision) for spec in specs]
        self.small = _small_gathers(specs, precision)
        self.operators: list[OperatorSpec] = []
        self.place: dict[int, int] = {-1: -1}  # position of an operator in the rewritten pass
        self.casts: dict[int, int] = {}  # source operator -> its cast
        self.read = {spec.name: spec.inputs[0] for spec in forward if spec.kind == "gemm"}
        self.gathered = _small_gathers(forward, precision)  # in the forward pass
        self.transposes: dict[tuple[str, int | str], int] = {}

    def add(self, spec: OperatorSpec) -> int:
        """Add an operator and return its position."""
        self.operators.append(spec)
        return len(self.operators) - 1

    def cast(self, source: int, elements: float, sent: bool) -> None:
        """Cast an operator's output, once for all readers.

        The cast also writes the transpose, unless the precision transposes late and the cast is for
        a gather (`sent`) or in the forward pass.
        """
        if source in self.casts:
            return
        p = self.precision
        one = p.transposed_late and (sent or not self.backward)
        reads = 1.0 + p.amax_reads + (0.0 if one else p.transpose_reads)
        name = self.specs[source].name if source >= 0 else "input"
        kernel = _kernel(
            name + (PASSING_CAST if p.transposed_late and not self.backward else CAST),
            (self.place[source],),
            elements,
            ELEMENT_BYTES * reads,
            (1.0 if one else p.copies) * p.element_bytes,
        )
        self.casts[source] = self.add(kernel)

    def cast_weights(self, spec: OperatorSpec) -> tuple[int, ...]:
        """Cast the weights that a product reads; return the position of the cast, if any."""
        p = self.precision
        if not p.pass_weight_casts or spec.kind == "gemm-weight-gradient":
            return ()
        read = p.pass_weight_casts - p.element_bytes
        weights = spec.b * spec.k * spec.n
        name = f"{_linear_name(spec)}-weights{PASSING_CAST}"
        return (self.add(_kernel(name, (-1,), weights, read, p.element_bytes)),)

    def transpose(self, spec: OperatorSpec) -> tuple[int, ...]:
        """Add the late transposes that a weight gradient reads; return their positions.

        A tensor that was gathered in the low format is transposed in that format; other inputs of
        forward products are cast again. Output gradients already have both layouts, unless they
        were gathered.
        """
        p = self.precision
        if not p.transposed_late or spec.kind != "gemm-weight-gradient":
            return ()
        name = _linear_name(spec)
        again = tuple(self.place[at] for at in spec.inputs if at >= 0 and self._again(at))
        source: int | str = self.read.get(name, name)
        turned = source in self.gathered
        read = p.element_bytes if turned else ELEMENT_BYTES * p.transpose_reads
        transposes = [self._turned(("input", source), name, again, spec.b * spec.m * spec.k, read)]
        arrived = next((at for at in spec.inputs if at in self.small and not self._again(at)), -1)
        if arrived >= 0:
            size, place = spec.b * spec.k * spec.n, (self.place[arrived],)
            key = ("gradient", arrived)
            transposes.append(self._turned(key, f"d-{name}", place, size, p.element_bytes))
        return tuple(transposes)

    def _again(self, at: int) -> bool:
        return _is_again(self.specs[at])

    def _turned(
        self, key: tuple[str, int | str], name: str, after: tuple[int, ...], size: int, read: float
    ) -> int:
        """Add the transpose of a tensor, once for all readers."""
        if key not in self.transposes:
            kernel = _kernel(
                f"{name}-transpose", after or (-1,), size, read, self.precision.element_bytes
            )
            self.transposes[key] = self.add(kernel)
        return self.transposes[key]


def _is_again(spec: OperatorSpec) -> bool:
    """Whether an operator repeats a gather of the forward pass."""
    return spec.name.endswith(AGAIN)


def _small_gathers(specs: Sequence[OperatorSpec], precision: Precision) -> set[int]:
    """Return the gathers that only low-precision products read: they carry the low format.

    All-to-alls that bring rows to experts carry it too, if the precision's `dispatches` is set.
    """
    low = [_is_low(spec, precision) for spec in specs]
    carried = {"all-gather": precision.gathers, "all-to-all": precision.dispatches}
    small: set[int] = set()
    readers: dict[int, list[int]] = {}
    for i, spec in reversed(list(enumerate(specs))):  # readers come after what they read
        for source in spec.inputs:
            readers.setdefault(source, []).append(i)
        own = readers.get(i, ())
        if (
            carried.get(spec.collective)
            and not spec.virtual
            and own
            and all(low[reader] or (precision.dispatches and reader in small) for reader in own)
        ):
            small.add(i)
    return small


def quantised(
    specs: Sequence[OperatorSpec],
    precision: Precision,
    widths: int = 1,
    forward: Sequence[OperatorSpec] = (),
) -> list[OperatorSpec]:
    """Return the operators of a pass with products in a precision's format, and their casts.

    Parameters
    ----------
    specs
        Operators of a forward or a backward pass, in topological order.
    precision
        The number formats.
    widths
        Devices over which a gather concatenates shares of rows.
    forward
        For a backward pass: the operators of the forward pass.
    """
    new = _Pass(specs, precision, forward)
    for i, spec in enumerate(specs):
        own = replace(spec, inputs=tuple(new.place[source] for source in spec.inputs))
        slot, elements = _arriving(spec) if new.low[i] else (-1, 0.0)
        sent = i in new.small
        if sent:
            share = widths if spec.collective == "all-gather" else 1
            slot, elements = 0, spec.payload_bytes / ELEMENT_BYTES / share
            own = replace(own, payload_bytes=spec.payload_bytes * precision.element_bytes / 2.0)
        source = spec.inputs[slot] if slot >= 0 else -1
        fused = source >= 0 and specs[source].kind in precision.fused_casts
        if slot >= 0 and source not in new.small and not fused and not _is_again(spec):
            new.cast(source, elements, sent)
            own = replace(own, inputs=tuple(new.casts.get(s, new.place[s]) for s in spec.inputs))
        if new.low[i]:
            also = (*new.cast_weights(spec), *new.transpose(spec))
            own = replace(own, format=precision.format, inputs=(*own.inputs, *also))
        new.place[i] = new.add(own)
    return new.operators


def quantised_tensors(tensors: Sequence[Tensor], precision: Precision) -> tuple[Tensor, ...]:
    """Return the stored tensors, with inputs of weight gradients in the format that these read."""
    if "weight-gradient" not in precision.products:
        return tuple(tensors)
    share = precision.element_bytes / ELEMENT_BYTES
    kept_tensors: list[Tensor] = []
    for tensor in tensors:
        if tensor.operand == "only":
            kept_tensors.append(replace(tensor, bytes=math.trunc(tensor.bytes * share)))
        else:
            kept_tensors.append(tensor)
        if tensor.operand == "also":
            copy = replace(
                tensor, name=f"{tensor.name}-cast", bytes=math.trunc(tensor.bytes * share)
            )
            kept_tensors.append(copy)
    return tuple(kept_tensors)
