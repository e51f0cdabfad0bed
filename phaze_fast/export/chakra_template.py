"""Traces of many ranks from one of each stage: they differ in groups and in peers alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phaze_fast.export.chakra_schema import framed, messages
from phaze_fast.export.ranks import Place, Ranks

__all__ = ["StageTemplate"]

_ENDS = ("comm_src", "comm_dst", "comm_tag")


class StageTemplate:
    """The nodes of a rank, of which those of the other ranks of its stage are made.

    Attributes are the last field of a node, so that a node may be written without some of them and
    those be added to its bytes.

    Parameters
    ----------
    nodes
        Of the rank.
    place
        Of the rank.
    ranks
        Of the plan.
    """

    def __init__(self, nodes: Iterable[Any], place: Place, ranks: Ranks) -> None:
        self._ranks, self._node = ranks, messages()[1]
        self._parts: list[tuple[bytes, Any]] = []
        """Bytes, and what follows in the last node of them: a group's kind, or both ends."""
        self.shared = True
        """Whether other ranks can be made of it: not where they pass pieces around a ring."""
        run = bytearray()
        for node in nodes:
            rest = self._cut(node, place)
            if rest is None:
                run += framed(node.SerializeToString())
                continue
            self._parts.append((bytes(run), (node.SerializeToString(), rest)))
            run.clear()
        self._end = bytes(run)

    def _cut(self, node: Any, place: Place) -> str | tuple[bool, int, int] | None:
        """Take off a node what depends on the rank; give the kind of group, or the other end."""
        names = [attribute.name for attribute in node.attr]
        if names[-1] == "pg_name":
            kind: str = node.attr[-1].string_val.partition(".")[0]
            del node.attr[-1]
            return kind
        if names[-1] != _ENDS[-1]:
            return None
        source, target, tag = (attribute.int32_val for attribute in node.attr[-3:])
        self.shared = self.shared and tag >= 0
        del node.attr[-3:]
        sends = source == place.rank
        return sends, self._ranks.place(target if sends else source).stage, tag

    def bytes_of(self, place: Place) -> bytes:
        """Give all nodes of a rank of the same stage, as they stand in its file."""
        groups: dict[str, bytes] = {}
        found: list[bytes] = []
        for run, (node, rest) in self._parts:
            if isinstance(rest, str):
                if rest not in groups:
                    first = min(self._ranks.group(place, rest))
                    made = self._node()
                    made.attr.add(name="pg_name", string_val=f"{rest}.{first}")
                    groups[rest] = made.SerializeToString()
                tail = groups[rest]
            else:
                tail = self._ends(place, *rest)
            found += (run, framed(node + tail))
        found.append(self._end)
        return b"".join(found)

    def _ends(self, place: Place, sends: bool, stage: int, tag: int) -> bytes:
        other = self._ranks.rank(place.tensor, place.context, place.replica, stage)
        pair = (place.rank, other) if sends else (other, place.rank)
        made = self._node()
        for name, value in zip(_ENDS, (*pair, tag), strict=True):
            made.attr.add(name=name, int32_val=value)
        data: bytes = made.SerializeToString()
        return data
