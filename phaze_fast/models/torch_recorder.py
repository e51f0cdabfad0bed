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
from dataclasses import replace
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
from phaze_fast.models.recording import (
    CONVERTED,
    MASK,
    NEED_CONTIGUOUS,
    Array,
    Recording,
    mask_load,
    safe_softmax,
)
from phaze_fast.models.torch_recurrent import RECURRENT, run_recurrent

# ---- values that depend on no input: positions and masks ----


_MOST = {torch.bool: 2**28}  # largest constant whose values are tracked, in elements by type
_MOST_OF_OTHERS = 2**24
_MOST_BYTES = 2**30  # limit for all constants together
_HIDDEN = -1e4  # masks add at most this to the scores of masked keys
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

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator whose sizes depend on constants; None if unknown."""
        try:
            return func(*self._of(tuple(args)), **kwargs).to("meta")
        except (KeyError, RuntimeError, NotImplementedError, AttributeError):
            return None

    def knows(self, tensor: Any) -> bool:
        """Whether the values of an array are known, and not drawn at random."""
        return id(tensor) in self._known and id(tensor) not in self._drawn

    def values(self, tensor: Any) -> Any:
        """Return an array whose values are known."""
        return self._of(tensor)

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
        """Return whether a mask of scores is causal, and its window in keys; empty if not causal.

        With `either`, a boolean mask may mark the masked keys instead of the visible ones.
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
    """Return whether a square mask is causal, and its window in keys (0 if it has none)."""
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


def _laid_out_like(q: Any, width: int) -> Any:
    """Return an array like `q` with rows of `width`, its dimensions ordered in memory as in `q`."""
    shape = (*q.shape[:-1], width)
    order = sorted(range(q.dim()), key=lambda dim: (-q.stride(dim), dim))
    out = q.new_empty([shape[dim] for dim in order])
    return out.permute([order.index(dim) for dim in range(q.dim())])


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Fused attention as one forward and one backward operator, with the tensors it saves.

    The gradient of a trained bias is written for every sample and head, and then summed.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, seen: Any, recorder: Any
    ) -> Any:
        """Record the forward operator."""
        out = _laid_out_like(q, v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        if mask is not None:
            recorder.load_mask(mask, q.shape[:-2], CONVERTED)
        ctx.seen, ctx.recorder = seen, recorder
        ctx.bias_shape = None if bias is None else bias.shape
        reads, writes = recorder.arrays([q, k, v]), recorder.arrays([out, sums])
        recorder.add("attention", reads, writes, seen, _any_tracked((q, k, v)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Record the gradient operator."""
        q, k, v, out, sums, mask = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        if ctx.bias_shape is not None:
            gradients.append(q.new_empty((*q.shape[:-1], k.shape[-2])))
        recorder = ctx.recorder
        if mask is not None:
            recorder.load_mask(mask, (*q.shape[:-3], 2 * q.shape[-3]))
        reads = recorder.arrays([q, k, v, out, sums, gradient])
        recorder.add("attention_backward", reads, recorder.arrays(gradients), ctx.seen)
        of_bias = gradients[3].sum_to_size(ctx.bias_shape) if ctx.bias_shape is not None else None
        return (*gradients[:3], of_bias, None, None, None)


def _attend_in_parts(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool) -> Any:
    """Run attention as PyTorch does where no fused kernel applies: in fp32, operator by operator.

    PyTorch, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    scores = torch.matmul(wide_q * 1.0, wide_k.transpose(-2, -1) * 1.0)
    if mask is not None:
        scores = scores.add_(mask)
    shares = torch._safe_softmax(scores, -1)
    if dropout:
        shares = torch.native_dropout(shares, dropout, True)[0]
    shares.to(q.dtype)  # PyTorch's second result, which nothing reads
    return torch.matmul(shares, wide_v).to(q.dtype)


_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUTS = (torch.nn.functional.dropout, torch.dropout, torch.dropout_)


class Functions(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Intercepts fused attention and dropout before PyTorch decomposes them.

    On GPUs dropout is one kernel; on the meta device it would be several.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace fused attention, dropout and recurrent layers by operators of their own."""
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self._attend(*args, **kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func in _DROPOUTS:
            return self._drop(func, *args, **kwargs)
        if func in RECURRENT:
            return run_recurrent(func, self.recorder, *args)
        if func is torch.Tensor.tolist and self.recorder.constants.knows(args[0]):
            return self.recorder.constants.values(args[0]).tolist()
        return func(*args, **kwargs)

    @staticmethod
    def _drop(func: Any, x: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
        if training and 0.0 < p < 1.0 and not inplace and func is not torch.dropout_:
            return torch.native_dropout(x, p, True)[0]
        rest = {"inplace": inplace} if func is torch.nn.functional.dropout else {}
        return func(x, p=p, train=training) if not rest else func(x, p, training, **rest)

    def _multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run PyTorch's multi-head attention, inside of which function modes are off."""
        functional: Any = torch.nn.functional
        functional.scaled_dot_product_attention = self._attend
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = _ATTENTION

    def _attend(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        options = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | named
        mask, dropout = options.get("attn_mask"), options.get("dropout_p") or 0.0
        causal = bool(options.get("is_causal"))
        arrays = [x for x in (query, key, value, mask) if x is not None and x.shape[-1] > 1]
        if any(x.stride(-1) != 1 for x in arrays):  # fused kernels need contiguous rows
            return _attend_in_parts(query, key, value, mask, dropout, causal)
        seen = {"causal": causal, "dropout": bool(dropout), "masked": mask is not None}
        seen["expands_mask"] = mask is None and not causal and self.recorder.expands_mask()
        if mask is not None:
            seen |= self.recorder.constants.mask(mask)
        bias = mask if mask is not None and mask.requires_grad else None
        windowed = None  # copy of a windowed boolean mask in numbers
        if mask is not None and seen.get("window"):
            windowed = mask.new_empty(mask.shape, dtype=query.dtype)
        return _Attention.apply(  # type: ignore[no-untyped-call, unused-ignore]
            query, key, value, bias, windowed, seen, self.recorder
        )


class _Loss(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A scalar that depends on all outputs, for modules without a loss; it is not recorded."""

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


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, tuple | list) or hasattr(output, "values"):
        for value in output.values() if hasattr(output, "values") else output:
            yield from _tensors(value)


def loss_of(output: Any) -> Any:
    """Return the scalar of a module's output to differentiate; None if there is none."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if len(outputs) == 1 and outputs[0].numel() == 1:
        return outputs[0]
    if not outputs:
        return None
    return _Loss.apply(*outputs)  # type: ignore[no-untyped-call, unused-ignore]


# ---- the recording ----


_MAKERS = """
    empty empty_like empty_strided new_empty new_empty_strided full full_like ones ones_like zeros
    zeros_like new_zeros new_ones new_full arange scalar_tensor eye linspace tril_indices
    triu_indices
    """
_CREATORS = frozenset(_MAKERS.split())
_ON_DATA = (
    "; expected shapes that are known before: a mask in place of selected rows, and experts as "
    "grouped products (torch.nn.functional.grouped_mm of rows sorted by expert)"
)
_MOST_CALLS = 200_000
"""Most operators of one step; a transformer of a hundred layers has about ten thousand."""
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


def _any_tracked(values: Any) -> bool:
    """Whether autograd tracks any of the tensors among values."""
    return any(
        _any_tracked(value)
        if isinstance(value, tuple | list)
        else isinstance(value, torch.Tensor) and value.requires_grad
        for value in values
    )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _by_channels(x: Any, weights: Any) -> bool:
    """Whether PyTorch runs a convolution with channels last: if its input or its weights are so."""
    return any(
        array.dim() in _CHANNELS_LAST and array.stride(1) == 1 and not array.is_contiguous()
        for array in (x, weights)
    )


def _last(array: Any) -> Any:
    """Return an empty array like a result of a convolution, with channels last."""
    if array is None or array.dim() not in _CHANNELS_LAST:
        return array
    return torch.empty_like(array, memory_format=_CHANNELS_LAST[array.dim()])


def _described(arguments: Any, by_channels: bool) -> dict[str, Any]:
    """Options of a convolution: strides, groups, layout, and whether it is transposed."""
    strides, _, _, transposed, _, groups = arguments
    return {
        "strides": tuple(strides),
        "groups": groups,
        "transposed": transposed,
        "channels_last": by_channels,
    }


class Recorder(Recording, TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Records operators as they run."""

    def __init__(self, module: Any, highest: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.title = type(module).__name__
        self.names: dict[int, str] = {}
        self._masking: set[str] = set()
        for path, part in module.named_modules(remove_duplicate=False):
            self.names.setdefault(id(part), path)
            if hasattr(sys.modules.get(type(part).__module__), "create_bidirectional_mask"):
                self._masking.add(path)
        self.constants = Constants(highest)
        self._saved_storages: set[int] = set()  # storages of the tensors that autograd saves
        self._storages: dict[int, tuple[int, Any]] = {}  # number by address, while it is alive
        self._numbered = 0
        self.freed: dict[int, int] = {}
        """Number of operators that ran before each storage was freed."""
        self.custom = False
        """Whether the forward pass of a custom autograd function runs."""
        self._temporaries = 0  # copies inside of operators: storages numbered from -1 down
        for part in module.parameters():
            key = self._note(part).storage
            self.parameters[key] = part.numel()
            if not part.requires_grad:
                self.frozen.add(key)

    # ---- arrays ----

    def _note(self, tensor: Any) -> Array:
        storage = tensor.untyped_storage()
        key = self._number(storage)
        return Array(
            key,
            tuple(tensor.shape),
            tensor.element_size(),
            storage.nbytes(),
            self.is_weight(key),
            () if tensor.is_contiguous() else tuple(tensor.stride()),
        )

    def _number(self, storage: Any) -> int:
        """Return the number of a storage; a weak reference sees when it is freed."""
        address = storage._cdata
        if address not in self._storages:
            self._numbered += 1
            seen = weakref.ref(storage, partial(self._free, address))
            self._storages[address] = self._numbered, seen
        return self._storages[address][0]

    def _free(self, address: int, _: Any) -> None:
        number, _ = self._storages.pop(address)
        self.freed[number] = len(self.calls)

    def arrays(self, values: Any) -> list[Array]:
        """Return the tensors among values as arrays, in order."""
        arrays = []
        for value in values:
            if isinstance(value, torch.Tensor):
                arrays.append(self._note(value))
            elif isinstance(value, tuple | list):
                arrays += self.arrays(value)
        return arrays

    def enter_inputs(self, values: Any) -> None:
        """Register the floating-point inputs; only operators that depend on them are recorded."""
        for value in values:
            if isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex()
            ):
                self._writer[self._note(value).storage] = -1

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        reads = self.arrays([*args, *kwargs.values()])
        constant = not any(map(self.counts, reads))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.constants.value(args[0], constant, _calling_line())
        name, mutable = func.overloadpacket.__name__, func._schema.is_mutable
        if name.endswith("_") and not self.backward and torch.Tag.inplace_view not in func.tags:
            self._refuse_overwriting(name, args)
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            out = self.constants.computed(func, args, kwargs) if constant else None
            if out is None:
                raise
        if name == "convolution" and _by_channels(*args[:2]):
            out = _last(out)
        elif name == "convolution_backward" and _by_channels(*args[1:3]):
            out = tuple(map(_last, out))
        if constant:
            self.constants.follow(func, args, kwargs, out)
        writes = self.arrays(out if isinstance(out, tuple | list) else [out])
        read_storages = {array.storage for array in reads}
        restrided = torch.Tag.inplace_view in func.tags  # such as as_strided_
        view = restrided or (
            not mutable and bool(writes) and all(array.storage in read_storages for array in writes)
        )
        if view or name in _CREATORS or constant:
            if self.backward and not view:  # the initial gradient, and zeros for missing gradients
                for array in writes:
                    self._writer.setdefault(array.storage, -1)
            return out
        if name.startswith("convolution"):
            convolve = self._convolution if name == "convolution" else self._convolution_gradients
            convolve(args, out)
            return out
        if name == "_safe_softmax":
            self._safe_softmax(reads[0], writes[0])
            return out
        if name in NEED_CONTIGUOUS:
            reads = [self._copied(array) if array.strides else array for array in reads]
        options: dict[str, Any] = {}
        if name in _MASKS:
            options = self._hidden(args, writes)
        elif torch.Tag.pointwise in func.tags:
            options = {"element_wise": True}
        tracked = torch.is_grad_enabled() and _any_tracked([*args, *kwargs.values()])
        tracked = tracked or self.custom
        self.add(name.removesuffix("_") if mutable else name, reads, writes, options, tracked)
        return out

    def _refuse_overwriting(self, name: str, args: Any) -> None:
        """Refuse in-place writes to parameters and to tensors that the backward pass reads."""
        if not args or not isinstance(args[0], torch.Tensor):
            return
        storage = self._note(args[0]).storage
        weights = storage in self.parameters  # a clone of them may be written
        target = "parameters" if weights else "what the backward pass reads"
        if weights or storage in self._saved_storages:
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

    def _temporary(self, shape: tuple[int, ...], item_bytes: int) -> Array:
        """Return an array that exists inside of an operator."""
        self._temporaries += 1
        return Array(-self._temporaries, shape, item_bytes, math.prod(shape) * item_bytes)

    def _copied(self, array: Array) -> Array:
        """Record the copy that PyTorch makes of an array for a kernel that needs it contiguous."""
        copy = self._temporary(array.shape, array.item_bytes)
        self.add("clone", [array], [copy], {})
        return copy

    def _safe_softmax(self, scores: Array, out: Array) -> None:
        """Record a softmax that is zero in rows where everything is masked: four kernels."""
        for name, reads, writes in safe_softmax(scores, out, self._temporary):
            self.add(name, reads, writes, {}, tracked=scores in reads)

    def _laid_out(self, arrays: list[Array], options: dict[str, Any]) -> list[Array]:
        """Record the copies of activations that are not in the layout of their convolution."""
        last = options["channels_last"]
        return [
            array
            if array.parameter or (array.channels_last if last else not array.strides)
            else self._copied(array)
            for array in arrays
        ]

    def _convolution(self, args: Any, out: Any) -> None:
        """Record a convolution; on GPUs PyTorch adds the bias in a kernel of its own."""
        written, options = self.arrays([out]), _described(args[3:9], _by_channels(*args[:2]))
        reads = self._laid_out(self.arrays(args[:2]), options)
        self.add("convolution", reads, written, options)
        if args[2] is not None:
            self.add("add", written + self.arrays(args[2:3]), written, {})
            self.calls[-1] = replace(self.calls[-1], sequence=-1)  # the convolution has its node

    def _convolution_gradients(self, args: Any, out: Any) -> None:
        """Record the gradients of a convolution's input, weights and bias as separate operators."""
        options = _described(args[4:10], _by_channels(*args[1:3]))
        gradient, x, weights = self._laid_out(self.arrays(args[:3]), options)
        shapes = {"x": x.shape, "weights": weights.shape, "out": gradient.shape}
        wanted = (("input", weights, out[0]), ("weight", x, out[1]))
        for operand, other, computed in wanted:
            if computed is not None:
                written = self.arrays([computed])
                self.add(
                    f"convolution_{operand}", [gradient, other], written, {**options, **shapes}
                )
        if out[2] is not None:
            self.add("sum", [gradient], self.arrays([out[2]]), {})

    def add(
        self,
        name: str,
        reads: list[Array],
        writes: list[Array],
        options: dict[str, Any],
        tracked: bool = True,
    ) -> None:
        """Record an operator, and whether autograd tracks it; refuse more than `_MOST_CALLS`."""
        if len(self.calls) >= _MOST_CALLS:
            line = "" if self.backward else f" ({_calling_line()})"
            raise InvalidInputError(
                f"{self.title}: runs more than {_MOST_CALLS:,} operators{line}, as a loop over "
                "tokens does; expected fewer layers, a shorter sequence or a scan in chunks"
            )
        sequence = self._sequence() if tracked or self.backward else -1
        self.note(name, reads, writes, options, sequence, "" if self.backward else _calling_line())

    def expands_mask(self) -> bool:
        """Whether the running module is one of transformers that, if compiled, expands a mask."""
        return bool(self._path) and self._path[-1][1] in self._masking

    def load_mask(self, mask: Any, heads: Any, passes: int = 0) -> None:
        """Record the loads of a mask by the heads of an attention."""
        array = self._note(mask)
        loaded, options = mask_load(array, tuple(heads), passes)
        self.add(MASK, [loaded], [array] if passes else [], options)

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
                self._saved_storages.add(array.storage)
            self.note_saved(array)
        return tensor

    # ---- modules ----

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track which module is running."""

        def enter(module: Any, _: Any) -> None:
            self.enter(self.names.get(id(module), ""))

        def leave(_module: Any, _inputs: Any, _output: Any) -> None:
            self._path.pop()

        hooks = torch.nn.modules.module
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
            stack.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            yield


@contextmanager
def _custom_gradients(recorder: Recorder) -> Iterator[None]:
    """Refuse custom autograd functions that hold tensors which hooks do not see."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        before, recorder.custom = recorder.custom, True
        out = original.__get__(None, cls)(*args, **kwargs)
        recorder.custom = before
        node = next((x.grad_fn for x in _tensors(out) if x.grad_fn is not None), None)
        own = cls.__module__.split(".")[0] in ("torch", "phaze_fast")
        if not own and any(
            isinstance(x, torch.Tensor) for x in getattr(node, "__dict__", {}).values()
        ):
            raise InvalidInputError(
                f"{recorder.title}: {cls.__qualname__} ({_calling_line()}) is a "
                "torch.autograd.Function that holds tensors as attributes, which are not seen; "
                "expected ctx.save_for_backward"
            )
        return out

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
        If the step cannot run without data; the message gives the source line.
    """
    recorder = Recorder(module, highest)
    recorder.title = name
    recorder.enter_inputs([*inputs, *kwargs.values()])
    try:
        with recorder.watching(), _custom_gradients(recorder), Functions(recorder), recorder:
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
        hint = _ON_DATA if "depend" in reason and "data" in reason else ""
        raise InvalidInputError(
            f"{name}: PyTorch cannot run it on shapes alone: {reason}"
            + (f" ({line})" if line else "")
            + hint
        ) from error
    return recorder
