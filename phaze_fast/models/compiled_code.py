"""Code of transformers takes other branches when it is compiled.

While torch.compile traces a model, transformers builds causal masks as tensors instead of leaving
them to the attention kernel (masking_utils.py, ``_ignore_causal_mask_sdpa``): no score is skipped,
and grouped keys and values are repeated for every head (integrations/sdpa_attention.py,
``use_gqa_in_sdpa``). The mask of an encoder is one element that is expanded
(``_ignore_bidirectional_mask_sdpa``): fused kernels need masks whose rows lie together in memory
(PyTorch, aten/src/ATen/native/transformers/sdp_utils_cpp.h,
``check_last_dim_stride_equals_1_dense``), so attention runs in fp32, operator by operator. The
model returns logits besides the loss; AOTAutograd gives each output a gradient, here a tensor of
zeros. Profiled on compiled Llama and GPT-2 steps (PyTorch 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from phaze_fast.models.decompose import Parts
from phaze_fast.models.operators import attention_in_parts
from phaze_fast.models.recording import MASK, Array, Call, mask_load
from phaze_fast.models.tape import Tape

Code = Literal["own", "transformers", "transformers, loss apart"]
"""Whose code a module is, and whether its loss is compiled as a graph of its own."""

_MASK_BYTES = 2  # per element of a mask, which is added to the scores
_MASKED = ("causal", "masked", "expands_mask")  # options of attention that gets a mask if compiled
_FORMATS = {2: "bfloat16", 4: "float32"}


def code_of_class(name: str) -> Code:
    """Return how a class of transformers is compiled.

    transformers chooses the loss by the class's name. Where it knows no loss of that name it logs a
    warning, which ends the compiled graph before the loss.
    """
    return "transformers, loss apart" if name.startswith("GPT2") else "transformers"


def transformers_branches(calls: Sequence[Call], parts: Parts, code: Code) -> list[Call]:
    """Return the operators of a step as a compiled model of transformers runs them."""
    repeated: dict[int, tuple[Array, Array, Array]] = {}
    in_parts: dict[int, _InParts] = {}
    masks: dict[tuple[int, ...], Array] = {}
    step: list[Call] = []
    for call in calls:
        if call.name == MASK:
            continue  # loads are added below, of one mask for all layers
        if call.name == "attention" and any(map(call.options.get, _MASKED)):
            q, k, v = call.reads[:3]
            wide = [_per_head(q, array, parts) for array in (k, v)]
            step += [
                replace(call, name="repeat", reads=(narrow,), writes=(array,), options={})
                for narrow, array in zip((k, v), wide, strict=True)
                if array is not narrow
            ]
            if call.options.get("expands_mask"):
                whole = in_parts[call.writes[0].storage] = _InParts(call, (q, *wide), parts)
                step += whole.forward()
                continue
            shape = (*q.shape[:-3], 1, q.shape[-2], k.shape[-2])
            mask = masks.setdefault(shape, parts.array(shape, _MASK_BYTES))
            repeated[call.writes[0].storage] = wide[0], wide[1], mask
            options = {**call.options, "causal": False, "window": 0}
            step += _mask_loads(call, q, mask, 1)
            step.append(replace(call, reads=(q, *wide, mask), options=options))
        elif call.name == "attention_backward" and call.reads[3].storage in in_parts:
            writes, sums = _widened(call, parts)
            step += [*in_parts[call.reads[3].storage].backward(call, writes), *sums]
        elif call.name == "attention_backward" and call.reads[3].storage in repeated:
            step += _gradient(call, *repeated[call.reads[3].storage], parts)
        else:
            step.append(call)
    return step if code == "transformers, loss apart" else _with_gradient_of_logits(step, parts)


def _per_head(q: Array, array: Array, parts: Parts) -> Array:
    """Return keys or values repeated for every head of the queries."""
    if array.shape[-3] == q.shape[-3]:
        return array
    return parts.array((*q.shape[:-1], array.shape[-1]), array.item_bytes)


def _gradient(call: Call, k: Array, v: Array, mask: Array, parts: Parts) -> list[Call]:
    """Return the gradient of attention with repeated keys, and the sums over repetitions."""
    q, rest = call.reads[0], call.reads[3:]
    writes, sums = _widened(call, parts)
    options = {**call.options, "causal": False, "window": 0}
    whole = replace(call, reads=(q, k, v, *rest, mask), writes=tuple(writes), options=options)
    return [*_mask_loads(call, q, mask, 2), whole, *sums]


def _widened(call: Call, parts: Parts) -> tuple[list[Array], list[Call]]:
    """Return the gradients of queries and repeated keys, and the sums over repetitions."""
    writes, sums = [call.writes[0]], []
    for narrow in call.writes[1:]:
        wide = _per_head(call.reads[0], narrow, parts)
        writes.append(wide)
        if wide is not narrow:
            sums.append(replace(call, name="add", reads=(wide,), writes=(narrow,), options={}))
    return writes, sums


class _InParts:
    """Attention to all keys, with a mask that fused kernels do not accept."""

    def __init__(self, call: Call, operands: Sequence[Array], parts: Parts) -> None:
        self._call, self._parts, self._tape = call, parts, Tape()
        tape = self._tape
        q, k, v = (tape.input(a.shape, _FORMATS[a.item_bytes], a.strides) for a in operands)
        mask = tape.constant(*(1,) * len(q.shape))
        out = attention_in_parts(q, k, v, mask, bool(call.options.get("dropout")))
        gradients = tape.run_backward(out)
        self._gradients = [gradients[x.node] for x in (out, q, k, v) if x.node is not None]
        pairs = zip((q, k, v, out), (*operands, call.writes[0]), strict=True)
        self._storages = {x.storage.key: array.storage for x, array in pairs}

    def forward(self) -> list[Call]:
        """Return the operators of the forward pass."""
        return self._spliced(self._call, backward=False)

    def backward(self, call: Call, writes: Sequence[Array]) -> list[Call]:
        """Return the operators of the gradient `call`, which write the arrays `writes`."""
        arrays = (call.reads[5], *writes)
        pairs = zip(self._gradients, arrays, strict=True)
        self._storages |= {x.storage.key: array.storage for x, array in pairs}
        return self._spliced(call, backward=True)

    def _spliced(self, call: Call, backward: bool) -> list[Call]:
        calls = []
        for one in self._tape.calls:
            if one.backward == backward:
                reads, writes = (tuple(map(self._moved, x)) for x in (one.reads, one.writes))
                own = replace(call, name=one.name, options=one.options)
                calls.append(replace(own, reads=reads, writes=writes))
        return calls

    def _moved(self, array: Array) -> Array:
        if array.storage not in self._storages:
            self._storages[array.storage] = self._parts.array(()).storage
        return replace(array, storage=self._storages[array.storage])


def _mask_loads(call: Call, q: Array, mask: Array, times: int) -> list[Call]:
    loaded, options = mask_load(mask, (*q.shape[:-3], times * q.shape[-3]))
    return [replace(call, name=MASK, reads=(loaded,), writes=(), sources=(), options=options)]


def _logits(calls: Sequence[Call]) -> Array | None:
    """Return the tensor that the loss upcasts or normalises."""
    written = {array.storage: call for call in calls for array in call.writes}
    for call in reversed(calls):
        if call.name == "_log_softmax" and not call.backward:
            cast = written.get(call.reads[0].storage)
            return cast.reads[0] if cast and cast.name == "_to_copy" else call.reads[0]
    return None


def _with_gradient_of_logits(calls: list[Call], parts: Parts) -> list[Call]:
    """Add zeros, the gradient of the logits as an output, to their gradient from the loss."""
    logits = _logits(calls)
    if logits is None:
        return calls
    sequence = next(c.sequence for c in calls if logits.storage in {a.storage for a in c.writes})
    zeros, total = (parts.array(logits.shape, logits.item_bytes) for _ in range(2))
    step: list[Call] = []
    summed = -1
    for call in calls:
        if call.backward and not (step and step[-1].backward):
            step.append(replace(call, name="zero", reads=(), writes=(zeros,), sources=()))
        if call.backward and summed < 0 and call.sequence == sequence:
            own = [a for a in call.reads if a.elements == logits.elements]
            if own:
                step.append(replace(call, name="add", reads=(own[0], zeros), writes=(total,)))
                summed = own[0].storage
        if summed >= 0:
            reads = tuple(
                replace(a, storage=total.storage) if a.storage == summed else a for a in call.reads
            )
            call = replace(call, reads=reads)
        step.append(call)
    return step
