"""Chakra execution traces of a plan: one file for each rank, made without a cluster.

Each rank has its passes in the order of its schedule. A pass receives, runs its layers, and sends;
a layer is runs of computation between the collectives of its groups. Gradients and weights of
replicas and the optimiser follow the passes, or go with them as ZeRO has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.chakra_schema import COLLECTIVES, NODES, VERSION, framed, messages
from phaze_fast.export.chakra_template import StageTemplate
from phaze_fast.export.ranks import Place, Ranks
from phaze_fast.hardware import Cluster
from phaze_fast.memory import SCHEDULES, optimizer
from phaze_fast.models import Model
from phaze_fast.opgraph import GROUPS, OpGraph
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.timeline import Timeline, timeline
from phaze_fast.planning.training import block_mode, recompute_code

__all__ = ["ChakraTrace", "chakra_trace"]

_NET = 3


@dataclass(frozen=True)
class Piece:
    """A run of computation, or one collective, of a layer."""

    name: str
    group: str
    """Empty for computation."""
    collective: str
    seconds: float
    flops: int
    bytes_: int
    """That are read and written, or the payload of a collective."""


def _pieces(graph: OpGraph, seconds: Any, wanted: frozenset[str] | None = None) -> list[Piece]:
    """Give runs of computation between the collectives of a graph, in its order."""
    found: list[Piece] = []
    run = [0.0, 0, 0]

    def close() -> None:
        if run[0] or run[1]:
            found.append(Piece("compute", "", "", run[0], int(run[1]), int(run[2])))
        run[:] = [0.0, 0, 0]

    for i, name in enumerate(graph.names):
        if wanted is not None and name not in wanted:
            continue
        op = graph.ops[i]
        if int(op["unit"]) == _NET:
            close()
            word = _core.COLLECTIVE_OPS[int(op["collective"])]
            group = GROUPS[int(op["group"])]
            payload = int(op["payload_bytes"])
            found.append(Piece(name, group, word, float(seconds[i]), 0, payload))
        else:
            run[0] += float(seconds[i])
            run[1] += float(op["flops"])
            run[2] += float(op["read_bytes"] + op["write_bytes"])
    close()
    return found


_GROUPS = ("tensor", "expert-tensor", "context", "expert", "data", "expert-data", "copies")
"""Kinds of groups that communicate."""


class _Layers:
    """Pieces of each kind of layer, forward, backward, and of what is computed again."""

    def __init__(self, sizes: StrategySizes, cluster: Cluster) -> None:
        assert cluster.chip is not None, "the plan was timed on it"
        stride = sizes.expert_stride if sizes.strategy.ep > 1 else None
        costs = estimate_costs([sizes.graph], cluster.chip, cluster, expert_stride=stride)
        self._sizes = sizes
        self._seconds = [costs.time_s(g)[0] for g in range(2 * len(sizes.graph.layers))]
        self._known: dict[tuple[int, str], list[Piece]] = {}

    def forward(self, kind: int) -> list[Piece]:
        return self._kept(kind, "forward")

    def backward(self, kind: int, mode: str) -> list[Piece]:
        return self._kept(kind, mode)

    def _kept(self, kind: int, what: str) -> list[Piece]:
        if (kind, what) not in self._known:
            layer = self._sizes.graph.layers[kind]
            forward, backward = self._seconds[2 * kind], self._seconds[2 * kind + 1]
            if what == "forward":
                found = _pieces(layer.forward, forward)
            else:
                again = layer.forward.recomputed(what)
                again = frozenset() if layer.kind in ("embedding", "head") else again
                found = _pieces(layer.forward, forward, again)
                found += _pieces(layer.backward, backward)
            self._known[kind, what] = found
        return self._known[kind, what]


class ChakraTrace:
    """Execution traces of all ranks of a plan, made when they are asked for."""

    def __init__(self, played: Timeline, sizes: StrategySizes, cluster: Cluster) -> None:
        self.plan, self._played, self._sizes = played.plan, played, sizes
        self.ranks = Ranks(played.plan)
        self._layers = _Layers(sizes, cluster)
        self._spec = optimizer(played.plan.optimizer)
        self._chain = _core.pipeline_chain(
            SCHEDULES.index(played.plan.schedule), played.plan.pp, played.plan.vpp
        )
        self._message = int(sizes.record["message_bytes"][0])
        self._templates: dict[int, StageTemplate | None] = {}

    # ---- groups ----

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of each group that communicates, by its name in the traces."""
        found: dict[str, tuple[int, ...]] = {}
        for rank in range(len(self.ranks)):
            place = self.ranks.place(rank)
            for kind in _GROUPS:
                ranks = self.ranks.group(place, kind)
                if len(ranks) > 1 and min(ranks) == rank:
                    found[f"{kind}.{rank}"] = tuple(sorted(ranks))
        return found

    def _group(self, place: Place, kind: str) -> str:
        ranks = self.ranks.group(place, kind)
        return f"{kind}.{min(ranks)}" if len(ranks) > 1 else ""

    def _place(self, rank: int) -> Place:
        if not 0 <= rank < len(self.ranks):
            raise InvalidInputError(
                f"rank: {rank} is not accepted; expected 0 to {len(self.ranks) - 1}"
            )
        return self.ranks.place(rank)

    # ---- nodes ----

    def nodes(self, rank: int) -> Iterator[Any]:
        """Give the nodes of a rank, in the order it runs them.

        Raises
        ------
        InvalidInputError
            Where there is no such rank.
        """
        place = self._place(rank)
        writer = _Writer(self._group, self.ranks.group, place)
        for _, code, chunk, _, micro_batch, other, _, _ in self._played.of_stage(
            place.stage
        ).tolist():
            letter = self._played.kinds[code]
            if letter in ("F", "F&B"):
                yield from self._pass(writer, place, chunk, micro_batch, True)
            if letter in ("B", "I"):
                yield from self._pass(writer, place, chunk, micro_batch, False)
            if letter == "F&B":
                yield from self._pass(writer, place, 1 - chunk, other, False)
        yield from self._update(writer, place)

    def _layers_of(self, place: Place, chunk: int) -> list[tuple[int, str]]:
        """Kind and mode of each layer of a chunk of a stage."""
        stage, order = self.plan.stages[place.stage], self._sizes.graph.order
        code = recompute_code(stage.recompute, self._sizes.variant_of)
        first = sum(stage.chunks[:chunk])
        found, number = [], 0
        for position in stage.layers[first : first + stage.chunks[chunk]]:
            kind = order[position]
            inner = self._sizes.graph.layers[kind].kind not in ("embedding", "head")
            number += inner
            mode = block_mode(code, number, self._sizes.variants) if inner else "none"
            found.append((kind, mode))
        return found

    def _pass(
        self, writer: _Writer, place: Place, chunk: int, micro_batch: int, forward: bool
    ) -> Iterator[Any]:
        position = int(self._chain[place.stage * self.plan.vpp + chunk])
        last = self.plan.pp * self.plan.vpp - 1
        step = 1 if forward else -1
        word = f"{'F' if forward else 'B'}{micro_batch}.{chunk}"
        layers = self._layers_of(place, chunk)
        if 0 <= position - step <= last:
            yield from self._send(writer, place, position - step, position, word, micro_batch)
        if self.plan.zero == 3:
            yield from self._sync(writer, layers, word, "all-gather", self._spec.weight_bytes)
        for kind, mode in layers if forward else reversed(layers):
            pieces = self._layers.forward(kind) if forward else self._layers.backward(kind, mode)
            for piece in pieces:
                yield from writer.piece(word, piece)
        if self.plan.zero >= 2 and not forward:
            yield from self._sync(writer, layers, word, "reduce-scatter", self._spec.gradient_bytes)
        if 0 <= position + step <= last:
            yield from self._send(writer, place, position, position + step, word, micro_batch)

    def _send(
        self, writer: _Writer, place: Place, source: int, target: int, word: str, micro_batch: int
    ) -> Iterator[Any]:
        """Send to the next chunk of the chain, or receive from the one before."""
        stages = self._chain.reshape(self.plan.pp, self.plan.vpp)
        ends = [int(np.argwhere(stages == position)[0][0]) for position in (source, target)]
        if ends[0] == ends[1]:
            return
        ranks = [self.ranks.rank(place.tensor, place.context, place.replica, e) for e in ends]
        mine = ranks[0] == place.rank
        tag = 2 * (micro_batch * len(self._chain) + min(source, target)) + (source > target)
        yield writer.message(word, "send" if mine else "receive", self._message, ranks, tag)

    def _parameters(self, layers: Sequence[tuple[int, str]]) -> tuple[float, float]:
        """Parameters of layers that a device holds: all but experts, and experts."""
        kinds = self._sizes.kinds
        experts = sum(float(kinds["expert_parameters"][kind]) for kind, _ in layers)
        return sum(float(kinds["parameters"][kind]) for kind, _ in layers) - experts, experts

    def _sync(
        self,
        writer: _Writer,
        layers: Sequence[tuple[int, str]],
        word: str,
        collective: str,
        each: float,
    ) -> Iterator[Any]:
        dense, experts = self._parameters(layers)
        for group, count in (("data", dense), ("expert-data", experts)):
            if count:
                name = f"{collective} of {group}"
                piece = Piece(name, group, collective, 0.0, 0, int(count * each))
                yield from writer.piece(word, piece)

    def _update(self, writer: _Writer, place: Place) -> Iterator[Any]:
        stage = self.plan.stages[place.stage]
        layers = [x for c in range(len(stage.chunks)) for x in self._layers_of(place, c)]
        if self.plan.zero == 0:
            yield from self._sync(writer, layers, "step", "all-reduce", self._spec.gradient_bytes)
        if self.plan.zero == 1:
            bytes_ = self._spec.gradient_bytes
            yield from self._sync(writer, layers, "step", "reduce-scatter", bytes_)
        if self.plan.hybrid:
            share = sum(self._parameters(layers)) / (self.plan.shard * self.plan.cp)
            bytes_ = self._spec.gradient_bytes
            added = Piece(
                "all-reduce of copies", "copies", "all-reduce", 0.0, 0, int(share * bytes_)
            )
            yield from writer.piece("step", added)
        seconds = self.plan.parts_s["optimizer"]
        state = int(sum(stage.memory[t] for t in ("weights", "gradients", "optimizer")))
        yield from writer.piece("step", Piece("optimizer", "", "", seconds, 0, state))
        if self.plan.zero in (1, 2):
            yield from self._sync(writer, layers, "step", "all-gather", self._spec.weight_bytes)

    # ---- files ----

    def _bytes_of(self, rank: int) -> bytes:
        """Give the nodes of a rank as they stand in its file."""
        place = self._place(rank)
        if place.stage not in self._templates:
            made = StageTemplate(self.nodes(rank), place, self.ranks)
            self._templates[place.stage] = made if made.shared else None
        template = self._templates[place.stage]
        if template is not None:
            return template.bytes_of(place)
        return b"".join(framed(node.SerializeToString()) for node in self.nodes(rank))

    def write(self, folder: str | Path, ranks: Sequence[int] | None = None) -> list[Path]:
        """Write a file for each rank, and the groups as ``comm_group.json``.

        Parameters
        ----------
        folder
            Where to; made where it is missing.
        ranks
            Which; by default all.

        Returns
        -------
        list of Path
            What was written.
        """
        metadata, _ = messages()
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            groups = {name: list(members) for name, members in self.groups.items()}
            paths = [folder / "comm_group.json"]
            paths[0].write_text(json.dumps(groups) + "\n", encoding="utf-8")
            begin = framed(metadata(version=VERSION).SerializeToString())
            for rank in range(len(self.ranks)) if ranks is None else ranks:
                paths.append(folder / f"plan.{rank}.et")
                paths[-1].write_bytes(begin + self._bytes_of(rank))
        except OSError as error:
            raise InvalidInputError(f"{folder}: cannot be written: {error.strerror}") from None
        return paths


class _Writer:
    """Makes the nodes of one rank, each after the one before."""

    def __init__(self, group: Any, members: Any, place: Place) -> None:
        self._group, self._members, self._place = group, members, place
        self._last, self._turn = -1, 0
        self._node = messages()[1]
        self._groups: dict[str, str] = {}

    def _made(self, name: str, kind: str, seconds: float = 0.0) -> Any:
        after = [] if self._last < 0 else [self._last]
        self._last += 1
        node = self._node(id=self._last, name=name, type=NODES[kind], data_deps=after)
        node.duration_micros = round(1e6 * seconds)
        node.attr.add(name="is_cpu_op", bool_val=False)
        return node

    def piece(self, word: str, piece: Piece) -> Iterator[Any]:
        """Give computation, or a collective where its group has more than one rank."""
        if not piece.group or piece.group == "none":
            node = self._made(f"{word} {piece.name}", "compute", piece.seconds)
            node.attr.add(name="num_ops", int64_val=piece.flops)
            node.attr.add(name="tensor_size", uint64_val=piece.bytes_)
            yield node
            return
        if piece.group not in self._groups:
            self._groups[piece.group] = self._group(self._place, piece.group)
        group = self._groups[piece.group]
        if group and piece.collective == "point-to-point":
            yield from self._ring(word, piece)
        elif group:
            node = self._made(f"{word} {piece.name}", "collective", piece.seconds)
            node.attr.add(name="comm_type", int64_val=COLLECTIVES[piece.collective])
            node.attr.add(name="comm_size", int64_val=piece.bytes_)
            node.attr.add(name="pg_name", string_val=group)
            yield node

    def _ring(self, word: str, piece: Piece) -> Iterator[Any]:
        """Pass a piece on to the next rank of a group, and take one from the rank before."""
        ranks, own = sorted(self._members(self._place, piece.group)), self._place.rank
        at = ranks.index(own)
        pairs = [(own, ranks[(at + 1) % len(ranks)]), (ranks[at - 1], own)]
        self._turn += 1
        for kind, pair in zip(("send", "receive"), pairs, strict=True):
            yield self.message(f"{word} {piece.name}", kind, piece.bytes_, pair, -self._turn)

    def message(self, word: str, kind: str, size: int, ranks: Sequence[int], tag: int) -> Any:
        """Give a message between two ranks."""
        node = self._made(f"{word} {kind}", kind)
        node.attr.add(name="comm_size", int64_val=size)
        node.attr.add(name="comm_src", int32_val=ranks[0])
        node.attr.add(name="comm_dst", int32_val=ranks[1])
        node.attr.add(name="comm_tag", int32_val=tag)
        return node


def chakra_trace(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
) -> ChakraTrace:
    """Prepare the execution traces of a plan's ranks; the parameters are those of `predict`.

    Raises
    ------
    MissingExtraError
        Where protobuf is not installed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> trace = chakra_trace("llama2-7b", cluster, {"tp": 4, "dp": 2, "global_batch": 2})
    >>> len(list(trace.nodes(0))) == len(list(trace.nodes(7)))
    True
    """
    messages()
    evaluator, _, _ = evaluated(model, cluster, plan)
    return ChakraTrace(timeline(model, cluster, plan), evaluator.sizes[0], cluster)
