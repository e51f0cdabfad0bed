"""Takes a GPU, gives CSV files of measured operator times that `phaze-fast validate` reads.

Run it on the machine to be checked, with PyTorch and CUDA installed (nothing of phaze_fast is
needed there): ``python bench/measure_gpu.py OUT_FOLDER``. Every operator is captured in a CUDA
graph several times over and replayed; the figure is the median over replays of the time of one.
The shapes are drawn with a fixed seed, so that two machines measure the same ones.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

MODELS = (  # hidden, feed-forward
    (1024, 4096),
    (1600, 6400),
    (2048, 8192),
    (3072, 12288),
    (4096, 11008),
    (4096, 14336),
    (8192, 28672),
    (12288, 49152),
)


def timed_us(call: Callable[[], object], replays: int = 15) -> float:
    """Median microseconds of one call, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        stream.synchronize()
        count = max(1, min(20, int(2000.0 / max(start.elapsed_time(end) * 1e3, 1.0))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        graph.replay()
        samples = []
        for _ in range(replays):
            start.record()
            graph.replay()
            end.record()
            stream.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(samples)


def half(*shape: int, grad: bool = False) -> torch.Tensor:
    """Random bf16 values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def gemms(rng: random.Random) -> list[tuple[int, int, int, int]]:
    """Products of transformer layers, of attention scores, and ragged ones."""
    found = set()
    for _ in range(170):
        hidden, ffn = rng.choice(MODELS)
        t = rng.choice((1, 2, 4, 8))
        pairs = ((hidden, 3 * hidden // t), (hidden // t, hidden), (hidden, ffn // t))
        k, n = rng.choice((*pairs, (ffn // t, hidden)))
        m = rng.choice((512, 1024, 2048, 4096, 8192))
        shape = rng.choice(((m, k, n), (m, k, n), (m, n, k), (k, m, n)))
        if 2.0 * shape[0] * shape[1] * shape[2] < 2e12:
            found.add((1, *shape))
    for _ in range(45):
        b, s, d = (
            rng.choice((16, 32, 64, 128)),
            rng.choice((512, 1024, 2048)),
            rng.choice((64, 128)),
        )
        found.add((b, s, d, s) if rng.random() < 0.5 else (b, s, s, d))
    for _ in range(60):
        found.add((1, *(int(2 ** rng.uniform(5, 13)) for _ in range(3))))
    return sorted(found)


def measure_gemm(shape: tuple[int, int, int, int]) -> float:
    """One product."""
    b, m, k, n = shape
    if b == 1:
        x, w = half(m, k), half(k, n)
        return timed_us(lambda: torch.mm(x, w))
    x, w = half(b, m, k), half(b, k, n)
    return timed_us(lambda: torch.bmm(x, w))


def vector_call(op: str, rows: int, cols: int) -> Callable[[], object]:
    """One element-wise or row-wise operator, forward."""
    x, y, w = half(rows, cols), half(rows, cols), half(cols)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "copy": lambda: y.copy_(x),
        "relu": lambda: functional.relu(x),
        "gelu": lambda: functional.gelu(x),
        "silu": lambda: functional.silu(x),
        "softmax": lambda: functional.softmax(x, -1),
        "layernorm": lambda: functional.layer_norm(x, (cols,), w, w),
        "rmsnorm": lambda: functional.rms_norm(x, (cols,), w),
        "dropout": lambda: functional.dropout(x, 0.1, True),
    }
    return calls[op]


def both_ways(op: str, rows: int, cols: int) -> Callable[[], object]:
    """Forward and backward of one operator."""
    x, w, dy = half(rows, cols, grad=True), half(cols, grad=True), half(rows, cols)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "gelu": lambda: functional.gelu(x),
        "silu": lambda: functional.silu(x),
        "softmax": lambda: functional.softmax(x, -1),
        "layernorm": lambda: functional.layer_norm(x, (cols,), w, w),
        "rmsnorm": lambda: functional.rms_norm(x, (cols,), w),
    }
    wanted = [x, w] if "norm" in op else [x]
    return lambda: torch.autograd.grad(calls[op](), wanted, dy)


def end_call(op: str, rows: int, cols: int) -> Callable[[], object]:
    """One operator before, after or around the layers."""
    if op == "adamw_fused_bf16":
        p = torch.nn.Parameter(half(rows))
        p.grad = half(rows)
        step = torch.optim.AdamW([p], fused=True, capturable=True)
        return step.step
    if op.startswith("cross_entropy"):
        target = torch.randint(0, cols, (rows,), device="cuda")
        x = half(rows, cols, grad=op.endswith("bwd"))
        if op.endswith("bwd"):
            return lambda: torch.autograd.grad(functional.cross_entropy(x, target), [x])
        return lambda: functional.cross_entropy(x, target)
    if op == "embedding_fwd":
        table, ids = half(50304, cols), torch.randint(0, 50304, (rows,), device="cuda")
        return lambda: functional.embedding(ids, table)
    return both_ways(op.removesuffix("_fwd_bwd"), rows, cols)


def measure_attention(b: int, heads: int, seq: int, dim: int, causal: bool) -> tuple[float, float]:
    """Fused attention, forward and backward apart."""
    q, k, v = (half(b, heads, seq, dim, grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    with torch.no_grad():
        alone = timed_us(forward)
    dy = half(b, heads, seq, dim)
    both = timed_us(lambda: torch.autograd.grad(forward(), [q, k, v], dy))
    return alone, both - alone


def write(path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    """Write one table."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(header.split(","))
        out.writerows(rows)
    sys.stdout.write(f"{path.name}: {len(rows)} rows\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    """Measure everything."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    sys.stdout.write(f"{torch.cuda.get_device_name()}, {versions}\n")
    rng = random.Random(20261115)
    table: list[tuple[object, ...]] = [
        ("bmm" if s[0] > 1 else "mm", *s, round(measure_gemm(s), 3)) for s in gemms(rng)
    ]
    write(folder / "gemm.csv", "op,b,m,k,n,us_median", table)
    sizes = [(512, 1024), (2048, 1600), (4096, 4096), (8192, 1024), (2048, 12288), (16384, 3072)]
    sizes += [(8192, 8192), (32768, 2048), (65536, 512), (16384, 12288), (65536, 4096)]
    plain = [
        "add",
        "mul",
        "copy",
        "relu",
        "gelu",
        "silu",
        "softmax",
        "layernorm",
        "rmsnorm",
        "dropout",
    ]
    write(
        folder / "vector.csv",
        "op,rows,cols,us_median",
        [(op, *s, round(timed_us(vector_call(op, *s)), 3)) for op in plain for s in sizes],
    )
    ends = [("adamw_fused_bf16", n, 1) for n in (2**20, 2**24, 2**26, 2**28, 2**29)]
    logits = [(512, 32000), (2048, 30522), (4096, 32000), (4096, 50257), (8192, 50304)]
    logits += [(2048, 128256), (8192, 128256)]
    for op in ("cross_entropy_fwd", "cross_entropy_fwd_bwd"):
        ends += [(op, *s) for s in logits]
    ends += [("embedding_fwd", r, c) for r in (512, 2048, 8192) for c in (1024, 4096, 12288)]
    for op in ("gelu", "silu", "softmax", "layernorm", "rmsnorm"):
        ends += [(f"{op}_fwd_bwd", *s) for s in sizes[:9]]
    write(
        folder / "ends.csv",
        "op,rows,cols,us_median",
        [(*e, round(timed_us(end_call(*e)), 3)) for e in ends],
    )
    cases = [
        (b, h, s, d, c)
        for b in (1, 2, 8)
        for h in (12, 32, 40)
        for s in (512, 1024, 2048, 4096)
        for d in (64, 128)
        for c in (False, True)
        if b * h * s * s * d <= 8 * 40 * 2048**2 * 128
    ]
    table = [(*c, *(round(us, 3) for us in measure_attention(*c))) for c in cases]
    write(folder / "attention.csv", "b,heads,seq,head_dim,causal,fwd_us,bwd_us", table)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
