"""What recording a PyTorch step replaces: fused attention, a missing loss, values of constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Constants", "Functions", "loss_of"]

_SMALL = 2**16  # elements of a constant whose values are followed


class Constants:
    """Values of small arrays that depend on no input: positions, masks.

    Control flow may depend on them, as on anything that is the same in every step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity; keeping both keeps it unique

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                return value
            return self._known[id(value)][1]
        if isinstance(value, tuple | list):
            return type(value)(self._of(one) for one in value)
        return value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what an operator on constants gives, where that is small and known."""
        outputs = out if isinstance(out, tuple | list) else (out,)
        if any(not isinstance(x, torch.Tensor) or x.numel() > _SMALL for x in outputs):
            return
        try:
            given = {key: self._of(value) for key, value in kwargs.items()}
            if "device" in given:
                given["device"] = "cpu"
            made = func(*self._of(tuple(args)), **given)
        except (KeyError, RuntimeError, NotImplementedError):
            return  # it depends on an input, or has no values
        values = made if isinstance(made, tuple | list) else (made,)
        for tensor, value in zip(outputs, values, strict=True):
            self._known[id(tensor)] = (tensor, value)

    def value(self, tensor: Any, constant: bool) -> Any:
        """Give the number in an array of one."""
        if not constant or (tensor.is_meta and id(tensor) not in self._known):
            raise RuntimeError("control flow, or a number, that depends on data")
        return self._of(tensor).item()


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Fused attention as one operator each way, which keeps what such kernels keep."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, recorder: Any) -> Any:
        """Note the operator."""
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.causal, ctx.recorder = causal, recorder
        reads, writes = recorder.arrays([q, k, v]), recorder.arrays([out, sums])
        recorder.add("attention", reads, writes, {"causal": causal})
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Note its gradient."""
        q, k, v, out, sums = ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v)]
        recorder = ctx.recorder
        reads = recorder.arrays([q, k, v, out, sums, gradient])
        recorder.add("attention_backward", reads, recorder.arrays(made), {"causal": ctx.causal})
        return (*made, None, None)


class Functions(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Takes fused attention before PyTorch takes it apart."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace fused attention by one operator."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        causal = rest[2] if len(rest) > 2 else named.get("is_causal", False)
        return _Attention.apply(  # type: ignore[no-untyped-call, unused-ignore]
            query, key, value, bool(causal), self.recorder
        )


class _Loss(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A number that all outputs go into, where a module gives no loss; it costs nothing."""

    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        """Give a number."""
        ctx.save_for_backward()
        ctx.like = [(tuple(x.shape), x.dtype) for x in outputs]
        return outputs[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Give a gradient of each."""
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
    """Give the number of a module's output that is differentiated; None where nothing can be."""
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
