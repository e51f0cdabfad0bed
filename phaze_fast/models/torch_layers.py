"""Layers of a traced module, grouped by the modules that called their operators.

A layer is a numbered child of a container (``h.0``, ``layers.3``): what runs between two of them
becomes a layer of its own. Layers of the same operators are one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from phaze_fast.models.traced import TracedLayer, TracedModel, TracedOp

__all__ = ["CalledOp", "Module", "fuse_leaves", "layered"]

_SPREAD = {"rsqrt", "sqrt"}
_MEAN = {"linalg_vector_norm", "mean", "var", "var_mean"}


@dataclass(frozen=True)
class CalledOp:
    """An operator with positions in the whole model as inputs, and where it was called."""

    op: TracedOp
    """Named for its ATen operator."""
    stack: tuple[tuple[str, str], ...]
    """Modules it runs in, outermost first: the call, and the path of the module."""


@dataclass(frozen=True)
class Module:
    """What layers are found by: the class of a module and its children."""

    kind: str
    children: tuple[str, ...]


def _layer_paths(modules: Mapping[str, Module]) -> frozenset[str]:
    """Paths of numbered children that are layers.

    A row of bare operators of several classes, such as a linear, an activation and a linear, is
    no stack of layers.
    """
    found: set[str] = set()
    for path, module in modules.items():
        numbered = [f"{path}.{child}".lstrip(".") for child in module.children if child.isdecimal()]
        composite = any(modules[child].children for child in numbered)
        if composite or len({modules[child].kind for child in numbered}) == 1:
            found.update(numbered)
    return frozenset(found)


# ---- modules that are one operator ----


def _fused_kind(names: set[str], kinds: set[str]) -> str:
    """Kind of the operator that a module's operators make up together, or an empty text."""
    if names & _SPREAD and names & _MEAN:
        return "norm"
    return "activation" if kinds == {"elementwise", "activation"} else ""


def _is_one(run: range, ops: list[CalledOp], readers: Mapping[int, set[int]]) -> bool:
    """Whether a run reads one array and gives one."""
    outside = {i for at in run for i in ops[at].op.inputs if i not in run}
    leaving = [at for at in run if any(reader not in run for reader in readers.get(at, ()))]
    return len(outside) == 1 and leaving in ([], [run[-1]])


def fuse_leaves(ops: list[CalledOp], modules: Mapping[str, Module]) -> list[CalledOp]:
    """Make one operator of a norm or an activation that a leaf module spells out.

    Llama's norm is six ATen operators and GPT-2's activation eight; each reads one array and
    writes one.
    """
    readers: dict[int, set[int]] = {}
    for at, called in enumerate(ops):
        for source in called.op.inputs:
            readers.setdefault(source, set()).add(at)
    made: list[CalledOp] = []
    place = {-1: -1}
    for (_, path), group in groupby(range(len(ops)), lambda at: (ops[at].stack or (("", ""),))[-1]):
        positions = list(group)
        run = range(positions[0], positions[-1] + 1)
        inside = [ops[at].op for at in run]
        names, kinds = {op.name for op in inside}, {op.kind for op in inside}
        kind = _fused_kind(names, kinds) if kinds <= {"elementwise", "activation"} else ""
        leaf = bool(path) and path in modules and not modules[path].children
        if leaf and kind and len(run) > 1 and _is_one(run, ops, readers):
            largest = max(inside, key=lambda op: op.elements)
            (source,) = {i for op in inside for i in op.inputs if i not in run}
            whole = replace(
                largest,
                name=kind,
                kind=kind,
                inputs=(place[source],),
                weight_elements=sum(op.weight_elements for op in inside),
            )
            made.append(CalledOp(whole, ops[run[0]].stack))
            place.update(dict.fromkeys(run, len(made) - 1))
            continue
        for at in run:
            inputs = tuple(dict.fromkeys(place[i] for i in ops[at].op.inputs))
            made.append(replace(ops[at], op=replace(ops[at].op, inputs=inputs)))
            place[at] = len(made) - 1
    return made


# ---- layers ----


def _named(called: Iterable[CalledOp], layer: str) -> list[str]:
    """Names within a layer: module path from there, and operator."""
    taken: dict[str, int] = {}
    names = []
    for one in called:
        path = one.stack[-1][1] if one.stack else ""
        if layer:
            path = path.removeprefix(layer).lstrip(".")
        name = f"{path}.{one.op.name}".lstrip(".")
        taken[name] = taken.get(name, 0) + 1
        names.append(name if taken[name] == 1 else f"{name}-{taken[name]}")
    return names


def _local(run: range, ops: list[CalledOp], layer: str) -> tuple[TracedOp, ...]:
    """Operators of one layer, with inputs and names of that layer."""
    names = _named((ops[at] for at in run), layer)
    found = []
    for at, name in zip(run, names, strict=True):
        op = ops[at].op
        inputs = dict.fromkeys(i - run.start if i in run else -1 for i in op.inputs)
        found.append(replace(op, name=name, inputs=tuple(inputs)))
    return tuple(found)


def _segments(ops: list[CalledOp], modules: Mapping[str, Module]) -> list[tuple[str, range]]:
    """(Path of the layer or empty, its operators) in order of execution."""
    layers = _layer_paths(modules)

    def call(at: int) -> tuple[str, str]:
        return next((entry for entry in ops[at].stack if entry[1] in layers), ("", ""))

    runs = [(key, list(group)) for key, group in groupby(range(len(ops)), call)]
    return [(path, range(run[0], run[-1] + 1)) for (_, path), run in runs]


def layered(
    name: str, ops: list[CalledOp], modules: Mapping[str, Module], parameters: int
) -> TracedModel:
    """Split operators into layers and store each kind of layer once.

    Parameters
    ----------
    name
        Name of the model, and of its one layer where it has no numbered children.
    ops
        Operators in topological order.
    modules
        Every module by its path; the root's is empty.
    parameters
        Parameters of the model.
    """
    segments = _segments(ops, modules)
    last = len(segments) - 1
    owner = {at: position for position, (_, run) in enumerate(segments) for at in run}
    layers: list[TracedLayer] = []
    known: dict[tuple[TracedOp, ...], int] = {}
    order: list[int] = []
    for position, (path, run) in enumerate(segments):
        local = _local(run, ops, path)
        nameless = tuple(replace(op, name="") for op in local)
        if nameless not in known:
            known[nameless] = len(layers)
            between = "before" if position == 0 else "after" if position == last else "between"
            layers.append(TracedLayer(path or (between if last else name), 0, local))
        at = known[nameless]
        layers[at] = replace(layers[at], count=layers[at].count + 1)
        order.append(at)
    edges = {
        (owner[source], owner[at])
        for at, called in enumerate(ops)
        for source in called.op.inputs
        if source >= 0 and owner[source] != owner[at]
    }
    return TracedModel(name, tuple(layers), tuple(order), tuple(sorted(edges)), parameters)
