"""A recorded step as a graph of layers, each kind once.

A layer is a numbered child of a container (``h.0``, ``layers.3``): what runs between two of them
becomes a layer of its own. Layers of the same operators, parameters and kept arrays are one kind.
Two recordings, of 2 and of 4 samples, tell what grows with the samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.aten import KNOWN, figures
from phaze_fast.models.graph_model import GraphLayer, GraphModel, GraphOperator, SavedTensor
from phaze_fast.models.split_rules import with_split

__all__ = ["layered"]

Children = Mapping[str, tuple[str, tuple[str, ...]]]
"""Class and names of the children of every module, by path."""


def layer_paths(modules: Children) -> frozenset[str]:
    """Paths of numbered children that are layers.

    A row of bare operators of several classes, such as a linear, an activation and a linear, is
    no stack of layers.
    """
    found: set[str] = set()
    for path, (_, children) in modules.items():
        numbered = [f"{path}.{child}".lstrip(".") for child in children if child.isdecimal()]
        composite = any(modules[child][1] for child in numbered)
        if composite or len({modules[child][0] for child in numbered}) == 1:
            found.update(numbered)
    return frozenset(found)


class _Trace:
    """Two recordings of one step, and where each operator belongs."""

    def __init__(self, name: str, small: Any, large: Any, layers: frozenset[str]) -> None:
        self.name, self.small, self.large, self.layers = name, small, large, layers
        calls = small.calls
        for call in calls:
            if call.name not in KNOWN:
                where = call.path[-1][1] if call.path else ""
                raise InvalidInputError(
                    f"{name}: aten.{call.name}{f' of {where}' if where else ''} ({call.line}) is "
                    "not modelled"
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
        self.figures = [figures(call) for call in calls]
        self.more = [figures(call) for call in large.calls]
        self.segments = self._segments()
        self.owner = {at: s for s, (_, run) in enumerate(self.segments) for at in run}
        self.origin: dict[int, int] = {}
        """Forward operator that each backward one belongs to."""
        self._place_backward()

    def call_of(self, path: Sequence[tuple[int, str]]) -> tuple[int, str]:
        """Call of the outermost layer among running modules."""
        return next((entry for entry in path if entry[1] in self.layers), (0, ""))

    def _segments(self) -> list[tuple[str, list[int]]]:
        calls = self.small.calls
        runs = groupby(self.forward, lambda at: self.call_of(calls[at].path))
        return [(path, list(run)) for (_, path), run in runs]

    def _place_backward(self) -> None:
        """Give each backward operator to the forward one whose gradient it is part of."""
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

    def operator(self, at: int, name: str, inputs: tuple[int, ...], weights: int) -> dict[str, Any]:
        """Fields of one operator: what one sample adds, and what is there whatever the samples."""
        one, two = self.figures[at], self.more[at]
        grown = [d for d, a, b in zip("bmnk", one.sizes, two.sizes, strict=True) if b != a]
        scales = grown[0] if len(grown) == 1 else "none"
        sizes = dict(zip("bmnk", one.sizes, strict=True))
        more = two.sizes["bmnk".index(scales)] if grown else 0
        if self.small.calls[at].name == "_grouped_mm" and grown == ["m"]:
            sizes["m"] = 2 * -(-more // 4)  # rows of each group, the last ones few
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
            "name": name,
            "kind": one.kind,
            "function": one.function,
            "inputs": inputs,
            **sizes,
            "scales": scales,
            "flops": one.flops / 2.0,
            "read_bytes": read,
            "write_bytes": write,
            "fixed_read_bytes": fixed_read,
            "fixed_write_bytes": fixed_write,
            "causal": one.causal,
            "window": one.window,
            "bias": one.bias,
            "weights": weights,
        }


def _per_sample(two: float, four: float) -> tuple[float, float]:
    """Give what one sample adds, and the rest, of figures of two and of four."""
    grows = max((four - two) / 2.0, 0.0)
    return grows, max(two - 2.0 * grows, 0.0)


def _names(trace: _Trace, positions: Sequence[int], layer: str) -> list[str]:
    """Names within a layer: module path from there, and operator."""
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


def _weights(trace: _Trace) -> tuple[dict[int, int], int]:
    """Elements of the parameters that each operator is the first to read; and of the others."""
    recorder, seen, found = trace.small, set(), {}
    for at in trace.forward:
        total = 0
        for array in recorder.calls[at].reads:
            key = recorder.copies.get(array.storage, array.storage)
            if key in recorder.parameters and key not in seen:
                seen.add(key)
                total += recorder.parameters[key]
        found[at] = total
    rest = sum(count for key, count in recorder.parameters.items() if key not in seen)
    return found, rest


def _saved(trace: _Trace) -> dict[int, list[tuple[int, float, float]]]:
    """(Operator that makes it, bytes of a sample, fixed bytes) of what each segment keeps."""
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
    found: dict[int, list[tuple[int, float, float]]] = {}
    for key, segments in savers.items():
        one, two = arrays[key]
        home = segments[0]
        if one.source == -2:
            home = 0  # a constant: positions, a mask
        elif len(set(segments)) > 1:
            home = 0 if one.source < 0 else trace.owner[one.source]
        grows, fixed = _per_sample(one.array.held_bytes, two.held_bytes)
        found.setdefault(home, []).append((one.source, grows, fixed))
    return found


def _local(positions: Sequence[int], trace: _Trace, at: int) -> tuple[int, ...]:
    """Give the inputs of an operator within its pass of its layer."""
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
    made = []
    for at in positions:
        origin = place[trace.origin[at]]
        call, kind = trace.small.calls[at], trace.figures[at].kind
        ends = {"gemm-input-gradient": "-x", "gemm-weight-gradient": "-w"}
        name = f"d-{names[origin]}"
        if kind not in ends and not call.name.endswith("backward"):
            name += f".{call.name}"
        taken[name] += 1
        name += f"-{taken[name]}" if taken[name] > 1 and kind not in ends else ""
        fields = trace.operator(at, name + ends.get(kind, ""), _local(positions, trace, at), 0)
        forward_kind = trace.figures[forward[origin]].kind
        if kind == "gemm-weight-gradient" and forward_kind == "batched-gemm":
            fields |= {"kind": "batched-gemm-gradient", "name": f"{name}-{taken[name]}"}
        made.append(GraphOperator(**fields, forward=origin))
    return _distinct(made)


def _distinct(operators: list[GraphOperator]) -> tuple[GraphOperator, ...]:
    """Give operators names that differ, and keep how weight gradients end."""
    taken: Counter[str] = Counter()
    found = []
    for op in operators:
        taken[op.name] += 1
        if taken[op.name] > 1:
            stem, end = (
                (op.name[:-2], op.name[-2:]) if op.name[-2:] in ("-x", "-w") else (op.name, "")
            )
            op = op.replace(name=f"{stem}-{taken[op.name]}{end}")
        found.append(op)
    return tuple(found)


def _layer(
    trace: _Trace, segment: int, name: str, weights: dict[int, int], extra: int, kept: Any
) -> GraphLayer:
    path, forward = trace.segments[segment]
    backward = [at for at in trace.origin if trace.owner[at] == segment]
    names = _names(trace, forward, path)
    place = {at: local for local, at in enumerate(forward)}
    operators = tuple(
        GraphOperator(**trace.operator(at, label, _local(forward, trace, at), weights[at]))
        for at, label in zip(forward, names, strict=True)
    )
    saved = tuple(
        SavedTensor(
            name=f"{names[place[source]] if source in place else 'input'}#{number}",
            bytes=grows,
            fixed_bytes=fixed,
            producer=place.get(source, -1),
        )
        for number, (source, grows, fixed) in enumerate(kept)
    )
    later = {
        source
        for at in trace.forward
        if trace.owner[at] > segment
        for source in trace.small.calls[at].sources
        if source in place
    }
    sent = sum(_per_sample(*_written(trace, at))[0] for at in later)
    layer = GraphLayer(
        name=name,
        count=1,
        parameters=sum(weights[at] for at in forward) + extra,
        forward=operators,
        backward=_backward(trace, backward, forward, names),
        saved=saved,
        output_bytes=sent,
    )
    return with_split(layer)


def _written(trace: _Trace, at: int) -> tuple[float, float]:
    pair = [recorder.calls[at].writes[0].bytes for recorder in (trace.small, trace.large)]
    return float(pair[0]), float(pair[1])


def _kind_key(layer: GraphLayer) -> Any:
    """Give what layers of one kind share: all but names, and of the backward pass its products."""
    forward = tuple(op.replace(name="-") for op in layer.forward)
    products = Counter((op.kind, op.b, op.m, op.n, op.k) for op in layer.backward if op.flops > 0.0)
    saved = tuple(tensor.replace(name="-") for tensor in layer.saved)
    return forward, layer.parameters, saved, frozenset(products.items())


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
    kept = _saved(trace)
    count = len(trace.segments)
    alike: dict[Any, list[tuple[int, GraphLayer]]] = {}
    for segment in range(count):
        extra = rest if segment == count - 1 else 0
        title = _title(trace, segment)
        made = _layer(trace, segment, title, weights, extra, kept.get(segment, ()))
        alike.setdefault(_kind_key(made), []).append((segment, made))
    layers: list[GraphLayer] = []
    order = [0] * count
    for at, members in enumerate(alike.values()):
        common = Counter(len(layer.backward) for _, layer in members).most_common(1)[0][0]
        usual = next(layer for _, layer in members if len(layer.backward) == common)
        most = max(layer.output_bytes for _, layer in members)
        title = members[0][1].name
        if any(layer.name == title for layer in layers):
            title = f"{title}-{at}"
        layers.append(usual.replace(name=title, count=len(members), output_bytes=most))
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
