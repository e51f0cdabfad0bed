"""PyTorch modules as graphs: one training step, recorded on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from phaze_fast.errors import InvalidTypeError, MissingExtraError
from phaze_fast.models.graph_model import GraphModel

__all__ = ["from_torch"]


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "reading a PyTorch module needs: pip install 'phaze-fast[torch]'"
        ) from None
    return torch


@contextmanager
def _on_meta(module: Any, dtype: Any) -> Iterator[None]:
    """Let a module's parameters and buffers be shapes; it is left as it was."""
    torch = _torch()
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Any] = {}

    def shape_of(tensor: Any) -> Any:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=kind)

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    shape = shape_of(tensor)
                    if held is part._parameters:
                        shape = torch.nn.Parameter(shape, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = shape
                swapped.append((held, name, tensor))
                held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


@contextmanager
def _without_warnings_of_padding(module: Any) -> Iterator[None]:
    """Leave out a check of transformers that looks at token ids only to warn."""
    name = "warn_if_padding_and_no_attention_mask"
    parts = [part for part in module.modules() if hasattr(type(part), name)]
    for part in parts:
        part.__dict__[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop(name, None)


GROUPED = "experts as grouped products (transformers' experts_implementation 'grouped_mm')"
"""What a traced graph notes where its experts were recorded in another way than they would run."""


@contextmanager
def _grouped_experts(module: Any) -> Iterator[bool]:
    """Run experts of transformers as grouped products; their loop over experts depends on data.

    Gives whether anything was changed; the module is left as it was.
    """
    changed: list[tuple[Any, Any]] = []
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        loops = getattr(config, "_experts_implementation", "") in (None, "eager")
        if loops and hasattr(part, "_apply_gate") and hasattr(config, "_experts_implementation"):
            changed.append((config, config._experts_implementation))
            config._experts_implementation = "grouped_mm"
    try:
        yield bool(changed)
    finally:
        for config, before in changed:
            config._experts_implementation = before


def _samples(value: Any, size: int, count: int, dtype: Any) -> Any:
    """Shape `count` samples like an example of `size`."""
    torch = _torch()
    if isinstance(value, tuple | list):
        return type(value)(_samples(one, size, count, dtype) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if shape and shape[0] == size:
        shape[0] = count
    kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty(shape, dtype=kind, device="meta", requires_grad=value.requires_grad)


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
    """Read a PyTorch module: the operators of its training step, its layers, what it keeps.

    The step runs on the meta device: no weight is read and none is allocated. The first dimension
    of the example inputs is that of the samples.

    Parameters
    ----------
    module
        A ``torch.nn.Module``. Where its output has a ``loss``, or is one number, that is what is
        differentiated; else the sum of its outputs.
    example_inputs
        Positional arguments of its ``forward``.
    example_kwargs
        Arguments by name; for a HuggingFace decoder ``{"labels": ids, "use_cache": False}``.
    name
        What to call it; by default its class.
    dtype
        Of parameters and floating-point inputs; None = as they are.

    Returns
    -------
    GraphModel
        Each kind of layer once. Layers are the numbered children of the outermost container that
        has them; what runs before, between and after them is a layer of its own.

    Raises
    ------
    InvalidInputError
        Where an operator is not modelled, or the step cannot run without data; the message names
        it and the source line.
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
    from phaze_fast.models.torch_layers import layered
    from phaze_fast.models.torch_recorder import record_step

    kwargs = dict(example_kwargs or {})
    title = name or type(module).__name__
    given = list(_tensors([*example_inputs, *kwargs.values()]))
    size = given[0].shape[0] if given and given[0].dim() else 1
    ids = next((x for x in given if not x.is_floating_point() and x.dim() == 2), None)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    recorded: list[Any] = []
    with (
        _on_meta(module, kind),
        _without_warnings_of_padding(module),
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
    found = layered(title, recorded[0], recorded[1], modules, seq)
    return found.replace(notes=GROUPED) if regrouped else found
