"""Pipeline schedules by name: steps simulated event by event, and activations in flight.

Orders of passes, their sources and what is known of their bubbles are in docs/pipelines.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import (
    InvalidInputError,
    InvalidTypeError,
    check_one_of,
    not_accepted,
)
from phaze_fast.memory import SCHEDULE_CODES, SCHEDULES
from phaze_fast.tables import Array

_SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


@dataclass(frozen=True, eq=False)
class PipelineStep:
    """One simulated step of a pipeline; arrays have one value per device."""

    step_s: float
    """Seconds from the first pass of any device to the end of the last."""
    longest_device_s: float
    """Most seconds between a device's first pass and its last: the time from step to step if no
    device waits for all others between steps."""
    bound_s: float
    """A lower bound of `step_s` that needs no simulation."""
    start_s: Array
    """When a device's first pass starts."""
    end_s: Array
    """When a device's last pass ends."""
    busy_s: Array
    """Seconds a device is busy."""
    _arguments: tuple[Any, ...] = field(default=(), repr=False)
    """Arguments of the kernel for the simulated step."""

    @cached_property
    def passes(self) -> Array:
        """Every pass with its times, devices one after another and each in its order.

        Records of ``device``, ``kind`` (a position in ``_core.PASS_KINDS``: F, B, I, W, F&B),
        ``chunk``, ``micro_batch``, ``start_s`` and ``end_s``; InvalidInputError where there are
        more than about 2^24.
        """
        events: Array = _core.pipeline_events(*self._arguments)
        return events

    @property
    def bubble_s(self) -> float:
        """Idle seconds of the device with the most work."""
        return self.step_s - float(self.busy_s.max())


def schedule_code(schedule: str) -> int:
    """Look up the kernels' code of a schedule.

    Examples
    --------
    >>> schedule_code("zb-h1"), schedule_code("zero-bubble")
    (3, 3)
    """
    if not isinstance(schedule, str):
        raise InvalidTypeError(f"schedule: {schedule!r} is not accepted; expected a name")
    check_one_of("schedule", schedule, SCHEDULE_CODES)
    return SCHEDULE_CODES[schedule]


def refusal(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> str | None:
    """Return the rule of a schedule that these sizes violate, or None.

    Examples
    --------
    >>> refusal("dualpipe", stages=4, micro_batches=6, chunks=2)
    'DualPipe and DualPipeV need at least twice as many micro-batches as stages'
    >>> refusal("1f1b", stages=4, micro_batches=6) is None
    True
    """
    status = _core.check_pipeline(schedule_code(schedule), stages, chunks, micro_batches)
    return _core.PIPELINE_SENTENCES[status] if status else None


def _checked(schedule: str, stages: int, micro_batches: int, chunks: int) -> int:
    code = schedule_code(schedule)
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected a whole number")
    status = _core.check_pipeline(code, stages, chunks, micro_batches)
    if status:
        raise InvalidInputError(
            f"schedule: {schedule} with {stages} stages, {chunks} chunks a device and "
            f"{micro_batches} micro-batches is not accepted: {_core.PIPELINE_SENTENCES[status]}"
        )
    return code


def _loads(name: str, value: Any, shape: tuple[int, int] | None) -> Array:
    """Check numbers by chunk, and return them as an array of shape (devices, chunks)."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected numbers") from None
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or (shape is not None and array.shape != shape):
        expected = "(devices,) or (devices, chunks)" if shape is None else f"{shape}"
        raise InvalidInputError(
            f"{name}: shape {np.shape(value)} is not accepted; expected {expected}"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidInputError(f"{name}: expected finite numbers, zero or more")
    return np.ascontiguousarray(array)


def play(
    schedule: str,
    forward_s: Any,
    backward_s: Any,
    micro_batches: int,
    *,
    weight_grad_s: Any = None,
    overlap: float = 1.0,
) -> PipelineStep:
    """Simulate one step of a pipeline, event by event.

    Parameters
    ----------
    schedule
        A name of `phaze_fast.memory.SCHEDULES`.
    forward_s
        Seconds of one micro-batch's forward pass, shape (devices,) or (devices, chunks), receiving
        its input included. Chunks are numbered in the order of the model (docs/pipelines.md).
    backward_s
        Seconds of a micro-batch's whole backward pass, weight gradient and recomputation included.
    micro_batches
        Micro-batches of one step; of both directions together for DualPipe.
    weight_grad_s
        The part of the backward pass that can be postponed; required by the ZB and DualPipe
        schedules.
    overlap
        For DualPipe and DualPipeV: a forward and a backward pass that run together take this share
        of the sum of both.

    Returns
    -------
    PipelineStep

    Examples
    --------
    >>> step = play("1f1b", [1.0, 1.0], [2.0, 2.0], micro_batches=4)
    >>> step.step_s, step.bubble_s
    (15.0, 3.0)
    >>> play("zb-h1", [1.0] * 4, [2.0] * 4, 8, weight_grad_s=[1.0] * 4).step_s
    27.0
    >>> len(step.passes), float(step.passes["end_s"].max())
    (16, 15.0)
    """
    forward = _loads("forward_s", forward_s, None)
    stages, chunks = forward.shape
    code = _checked(schedule, stages, micro_batches, chunks)
    backward = _loads("backward_s", backward_s, (stages, chunks))
    if weight_grad_s is None and SCHEDULES[code] in _SPLIT:
        raise InvalidInputError(
            f"weight_grad_s: None is not accepted; schedule {schedule} runs weight gradients apart"
        )
    weight_grad = (
        np.zeros_like(forward)
        if weight_grad_s is None
        else _loads("weight_grad_s", weight_grad_s, (stages, chunks))
    )
    if (weight_grad > backward).any():
        raise InvalidInputError(
            "weight_grad_s: expected no more than backward_s, of which it is a part"
        )
    if not 0.0 <= overlap < np.inf:
        raise not_accepted("overlap", overlap, "zero or more")
    arrays = forward.ravel(), backward.ravel(), weight_grad.ravel()
    arguments = (code, stages, chunks, micro_batches, *arrays, overlap)
    return PipelineStep(*_core.pipeline_step(*arguments, False), _arguments=arguments)


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int | None = None) -> Array:
    """Count the most activations that each device holds, one per micro-batch and chunk.

    By default there are as few chunks as the schedule allows.

    Examples
    --------
    >>> in_flight("1f1b", 4, 8), in_flight("dualpipe", 4, 8)
    (array([4., 3., 2., 1.]), array([5., 5., 5., 5.]))
    """
    code = schedule_code(schedule)
    if chunks is None:
        chunks = 2 if _core.check_pipeline(code, stages, 1, micro_batches) else 1
    _checked(schedule, stages, micro_batches, chunks)
    return _core.pipeline_in_flight(code, stages, chunks, micro_batches)


def peak_activations(
    schedule: str, chunk_bytes: Any, micro_batches: int, *, kept_for_weight_grad: float = 1.0
) -> Array:
    """Compute the peak bytes of activations of each device.

    Parameters
    ----------
    schedule
        A name of `phaze_fast.memory.SCHEDULES`.
    chunk_bytes
        Bytes of activations of one micro-batch, shape (devices,) or (devices, chunks).
    micro_batches
        Micro-batches of one step.
    kept_for_weight_grad
        Share of the bytes that stays allocated until the weight gradient is done, in schedules that
        run weight gradients as separate passes.

    Examples
    --------
    >>> peak_activations("1f1b", [10.0, 20.0, 10.0], micro_batches=8)
    array([30., 40., 10.])
    """
    sizes = _loads("chunk_bytes", chunk_bytes, None)
    stages, chunks = sizes.shape
    code = _checked(schedule, stages, micro_batches, chunks)
    if not 0.0 <= kept_for_weight_grad <= 1.0:
        raise not_accepted("kept_for_weight_grad", kept_for_weight_grad, "0 to 1")
    return _core.pipeline_peak(
        code, stages, chunks, micro_batches, sizes.ravel(), kept_for_weight_grad
    )
