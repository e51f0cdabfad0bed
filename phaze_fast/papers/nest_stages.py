"""The stages of a NEST plan in full: devices, tiers, time and memory of each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from phaze_fast.papers.nest_problem import NestProblem, NestWidth

__all__ = ["NestStages"]

_MOST_STAGES = 2**20


class NestStages:
    """Stages of a pipeline, each layers ``begin`` up to ``end``, first to last.

    Stages are packed: the last one on devices 0 to a - 1, the one before it next to it, and so on;
    the next replica follows.
    """

    def __init__(
        self, problem: NestProblem, width: NestWidth, ranges: list[tuple[int, int]]
    ) -> None:
        self._problem, self._width, self._ranges = problem, width, ranges
        self._devices = problem.stage_devices(width)

    def _tiers(self, begins: Any) -> Any:
        """Lowest level that joins each device with the one a stage further on."""
        tiers = np.full(len(begins), len(self._problem.level_sizes) - 1)
        inside = self._problem.devices
        for level in range(len(self._problem.level_sizes) - 1, -1, -1):
            tiers[begins // inside == (begins + self._devices) // inside] = level
            inside //= self._problem.level_sizes[level]
        return tiers

    def _messages(self, sizes: Any, tier: int) -> float:
        """Time of the longest of some messages."""
        if not len(sizes):
            return 0.0
        rate = min(self._problem.level_bytes_per_s[: tier + 1])
        once = float(sizes.max()) / rate + self._problem.level_latency_s[tier]
        return once if tier == 0 else 2.0 * once

    def load(self, stage: int, tier_in: int, tier_out: int) -> float:
        """Seconds of one micro-batch in a stage whose messages cross the given tiers."""
        begin, end = self._ranges[stage]
        w = self._width
        done = 0.0
        into = (w.edge_from < begin) & (w.edge_to >= begin) & (w.edge_to < end)
        for k in range(begin, end):
            arrived = self._messages(w.edge_bytes[into & (w.edge_to == k)], tier_in)
            done = float(w.forward_s[k]) + max(done, arrived)
        back = math.fsum(w.backward_s[begin:end])
        returned = back if self._problem.recompute and stage + 1 < len(self._ranges) else 0.0
        out = (w.edge_from >= begin) & (w.edge_from < end) & (w.edge_to >= end)
        for k in range(end - 1, begin - 1, -1):
            arrived = self._messages(w.edge_bytes[out & (w.edge_from == k)], tier_out)
            returned = float(w.backward_s[k]) + max(returned, arrived)
        return done + returned

    def memory_bytes(self, stage: int) -> float:
        """Bytes of one device of a stage."""
        begin, end = self._ranges[stage]
        w = self._width
        kept = math.fsum(w.kept_bytes[begin:end])
        stash = kept
        if self._problem.recompute:
            into = (w.edge_from < begin) & (w.edge_to >= begin) & (w.edge_to < end)
            stash = math.fsum(w.edge_bytes[into])
        after = len(self._ranges) - 1 - stage
        return self._problem.states * math.fsum(w.weight_bytes[begin:end]) + kept + after * stash

    def _boundaries(self, replicas: int) -> Any:
        """Tiers of stage boundaries: a row per replica, from the last boundary to the first."""
        count = len(self._ranges)
        begins = np.arange(replicas * count, dtype=np.int64) * self._devices
        return self._tiers(begins).reshape(replicas, count)[:, : count - 1]

    def largest_load(self, replicas: int) -> float | None:
        """Of all stages of all replicas; None where those are too many to look at."""
        count = len(self._ranges)
        inside = math.prod(self._problem.level_sizes[:-1])
        alike = inside // math.gcd(inside, count * self._devices)  # tiers repeat after so many
        replicas = min(replicas, alike)
        if replicas * count > _MOST_STAGES:
            return None
        tiers = self._boundaries(replicas)
        largest = 0.0
        for stage in range(count):
            after = count - 1 - stage
            into = tiers[:, after] if stage > 0 else np.zeros(replicas, dtype=np.int64)
            out = tiers[:, after - 1] if after > 0 else np.zeros(replicas, dtype=np.int64)
            for pair in set(zip(into.tolist(), out.tolist(), strict=True)):
                largest = max(largest, self.load(stage, *pair))
        return largest

    def records(self) -> list[dict[str, Any]]:
        """Every stage as plain data, first to last; tiers and devices of the first replica."""
        tiers = self._boundaries(1)[0].tolist()
        count = len(self._ranges)
        stages = []
        for stage, (begin, end) in enumerate(self._ranges):
            after = count - 1 - stage
            tier_in = tiers[after] if stage > 0 else None
            tier_out = tiers[after - 1] if after > 0 else None
            stages.append(
                {
                    "devicesForStage": self._devices,
                    "nodes": list(self._width.ids[begin:end]),
                    "firstDevice": after * self._devices,
                    "tierIn": tier_in,
                    "tierOut": tier_out,
                    "load": self.load(stage, tier_in or 0, tier_out or 0),
                    "memoryBytes": self.memory_bytes(stage),
                }
            )
        return stages
