"""Throughput of a training step: utilisation, operations and tokens per device.

Definitions and sources are in docs/throughput.md. All functions are pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phaze_fast.errors import not_accepted
from phaze_fast.models import Model, ModelFlops, model_flops

MFU_CONVENTION = "MFU: attention in full, over the dense peak of the products' number format"
"""What `mfu` counts, in all tables and for all number formats."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < float("inf"):
            raise not_accepted(name, value, "a number greater than 0")


def mfu(flops: ModelFlops, time_s: float, devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: operations of the model over the peak operations of the devices.

    Attention counts in full, whether or not half of it is masked (PaLM, appendix B).

    Parameters
    ----------
    flops
        Operations of one step, from `model_flops`.
    time_s
        Seconds of that step.
    devices
        All devices that are paid for, idle ones included.
    peak_flops
        FLOP/s of one device in the format its products run in.

    Raises
    ------
    InvalidInputError
        Where a number is not greater than 0.

    Examples
    --------
    >>> from phaze_fast import models
    >>> step = models.model_flops(models.load("gpt3-175b"), seq=2048, sequences=1536)
    >>> round(mfu(step, time_s=24.0, devices=1024, peak_flops=312e12), 3)
    0.442
    """
    _positive(time_s=time_s, devices=devices, peak_flops=peak_flops)
    return flops.total / (time_s * devices * peak_flops)


def mfu_causal(flops: ModelFlops, time_s: float, devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation with causal attention counted by half, as it is computed.

    See `mfu` for the parameters. Never more than `mfu`; equal for models without a mask.

    Examples
    --------
    >>> from phaze_fast import models
    >>> step = models.model_flops(models.load("gpt3-175b"), seq=2048, sequences=1536)
    >>> round(mfu_causal(step, time_s=24.0, devices=1024, peak_flops=312e12), 3)
    0.436
    """
    _positive(time_s=time_s, devices=devices, peak_flops=peak_flops)
    return flops.total_causal / (time_s * devices * peak_flops)


def hfu(hardware_flops: float, time_s: float, devices: int, peak_flops: float) -> float:
    """Hardware FLOPs utilisation: operations that are executed over the peak of the devices.

    Parameters
    ----------
    hardware_flops
        Operations of one step that are executed: those of the model, and recomputed ones. With full
        recomputation, the model's `total` (or `total_causal`) and one more `forward_blocks` (or
        `forward_blocks_causal`).
    time_s, devices, peak_flops
        As for `mfu`.

    Examples
    --------
    >>> from phaze_fast import models
    >>> step = models.model_flops(models.load("gpt3-175b"), seq=2048, sequences=1536)
    >>> again = step.total + step.forward_blocks
    >>> round(hfu(again, time_s=24.0, devices=1024, peak_flops=312e12), 3)
    0.588
    """
    _positive(time_s=time_s, devices=devices, peak_flops=peak_flops)
    if not 0.0 <= hardware_flops < float("inf"):
        raise not_accepted("hardware_flops", hardware_flops, "a number of at least 0")
    return hardware_flops / (time_s * devices * peak_flops)


def tflops_per_device(flops: float, time_s: float, devices: int) -> float:
    """Teraflops per second and device: 10^12 operations of a step over its seconds and devices.

    Examples
    --------
    >>> from phaze_fast import models
    >>> step = models.model_flops(models.load("gpt3-175b"), seq=2048, sequences=1536)
    >>> round(tflops_per_device(step.total, time_s=24.0, devices=1024), 1)
    137.8
    """
    _positive(time_s=time_s, devices=devices)
    return flops / (time_s * devices) / 1e12


def tokens_per_s_per_device(tokens: float, time_s: float, devices: int) -> float:
    """Tokens of a step over its seconds and devices.

    Examples
    --------
    >>> tokens_per_s_per_device(tokens=1536 * 2048, time_s=24.0, devices=1024)
    128.0
    """
    _positive(time_s=time_s, devices=devices)
    return tokens / (time_s * devices)


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step in the units in which runs are published."""

    tokens_per_s: float
    """Tokens per second of all devices together."""
    tokens_per_s_per_device: float
    tflops_per_device: float
    """Model TFLOP/s by the common formula, attention in full."""
    tflops_per_device_causal: float
    """Model TFLOP/s with masked attention counted by half."""
    mfu: float
    """Model FLOPs utilisation by the common formula."""
    mfu_causal: float
    """Model FLOPs utilisation with masked attention counted by half."""
    hfu: float
    """Hardware FLOPs utilisation: as `mfu`, with recomputed operations counted."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)


def step_throughput(
    model: Model,
    sequences: int,
    time_s: float,
    devices: int,
    peak_flops: float,
    seq: int | None = None,
    recomputed_flops: float = 0.0,
) -> Throughput:
    """Convert the seconds of a step into the units in which runs are published.

    Parameters
    ----------
    model
        The model.
    sequences
        Sequences of one step, over all replicas.
    time_s
        Seconds of the step.
    devices
        All devices that are paid for, idle ones included.
    peak_flops
        FLOP/s of one device.
    seq
        Tokens of a sequence, by default the model's.
    recomputed_flops
        Recomputed operations of the step, attention in full; only `hfu` counts them.

    Raises
    ------
    InvalidInputError
        Where a number is not greater than 0.

    Examples
    --------
    >>> from phaze_fast import models
    >>> llama = models.load("llama3-405b")
    >>> speed = step_throughput(llama, 2048, 6.7, 16384, 989.4e12, seq=8192)
    >>> round(speed.mfu, 3), round(speed.tflops_per_device), round(speed.tokens_per_s_per_device, 1)
    (0.406, 401, 152.8)
    """
    flops = model_flops(model, seq, sequences)
    executed = flops.total + recomputed_flops
    return Throughput(
        tokens_per_s=flops.tokens / time_s,
        tokens_per_s_per_device=tokens_per_s_per_device(flops.tokens, time_s, devices),
        tflops_per_device=tflops_per_device(flops.total, time_s, devices),
        tflops_per_device_causal=tflops_per_device(flops.total_causal, time_s, devices),
        mfu=mfu(flops, time_s, devices, peak_flops),
        mfu_causal=mfu_causal(flops, time_s, devices, peak_flops),
        hfu=hfu(executed, time_s, devices, peak_flops),
    )
