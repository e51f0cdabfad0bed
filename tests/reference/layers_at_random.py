"""Layers drawn at random, and the check of their schedules that every test makes."""

from reference.layer import faults


def check(found):
    assert faults(found.instance, found.starts, found.mode, found.makespan, found.overlap) == []
    assert found.bound <= found.makespan * (1 + 1e-12)
    assert (found.status == "optimal") == (found.proved_by != "nothing")


def random_layer(rng, most_ops, most_modes=2):
    """A random layer; latencies on all cores between perfect scaling and none."""
    count = rng.randint(1, most_ops)
    cores = {"num_tc": rng.randint(1, 4), "num_vc": rng.randint(1, 3)}
    ops = []
    for i in range(count):
        kind = rng.choice(["TC", "TC", "VC", "TCandVC", "NET"])
        single = rng.choice([rng.randint(1, 30), rng.uniform(0.1, 30.0)])
        have = cores["num_vc"] if kind == "VC" else cores["num_tc"]
        every = single / rng.uniform(1.0, have) if kind != "NET" else single
        op = {"id": 10 * i, "type": kind, "lat_single": single, "lat_all": every}
        if most_modes > 2 and rng.random() < 0.3:
            op["lat_cores"] = {"2": (single + every) / 2}
        ops.append(op)
    chance = rng.choice([0.1, 0.3, 0.5])
    edges = [
        [10 * a, 10 * b] for b in range(count) for a in range(b) if rng.random() < chance / (b - a)
    ]
    return {"name": "random", "ops": ops, "edges": edges, **cores}


def backward_like(rng, count):
    """A chain with operators beside it that nothing waits for, and few different latencies."""
    cores = {"num_tc": rng.choice([1, 2, 3, 8]), "num_vc": rng.choice([1, 2])}
    sizes = [rng.randint(1, 5), rng.randint(4, 12)]
    ops, edges, chain = [], [], []
    for i in range(count):
        kind = rng.choice(["TC", "TC", "TC", "VC", "NET", "TCandVC"])
        every = rng.choice(sizes) if rng.random() < 0.8 else rng.randint(1, 9)
        have = cores["num_vc"] if kind == "VC" else cores["num_tc"]
        single = every if kind == "NET" else every * have - rng.choice([0, 0, have - 1])
        ops.append({"id": i, "type": kind, "lat_single": max(single, 1), "lat_all": every})
        if chain and rng.random() < 0.9:
            edges.append([rng.choice(chain[-2:]), i])
        if rng.random() < 0.55:
            chain.append(i)
    return {"name": "backward", "ops": ops, "edges": edges, **cores}


def any_way(rng, count):
    """A layer of few small whole latencies with everything that is accepted: core counts between,
    several networks, ways that are missing."""
    cores = {
        "num_tc": rng.choice([1, 2, 3, 7]),
        "num_vc": rng.choice([1, 2]),
        "num_net": rng.choice([1, 1, 2, 3]),
    }
    ops = []
    for i in range(count):
        op = {"id": i, "type": rng.choice(["TC", "TC", "VC", "NET", "TCandVC"])}
        ways = rng.choice([("lat_single",), ("lat_all",), ("lat_single", "lat_all")])
        op |= {way: rng.choice([0, 1, 2, 3, 5, 8]) for way in ways}
        if rng.random() < 0.4:
            op["lat_cores"] = {"2": rng.randint(1, 8)}
        ops.append(op)
    edges = [[a, b] for b in range(count) for a in range(b) if rng.random() < 0.6 / (b - a)]
    return {"name": "any", "ops": ops, "edges": edges, **cores}


def wide_range(rng, count, decades):
    """A layer whose latencies are whole numbers from 1 to 10**decades, all sizes alike."""
    cores = {"num_tc": rng.randint(1, 4), "num_vc": rng.randint(1, 3)}

    def latency():
        return float(round(10 ** rng.uniform(0.0, decades)))

    ops = [
        {
            "id": i,
            "type": rng.choice(["TC", "TC", "VC", "TCandVC", "NET"]),
            "lat_single": latency(),
            "lat_all": latency(),
        }
        for i in range(count)
    ]
    chance = rng.choice([0.1, 0.3, 0.5])
    edges = [[a, b] for b in range(count) for a in range(b) if rng.random() < chance / (b - a)]
    return {"name": "wide", "ops": ops, "edges": edges, **cores}
