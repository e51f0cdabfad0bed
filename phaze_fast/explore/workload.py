"""Takes a model, a cluster and a training step, gives what a search asks of its strategies.

A `Workload` holds all that no chip changes. Its three questions, each about many chips at once, are
all the work that a search has done; they can be put to other processes, which build the workload
once for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from phaze_fast.documents import digest
from phaze_fast.explore.energy import step_energy_j
from phaze_fast.explore.placing import Found, Frames, place_chips
from phaze_fast.explore.steps import Rows, rows_of
from phaze_fast.explore.timing import Totals, bound_layers, time_layers
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import layer_graph
from phaze_fast.placement import Training
from phaze_fast.placement.layers import MAX_NODES, KindTimes
from phaze_fast.placement.layouts import layouts, strategies
from phaze_fast.placement.planning import ties
from phaze_fast.placement.sizes import LayerSizes
from phaze_fast.placement.training import RECOMPUTE

__all__ = ["Question", "Timed", "Workload"]

Array = np.ndarray[Any, Any]

VERSION = "search-1"
"""Changes whenever the meaning of an answer does."""


@dataclass(frozen=True)
class Question:
    """A model to be trained, and all that is given for it."""

    model: TransformerModel
    cluster: Cluster
    """Without a chip."""
    training: Training
    like: Accelerator
    """The chip whose tuning, launch latency and formats all chips share."""
    capacities: tuple[int, ...]
    """Bytes of HBM that occur, rising."""

    @cached_property
    def digest(self) -> str:
        """Hash of the content."""
        records = (self.model, self.cluster, self.training, self.like)
        return digest([VERSION, *(record.digest() for record in records), self.capacities])

    def workload(self) -> Workload:
        """Work out what no chip changes; done once in a process."""
        return _workload(self)


@dataclass(frozen=True, eq=False)
class Timed:
    """Layers of one strategy on several chips, scheduled."""

    kinds: KindTimes
    totals: Totals
    """Of what is proven of the times."""
    static_w: Array

    def at(self, chips: Any) -> Timed:
        """Those of some chips."""
        return Timed(self.kinds.at(chips), self.totals.at(chips), self.static_w[chips])

    @classmethod
    def joined(cls, parts: Sequence[Timed]) -> Timed:
        """Several, one after another."""
        return cls(
            KindTimes.joined([part.kinds for part in parts]),
            Totals.joined([part.totals for part in parts]),
            np.concatenate([part.static_w for part in parts]),
        )

    def same_times(self) -> list[bytes]:
        """Give what placement sees of each chip but its HBM: equal where it cannot tell them."""
        kinds = self.kinds
        columns = (kinds.forward_s, kinds.backward_s, kinds.weight_grad_s)
        flat = np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)
        return [row.tobytes() for row in np.ascontiguousarray(flat)]


class _Strategic:
    """One strategy: sizes, layouts, and their bounds for each capacity."""

    def __init__(self, sizes: LayerSizes, question: Question) -> None:
        self.sizes = sizes
        training = question.training
        self.layouts = list(layouts(sizes, training, question.cluster.devices))
        self.frames = Frames(sizes, self.layouts, ties(training))
        self.room = np.array(question.capacities, dtype=float) - float(training.reserved_bytes)
        self.passes = sizes.inner * training.global_batch / sizes.graph.strategy.microbatch
        """Devices x micro-batches that a step runs each layer's passes."""

    @cached_property
    def rows(self) -> list[Rows]:
        return rows_of(self.sizes, self.layouts, self.room)


class Workload:
    """The strategies of a question, and bounds, times and plans of them on chips."""

    def __init__(self, question: Question) -> None:
        self.question, self.rejected = question, Counter[str]()
        model, cluster, training = question.model, question.cluster, question.training
        modes = RECOMPUTE if training.recompute == "auto" else (training.recompute,)
        spec = optimizer(training.optimizer)
        graphs = [
            layer_graph(model, s) for s in strategies(model, cluster, training, self.rejected)
        ]
        self.strategies = [
            _Strategic(LayerSizes(graph, cluster, modes, spec), question) for graph in graphs
        ]
        share = question.like.tuning.hbm_share if question.like.tuning is not None else 1.0
        self._share = share

    def __len__(self) -> int:
        return len(self.strategies)

    def rate(self, records: Array) -> Array:
        """Bytes per second that the HBM of chips gives."""
        found: Array = records["hbm_bytes_per_s"] * self._share
        return found

    def bound(self, s: int, records: Array, step: str, threads: int = 1) -> Totals:
        """Bound the layers of strategy `s` on chips."""
        mine = self.strategies[s]
        return bound_layers(mine.sizes, records, self.question.like, step, threads)

    def time(
        self,
        s: int,
        records: Array,
        threads: int = 1,
        nodes: int = MAX_NODES,
        bounds: bool = False,
    ) -> Timed:
        """Schedule the layers of strategy `s` on chips; or give what is proven of their times."""
        mine = self.strategies[s]
        return Timed(*time_layers(mine.sizes, records, self.question.like, threads, nodes, bounds))

    def place(
        self, s: int, records: Array, timed: Timed, below_s: Array, threads: int = 1
    ) -> list[list[Found]]:
        """Place strategy `s` on chips with each capacity, where it may take at most `below_s`."""
        mine, rate = self.strategies[s], self.rate(records)
        times = (timed.kinds, timed.totals)
        return place_chips(mine.frames, mine.rows, times, rate, mine.room, below_s, threads)

    def energy_j(self, s: int, timed: Timed, chip: int, found: Found) -> float:
        """Joules of a step by a plan that was found."""
        mine = self.strategies[s]
        return step_energy_j(
            mine.sizes,
            mine.layouts[found.layout],
            (found.stage_of, found.variant_of),
            (timed.kinds.forward_j[chip], timed.kinds.backward_j[chip]),
            float(timed.static_w[chip]),
            found.time_s,
        )

    def least_energy_j(self, s: int, totals: Totals, static_w: Array) -> Array:
        """Joules of a step at least: all passes, and what flows while they run."""
        passes = self.strategies[s].passes
        found: Array = passes * (totals.dynamic_j + static_w * totals.work_s) * (1.0 - 1e-9)
        return found


@lru_cache(maxsize=16)
def _workload(question: Question) -> Workload:
    return Workload(question)
