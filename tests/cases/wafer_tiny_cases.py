"""Models of few operators on small wafers, small enough for brute force."""

from __future__ import annotations

import random

from phaze_fast import models
from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec
from phaze_fast.wafer import Problem, WaferTraining, load_wafer
from phaze_fast.wafer.mapping.operators import Edge, MeshOperator, Workload

BERT = models.load("bertlarge")
FAST = {"bandwidth_bytes_per_s": 1e12}


def tiny_workload(rng: random.Random) -> Workload:
    """Up to six operators: an end, a block of products and others, another end."""
    seq, width = rng.choice([8, 64, 512]), rng.choice([64, 256, 1024])
    count = rng.randint(2, 4)
    kinds = [rng.choice(["gemm", "gemm", "activation", "residual", "norm"]) for _ in range(count)]
    kinds[rng.randrange(count)] = "gemm"
    kinds[-1] = rng.choice(["residual", "norm"])
    before, behind = rng.random() < 0.3, rng.random() < 0.4
    parts = ["before"] * before + ["block"] * count + ["behind"] * behind
    kinds = ["gemm"] * before + kinds + ["gemm"] * behind
    ops = []
    for i, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        product = kind == "gemm"
        size = ELEMENT_BYTES * seq * width
        spec = OperatorSpec(
            f"op{i}",
            kind,
            "TC" if product else "VC",
            (-1,),
            m=seq,
            n=width,
            k=width if product else 0,
            flops=2.0 * seq * width * width if product else 0.0,
            read_bytes=size + (ELEMENT_BYTES * width * width if product else 0),
            write_bytes=size,
            function="layernorm" if kind == "norm" else "",
        )
        last = part == "block" and i + 1 == before + count
        kept = last or (part == "block" and rng.random() < 0.6)
        ops.append(
            MeshOperator(
                name=spec.name,
                part=part,
                spec=spec,
                seq_rows=seq,
                units=width,
                inner_units=width if product else 0,
                kept_bytes=float(size) if kept else 0.0,
                output_kept=kept,
                parameters=width * width if product else 0,
                stat_bytes=8.0 * seq if kind == "norm" else 0.0,
                gather_bytes=0.0,
            )
        )
    size = float(ELEMENT_BYTES * seq * width)
    start, end = int(before), before + count - 1
    edges = [Edge(i, i + 1, "inside", size, ops[i].output_kept) for i in range(start, end)]
    edges.append(Edge(end, start, "wrap", size, True))
    if count > 2 and rng.random() < 0.5:
        edges.append(Edge(start, end, "inside", size, False))
    if before:
        edges.append(Edge(0, start, "entry", size, False))
    if behind:
        edges.append(Edge(end, end + 1, "exit", size, True))
    chain = tuple(range(start, end + 1))
    return Workload(BERT, seq, tuple(ops), tuple(edges), chain, size, blocks=rng.randint(1, 6))


def tiny_problem(rng: random.Random) -> Problem:
    """On at most four dies, with so much memory that keeping everything now and then fits."""
    name = rng.choice(["dram-wafer", "dram-wafer", "dram-stream-wafer"])
    columns, rows = rng.choice([(2, 1), (1, 2), (3, 1), (2, 2), (4, 1)])
    wafer = load_wafer(name).replace(columns=columns, rows=rows)
    if wafer.off_wafer is not None and rng.random() < 0.7:  # the mesh to the rim counts, not I/O
        edges = rng.choice([("left",), ("top",), ("left", "top"), ("left", "right")])
        fast = wafer.off_wafer.replace(edges=edges, bandwidth_bytes_per_s=1e15)
        slow = wafer.die.replace(d2d_modules_x=1, d2d_modules_y=1)
        wafer = wafer.replace(off_wafer=fast, die=slow)
    work = tiny_workload(rng)
    training = WaferTraining(rng.choice([2, 3, 4, 6, 8, 9, 12]))
    free = Problem(BERT, wafer, training, work=work)
    state = 16.0 * work.parameters
    kept = sum(op.kept_bytes for op in work.operators) * training.global_batch * work.blocks
    room = (state * rng.uniform(0.3, 1.5) + kept * rng.uniform(0.1, 1.0)) / wafer.dies
    return free.variant(capacity_bytes=room)
