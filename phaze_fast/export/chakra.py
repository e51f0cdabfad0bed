"""Chakra execution traces of a plan: one file for each rank, made without a cluster.

Each rank has its passes in the order of its schedule. A pass receives, runs its layers, and sends;
a layer is computation between the collectives of its groups. Collectives of gradients and weights
and the optimizer step follow the passes, or are part of them, depending on the ZeRO stage.

The protobuf messages are those of mlcommons/chakra@6dc63e147b9d schema/protobuf/et_def.proto, with
the numbers and types of the fields that are written here. A file is a GlobalMetadata and then
Nodes, each preceded by its length as a varint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import estimate_costs
from phaze_fast.errors import InvalidInputError, MissingExtraError
from phaze_fast.export.ranks import Place, Ranks, stage_layers
from phaze_fast.hardware import Cluster
from phaze_fast.memory import SCHEDULES, optimizer
from phaze_fast.models import Model
from phaze_fast.opgraph import GROUPS, OpGraph
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.timeline import Timeline, timeline

# ---- messages ----

VERSION = "0.0.4"
"""Version of the schema, as written in GlobalMetadata."""
NODES = {"compute": 4, "send": 5, "receive": 6, "collective": 7}
"""Numbers of the kinds of nodes in the schema."""
_COLLECTIVES = {
    "all-reduce": 0,
    "all-gather": 2,
    "broadcast": 5,
    "all-to-all": 6,
    "reduce-scatter": 7,
}
_TYPES = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9}
_TYPES |= {"uint32": 13}
_MESSAGE, _REPEATED, _OPTIONAL = 11, 3, 1
_MESSAGES = {
    "AttributeProto": "name=1:string",
    "GlobalMetadata": "version=1:string attr=2:AttributeProto*",
    # The type of a node is an enumeration, encoded like an int32.
    "Node": "id=1:uint64 name=2:string type=3:int32 ctrl_deps=4:uint64* data_deps=5:uint64* "
    "start_time_micros=6:uint64 duration_micros=7:uint64 attr=10:AttributeProto*",
}
"""Fields of the protobuf messages: name, number, type; a star marks a repeated field."""
_VALUES = (
    "double_val=3:double float_val=5:float int32_val=7:int32 int64_val=9:int64 "
    "uint32_val=11:uint32 uint64_val=13:uint64 bool_val=27:bool string_val=29:string"
)
"""Fields for the value of an attribute; exactly one is set."""


@cache
def messages() -> tuple[Any, Any]:
    """Return the classes of the protobuf messages (GlobalMetadata, Node).

    Raises
    ------
    MissingExtraError
        Where protobuf is not installed.
    """
    try:
        from google.protobuf import (  # type: ignore[import-untyped, unused-ignore]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError:
        raise MissingExtraError(
            "Chakra traces need protobuf: pip install 'phaze-fast[trace]'"
        ) from None
    package = "ChakraProtoMsg"
    file = descriptor_pb2.FileDescriptorProto(
        name="phaze_fast/chakra.proto", package=package, syntax="proto3"
    )

    def add_fields(message: Any, fields: str, **options: int) -> None:
        for text in fields.split():
            name, _, numbered = text.partition("=")
            number, _, kind = numbered.partition(":")
            label = _REPEATED if kind.endswith("*") else _OPTIONAL
            field = message.field.add(name=name, number=int(number), label=label, **options)
            kind = kind.rstrip("*")
            field.type = _TYPES.get(kind, _MESSAGE)
            if kind not in _TYPES:
                field.type_name = f".{package}.{kind}"

    for name, fields in _MESSAGES.items():
        add_fields(file.message_type.add(name=name), fields)
    attribute = file.message_type[0]
    attribute.oneof_decl.add(name="value")
    add_fields(attribute, _VALUES, oneof_index=0)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in ("GlobalMetadata", "Node")
    )
    return metadata, node


def _framed(data: bytes) -> bytes:
    """Return a serialised protobuf message preceded by its length."""
    length, head = len(data), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data


# ---- nodes of one rank ----

_NET = 3


@dataclass(frozen=True)
class Piece:
    """A part of a layer: computation, or one collective."""

    name: str
    group: str
    """Kind of the group that communicates, as `Ranks.group` takes it; empty for computation."""
    collective: str
    seconds: float
    flops: int
    bytes_: int
    """Bytes read and written, or the payload of a collective."""


def _pieces(graph: OpGraph, seconds: Any, wanted: frozenset[str] | None = None) -> list[Piece]:
    """Return the collectives of a graph and the computation between them, in the graph's order."""
    pieces: list[Piece] = []
    total = [0.0, 0.0, 0.0]

    def close() -> None:
        if total[0] or total[1]:
            pieces.append(Piece("compute", "", "", total[0], int(total[1]), int(total[2])))
        total[:] = [0.0, 0.0, 0.0]

    for i, name in enumerate(graph.names):
        if wanted is not None and name not in wanted:
            continue
        op = graph.ops[i]
        if int(op["unit"]) == _NET:
            close()
            collective = _core.COLLECTIVE_OPS[int(op["collective"])]
            group, payload = GROUPS[int(op["group"])], int(op["payload_bytes"])
            pieces.append(Piece(name, group, collective, float(seconds[i]), 0, payload))
        else:
            total[0] += float(seconds[i])
            total[1] += float(op["flops"])
            total[2] += float(op["read_bytes"] + op["write_bytes"])
    close()
    return pieces


class _Writer:
    """Builds the nodes of one rank; each node depends on the one before it."""

    def __init__(self, ranks: Ranks, place: Place) -> None:
        self._ranks, self._place = ranks, place
        self._last = -1
        self._node = messages()[1]
        self._groups: dict[str, str] = {}

    def _next(self, name: str, kind: str, seconds: float = 0.0) -> Any:
        after = [] if self._last < 0 else [self._last]
        self._last += 1
        node = self._node(id=self._last, name=name, type=NODES[kind], data_deps=after)
        node.duration_micros = round(1e6 * seconds)
        node.attr.add(name="is_cpu_op", bool_val=False)
        return node

    def piece(self, word: str, piece: Piece) -> Iterator[Any]:
        """Create computation, or a collective where its group has more than one rank."""
        if not piece.group or piece.group == "none":
            node = self._next(f"{word} {piece.name}", "compute", piece.seconds)
            node.attr.add(name="num_ops", int64_val=piece.flops)
            node.attr.add(name="tensor_size", uint64_val=piece.bytes_)
            yield node
            return
        if piece.group not in self._groups:
            self._groups[piece.group] = self._ranks.group_name(self._place, piece.group)
        group = self._groups[piece.group]
        if group:
            node = self._next(f"{word} {piece.name}", "collective", piece.seconds)
            node.attr.add(name="comm_type", int64_val=_COLLECTIVES[piece.collective])
            node.attr.add(name="comm_size", int64_val=piece.bytes_)
            node.attr.add(name="pg_name", string_val=group)
            yield node

    def message(self, word: str, kind: str, size: int, ranks: Sequence[int], tag: int) -> Any:
        """Create a message between two ranks."""
        node = self._next(f"{word} {kind}", kind)
        node.attr.add(name="comm_size", int64_val=size)
        for name, value in zip(_ENDS, (*ranks, tag), strict=True):
            node.attr.add(name=name, int32_val=value)
        return node


_ENDS = ("comm_src", "comm_dst", "comm_tag")


class _StageTemplate:
    """The nodes of one rank, a template for the other ranks of its stage.

    The ranks differ only in groups and peers. Attributes are the last field of a node, so a node is
    serialised without those that differ, which are appended to its bytes for each rank.
    """

    def __init__(self, nodes: Iterable[Any], place: Place, ranks: Ranks) -> None:
        self._ranks, self._node = ranks, messages()[1]
        self._parts: list[tuple[bytes, Any]] = []
        """Bytes that all ranks share, and the node after them that differs: its bytes, with the
        kind of its group, or whether it sends, its peer's stage and its tag."""
        same = bytearray()
        for node in nodes:
            own = self._cut(node, place)
            if own is None:
                same += _framed(node.SerializeToString())
                continue
            self._parts.append((bytes(same), (node.SerializeToString(), own)))
            same.clear()
        self._end = bytes(same)

    def _cut(self, node: Any, place: Place) -> str | tuple[bool, int, int] | None:
        """Remove the attributes that depend on the rank; return what `_parts` keeps of these."""
        last = node.attr[-1]
        if last.name == "pg_name":
            kind: str = last.string_val.partition(".")[0]
            del node.attr[-1]
            return kind
        if last.name != _ENDS[-1]:
            return None
        source, target, tag = (attribute.int32_val for attribute in node.attr[-3:])
        del node.attr[-3:]
        sends = source == place.rank
        return sends, self._ranks.place(target if sends else source).stage, tag

    def bytes_of(self, place: Place) -> bytes:
        """Return the bytes of all nodes of a rank of the same stage."""
        groups: dict[str, bytes] = {}
        pieces: list[bytes] = []
        for same, (node, own) in self._parts:
            if isinstance(own, str):
                if own not in groups:
                    tail = self._node()
                    tail.attr.add(name="pg_name", string_val=self._ranks.group_name(place, own))
                    groups[own] = tail.SerializeToString()
                pieces += (same, _framed(node + groups[own]))
            else:
                pieces += (same, _framed(node + self._ends(place, *own)))
        return b"".join([*pieces, self._end])

    def _ends(self, place: Place, sends: bool, stage: int, tag: int) -> bytes:
        peer = self._ranks.rank(place.tensor, place.context, place.replica, stage)
        pair = (place.rank, peer) if sends else (peer, place.rank)
        tail = self._node()
        for name, value in zip(_ENDS, (*pair, tag), strict=True):
            tail.attr.add(name=name, int32_val=value)
        data: bytes = tail.SerializeToString()
        return data


# ---- all ranks ----


class ChakraTrace:
    """Execution traces of all ranks of a plan, built on request."""

    def __init__(self, played: Timeline, sizes: StrategySizes, cluster: Cluster) -> None:
        assert cluster.chip is not None, "the plan was timed on it"
        self.plan, self._played, self._sizes = played.plan, played, sizes
        self.ranks = Ranks(played.plan)
        costs = estimate_costs([sizes.graph], cluster.chip, cluster)
        self._seconds = [costs.time_s(g)[0] for g in range(2 * len(sizes.graph.layers))]
        self._layers = [stage_layers(played.plan, sizes, k) for k in range(played.plan.pp)]
        self._pieces: dict[tuple[int, str], list[Piece]] = {}
        self._optimizer = optimizer(played.plan.optimizer)
        self._chain = _core.pipeline_chain(
            SCHEDULES.index(played.plan.schedule), played.plan.pp, played.plan.vpp
        )
        self._message_bytes = int(sizes.record["message_bytes"][0])
        self._templates: dict[int, _StageTemplate] = {}

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of each group that communicates, by its name in the traces."""
        ranks_of: dict[str, tuple[int, ...]] = {}
        for rank in range(len(self.ranks)):
            place = self.ranks.place(rank)
            for kind in self.ranks.KINDS:
                ranks = self.ranks.group(place, kind)
                if len(ranks) > 1 and min(ranks) == rank:
                    ranks_of[f"{kind}.{rank}"] = tuple(sorted(ranks))
        return ranks_of

    def nodes(self, rank: int) -> Iterator[Any]:
        """Yield the nodes of a rank, in the order it runs them.

        Raises
        ------
        InvalidInputError
            Where there is no such rank.
        """
        place = self._place(rank)
        writer = _Writer(self.ranks, place)
        for row in self._played.of_stage(place.stage).tolist():
            _, code, chunk, _, micro_batch, other, _, _ = row
            letter = self._played.kinds[code]
            if letter in ("F", "F&B"):
                yield from self._pass(writer, place, chunk, micro_batch, True)
            if letter in ("B", "I"):
                yield from self._pass(writer, place, chunk, micro_batch, False)
            if letter == "F&B":
                yield from self._pass(writer, place, 1 - chunk, other, False)
        yield from self._update(writer, place)

    def write(self, folder: str | Path, ranks: Sequence[int] | None = None) -> list[Path]:
        """Write a file for each rank, and the groups as ``comm_group.json``.

        Parameters
        ----------
        folder
            Target folder; created where it is missing.
        ranks
            Ranks to write; by default all.

        Returns
        -------
        list of Path
            Files that were written.
        """
        metadata, _ = messages()
        folder, wanted = Path(folder), range(len(self.ranks)) if ranks is None else ranks
        for rank in {min(wanted, default=0), max(wanted, default=0)}:
            self._place(rank)  # refuses a rank that is not there, before anything is written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            groups = {name: list(members) for name, members in self.groups.items()}
            paths = [folder / "comm_group.json"]
            paths[0].write_text(json.dumps(groups) + "\n", encoding="utf-8")
            begin = _framed(metadata(version=VERSION).SerializeToString())
            for rank in wanted:
                paths.append(folder / f"plan.{rank}.et")
                paths[-1].write_bytes(begin + self._bytes_of(rank))
        except OSError as error:
            raise InvalidInputError(f"{folder}: cannot be written: {error.strerror}") from None
        return paths

    def _bytes_of(self, rank: int) -> bytes:
        """Return the nodes of a rank, serialised."""
        place = self._place(rank)
        if place.stage not in self._templates:
            self._templates[place.stage] = _StageTemplate(self.nodes(rank), place, self.ranks)
        return self._templates[place.stage].bytes_of(place)

    def _place(self, rank: int) -> Place:
        if not 0 <= rank < len(self.ranks):
            raise InvalidInputError(
                f"rank: {rank} is not accepted; expected 0 to {len(self.ranks) - 1}"
            )
        return self.ranks.place(rank)

    def _layer_pieces(self, kind: int, mode: str, forward: bool) -> list[Piece]:
        """Return the pieces of a layer's forward pass, or of recomputation and backward pass."""
        key = kind, "forward" if forward else mode
        if key not in self._pieces:
            layer = self._sizes.graph.layers[kind]
            forward_s, backward_s = self._seconds[2 * kind : 2 * kind + 2]
            if forward:
                pieces = _pieces(layer.forward, forward_s)
            else:
                pieces = _pieces(layer.forward, forward_s, layer.forward.recomputed(mode))
                pieces += _pieces(layer.backward, backward_s)
            self._pieces[key] = pieces
        return self._pieces[key]

    def _pass(
        self, writer: _Writer, place: Place, chunk: int, micro_batch: int, forward: bool
    ) -> Iterator[Any]:
        position = int(self._chain[place.stage * self.plan.vpp + chunk])
        last = int(self._chain.max())
        step = 1 if forward else -1
        word = f"{'F' if forward else 'B'}{micro_batch}.{chunk}"
        layers = self._layers[place.stage][chunk]
        if 0 <= position - step <= last:
            ends = (position - step, position)
            yield from self._send(writer, place, chunk, ends, word, micro_batch)
        if self.plan.zero == 3:
            yield from self._sync(writer, layers, word, "all-gather")
        for kind, mode in layers if forward else reversed(layers):
            for piece in self._layer_pieces(kind, mode, forward):
                yield from writer.piece(word, piece)
        if self.plan.zero >= 2 and not forward:
            yield from self._sync(writer, layers, word, "reduce-scatter")
        if 0 <= position + step <= last:
            ends = (position, position + step)
            yield from self._send(writer, place, chunk, ends, word, micro_batch)

    def _send(
        self,
        writer: _Writer,
        place: Place,
        chunk: int,
        positions: tuple[int, int],
        word: str,
        micro_batch: int,
    ) -> Iterator[Any]:
        """Send to the next chunk of the pipeline, or receive from the one before.

        With dualpipe each chunk position is on two stages, one for each direction of micro-batches.
        """
        stages, (source, target) = self._chain.reshape(self.plan.pp, self.plan.vpp), positions
        ends = []
        for position in positions:
            at = np.argwhere(stages == position)
            same = at[at[:, 1] == chunk]
            ends.append(int((same if len(same) else at)[0][0]))
        if ends[0] == ends[1]:
            return
        ranks = [self.ranks.rank(place.tensor, place.context, place.replica, e) for e in ends]
        kind = "send" if ranks[0] == place.rank else "receive"
        tag = 2 * (micro_batch * len(self._chain) + min(source, target)) + (source > target)
        yield writer.message(word, kind, self._message_bytes, ranks, tag)

    def _parameters(
        self, layers: Sequence[tuple[int, str]], frozen: bool = False
    ) -> tuple[float, float]:
        """Count the trained parameters of layers on a device; with `frozen` also the frozen ones.

        The first count is without experts, the second of experts.
        """
        kinds = self._sizes.kinds

        def total(name: str, frozen_name: str) -> float:
            counts = kinds[name] if frozen else kinds[name] - kinds[frozen_name]
            return sum(float(counts[kind]) for kind, _ in layers)

        experts = total("expert_parameters", "frozen_experts")
        return total("parameters", "frozen_parameters") - experts, experts

    def _sync(
        self, writer: _Writer, layers: Sequence[tuple[int, str]], word: str, collective: str
    ) -> Iterator[Any]:
        """Gather weights, or reduce gradients, of layers among the replicas that shard them."""
        gathers = collective == "all-gather"
        bytes_per_parameter = (
            self._optimizer.weight_bytes if gathers else self._optimizer.gradient_bytes
        )
        counts = self._parameters(layers, frozen=gathers and self.plan.zero == 3)
        for group, count in zip(("data", "expert-data"), counts, strict=True):
            if count:
                name = f"{collective} of {group}"
                piece = Piece(name, group, collective, 0.0, 0, int(count * bytes_per_parameter))
                yield from writer.piece(word, piece)

    def _update(self, writer: _Writer, place: Place) -> Iterator[Any]:
        plan, stage = self.plan, self.plan.stages[place.stage]
        layers = [layer for chunk in self._layers[place.stage] for layer in chunk]
        if plan.zero < 2:
            reduction = "reduce-scatter" if plan.zero else "all-reduce"
            yield from self._sync(writer, layers, "step", reduction)
        if plan.hybrid:
            share = sum(self._parameters(layers)) / (plan.shard * plan.cp)
            size = int(share * self._optimizer.gradient_bytes)
            piece = Piece("all-reduce of copies", "copies", "all-reduce", 0.0, 0, size)
            yield from writer.piece("step", piece)
        state = int(sum(stage.memory[t] for t in ("weights", "gradients", "optimizer")))
        piece = Piece("optimizer", "", "", plan.parts_s["optimizer"], 0, state)
        yield from writer.piece("step", piece)
        if plan.zero in (1, 2):
            yield from self._sync(writer, layers, "step", "all-gather")


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
