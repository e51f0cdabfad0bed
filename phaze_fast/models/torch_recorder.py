"""Every operator that a training step of a PyTorch module runs, forward and backward.

The step runs once on the meta device, where tensors have shapes and no data. A dispatch mode sees
each ATen operator that PyTorch itself executes, below autograd; arrays are told apart by their
storage, so that views need no rules of their own; a hook sees what autograd keeps.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.utils._python_dispatch import (  # type: ignore[import-not-found, unused-ignore]
    TorchDispatchMode,
)

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.torch_constants import Constants
from phaze_fast.models.torch_functions import Functions, loss_of

__all__ = ["Array", "Call", "Recorder", "Saved", "record_step"]

Modules = tuple[tuple[int, str], ...]
"""Modules that run, outermost first: number of the call, and path of the module."""


@dataclass(frozen=True)
class Array:
    """A tensor that an operator reads or writes."""

    storage: int
    shape: tuple[int, ...]
    item_bytes: int
    held_bytes: int
    """Of its storage."""
    parameter: bool = False

    @property
    def elements(self) -> int:
        """How many there are."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """That reading it moves: an expanded array is read once."""
        return min(self.elements * self.item_bytes, self.held_bytes)


@dataclass(frozen=True)
class Call:
    """One operator as it ran."""

    name: str
    """ATen's, without overload and the mark of writing in place."""
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    sources: tuple[int, ...]
    """Operators that made what it reads; -1: the module's input."""
    backward: bool
    path: Modules
    sequence: int
    """Number of the autograd node that it belongs to."""
    options: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    """Source line it was called from."""


@dataclass(frozen=True)
class Saved:
    """What autograd keeps."""

    array: Array
    before: int
    """Operators that ran before it was kept."""
    path: Modules
    source: int
    """Operator that made it; -1: an input; -2: a constant."""


_MAKERS = """
    empty empty_like empty_strided new_empty new_empty_strided full full_like ones ones_like zeros
    zeros_like new_zeros new_ones new_full arange scalar_tensor eye linspace tril_indices
    triu_indices
    """
_CREATORS = frozenset(_MAKERS.split())
_MOST_CALLS = 200_000
"""Operators of one step; a hundred layers of a transformer have some ten thousand."""
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
    """Notes operators as they run."""

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
        """Storages of casts of parameters, and the parameter each was made from."""
        self._path: list[tuple[int, str]] = []
        self._entered = 0
        self._made: dict[int, int] = {}  # storage -> operator that last wrote to it, -1: an input
        self.constants = Constants(highest)
        self._kept: set[int] = set()  # storages of what autograd keeps
        self._alive: list[Any] = []  # a storage that is freed could be taken for another
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
        """Note the tensors among values."""
        found = []
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(self._note(value))
            elif isinstance(value, tuple | list):
                found += self.arrays(value)
        return found

    def enter_inputs(self, values: Any) -> None:
        """Note the floating-point inputs: what is computed from them counts."""
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
        """Run an operator and note it."""
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
        held = {array.storage for array in reads}
        view = not mutable and bool(writes) and all(array.storage in held for array in writes)
        if view or name in _CREATORS or constant:
            if self.backward and not view:  # the first gradient, and zeros in place of others
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
            for array in writes:  # a cast of weights stands for them
                self._made.pop(array.storage)
                self.copies[array.storage] = self.copies.get(reads[0].storage, reads[0].storage)
        return out

    def _refuse_overwriting(self, name: str, args: Any) -> None:
        """Refuse to write over parameters, and over what the backward pass will read."""
        if not args or not isinstance(args[0], torch.Tensor):
            return
        array = self._note(args[0])
        what = "parameters" if array.parameter else "what the backward pass reads"
        if array.parameter or array.storage in self._kept:
            raise InvalidInputError(
                f"{self.title}: aten.{name} ({_calling_line()}) writes {what} in place, which is "
                "not modelled"
            )

    def _hidden(self, args: Any, writes: list[Array]) -> dict[str, Any]:
        """Say what a constant mask among an operator's arguments hides of square scores."""
        shape = writes[0].shape if writes else ()
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return {}
        for value in args:
            if isinstance(value, torch.Tensor) and tuple(value.shape[-2:]) == shape[-2:]:
                seen = not self.counts(self._note(value))
                found = self.constants.mask(value, either=True) if seen else {}
                if found:
                    return found
        return {}

    def _convolution_gradients(self, args: Any, out: Any) -> None:
        """Note the gradients of a convolution's input and of its weights as an operator each."""
        options = {"groups": args[9], "transposed": args[7]}
        gradient, x, weights = self.arrays(args[:3])
        shapes = {"x": x.shape, "weights": weights.shape, "out": gradient.shape}
        wanted = (("input", weights, out[0]), ("weight", x, out[1]))
        for what, other, made in wanted:
            if made is not None:
                written = self.arrays([made])
                self.add(f"convolution_{what}", [gradient, other], written, {**options, **shapes})

    def add(
        self, name: str, reads: list[Array], writes: list[Array], options: dict[str, Any]
    ) -> None:
        """Note an operator; refuse more than `_MOST_CALLS`."""
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
        """Note what autograd keeps; parameters are there anyway."""
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
        """Know which module runs."""

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
    """Refuse autograd functions of one's own: what they keep on their own account is not seen."""
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
    """Run one forward and backward pass of a module on the meta device and note its operators.

    Random numbers that control flow may depend on are the lowest of their range, or the `highest`.

    Raises
    ------
    InvalidInputError
        Where it cannot run without data; the message gives the source line.
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
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "data-independent implementation" in said or "no data" in said:
            said = "sizes or values that depend on data, such as x[x > 0] or a loop over experts"
        line = _failing_line(error)
        raise InvalidInputError(
            f"{name}: PyTorch cannot run it on shapes alone: {said}"
            + (f" ({line})" if line else "")
        ) from error
    return recorder
