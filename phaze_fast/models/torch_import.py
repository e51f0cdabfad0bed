"""PyTorch modules as graphs: one training step, recorded on the meta device and cut into layers.

A layer is a numbered child of a container (``h.0``, ``layers.3``); operators that run between two
of them form a separate layer. Layers with the same operators, parameters and saved arrays are of
one kind. Two recordings, of 2 and of 4 samples, show which sizes grow with the samples.

Tensor-parallel devices split pairs of products as Megatron-LM does, the first by columns and the
second by rows, if the region between them is closed: its tensors have no other reader, it has no
other input, and no operator in it reduces over the split columns. Logits are split by the
vocabulary up to the loss, and so is the token embedding table. Each expert computed in grouped
products is split like any pair of products.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.models.aten import figures, is_known
from phaze_fast.models.compiled import Code, code_of_class, compiled
from phaze_fast.models.graph_model import (
    GraphLayer,
    GraphModel,
    GraphOperator,
    HeldTensor,
    LayerPeak,
    SavedTensor,
    peak_bytes,
)
from phaze_fast.models.lifetimes import Lifetime, lifetimes, peaks_by_layer
from phaze_fast.tables import needed, picked

# ---- tensor-parallel splits ----


_REDUCTIONS = ("mean", "sum", "amax", "var", "norm", "max", "var_mean", "linalg_vector_norm")
_WIDEST_NUMBER = 8  # bytes of a 64-bit integer
_NO_PAIR = "no pair of products whose weights could be split by columns and by rows"


def _consumers(operators: tuple[GraphOperator, ...]) -> list[set[int]]:
    consumers: list[set[int]] = [set() for _ in operators]
    for at, op in enumerate(operators):
        for source in op.inputs:
            if source >= 0:
                consumers[source].add(at)
    return consumers


def _begins(operators: tuple[GraphOperator, ...], row: int, at: int) -> bool:
    """Whether an input is the array of row offsets of a grouped product."""
    groups, source = operators[row].b, operators[at]
    size = source.write_bytes + source.fixed_write_bytes
    return at >= 0 and groups > 1 and size <= _WIDEST_NUMBER * groups


class _Region:
    """The operators between products split by columns and a product split by rows."""

    def __init__(self, operators: tuple[GraphOperator, ...], row: int) -> None:
        self.row = row
        self.columns: set[int] = set()
        self.inside: set[int] = set()
        self.closed = True
        waiting = [at for at in operators[row].inputs if not _begins(operators, row, at)]
        while waiting:
            at = waiting.pop()
            if at < 0:
                self.closed = False
                return
            if operators[at].kind == "gemm":
                self.columns.add(at)
            elif at not in self.inside:
                self.inside.add(at)
                waiting += operators[at].inputs

    def fits(self, operators: tuple[GraphOperator, ...], consumers: list[set[int]]) -> bool:
        """Whether the region can be split by columns over tensor-parallel devices.

        Only its row-parallel product may read from it, and no operator inside may reduce over the
        columns that are split.
        """
        if not self.closed or not self.columns:
            return False
        own = self.inside | {self.row}
        if any(not consumers[at] <= own for at in self.columns | self.inside):
            return False
        widths = {operators[at].n for at in self.columns}
        if operators[self.row].k > sum(operators[at].n for at in self.columns):
            return False
        for op in (operators[at] for at in self.inside):
            name = op.name.rsplit(".", 1)[-1].split("-")[0]
            if op.n in widths and (op.kind in ("norm", "softmax") or name in _REDUCTIONS):
                return False
        return True


def _vocabulary(operators: tuple[GraphOperator, ...], consumers: list[set[int]]) -> dict[int, str]:
    """Roles of an embedding table, and of logits and the operators after them up to the loss."""
    tables = [at for at, op in enumerate(operators) if op.kind == "embedding" and op.weights]
    roles = {}
    if tables:  # smaller tables (positions, segments) are not split
        roles[max(tables, key=lambda at: operators[at].weights)] = "vocabulary"
    for at, op in enumerate(operators):
        if op.kind != "gemm":
            continue
        downstream: set[int] = set()
        waiting = [at]
        while waiting:
            for reader in consumers[waiting.pop()] - downstream:
                downstream.add(reader)
                waiting.append(reader)
        kinds = {operators[reader].kind for reader in downstream}
        if "softmax" in kinds and not kinds & {"gemm", "attention", "batched-gemm"}:
            roles[at] = "vocabulary"
            roles |= {r: "inside" for r in downstream if operators[r].n == op.n}
    return roles


def with_split(layer: GraphLayer) -> GraphLayer:
    """Mark the tensor-parallel split of a layer's operators, or the reason why there is none."""
    operators = layer.forward
    consumers = _consumers(operators)
    roles: dict[int, str] = {}
    for at, op in enumerate(operators):
        if op.kind != "gemm" or at in roles:
            continue
        region = _Region(operators, at)
        if region.fits(operators, consumers) and not roles.keys() & region.columns:
            roles |= dict.fromkeys(region.columns, "columns")
            roles |= dict.fromkeys(region.inside, "inside")
            roles[at] = "rows"
    for at, role in _vocabulary(operators, consumers).items():
        roles.setdefault(at, role)
    if not roles:
        return layer.replace(unsplit=f"{layer.name} has {_NO_PAIR}")
    forward = tuple(
        op.replace(split=roles[at]) if at in roles else op for at, op in enumerate(operators)
    )
    saved = tuple(
        x.replace(split=True) if roles.get(x.producer) in ("columns", "inside") else x
        for x in layer.saved
    )
    peaks = tuple(
        peak.replace(tensors=tuple(_shared_at_peak(x, roles, operators) for x in peak.tensors))
        for peak in layer.peaks
    )
    return layer.replace(forward=forward, saved=saved, peaks=peaks)


def _shared_at_peak(
    tensor: HeldTensor, roles: dict[int, str], operators: tuple[GraphOperator, ...]
) -> HeldTensor:
    role = roles.get(tensor.producer, "no")
    if tensor.gradient:
        split = role in ("columns", "rows", "vocabulary")
    elif tensor.backward:  # the gradient of the operator's input
        split = role in ("inside", "rows")
    else:
        logits = role == "vocabulary" and operators[tensor.producer].kind == "gemm"
        split = role in ("columns", "inside") or logits
    return tensor.replace(split=True) if split else tensor


# ---- layers of a recording ----


_DIGITS = "0123456789"
Children = Mapping[str, tuple[str, tuple[str, ...]]]
"""Class and names of the children of every module, by path."""


def layer_paths(modules: Children) -> frozenset[str]:
    """Return the paths of numbered children that are layers.

    Children of a stack may be numbered after a common name, as ``layer_0``. A sequence of plain
    operators of several classes, such as a linear, an activation and a linear, is not a stack of
    layers; nor is a stage that holds nothing but layers a layer itself.
    """
    paths: set[str] = set()
    stages: set[str] = set()
    for path, (_, children) in modules.items():
        stems = {child.rstrip(_DIGITS) for child in children}
        named = len(stems) == 1 and len(children) > 1
        numbered = [
            f"{path}.{child}".lstrip(".")
            for child in children
            if child[-1] in _DIGITS and (named or child.isdecimal())
        ]
        composite = any(modules[child][1] for child in numbered)
        if composite or len({modules[child][0] for child in numbered}) == 1:
            paths.update(numbered)
            if composite and len(numbered) == len(children):
                stages.add(path)
    return frozenset(paths - stages)


class _Trace:
    """Two recordings of one step, and the layer of each operator."""

    def __init__(self, name: str, small: Any, large: Any, layers: frozenset[str]) -> None:
        self.name, self.small, self.large, self.layers = name, small, large, layers
        calls = small.calls
        for call in calls:
            if not is_known(call):
                where = call.path[-1][1] if call.path else ""
                line = call.line or "in the backward pass"
                raise InvalidInputError(
                    f"{name}: aten.{call.name}{f' of {where}' if where else ''} ({line}) is "
                    "not modelled; expected operators of docs/graphs.md: write it with those"
                )
        same = [call.name for call in calls] == [call.name for call in large.calls]
        if not same or len(small.saved) != len(large.saved):
            for line in (*small.constants.random_lines, *large.constants.random_lines):
                raise InvalidInputError(f"{name}: control flow that depends on chance ({line})")
            raise InvalidInputError(
                f"{name}: which operators run depends on the number of samples: "
                f"{len(calls)} of 2, {len(large.calls)} of 4"
            )
        self.forward = [at for at, call in enumerate(calls) if not call.backward]
        if not self.forward:
            raise InvalidInputError(f"{name}: no operator of it uses its inputs or parameters")
        wide = any(array.parameter and array.item_bytes == 2 for x in calls for array in x.reads)
        self.figures = [figures(call, wide) for call in calls]
        self.more = [figures(call, wide) for call in large.calls]
        self.segments = self._segments()
        self.owner = {at: s for s, (_, run) in enumerate(self.segments) for at in run}
        self.origin: dict[int, int] = {}
        """Forward operator of each backward operator."""
        self._place_backward()

    def call_of(self, path: Sequence[tuple[int, str]]) -> tuple[int, str]:
        """Return the call of the outermost layer among the running modules."""
        return next((entry for entry in path if entry[1] in self.layers), (0, ""))

    def _segments(self) -> list[tuple[str, list[int]]]:
        calls = self.small.calls
        runs = groupby(self.forward, lambda at: self.call_of(calls[at].path))
        return [(path, list(run)) for (_, path), run in runs]

    def _place_backward(self) -> None:
        """Assign each backward operator to the forward one whose gradient it is part of."""
        calls = self.small.calls
        numbers = [(calls[at].sequence, at) for at in self.forward]
        numbers.sort()
        keys = [sequence for sequence, _ in numbers]
        last = self.forward[-1]
        for at, call in enumerate(calls):
            if not call.backward:
                continue
            if 0 <= call.sequence < 2**62:
                last = numbers[max(bisect_right(keys, call.sequence) - 1, 0)][1]
            self.origin[at] = last
            self.owner[at] = self.owner[last]

    # ---- sizes ----

    def operator(
        self, at: int, name: str, inputs: tuple[int, ...], weights: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        """Fields of one operator: the per-sample part and the constant part of each size."""
        one, two = self.figures[at], self.more[at]
        grown = [d for d, a, b in zip("bmnk", one.sizes, two.sizes, strict=True) if b != a]
        scales = grown[0] if len(grown) == 1 else "none"
        sizes = dict(zip("bmnk", one.sizes, strict=True))
        more = two.sizes["bmnk".index(scales)] if grown else 0
        if self.small.calls[at].name == "_grouped_mm" and grown == ["m"]:
            sizes["m"] = 2 * -(-more // 4)  # rows of each group, rounded up
        elif len(grown) > 1 or (grown and sizes[scales] * 2 != more):
            raise InvalidInputError(
                f"{self.name}: {name} ({self.small.calls[at].line}): its sizes do not grow with "
                f"the samples: {one.sizes} for 2, {two.sizes} for 4"
            )
        if scales != "none":
            sizes[scales] = max(sizes[scales] // 2, 1)
        read, fixed_read = _per_sample(one.read_bytes, two.read_bytes)
        write, fixed_write = _per_sample(one.write_bytes, two.write_bytes)
        return {
            **picked(one, "kind", "function", "causal", "window", "bias"),
            "name": name,
            "inputs": inputs,
            **sizes,
            "scales": scales,
            "flops": one.flops / 2.0,
            "read_bytes": read,
            "write_bytes": write,
            "fixed_read_bytes": fixed_read,
            "fixed_write_bytes": fixed_write,
            "weights": weights[0],
            "frozen": weights[1],
        }


def _per_sample(two: float, four: float) -> tuple[float, float]:
    """Return the per-sample and the constant part, given values for two and four samples."""
    grows = max((four - two) / 2.0, 0.0)
    return grows, max(two - 2.0 * grows, 0.0)


def _names(trace: _Trace, positions: Sequence[int], layer: str) -> list[str]:
    """Names within a layer: module path relative to the layer, and operator."""
    taken: Counter[str] = Counter()
    names = []
    for at in positions:
        call = trace.small.calls[at]
        path = call.path[-1][1] if call.path else ""
        if layer:
            path = path.removeprefix(layer).lstrip(".")
        name = f"{path}.{call.name}".lstrip(".")
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}-{taken[name]}")
    return names


def _weights(trace: _Trace) -> tuple[dict[int, tuple[int, int]], tuple[int, int]]:
    """Count the parameters that each operator is the first to read, and those never read.

    Each count is a pair: all parameters, and the frozen ones of them.
    """
    recorder, seen, elements = trace.small, set(), {}

    def counted(keys: Iterable[int]) -> tuple[int, int]:
        own = [(recorder.parameters[key], key in recorder.frozen) for key in keys]
        return sum(count for count, _ in own), sum(count for count, frozen in own if frozen)

    for at in trace.forward:
        keys = dict.fromkeys(
            recorder.copies.get(array.storage, array.storage) for array in recorder.calls[at].reads
        )
        new = [key for key in keys if key in recorder.parameters and key not in seen]
        seen.update(new)
        elements[at] = counted(new)
    return elements, counted(key for key in recorder.parameters if key not in seen)


def _saved(trace: _Trace) -> dict[int, dict[int, tuple[int, float, float]]]:
    """Return each segment's saved tensors by storage: producer, bytes per sample, fixed bytes."""
    calls = trace.small.calls
    savers: dict[int, list[int]] = {}
    arrays: dict[int, tuple[Any, Any]] = {}
    for one, two in zip(trace.small.saved, trace.large.saved, strict=True):
        wanted, segment = trace.call_of(one.path), None
        for at in (one.before, one.before - 1):
            inside = 0 <= at < len(calls) and not calls[at].backward
            if inside and trace.call_of(calls[at].path) == wanted:
                segment = trace.owner[at]
                break
        if segment is None:
            segment = trace.owner[min(max(one.before - 1, 0), trace.forward[-1])]
        key = one.array.storage
        savers.setdefault(key, []).append(segment)
        arrays.setdefault(key, (one, two.array))
    by_segment: dict[int, dict[int, tuple[int, float, float]]] = {}
    for key, segments in savers.items():
        one, two = arrays[key]
        home = segments[0]
        if one.source == -2:
            home = 0  # constants (positions, masks) belong to the first segment
        elif len(set(segments)) > 1:
            home = 0 if one.source < 0 else trace.owner[one.source]
        grows, fixed = _per_sample(one.array.held_bytes, two.held_bytes)
        by_segment.setdefault(home, {})[key] = one.source, grows, fixed
    return by_segment


class _Memory:
    """What is allocated at the peaks of each segment, and what each segment saves."""

    def __init__(self, trace: _Trace) -> None:
        self._trace, calls = trace, trace.small.calls
        self.saved = _saved(trace)
        homes = {storage: home for home, kept in self.saved.items() for storage in kept}
        owners = [trace.owner[at] for at in range(len(calls))]
        alive = lifetimes(trace.small, trace.large)
        self._peaks = peaks_by_layer(
            alive, owners, homes, len(trace.segments), lambda at: calls[at].backward
        )
        self._inputs: dict[int, float] = {}
        passed = {x.storage: x for x in alive if x.storage not in homes and x.born >= 0}
        read = {(owners[at], a.storage) for at in trace.forward for a in calls[at].reads}
        for segment, storage in sorted(read):
            one = passed.get(storage)
            if one is not None and owners[one.born] < segment and not calls[one.born].backward:
                grows = _per_sample(*one.sizes)[0]
                self._inputs[segment] = self._inputs.get(segment, 0.0) + grows

    def fields(
        self, segment: int, forward: list[int], names: list[str], backward: dict[int, str]
    ) -> dict[str, Any]:
        """Return the fields of a segment's layer, given the names of its operators."""
        trace = self._trace
        place = {at: local for local, at in enumerate(forward)}
        kept = self.saved.get(segment, {})
        saved = tuple(
            SavedTensor(
                name=f"{names[place[source]] if source in place else 'input'}#{number}",
                bytes=grows,
                fixed_bytes=fixed,
                producer=place.get(source, -1),
            )
            for number, (source, grows, fixed) in enumerate(kept.values())
        )
        labels = {at: names[local] for at, local in place.items()} | backward
        peaks = []
        for peak in self._peaks[segment]:
            held = {one.storage: one for one in peak.tensors}
            peaks.append(
                LayerPeak(
                    operator=labels[peak.operator],
                    backward=trace.small.calls[peak.operator].backward,
                    tensors=tuple(
                        self._held(one, labels, place)
                        for storage, one in held.items()
                        if storage not in kept
                    ),
                    absent=tuple(n for n, storage in enumerate(kept) if storage not in held),
                )
            )
        return {
            "saved": saved,
            "peaks": tuple(peaks),
            "input_bytes": self._inputs.get(segment, 0.0),
        }

    def _held(self, one: Lifetime, labels: dict[int, str], place: dict[int, int]) -> HeldTensor:
        late = one.born >= 0 and self._trace.small.calls[one.born].backward
        grows, fixed = _per_sample(*one.sizes)
        return HeldTensor(
            name=labels.get(one.born, "output gradient" if late else "input"),
            bytes=grows,
            fixed_bytes=fixed,
            producer=place.get(self._trace.origin.get(one.born, one.born), -1),
            backward=late,
            gradient=one.gradient,
        )


def _local(positions: Sequence[int], trace: _Trace, at: int) -> tuple[int, ...]:
    """Return the inputs of an operator as positions in the pass of its layer; -1: outside."""
    place = {global_at: local for local, global_at in enumerate(positions)}
    sources = trace.small.calls[at].sources
    inputs = dict.fromkeys(place.get(source, -1) for source in sources)
    return tuple(i for i in inputs if i < place[at]) or (-1,)


def _backward(
    trace: _Trace, positions: list[int], forward: list[int], names: list[str]
) -> tuple[GraphOperator, ...]:
    """Operators of a layer's backward pass."""
    place = {at: local for local, at in enumerate(forward)}
    taken: Counter[str] = Counter()
    operators = []
    for at in positions:
        origin = place[trace.origin[at]]
        call, kind = trace.small.calls[at], trace.figures[at].kind
        ends = {"gemm-input-gradient": "-x", "gemm-weight-gradient": "-w"}
        name = f"d-{names[origin]}"
        if kind not in ends and not call.name.endswith("backward"):
            name += f".{call.name}"
        taken[name] += 1
        name += f"-{taken[name]}" if taken[name] > 1 and kind not in ends else ""
        fields = trace.operator(at, name + ends.get(kind, ""), _local(positions, trace, at))
        forward_kind = trace.figures[forward[origin]].kind
        if kind == "gemm-weight-gradient" and forward_kind == "batched-gemm":
            fields |= {"kind": "batched-gemm-gradient", "name": f"{name}-{taken[name]}"}
        operators.append(GraphOperator(**fields, forward=origin))
    return _distinct(operators)


def _distinct(operators: list[GraphOperator]) -> tuple[GraphOperator, ...]:
    """Make the operators' names unique; suffixes of gradients stay at the end."""
    taken: Counter[str] = Counter()
    renamed = []
    for op in operators:
        taken[op.name] += 1
        if taken[op.name] > 1:
            stem, end = (
                (op.name[:-2], op.name[-2:]) if op.name[-2:] in ("-x", "-w") else (op.name, "")
            )
            op = op.replace(name=f"{stem}-{taken[op.name]}{end}")
        renamed.append(op)
    return tuple(renamed)


def _layer(
    trace: _Trace,
    segment: int,
    name: str,
    weights: dict[int, tuple[int, int]],
    extra: tuple[int, int],
    memory: _Memory,
) -> GraphLayer:
    path, forward = trace.segments[segment]
    backward = [at for at in trace.origin if trace.owner[at] == segment]
    names = _names(trace, forward, path)
    place = {at: local for local, at in enumerate(forward)}
    operators = tuple(
        GraphOperator(**trace.operator(at, label, _local(forward, trace, at), weights[at]))
        for at, label in zip(forward, names, strict=True)
    )
    gradients = _backward(trace, backward, forward, names)
    labels = {at: op.name for at, op in zip(backward, gradients, strict=True)}
    later = {
        source
        for at in trace.forward
        if trace.owner[at] > segment
        for source in trace.small.calls[at].sources
        if source in place
    }
    both = trace.small.calls, trace.large.calls
    sent = sum(_per_sample(*(float(c[at].writes[0].bytes) for c in both))[0] for at in later)
    layer = GraphLayer(
        name=name,
        count=1,
        parameters=sum(weights[at][0] for at in forward) + extra[0],
        frozen_parameters=sum(weights[at][1] for at in forward) + extra[1],
        forward=operators,
        backward=gradients,
        output_bytes=sent,
        **memory.fields(segment, forward, names, labels),
    )
    return with_split(layer)


def _kind_key(layer: GraphLayer) -> Any:
    """Return a key that is equal for layers of the same kind; names of operators are ignored."""
    forward = tuple(op.replace(name="-") for op in layer.forward)
    products = Counter((op.kind, op.b, op.m, op.n, op.k) for op in layer.backward if op.flops > 0.0)
    saved = tuple(tensor.replace(name="-") for tensor in layer.saved)
    counts = layer.parameters, layer.frozen_parameters
    return forward, counts, saved, frozenset(products.items())


def _title(trace: _Trace, segment: int) -> str:
    path, last = trace.segments[segment][0], len(trace.segments) - 1
    if path or not last:
        return path or trace.name
    return "embedding" if segment == 0 else "head" if segment == last else f"between-{segment}"


def layered(name: str, small: Any, large: Any, modules: Children, seq: int) -> GraphModel:
    """Split a recorded step into layers and store each kind once.

    Parameters
    ----------
    name
        Name of the model.
    small, large
        Recordings of 2 and of 4 samples.
    modules
        Class and children of every module by its path; the root's is empty.
    seq
        Tokens of a sample.
    """
    trace = _Trace(name, small, large, layer_paths(modules))
    weights, rest = _weights(trace)
    memory = _Memory(trace)
    count = len(trace.segments)
    layers_by_kind: dict[Any, list[tuple[int, GraphLayer]]] = {}
    for segment in range(count):
        extra = rest if segment == count - 1 else (0, 0)
        title = _title(trace, segment)
        new_layer = _layer(trace, segment, title, weights, extra, memory)
        layers_by_kind.setdefault(_kind_key(new_layer), []).append((segment, new_layer))
    layers: list[GraphLayer] = []
    order = [0] * count
    for at, members in enumerate(layers_by_kind.values()):
        common = Counter(len(layer.backward) for _, layer in members).most_common(1)[0][0]
        usual = next(layer for _, layer in members if len(layer.backward) == common)
        most = {
            field: max(getattr(layer, field) for _, layer in members)
            for field in ("input_bytes", "output_bytes")
        }
        peaks = max(  # those of the layer that needs the most bytes for 4 samples
            (layer for _, layer in members),
            key=lambda layer: max(
                (peak_bytes(layer, peak, 4) for peak in layer.peaks), default=0.0
            ),
        ).peaks
        title = members[0][1].name
        if any(layer.name == title for layer in layers):
            title = f"{title}-{at}"
        layers.append(usual.replace(name=title, count=len(members), peaks=peaks, **most))
        for segment, _ in members:
            order[segment] = at
    edges = {
        (trace.owner[source], trace.owner[at])
        for at in trace.forward
        for source in small.calls[at].sources
        if source >= 0 and trace.owner[source] != trace.owner[at]
    }
    return GraphModel(
        name=name, seq=seq, layers=tuple(layers), order=tuple(order), edges=tuple(sorted(edges))
    )


# ---- recording a module ----


def _torch() -> Any:
    return needed("torch", "torch", "reading a PyTorch module")


@contextmanager
def _replaced(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set entries of dictionaries to other values; restore them on exit."""
    absent, before = object(), []
    for owner, name, value in changes:
        before.append((owner, name, owner.get(name, absent)))
        owner[name] = value
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is absent:
                del owner[name]
            else:
                owner[name] = value


def _on_meta(module: Any, dtype: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield a module's parameters and buffers with their counterparts on the meta device."""
    torch = _torch()
    meta_tensors: dict[int, Any] = {}

    def shape_of(tensor: Any) -> Any:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=kind)

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in meta_tensors:
                    shape = shape_of(tensor)
                    if tensors is part._parameters:
                        shape = torch.nn.Parameter(shape, requires_grad=tensor.requires_grad)
                    meta_tensors[id(tensor)] = shape
                yield tensors, name, meta_tensors[id(tensor)]


def _without_checks(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield checks of transformers that read data, each with a function that does nothing.

    One reads token ids only to warn of padding, one counts image tokens.
    """
    name = "warn_if_padding_and_no_attention_mask"
    owners = [(vars(x), name) for x in module.modules() if hasattr(type(x), name)]
    parts = [m for key, m in list(sys.modules.items()) if key.startswith("transformers.")]
    name = "torch_compilable_check"
    owners += [(vars(m), name) for m in parts if name in getattr(m, "__dict__", {})]
    for owner, name in owners:
        yield owner, name, lambda *_, **__: None


GROUPED = "experts as grouped products (transformers' experts_implementation 'grouped_mm')"
"""Note in a traced graph whose experts were recorded as grouped products instead of a loop."""


@contextmanager
def _grouped_experts(module: Any) -> Iterator[bool]:
    """Run the experts of transformers as grouped products: their default loop depends on data.

    Yields whether anything was changed; the module is restored on exit.
    """
    changed: list[tuple[Any, Any]] = []
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        loops = getattr(config, "_experts_implementation", "") in (None, "eager")
        if loops and hasattr(part, "_apply_gate"):
            changed.append((config, config._experts_implementation))
            config._experts_implementation = "grouped_mm"
    try:
        yield bool(changed)
    finally:
        for config, before in changed:
            config._experts_implementation = before


def _samples(value: Any, size: int, count: int, dtype: Any) -> Any:
    """Return `count` samples with the shape of an example that has `size` samples."""
    torch = _torch()
    if isinstance(value, tuple | list):
        return type(value)(_samples(one, size, count, dtype) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if shape and shape[0] == size:
        shape[0] = count
    kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
    by_channels = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    layout = torch.contiguous_format
    if by_channels and not value.is_contiguous():
        layout = torch.channels_last
    samples = torch.empty(shape, dtype=kind, device="meta", memory_format=layout)
    return samples.requires_grad_(value.requires_grad)


_IMAGE_DIMS = 4  # samples, channels, height and width


def _tensors(values: Any) -> Iterator[Any]:
    torch = _torch()
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def from_torch(
    module: Any,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    dtype: Any = "bfloat16",
) -> GraphModel:
    """Read a PyTorch module: the operators of its training step, its layers, its saved tensors.

    The step runs on the meta device: no weight is read and none is allocated. The first dimension
    of the example inputs is that of the samples.

    Parameters
    ----------
    module
        A ``torch.nn.Module``. If its output has a ``loss``, or is one number, that is
        differentiated; else the sum of its outputs.
    example_inputs
        Positional arguments of its ``forward``.
    example_kwargs
        Arguments by name; for a HuggingFace decoder ``{"labels": ids, "use_cache": False}``.
    name
        Name of the model; by default the name of its class.
    dtype
        Number format of parameters and floating-point inputs; None = unchanged.

    Returns
    -------
    GraphModel
        Each kind of layer once. Layers are the numbered children of the outermost container that
        has them; operators before, between and after them form separate layers.

    Raises
    ------
    InvalidInputError
        If an operator is not modelled, or the step cannot run without data; the message names it
        and the source line.
    MissingExtraError
        Where PyTorch is not installed.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())  # doctest: +SKIP
    >>> traced = from_torch(mlp, (torch.zeros(32, 64),))  # doctest: +SKIP
    >>> traced.gemms(), traced.flops, traced.parameters()  # doctest: +SKIP
    ([(1, 1, 64, 256)], 32768.0, 16640)
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
    from phaze_fast.models.torch_recorder import record_step

    kwargs = dict(example_kwargs or {})
    title = name or type(module).__name__
    input_tensors = list(_tensors([*example_inputs, *kwargs.values()]))
    size = input_tensors[0].shape[0] if input_tensors and input_tensors[0].dim() else 1
    ids = next((x for x in input_tensors if not x.is_floating_point() and x.dim() == 2), None)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    recorded: list[Any] = []
    with (
        _replaced(_on_meta(module, kind)),
        _replaced(_without_checks(module)),
        _grouped_experts(module) as regrouped,
    ):
        for count, highest in ((2, False), (4, True)):
            inputs = tuple(_samples(x, size, count, kind) for x in example_inputs)
            named = {key: _samples(x, size, count, kind) for key, x in kwargs.items()}
            recorded.append(record_step(title, module, inputs, named, highest))
            for parameter in module.parameters():
                parameter.grad = None
    modules = {
        path: (type(part).__name__, tuple(child for child, _ in part.named_children()))
        for path, part in module.named_modules(remove_duplicate=False)
    }
    seq = 1 if ids is None else int(ids.shape[1])
    graph = layered(title, recorded[0], recorded[1], modules, seq)
    if ids is None and input_tensors and input_tensors[0].dim() == _IMAGE_DIMS:
        graph = graph.replace(sample="image")
    own = not type(module).__module__.startswith("transformers.")
    code: Code = "own" if own else code_of_class(type(module).__name__)
    notes = GROUPED if regrouped else ""
    try:
        of_compiler = layered(title, *compiled(*recorded, code=code), modules, seq)
    except InvalidInputError:  # kernels whose sizes the samples do not scale
        return graph.replace(notes=notes)
    of_compiler = of_compiler.replace(kernels="compiled", as_traced=True, notes=notes)
    return graph.replace(compiled=of_compiler, notes=notes)
