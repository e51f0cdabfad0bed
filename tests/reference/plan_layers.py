"""The ranks of a parallel plan one by one, and what each of its layers takes on them.

Every rank has its number, every group is a list of ranks. Only layer graphs, operator times and
layer makespans come from the package; they are inputs of a plan.
"""

from functools import cache

from phaze_fast.cost import estimate_costs
from phaze_fast.hardware import FlatFabric, TieredFabric, TorusFabric
from phaze_fast.memory import OPTIMIZERS
from phaze_fast.opgraph import GROUPS, Strategy, layer_graph
from phaze_fast.schedule import schedule_layers
from phaze_fast.software import chip_as_run, model_as_run
from reference.collectives import price_message, price_ranks

ENDS = ("embedding", "head")

# ---- where ranks are ----


def described(fabric):
    """Kind of a fabric, and its levels by column, as `price_ranks` takes them."""
    if isinstance(fabric, FlatFabric):
        return "switched", [0], [fabric.bandwidth_bytes_per_s], [fabric.latency_s], [0]
    if isinstance(fabric, TieredFabric):
        tiers = fabric.tiers
        rates = [tier.bandwidth_bytes_per_s for tier in tiers]
        latencies = [tier.latency_s for tier in tiers]
        return "switched", [tier.size or 0 for tier in tiers], rates, latencies, [0] * len(tiers)
    n = len(fabric.dims)
    wraps = [int(isinstance(fabric, TorusFabric))] * n
    rates, latencies = [fabric.link_bandwidth_bytes_per_s] * n, [fabric.hop_latency_s] * n
    return "grid", list(fabric.dims), rates, latencies, wraps


def rank_numbers(spec):
    """Rank of every (tensor, context, replica, stage) index, counted one by one."""
    found, number = {}, 0
    inside = spec.rank_order == "replicas-inside"
    for outer in range(spec.pp if inside else spec.dp):
        for inner in range(spec.dp if inside else spec.pp):
            di, pi = (inner, outer) if inside else (outer, inner)
            for ci in range(spec.cp):
                for ti in range(spec.tp):
                    found[ti, ci, di, pi] = number
                    number += 1
    return found


def stage_ranks(spec, rank, count=None):
    """Ranks of the first stage, counted by tensor, then context, then replica index."""
    return [
        rank[ti, ci, di, 0]
        for di in range(count or spec.dp)
        for ci in range(spec.cp)
        for ti in range(spec.tp)
    ]


class Network:
    """Prices of the groups and messages of a plan, over the ranks of replica 0 and tensor 0."""

    def __init__(self, cluster, spec):
        self.spec, self.fabric = spec, described(cluster.fabric)
        self.rank = rank_numbers(spec)
        self.known = {}

    def collective(self, op, payload, ranks):
        key = (op, payload, tuple(ranks))
        if key not in self.known:
            prices = price_ranks(self.fabric, op, payload, ranks)
            self.known[key] = min(prices.values()) if prices else 0.0
        return self.known[key]

    def replicas(self, experts, count=None):
        """Ranks that hold the same weights: all replicas, or those with the same experts.

        Of the first `count` replicas, by default of all.
        """
        step = self.spec.ep * (self.spec.etp or self.spec.tp) if experts else self.spec.tp
        return stage_ranks(self.spec, self.rank, count)[::step]

    def shared(self, op, dense_bytes, expert_bytes):
        """A collective over the replicas that share, then one over those with the same experts."""
        dense = self.collective(op, dense_bytes, self.replicas(False, self.spec.shard))
        return dense + self.collective(op, expert_bytes, self.replicas(True, self.spec.shard))

    def among_groups(self, dense_bytes, expert_bytes):
        """Shares of gradients added up over the groups of replicas that share state."""
        step = self.spec.shard or self.spec.dp
        ranks = [self.rank[0, 0, di, 0] for di in range(0, self.spec.dp, step)]
        dense = dense_bytes / len(self.replicas(False, self.spec.shard))
        experts = expert_bytes / len(self.replicas(True, self.spec.shard))
        return self.collective("all-reduce", dense, ranks) + self.collective(
            "all-reduce", experts, ranks
        )

    def message(self, payload, a, b):
        """From stage a to stage b: every device sends one, and the slowest counts."""
        key = ("message", payload, a, b)
        if key not in self.known:
            spec, rank = self.spec, self.rank
            self.known[key] = max(
                price_message(self.fabric, payload, rank[ti, ci, di, a], rank[ti, ci, di, b])
                for ti in range(spec.tp)
                for ci in range(spec.cp)
                for di in range(spec.dp)
            )
        return self.known[key]


# ---- layers ----


@cache
def graph_of(model, strategy):
    return layer_graph(model, strategy)


def offloads(mode):
    """Whether a mode copies what a block stores to the host."""
    return "offload" in mode.split("+")


def on_device(mode):
    """The operators of a mode that are computed again."""
    return "+".join(word for word in mode.split("+") if word != "offload") or "none"


class Again(dict):
    """Seconds of the operators that a mode names, by mode: all of them are computed again."""

    def __init__(self, layer, forward_s, operators_s):
        super().__init__(none=0.0, full=forward_s)
        self.layer, self.operators_s = layer, operators_s

    def __missing__(self, mode):
        if self.layer.kind in ENDS:
            return 0.0
        chosen, names = self.layer.forward.recomputed(mode), self.layer.forward.names
        pairs = zip(self.operators_s, names, strict=True)
        self[mode] = sum(float(s) for s, name in pairs if name in chosen)
        return self[mode]


def beside_experts(costs, k, lost):
    """Share of a layer's expert exchanges that passes of another micro-batch hide.

    A forward pass meets a backward pass; of the cores, 20 of 132 or more run the exchange.
    """
    exchange = compute = 0.0
    for one in (2 * k, 2 * k + 1):
        ops = costs.graphs[one].ops
        for op, seconds in zip(ops, costs.time_s(one)[0], strict=True):
            if op["group"] in (GROUPS.index("expert"), GROUPS.index("expert-mesh")):
                exchange += float(seconds)
            elif op["collective"] < 0:
                compute += float(seconds)
    return min(1.0, compute / exchange) * (1 - max(lost, 20 / 132)) if exchange else 0.0


@cache
def layer_times(model, strategy, chip, fabric, slowdown):
    """Seconds of each kind of layer: forward, backward, again by mode, weight gradients."""
    graph = graph_of(model, strategy)
    costs = estimate_costs(graph, chip, fabric)
    costs = costs.without(("expert", "expert-mesh"), strategy.expert_overlap).with_contention(
        1 - 1 / slowdown
    )
    makespans = schedule_layers(costs, max_nodes=20000).makespan_s[:, 0]
    found, alone = [], costs
    for k, layer in enumerate(graph.layers):
        if strategy.overlap_experts and layer.expert_parameters:
            costs = alone.without(
                ("expert", "expert-mesh"), beside_experts(alone, k, 1 - 1 / slowdown)
            )
            makespans = schedule_layers(costs, max_nodes=20000).makespan_s[:, 0]
        forward, backward = float(makespans[2 * k]), float(makespans[2 * k + 1])
        ahead, back = costs.time_s(2 * k)[0], costs.time_s(2 * k + 1)[0]
        total = sum(float(s) for s in back)
        weights = sum(
            float(s)
            for s, name in zip(back, layer.backward.names, strict=True)
            if name.endswith("-w")
        )
        found.append(
            {
                "forward": forward,
                "backward": backward,
                "matrices": sum(count for count, _, _ in layer.matrices),
                "again": Again(layer, 0.0 if layer.kind in ENDS else forward, ahead),
                "weight_grad": backward * weights / total if total > 0 else 0.0,
            }
        )
    return found


class Layers:
    """The layers of a plan, by position: seconds, parameters, bytes."""

    def __init__(self, model, cluster, spec, network):
        self.spec, self.network = spec, network
        model = model_as_run(model, spec.software, spec.tp)
        self.strategy = Strategy(
            tp=spec.tp,
            sequence_parallel=spec.sequence_parallel and spec.tp > 1,
            cp=spec.cp,
            cp_kind=spec.cp_kind if spec.cp > 1 else "all-gather",
            ep=spec.ep,
            etp=spec.etp if spec.etp != spec.tp else None,
            dispatcher=spec.dispatcher if spec.ep > 1 else "all-to-all",
            offload_optimizer=spec.offload_optimizer,
            expert_imbalance=spec.expert_imbalance if spec.ep > 1 else 1.0,
            expert_overlap=spec.expert_overlap if spec.ep > 1 else 0.0,
            overlap_experts=spec.ep > 1
            and (spec.schedule in ("dualpipe", "dualpipe-v") or bool(spec.overlap_experts))
            and spec.overlap_experts is not False,
            micro_batch=spec.micro_batch,
            seq=spec.seq,
        )
        self.graph = graph_of(model, self.strategy)
        fabric = cluster.fabric
        chip = chip_as_run(cluster.chip, spec.software)
        slower = spec.software.overlap_slowdown
        self.kinds = layer_times(model, self.strategy, chip, fabric, slower)
        self.optimizer = OPTIMIZERS[spec.optimizer_name]
        self.order = self.graph.order
        self.shards = (spec.shard or spec.dp) * spec.cp
        tied = model.tied_embeddings and model.head in ("lm", "mlm") and spec.pp > 1
        self.copied = -(-model.vocab // spec.tp) * model.hidden if tied else 0
        tuning = cluster.chip.tuning
        share = tuning.hbm_share if tuning is not None else 1.0
        self.hbm_rate = cluster.chip.hbm.bandwidth_bytes_per_s * share
        self.host = cluster.chip.host
        kernel = tuning.functions.get("adamw")
        if kernel is not None:  # the optimiser's arithmetic on all lanes, if that takes longer
            vector = cluster.chip.vector_core
            lanes = vector.count * vector.lanes * vector.alus_per_lane
            a_parameter_s = kernel.ops_per_element / (
                lanes * cluster.chip.clock_hz * tuning.clock_factor
            )
            each = 2 * self.optimizer.state_bytes + self.optimizer.gradient_bytes
            moved = each + self.optimizer.weight_bytes
            self.hbm_rate = moved / max(moved / self.hbm_rate, a_parameter_s)

    def layer(self, i):
        return self.graph.layers[self.order[i]]

    def is_block(self, i):
        return self.layer(i).kind not in ENDS

    def parameters(self, i):
        """All parameters of a layer on a device, and of those the experts'."""
        copied = self.copied if i == len(self.order) - 1 else 0
        return self.layer(i).device_parameters + copied, self.layer(i).expert_parameters

    def share(self, i):
        """Parameters that a device is left with where replicas share them."""
        held, experts = self.parameters(i)
        same = len(self.network.replicas(True, self.spec.shard))
        return (held - experts) / self.shards + experts / same

    def over_replicas(self, op, i, bytes_each):
        held, experts = self.parameters(i)
        return self.network.shared(op, (held - experts) * bytes_each, experts * bytes_each)

    def forward(self, i):
        own = self.kinds[self.order[i]]["forward"]
        if self.spec.zero < 3:
            return own
        return self.beside(
            own, self.over_replicas("all-gather", i, min(2.0, self.optimizer.weight_bytes))
        )

    def backward(self, i, mode):
        kind = self.kinds[self.order[i]]
        own = kind["backward"] + kind["again"][on_device(mode)]
        if offloads(mode) and self.is_block(i):
            stored = self.layer(i).forward.stashed_bytes(on_device(mode))
            copy = stored / self.host.link_bytes_per_s  # out of the device, and back
            own = max(own, copy) + max(0.0, copy - kind["forward"])
        if self.spec.zero < 2:
            return own
        moved = self.over_replicas("reduce-scatter", i, self.optimizer.gradient_bytes)
        if self.spec.zero == 3:
            moved += self.over_replicas("all-gather", i, min(2.0, self.optimizer.weight_bytes))
        return self.beside(own, moved)

    def beside(self, work, moved):
        """Work with an exchange beside it, during which it goes on so many times more slowly."""
        slower = self.spec.software.overlap_slowdown
        done_meanwhile = moved / slower
        return moved if done_meanwhile >= work else moved + work - done_meanwhile

    def weight_grad(self, i):
        return self.kinds[self.order[i]]["weight_grad"]

    def sync(self, i):
        op, each = (
            "reduce-scatter" if self.spec.zero else "all-reduce",
            self.optimizer.gradient_bytes,
        )
        held, experts = self.parameters(i)
        among = self.network.among_groups((held - experts) * each, experts * each)
        paired = 0.0
        if self.spec.schedule == "dualpipe":  # the other device with this layer, furthest apart
            own = self.share(i) if self.spec.zero else held
            paired = 2 * self.network.message(own * each / 2, 0, self.spec.pp - 1)
        return self.over_replicas(op, i, each) + among + paired

    def step(self, i):
        """The optimiser, and weights that are gathered after it."""
        kept = self.share(i) if self.spec.zero else self.parameters(i)[0]
        each = 2 * self.optimizer.state_bytes + self.optimizer.gradient_bytes
        seconds = kept * (each + self.optimizer.weight_bytes) / self.hbm_rate
        if self.spec.offload_optimizer:  # gradients out, weights back, and the host's memory
            opt, host = self.optimizer, self.host
            there = opt.gradient_bytes / host.link_bytes_per_s
            back = opt.weight_bytes / host.link_bytes_per_s
            update = (each + opt.weight_bytes) / host.memory_bytes_per_s
            seconds = kept * max(there, back, update)
        if self.spec.zero in (1, 2):
            seconds += self.over_replicas("all-gather", i, min(2.0, self.optimizer.weight_bytes))
            slices = len(self.network.replicas(False, self.spec.shard))
            if slices > 1:
                matrices = self.kinds[self.order[i]]["matrices"]
                seconds += self.spec.software.slice_host_s * matrices * slices
        return seconds
