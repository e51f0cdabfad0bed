"""Rules that rows of a batch of plans may break, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from phaze_fast.memory import SCHEDULES, TWO_CHUNKS

__all__ = ["BAD_STRATEGY", "SCHEDULE_CODES", "statuses"]

Array = np.ndarray[Any, Any]

SCHEDULE_CODES = {name: code for code, name in enumerate(SCHEDULES)}
SCHEDULE_CODES["zero-bubble"] = SCHEDULE_CODES["zb-h1"]
_TWO = [SCHEDULES.index(name) for name in TWO_CHUNKS]
_BAD_DEVICES, _BAD_BATCH, _BAD_SCHEDULE, _BAD_EXPERTS, BAD_STRATEGY = 3, 4, 6, 8, 9
_BAD_SHARD = 11


def statuses(rows: Mapping[str, Array], devices: int, batch: int) -> Array:
    """Why plans cannot be, as far as the model does not matter; 0 where they can."""
    t, p, d, b, cp, ep = (rows[name] for name in ("t", "p", "d", "b", "cp", "ep"))
    status = np.zeros(len(t), dtype=np.int32)
    status[rows["zero"] > 3] = BAD_STRATEGY
    several = np.isin(rows["schedule"], [2, *_TWO])
    folded = np.isin(rows["schedule"], _TWO)
    status[((rows["v"] > 1) != several) | (folded & (rows["v"] != 2))] = _BAD_SCHEDULE
    parts = np.where(rows["own"] > 0, np.maximum(t // np.maximum(rows["own"], 1), 1), 1)
    ep = np.maximum(ep // parts, 1)  # replicas of an expert group
    status[d % ep != 0] = _BAD_EXPERTS
    sharing = np.where(rows["shard"] > 0, rows["shard"], d)
    uneven = (d % sharing != 0) | (sharing % ep != 0) | ((rows["zero"] == 0) & (sharing != d))
    status[uneven & (d % ep == 0)] = _BAD_SHARD
    # Products of large numbers would wrap around; as floats they only lose digits.
    shared = np.where(d.astype(np.float64) * b <= batch, d * b, batch + 1)
    status[batch % shared != 0] = _BAD_BATCH
    status[t.astype(np.float64) * p * d * cp != devices] = _BAD_DEVICES
    return status
