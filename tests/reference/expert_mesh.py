"""Ranks of attention and of experts as Megatron-Core numbers them, and every message of a dispatch.

Every rank, token and message is listed one by one. Nothing comes from the package.
"""

from collections import Counter
from itertools import product


def coordinates(order, sizes):
    """Coordinates of every rank; the first name of an order such as ``tp-cp-dp-pp`` varies first."""
    names = order.split("-")
    ranges = [range(sizes[name]) for name in reversed(names)]
    return [dict(zip(reversed(names), at, strict=True)) for at in product(*ranges)]


def groups(order, sizes, varying):
    """Groups of ranks that differ only in some coordinates, each in rising order."""
    found = {}
    for rank, at in enumerate(coordinates(order, sizes)):
        same = tuple(value for name, value in at.items() if name not in varying)
        found.setdefault(same, []).append(rank)
    return sorted(map(tuple, found.values()))


def meshes(widths, stages_inside=False):
    """Groups of a plan by kind: attention is laid out as tp-cp-dp-pp, experts as tp-ep-dp-pp.

    Of a context group, `heads` neighbours exchange rows for heads, and every such neighbour is in a
    ring (Megatron-Core's create_hierarchical_groups). That is Megatron-Core's RankGenerator, which is used twice: experts have sizes of their own for
    tp and dp, and no context parallelism.
    """
    order = "tp-cp-pp-dp" if stages_inside else "tp-cp-dp-pp"
    expert_order = order.replace("cp", "ep")
    dense = {name: widths[name] for name in ("tp", "cp", "dp", "pp")}
    copies = widths["tp"] * widths["cp"] * widths["dp"] // (widths["etp"] * widths["ep"])
    experts = {"tp": widths["etp"], "ep": widths["ep"], "dp": copies, "pp": widths["pp"]}
    inner = widths.get("heads", 1)
    parts = {**dense, "heads": inner, "ring": widths["cp"] // inner}
    context_order = order.replace("cp", "heads-ring")
    return {
        "tensor": groups(order, dense, {"tp"}),
        "context": groups(order, dense, {"cp"}),
        "context-heads": groups(context_order, parts, {"heads"}),
        "context-ring": groups(context_order, parts, {"ring"}),
        "expert-mesh": groups(expert_order, experts, {"tp", "ep"}),
        "data": groups(order, dense, {"cp", "dp"}),
        "expert-tensor": groups(expert_order, experts, {"tp"}),
        "expert": groups(expert_order, experts, {"ep"}),
        "expert-data": groups(expert_order, experts, {"dp"}),
    }


class Dispatch:
    """Tokens of one stage on their way to experts, as MoEAlltoAllTokenDispatcher sends them.

    `rows` tokens belong to each tensor group; with `split`, its devices have different ones, else
    all of them. Token i visits experts i * k to i * k + k - 1, so that load is even.
    """

    def __init__(self, widths, rows, experts, top_k, split):
        mesh = meshes({**widths, "pp": 1})
        self.sent, self.gathered = Counter(), Counter()  # copies of tokens by (from, to)
        member = {rank: group for group in mesh["expert"] for rank in group}
        sharing = {rank: group for group in mesh["expert-tensor"] for rank in group}
        received = Counter()
        for group in mesh["tensor"]:
            for place, rank in enumerate(group):
                share = rows // len(group)
                own = range(place * share, place * share + share) if split else range(rows)
                for token, k in product(own, range(top_k)):
                    expert = (token * top_k + k) % experts
                    to = member[rank][expert * widths["ep"] // experts]
                    self.sent[rank, to] += 1
                    received[to] += 1
        self.computed = Counter(received)
        if split:
            for rank, count in received.items():
                for other in sharing[rank]:
                    if other != rank:
                        self.gathered[rank, other] += count
                        self.computed[other] += count

    @staticmethod
    def to_all(widths, rows):
        """Rows that each device sends to every other one of its copy of the experts.

        That is MoEAllGatherTokenDispatcher; `rows` tokens belong to each tensor group.
        """
        sent = Counter()
        for group in meshes({**widths, "pp": 1})["expert-mesh"]:
            for rank, other in product(group, group):
                sent[rank, other] += rows // widths["tp"]
        return sent

    @staticmethod
    def by_tier(messages, node):
        """Copies of tokens that stay on a device, cross a node's links, or leave the node."""
        tiers = [0, 0, 0]
        for (a, b), count in messages.items():
            tiers[0 if a == b else 1 if a // node == b // node else 2] += count
        return tiers
