"""What recording a PyTorch step replaces: fused attention and a missing loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Functions", "loss_of"]


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Fused attention as one operator each way, which keeps what such kernels keep."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, seen: Any, recorder: Any) -> Any:
        """Note the operator."""
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.seen, ctx.recorder = seen, recorder
        reads, writes = recorder.arrays([q, k, v]), recorder.arrays([out, sums])
        recorder.add("attention", reads, writes, seen)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Note its gradient."""
        q, k, v, out, sums = ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v)]
        recorder = ctx.recorder
        reads = recorder.arrays([q, k, v, out, sums, gradient])
        recorder.add("attention_backward", reads, recorder.arrays(made), ctx.seen)
        return (*made, None, None)


_DROPOUTS = (torch.nn.functional.dropout, torch.dropout, torch.dropout_)


class Functions(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Takes fused attention and dropout before PyTorch takes them apart.

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
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | named
        mask = given.get("attn_mask")
        seen = {"causal": bool(given.get("is_causal")), "dropout": bool(given.get("dropout_p"))}
        if mask is not None:
            seen |= self.recorder.constants.mask(mask)
        return _Attention.apply(  # type: ignore[no-untyped-call, unused-ignore]
            query, key, value, seen, self.recorder
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
