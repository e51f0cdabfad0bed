"""Every operator that a training step of a PyTorch module runs, forward and backward.

The step runs once on the meta device, where tensors have shapes and no data. A dispatch mode sees
each ATen operator that PyTorch itself executes, below autograd; arrays are identified by their
storage, so that views need no special rules; a hook sees the tensors that autograd saves.
"""

from __future__ import annotations

import math
import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found, unused-ignore]
from torch.utils._python_dispatch import (  # type: ignore[import-not-found, unused-ignore]
    TorchDispatchMode,
)

from phaze_fast.errors import InvalidInputError

# ---- values that depend on no input: positions and masks ----


_MOST = {torch.bool: 2**28}  # largest constant whose values are tracked, in elements by type
_MOST_OF_OTHERS = 2**24
_MOST_BYTES = 2**30  # limit for all constants together
_HIDDEN = -1e4  # scores lowered by more than this belong to masked keys
_CHANCE = frozenset({"rand", "rand_like", "randn", "randn_like", "randint", "bernoulli", "uniform"})


class Constants:
    """Values of arrays that do not depend on any input.

    Control flow may depend on them, since they are the same in every step. Random numbers are
    replaced by the lowest or the highest value of their range: two recordings show whether control
    flow depends on them.

    Parameters
    ----------
    highest
        Whether random numbers take the highest value of their range.
    """

    def __init__(self, highest: bool = False) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity, during the array's lifetime
        self._chance = 1.0 - 2.0**-24 if highest else 0.0
        self._drawn: dict[int, str] = {}
        self.random_lines: list[str] = []
        """Source lines at which a number was read that depends on random values."""

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._known:
                return self._known[id(value)][1]
            if not value.is_meta:
                return value
            raise KeyError(id(value))
        if isinstance(value, tuple | list):
            return type(value)(self._of(one) for one in value)
        return value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the result of an operator on constants, if it is small and known."""
        outputs = out if isinstance(out, tuple | list) else (out,)
        if self._held_bytes() > _MOST_BYTES or any(
            not isinstance(x, torch.Tensor) or x.numel() > _MOST.get(x.dtype, _MOST_OF_OTHERS)
            for x in outputs
        ):
            return
        name = func.overloadpacket.__name__.removesuffix("_")
        drawn = name in _CHANCE or any(id(x) in self._drawn for x in (*args, *kwargs.values()))
        try:
            constant_kwargs = {key: self._of(value) for key, value in kwargs.items()}
            if "device" in constant_kwargs:
                constant_kwargs["device"] = "cpu"
            if name in _CHANCE:
                computed: Any = torch.full(tuple(out.shape), self._chance, dtype=torch.float32)
                computed = computed.to(out.dtype)
            else:
                computed = func(*self._of(tuple(args)), **constant_kwargs)
        except (KeyError, RuntimeError, NotImplementedError):
            return  # it depends on an input, or its values are unknown
        values = computed if isinstance(computed, tuple | list) else (computed,)
        for tensor, value in zip(outputs, values, strict=True):
            key = id(tensor)
            self._known[key] = (weakref.ref(tensor, partial(self._forget, key)), value)
            if drawn:
                self._drawn[key] = name

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)
        self._drawn.pop(key, None)

    def _held_bytes(self) -> int:
        storages = [value.untyped_storage() for _, value in self._known.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def value(self, tensor: Any, constant: bool, line: str) -> Any:
        """Return the number in an array of one element."""
        if not constant or (tensor.is_meta and id(tensor) not in self._known):
            raise RuntimeError("control flow, or a number, that depends on data")
        if id(tensor) in self._drawn:
            self.random_lines.append(line)
        return self._of(tensor).item()

    def mask(self, tensor: Any, either: bool = False) -> dict[str, Any]:
        """Return whether a mask of scores is causal, and its window.

        With `either`, a mask may also be true at the hidden scores.
        """
        try:
            values = self._of(tensor)
        except KeyError:
            return {}
        if values.dim() < 2 or not values.numel():
            return {}
        shown = values if values.dtype == torch.bool else values > _HIDDEN
        plane = shown[(0,) * (shown.dim() - 2)]
        if plane.shape[0] != plane.shape[1] or not plane.shape[0]:
            return {}
        spread = all(
            step == 0 or size == 1
            for step, size in zip(shown.stride()[:-2], shown.shape[:-2], strict=True)
        )
        if not spread and not torch.equal(shown, plane.expand_as(shown)):
            return {}
        return _pattern(plane) or (_pattern(~plane) if either else {})


def _pattern(plane: Any) -> dict[str, Any]:
    """Return whether a square mask is causal, and how many keys the last query of a window sees."""
    keys, shown = plane.shape[0], plane.to(torch.uint8)
    counts, order = shown.sum(1), torch.arange(plane.shape[0])
    seen = int(counts[-1])
    first, last = shown.argmax(1), keys - 1 - shown.flip(1).argmax(1)
    if not (
        seen > 0
        and torch.equal(last, order)
        and torch.equal(first, (order + 1 - seen).clamp(min=0))
        and torch.equal(counts, last - first + 1)
    ):
        return {}
    return {"causal": True, "window": seen if seen < keys else 0}


# ---- fused attention, dropout and a missing loss ----


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Fused attention as one forward and one backward operator, which saves the usual tensors."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, seen: Any, recorder: Any) -> Any:
        """Record the operator."""
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.seen, ctx.recorder = seen, recorder
        reads, writes = recorder.arrays([q, k, v]), recorder.arrays([out, sums])
        recorder.add("attention", reads, writes, seen)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Record its gradient."""
        q, k, v, out, sums = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        recorder = ctx.recorder
        reads = recorder.arrays([q, k, v, out, sums, gradient])
        recorder.add("attention_backward", reads, recorder.arrays(gradients), ctx.seen)
        return (*gradients, None, None)


_DROPOUTS = (torch.nn.functional.dropout, torch.dropout, torch.dropout_)


class Functions(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Intercepts fused attention and dropout before PyTorch decomposes them.

    On GPUs dropout is one kernel; on the meta device it would be several.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace fused attention by one operator."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _DROPOUTS:
            return self._drop(func, *args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _drop(func: Any, x: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
        if training and 0.0 < p < 1.0 and not inplace and func is not torch.dropout_:
            return torch.native_dropout(x, p, True)[0]
        rest = {"inplace": inplace} if func is torch.nn.functional.dropout else {}
        return func(x, p=p, train=training) if not rest else func(x, p, training, **rest)

    def _attend(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        options = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | named
        mask = options.get("attn_mask")
        seen = {"causal": bool(options.get("is_causal")), "dropout": bool(options.get("dropout_p"))}
        if mask is not None:
            seen |= self.recorder.constants.mask(mask)
        return _Attention.apply(  # type: ignore[no-untyped-call, unused-ignore]
            query, key, value, seen, self.recorder
        )


class _Loss(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A scalar that depends on all outputs, for modules without a loss; it costs nothing."""

    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        """Return a scalar that depends on all outputs."""
        ctx.save_for_backward()
        ctx.like = [(tuple(x.shape), x.dtype) for x in outputs]
        return outputs[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return a gradient for each output."""
        return tuple(gradient.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def _floats(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
        return
    values = output.values() if hasattr(output, "values") else output
    if isinstance(output, tuple | list) or hasattr(output, "values"):
        for value in values:
            yield from _floats(value)


def loss_of(output: Any) -> Any:
    """Return the scalar of a module's output to differentiate; None if there is none."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    outputs = list(_floats(output))
    if len(outputs) == 1 and outputs[0].numel() == 1:
        return outputs[0]
    if not outputs:
        return None
    return _Loss.apply(*outputs)  # type: ignore[no-untyped-call, unused-ignore]


# ---- the recording ----


Modules = tuple[tuple[int, str], ...]
"""Running modules, outermost first: number of the call, and path of the module."""


@dataclass(frozen=True)
class Array:
    """A tensor that an operator reads or writes."""

    storage: int
    shape: tuple[int, ...]
    item_bytes: int
    held_bytes: int
    """Bytes of its storage."""
    parameter: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes moved by reading it; an expanded array is read once."""
        return min(self.elements * self.item_bytes, self.held_bytes)


@dataclass(frozen=True)
class Call:
    """One recorded operator."""

    name: str
    """ATen name, without overload and in-place suffix."""
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    sources: tuple[int, ...]
    """Operators that produced its inputs; -1: the module's input."""
    backward: bool
    path: Modules
    sequence: int
    """Number of the autograd node that it belongs to."""
    options: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    """Source line it was called from."""


@dataclass(frozen=True)
class Saved:
    """A tensor saved by autograd."""

    array: Array
    before: int
    """Number of operators that ran before it was saved."""
    path: Modules
    source: int
    """Operator that produced it; -1: an input; -2: a constant."""


_MAKERS = """
    empty empty_like empty_strided new_empty new_empty_strided full full_like ones ones_like zeros
    zeros_like new_zeros new_ones new_full arange scalar_tensor eye linspace tril_indices
    triu_indices
    """
_CREATORS = frozenset(_MAKERS.split())
_MOST_CALLS = 200_000
"""Most operators of one step; a transformer of a hundred layers has about ten thousand."""
_COPIES = frozenset({"_to_copy", "clone"})
_MASKS = frozenset({"add", "add_", "where", "masked_fill", "masked_fill_"})
_HERE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _is_users(filename: str) -> bool:
    """Whether a source file is neither PyTorch's nor this package's."""
    return not filename.startswith(_HERE)


def _calling_line() -> str:
    """File and line of the innermost running frame outside of PyTorch, as ``model.py:12``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _failing_line(error: BaseException) -> str:
    """File and line of the innermost frame outside of PyTorch that an error went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return ""


class Recorder(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Records operators as they run."""

    def __init__(self, module: Any, highest: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.title = type(module).__name__
        self.calls: list[Call] = []
        self.saved: list[Saved] = []
        self.backward = False
        self.names: dict[int, str] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            self.names.setdefault(id(part), path)
        self.parameters: dict[int, int] = {}
        """Elements of each parameter, by storage."""
        self.copies: dict[int, int] = {}
        """Storages of casts of parameters, and the parameter of each cast."""
        self._path: list[tuple[int, str]] = []
        self._entered = 0
        self._made: dict[int, int] = {}  # storage -> operator that last wrote to it, -1: an input
        self.constants = Constants(highest)
        self._kept: set[int] = set()  # storages of the tensors that autograd saves
        self._alive: list[Any] = []  # the address of a freed storage could be reused
        for part in module.parameters():
            self._note(part)
            self.parameters[part.untyped_storage()._cdata] = part.numel()

    # ---- arrays ----

    def _note(self, tensor: Any) -> Array:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._alive.append(storage)
        return Array(
            key,
            tuple(tensor.shape),
            tensor.element_size(),
            storage.nbytes(),
            key in self.parameters or key in self.copies,
        )

    def arrays(self, values: Any) -> list[Array]:
        """Record the tensors among values."""
        arrays = []
        for value in values:
            if isinstance(value, torch.Tensor):
                arrays.append(self._note(value))
            elif isinstance(value, tuple | list):
                arrays += self.arrays(value)
        return arrays

    def enter_inputs(self, values: Any) -> None:
        """Record the floating-point inputs; operators that depend on them count."""
        for value in values:
            if isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex()
            ):
                self._made[self._note(value).storage] = -1

    def counts(self, array: Array) -> bool:
        """Whether arithmetic on an array is an operator: masks and positions are constants."""
        return array.parameter or array.storage in self._made

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        reads = self.arrays([*args, *kwargs.values()])
        constant = not any(map(self.counts, reads))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.constants.value(args[0], constant, _calling_line())
        name, mutable = func.overloadpacket.__name__, func._schema.is_mutable
        if name.endswith("_") and not self.backward:
            self._refuse_overwriting(name, args)
        out = func(*args, **kwargs)
        if constant:
            self.constants.follow(func, args, kwargs, out)
        writes = self.arrays(out if isinstance(out, tuple | list) else [out])
        read_storages = {array.storage for array in reads}
        view = (
            not mutable and bool(writes) and all(array.storage in read_storages for array in writes)
        )
        if view or name in _CREATORS or constant:
            if self.backward and not view:  # the first gradient, and zeros for absent ones
                for array in writes:
                    self._made.setdefault(array.storage, -1)
            return out
        if name == "convolution_backward":
            self._convolution_gradients(args, out)
            return out
        options = {"groups": args[8], "transposed": args[6]} if name == "convolution" else {}
        if name in _MASKS:
            options = self._hidden(args, writes)
        self.add(name.removesuffix("_") if mutable else name, reads, writes, options)
        if name in _COPIES and all(array.parameter for array in reads):
            for array in writes:  # a cast of weights counts as the weights
                self._made.pop(array.storage)
                self.copies[array.storage] = self.copies.get(reads[0].storage, reads[0].storage)
        return out

    def _refuse_overwriting(self, name: str, args: Any) -> None:
        """Refuse in-place writes to parameters and to tensors that the backward pass reads."""
        if not args or not isinstance(args[0], torch.Tensor):
            return
        array = self._note(args[0])
        target = "parameters" if array.parameter else "what the backward pass reads"
        if array.parameter or array.storage in self._kept:
            raise InvalidInputError(
                f"{self.title}: aten.{name} ({_calling_line()}) writes {target} in place, which is "
                "not modelled"
            )

    def _hidden(self, args: Any, writes: list[Array]) -> dict[str, Any]:
        """Describe a constant mask of square scores among an operator's arguments."""
        shape = writes[0].shape if writes else ()
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return {}
        for value in args:
            if isinstance(value, torch.Tensor) and tuple(value.shape[-2:]) == shape[-2:]:
                seen = not self.counts(self._note(value))
                hidden = self.constants.mask(value, either=True) if seen else {}
                if hidden:
                    return hidden
        return {}

    def _convolution_gradients(self, args: Any, out: Any) -> None:
        """Record the gradients of a convolution's input and weights as separate operators."""
        options = {"groups": args[9], "transposed": args[7]}
        gradient, x, weights = self.arrays(args[:3])
        shapes = {"x": x.shape, "weights": weights.shape, "out": gradient.shape}
        wanted = (("input", weights, out[0]), ("weight", x, out[1]))
        for operand, other, computed in wanted:
            if computed is not None:
                written = self.arrays([computed])
                self.add(
                    f"convolution_{operand}", [gradient, other], written, {**options, **shapes}
                )

    def add(
        self, name: str, reads: list[Array], writes: list[Array], options: dict[str, Any]
    ) -> None:
        """Record an operator; refuse more than `_MOST_CALLS`."""
        if len(self.calls) >= _MOST_CALLS:
            line = "" if self.backward else f" ({_calling_line()})"
            raise InvalidInputError(
                f"{self.title}: runs more than {_MOST_CALLS:,} operators{line}, as a loop over "
                "tokens does; expected fewer layers, a shorter sequence or a scan in chunks"
            )
        sources = [self._made[a.storage] for a in reads if a.storage in self._made]
        self.calls.append(
            Call(
                name,
                tuple(reads),
                tuple(writes),
                tuple(dict.fromkeys(sources)),
                self.backward,
                tuple(self._path),
                self._sequence(),
                options,
                "" if self.backward else _calling_line(),
            )
        )
        for array in writes:
            self._made[array.storage] = len(self.calls) - 1

    def _sequence(self) -> int:
        if not self.backward:
            return int(torch._C._autograd._get_sequence_nr()) - 1
        node = torch._C._current_autograd_node()
        return -1 if node is None else int(node._sequence_nr())

    def keep(self, tensor: Any) -> Any:
        """Record a tensor that autograd saves; parameters are not counted."""
        if not self.backward and isinstance(tensor, torch.Tensor):
            array = self._note(tensor)
            if not array.parameter:
                self._kept.add(array.storage)
                source = self._made.get(array.storage, -2)
                self.saved.append(Saved(array, len(self.calls), tuple(self._path), source))
        return tensor

    # ---- modules ----

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track which module is running."""

        def enter(module: Any, _: Any) -> None:
            self._entered += 1
            self._path.append((self._entered, self.names.get(id(module), "")))

        def leave(_module: Any, _inputs: Any, _output: Any) -> None:
            self._path.pop()

        hooks = torch.nn.modules.module
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
            stack.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            yield


@contextmanager
def _no_custom_gradients(name: str) -> Iterator[None]:
    """Refuse custom autograd functions: tensors that they save themselves are not visible."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] not in ("torch", "phaze_fast"):
            raise InvalidInputError(
                f"{name}: {cls.__qualname__} ({_calling_line()}) is a torch.autograd.Function, "
                "whose gradient is not modelled; expected operators that PyTorch differentiates"
            )
        return original.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


def record_step(
    name: str,
    module: Any,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    highest: bool = False,
) -> Recorder:
    """Run one forward and backward pass of a module on the meta device and record its operators.

    Random numbers that control flow may depend on take the lowest value of their range, or the
    highest if `highest`.

    Raises
    ------
    InvalidInputError
        If it cannot run without data; the message gives the source line.
    """
    recorder = Recorder(module, highest)
    recorder.title = name
    recorder.enter_inputs([*inputs, *kwargs.values()])
    try:
        with recorder.watching(), _no_custom_gradients(name), Functions(recorder), recorder:
            with torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x):
                loss = loss_of(module(*inputs, **kwargs))
            recorder.backward = True
            if loss is not None:
                loss.backward()
    except InvalidInputError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "data-independent implementation" in reason or "no data" in reason:
            reason = "sizes or values that depend on data, such as x[x > 0] or a loop over experts"
        line = _failing_line(error)
        raise InvalidInputError(
            f"{name}: PyTorch cannot run it on shapes alone: {reason}"
            + (f" ({line})" if line else "")
        ) from error
    return recorder
