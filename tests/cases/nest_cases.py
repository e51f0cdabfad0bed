"""Placement problems in NEST's form, drawn at random, small enough to enumerate."""

import math
import random


def width_at_random(rng, count, ids, scale):
    """Nodes and edges of one width: a chain with some edges that skip layers."""
    nodes = [
        {
            "id": key,
            "optimalLatencyFw": rng.choice([0.0, 1.0, rng.uniform(0, 4)]) * scale,
            "optimalLatencyBw": rng.choice([0.0, 2.0, rng.uniform(0, 8)]) * scale,
            "parameterSize": rng.randrange(40),
            "activationSize": rng.randrange(30),
        }
        for key in ids
    ]
    edges = [
        {"sourceId": ids[a], "destId": ids[b], "communicationCost": rng.randrange(50)}
        for a in range(count)
        for b in range(a + 1, count)
        if b == a + 1 or rng.random() < 0.2
    ]
    rng.shuffle(nodes)
    rng.shuffle(edges)
    return nodes, edges


def nest_problem(seed, most_layers=6, most_devices=32):
    """One problem; the same seed draws the same one everywhere."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.choice([1, 2, 3, 3, 3, 4]))]
    while math.prod(sizes) > most_devices:
        sizes[rng.randrange(len(sizes))] = 2
    count = rng.randint(1, most_layers)
    ids = rng.sample(range(-1, 20), count)
    scale = rng.choice([0.1, 1.0, 1.0, 10.0, 1000.0])
    tables = {
        str(w): width_at_random(rng, count, ids, scale / w)
        for w in rng.sample([1, 1, 2, 3, 4], rng.choice([1, 1, 2]))
    }
    states = rng.choice(["SGD", "SGD", "Adam"])
    layer = max(
        (8 if states == "Adam" else 2) * node["parameterSize"] + node["activationSize"]
        for nodes, _ in tables.values()
        for node in nodes
    )
    memory = layer * rng.choice([0.9, 1.0, 1.3, 1.6, 2.0, 3.0, 10.0])
    return {
        "maxDevices": math.prod(sizes),
        "devices_per_level": sizes,
        "bws": [rng.choice([1.0, 5.0, 20.0, rng.uniform(0.5, 50)]) for _ in sizes],
        "latency_per_level": [rng.choice([0.0, 0.1, rng.uniform(0, 2)]) for _ in sizes],
        "maxMemoryPerDevice": int(memory) + 20,
        "mbsInBatch": rng.choice([1.0, 4.0, 7.9, 16.0, float(rng.randint(1, 40))]),
        "ep_degree": rng.choice([1, 1, 1, 1, 1, 2]),
        "cp_degree": rng.choice([1, 1, 1, 1, 1, 2]),
        "activationRecomputation": rng.random() < 0.5,
        "optimizerAlgorithm": states,
        "nodes": {w: nodes for w, (nodes, _) in tables.items()},
        "edges": {w: edges for w, (_, edges) in tables.items()},
    }
