"""A training step written down without PyTorch: tensors with shapes and no data, and autograd.

Code written with these tensors, as a module's code is written with PyTorch's, records the operators
that PyTorch runs below autograd, forward and backward, in PyTorch's order, and the tensors that
autograd saves: what `phaze_fast.models.torch_recorder` records of the module itself. Strides are
tracked, because they decide which reshapes copy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from phaze_fast.models.lora import Lora
from phaze_fast.models.recording import MASK, NEED_CONTIGUOUS, Array, Recording, mask_load

ITEM_BYTES = {"bool": 1, "int32": 4, "int64": 8, "bfloat16": 2, "float32": 4, "complex64": 8}
"""Bytes of an element by number format; a result has its operands' last one in this order."""
_ORDER = tuple(ITEM_BYTES)

Shape = tuple[int, ...]


class Storage:
    """Memory that a tensor and its views share."""

    __slots__ = ("bytes", "key")
    made = 0

    def __init__(self, size: int) -> None:
        Storage.made += 1
        self.bytes, self.key = size, Storage.made


# ---- strides ----


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    wanted = contiguous_strides(shape)
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True))


def viewed_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of a view of another shape; None where only a copy has that shape."""
    if _is_contiguous(shape, strides):
        return contiguous_strides(new)
    result = [0] * len(new)
    at, chunk, block, viewed = len(new) - 1, strides[-1], 1, 1
    for dim in reversed(range(len(shape))):
        block *= shape[dim]
        ends = dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != block * chunk)
        if not ends:
            continue
        while at >= 0 and (viewed < block or new[at] == 1):
            result[at] = viewed * chunk
            viewed *= new[at]
            at -= 1
        if viewed != block:
            return None
        if dim:
            chunk, block, viewed = strides[dim - 1], 1, 1
    return tuple(result) if at == -1 else None


def _swaps(operands: Sequence[Shape], shape: Shape, one: int, other: int) -> int:
    for strides in operands:
        a, b = strides[one], strides[other]
        if a and b:
            if a != b:
                return -1 if a < b else 1
            if shape[one] > shape[other]:
                return 1
    return 0


def elementwise_strides(shape: Shape, operands: Sequence[Tensor]) -> Shape:
    """Strides of an element-wise result: dimensions in the order of the operands' strides."""
    spread = [tensor.spread(shape) for tensor in operands]
    if all(_is_contiguous(shape, strides) for strides in spread):
        return contiguous_strides(shape)
    order = list(reversed(range(len(shape))))
    for at in range(1, len(order)):
        later = at
        for earlier in reversed(range(at)):
            swap = _swaps(spread, shape, order[earlier], order[later])
            if swap > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif swap < 0:
                break
    result, step = [0] * len(shape), 1
    for dim in order:
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def broadcast(*shapes: Shape) -> Shape:
    """Shape of an element-wise result."""
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


# ---- tensors and nodes ----


class Tensor:
    """A tensor without data; operations on it are recorded by its tape.

    `tape.py` has what all operations need; `operators.py` has the operations.
    """

    __slots__ = ("dtype", "node", "shape", "slot", "storage", "strides", "tape")

    def __init__(
        self, tape: Tape, shape: Shape, dtype: str, strides: Shape | None = None,
        storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self.tape, self.shape, self.dtype = tape, shape, dtype
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.storage = storage or Storage(math.prod(shape) * ITEM_BYTES[dtype])
        self.node: Node | None = None
        self.slot = 0

    def spread(self, shape: Shape) -> Shape:
        """Strides of this tensor broadcast to a shape: 0 along repeated dimensions."""
        padding = len(shape) - len(self.shape)
        own = (
            0 if size == 1 and wide != 1 else stride
            for size, stride, wide in zip(self.shape, self.strides, shape[padding:], strict=True)
        )
        return (0,) * padding + tuple(own)

    def new(self, *shape: int, dtype: str = "", strides: Shape | None = None) -> Tensor:
        """Return another tensor of the tape, by default in the number format of this one."""
        return Tensor(self.tape, shape, dtype or self.dtype, strides)

    def alike(self, dtype: str = "") -> Tensor:
        """Return another tensor of this shape, with its dimensions in the same order in memory."""
        strides = elementwise_strides(self.shape, [self])
        return self.new(*self.shape, dtype=dtype, strides=strides)

    def overwritten(self) -> Tensor:
        """Return the tensor that an operation in place makes of this one."""
        return Tensor(self.tape, self.shape, self.dtype, self.strides, self.storage)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in memory."""
        return _is_contiguous(self.shape, self.strides)

    @property
    def requires_grad(self) -> bool:
        """Whether the backward pass computes its gradient."""
        return self.node is not None


Gradients = Sequence[Tensor | None]


class Node:
    """One operation in the graph of autograd; a leaf is a node without inputs."""

    __slots__ = ("backward", "edges", "like", "outputs", "sequence")

    def __init__(self, sequence: float, inputs: Sequence[Tensor | None], outputs: int = 1) -> None:
        self.sequence, self.outputs = sequence, outputs
        self.edges = [None if x is None or x.node is None else (x.node, x.slot) for x in inputs]
        self.like = [None if x is None else (x.shape, x.dtype) for x in inputs]
        self.backward: Callable[[Gradients], Gradients] = lambda _: ()

    def wants(self, at: int) -> bool:
        """Whether the gradient of an input is needed."""
        return self.edges[at] is not None


class _NoChance:
    """Stands for a recorder's `Constants`: control flow of a tape uses no random numbers."""

    random_lines: ClassVar[tuple[str, ...]] = ()


class Tape(Recording):
    """A step recorded without PyTorch, with the attributes that `layered` reads."""

    constants = _NoChance()

    def __init__(self, lora: Lora | None = None) -> None:
        super().__init__()
        self.lora = lora
        self.modules: dict[str, tuple[str, tuple[str, ...]]] = {"": ("", ())}
        self._sequence = 0
        self._node: Node | None = None

    # ---- modules and their tensors ----

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Run a child of the running module; `name` may be a path of several children.

        A module that is no child of another one has an empty name.
        """
        parent = self._path[-1][1] if self._path else ""
        path = f"{parent}.{name}".lstrip(".") if name else ""
        self._note_module(path)
        self.enter(path)
        yield
        self._path.pop()

    def _note_module(self, path: str) -> None:
        if path in self.modules:
            return
        self.modules[path] = ("", ())
        parent, _, child = path.rpartition(".")
        self._note_module(parent)
        kind, children = self.modules[parent]
        self.modules[parent] = (kind, (*children, child))

    def parameter(self, *shape: int, adapter: bool = False) -> Tensor:
        """Return a weight in bf16; with LoRA, all weights but adapters are frozen."""
        weight = Tensor(self, shape, "bfloat16")
        if self.lora is None or adapter:
            weight.node = Node(math.inf, ())
        else:
            self.frozen.add(weight.storage.key)
        self.parameters[weight.storage.key] = math.prod(shape)
        return weight

    def constant(self, *shape: int, dtype: str = "bfloat16") -> Tensor:
        """Return a tensor that depends on no weight, such as token ids, positions or masks."""
        return Tensor(self, shape, dtype)

    def input(
        self, shape: Shape, dtype: str = "bfloat16", strides: Shape = (), data: bool = False
    ) -> Tensor:
        """Return an input of the step, which has a gradient unless it is training data."""
        tensor = Tensor(self, shape, dtype, strides or None)
        tensor.node = None if data else Node(math.inf, ())
        self._writer[tensor.storage.key] = -1
        return tensor

    # ---- recording ----

    def _array(self, tensor: Tensor) -> Array:
        key, item = tensor.storage.key, ITEM_BYTES[tensor.dtype]
        strides = () if tensor.is_contiguous else tensor.strides
        return Array(key, tensor.shape, item, tensor.storage.bytes, self.is_weight(key), strides)

    def add(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], **options: Any
    ) -> None:
        """Record an operator, unless it works on constants alone."""
        if name in NEED_CONTIGUOUS:
            reads = [x if x.is_contiguous else self._copied(x) for x in reads]
        arrays = list(map(self._array, reads))
        if not any(map(self.counts, arrays)):
            return
        sequence = self._node_number(any(x.requires_grad for x in reads))
        self.note(name, arrays, list(map(self._array, writes)), options, sequence)

    def load_mask(self, mask: Tensor, heads: Shape, passes: int = 0) -> None:
        """Record the loads of a mask by the heads of an attention."""
        array = self._array(mask)
        loaded, options = mask_load(array, heads, passes)
        self.note(MASK, [loaded], [array] if passes else [], options, self._node_number(True))

    def _node_number(self, tracked: bool) -> int:
        if self.backward:
            return -1 if self._node is None else int(self._node.sequence)
        return self._sequence - 1 if tracked else -1

    def _copied(self, x: Tensor) -> Tensor:
        """Record the copy that PyTorch makes of a tensor for a kernel that needs it contiguous."""
        copy = Tensor(self, x.shape, x.dtype)
        copy.node, copy.slot = x.node, x.slot
        self.add("clone", [x], [copy])
        return copy

    def created(self, tensor: Tensor) -> Tensor:
        """Note a tensor that the backward pass fills, such as zeros for a missing gradient."""
        if self.backward:
            self._writer.setdefault(tensor.storage.key, -1)
        return tensor

    def node(self, inputs: Sequence[Tensor | None], outputs: int = 1) -> Node | None:
        """Return the node of an operation; None where it has no gradient."""
        if self.backward or not any(x is not None and x.requires_grad for x in inputs):
            return None
        self._sequence += 1
        return Node(self._sequence - 1, inputs, outputs)

    def save(self, node: Node | None, *tensors: Tensor) -> None:
        """Record what autograd saves for a node."""
        for tensor in tensors if node is not None else ():
            self.note_saved(self._array(tensor))

    # ---- the backward pass ----

    def run_backward(self, loss: Tensor) -> dict[Node, Tensor]:
        """Run the graph of autograd backward: the node that was created last runs first.

        Returns the gradients of `loss` and of the leaves.
        """
        self.backward = True
        if loss.node is None:
            return {}  # nothing is trained
        waits = self._waiting_edges(loss.node)
        arrived: dict[Node, list[Tensor | None]] = {}
        final = {loss.node: self.created(Tensor(self, loss.shape, loss.dtype))}
        arrived[loss.node] = [final[loss.node]]
        ready = [(-loss.node.sequence, 0, loss.node)]
        while ready:
            node = heapq.heappop(ready)[2]
            gradients = arrived.pop(node, [])
            if not node.edges:
                if gradients and gradients[0] is not None:
                    final[node] = gradients[0]
                continue
            self._node = node
            for edge, gradient in zip(node.edges, self._valid(node, gradients), strict=True):
                if edge is None:
                    continue
                target, slot = edge
                if gradient is not None:
                    slots = arrived.setdefault(target, [None] * target.outputs)
                    before = slots[slot]
                    slots[slot] = gradient if before is None else self.summed(before, gradient)
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(ready, (-target.sequence, id(target), target))
            self._node = None
        return final

    def _waiting_edges(self, root: Node) -> dict[Node, int]:
        counts: dict[Node, int] = {}
        seen, stack = {root}, [root]
        while stack:
            for edge in stack.pop().edges:
                if edge is not None:
                    counts[edge[0]] = counts.get(edge[0], 0) + 1
                    if edge[0] not in seen:
                        seen.add(edge[0])
                        stack.append(edge[0])
        return counts

    def _valid(self, node: Node, gradients: Gradients) -> list[Tensor | None]:
        """Return the gradients of a node's inputs that are wanted, in their shapes and formats."""
        if all(gradient is None for gradient in gradients):
            return [None] * len(node.edges)
        results: list[Tensor | None] = []
        for gradient, like, edge in zip(
            node.backward(gradients), node.like, node.edges, strict=True
        ):
            if gradient is None or like is None or edge is None:
                results.append(None)
            else:
                results.append(self.fitted(gradient, *like))
        return results

    def summed(self, one: Tensor, other: Tensor) -> Tensor:
        """Add two gradients of one tensor."""
        return self.elementwise("add", one, other)

    def elementwise(self, name: str, *operands: Tensor, dtype: str = "", **options: Any) -> Tensor:
        """Record an element-wise operator without gradient."""
        shape = broadcast(*(x.shape for x in operands))
        kind = dtype or max((x.dtype for x in operands), key=_ORDER.index)
        out = Tensor(self, shape, kind, elementwise_strides(shape, operands))
        self.add(name, operands, [out], **options)
        return out

    def fitted(self, gradient: Tensor, shape: Shape, dtype: str) -> Tensor:
        """Sum a gradient over dimensions that were repeated, and cast it."""
        if gradient.shape != shape:
            leading = len(gradient.shape) - len(shape)
            padded = (1,) * leading + shape
            total = Tensor(self, padded, gradient.dtype)
            self.add("sum", [gradient], [total])
            gradient = Tensor(self, shape, total.dtype, total.strides[leading:], total.storage)
        return (
            gradient
            if gradient.dtype == dtype
            else self.elementwise("_to_copy", gradient, dtype=dtype)
        )
