"""Chips of the published spaces, and random models, clusters and steps, for tests of the search."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import phaze_fast as pf
from phaze_fast.explore import ChipGroups, SearchProblem
from phaze_fast.hardware import FlatFabric
from phaze_fast.models import TransformerModel
from phaze_fast.models.transformer import MixtureOfExperts

GIB = 2**30
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
FRONTS = (("time", "area"), ("time", "energy"), ("area", "time", "hbm"), ("time", "cost"))
PRESETS = ("t5-small", "gpt2-small", "bertlarge", "t5-base", "vit-b16")
LARGE = ("opt-1.3b", "llama2-7b", "mixtral-8x7b")


@cache
def tpuv4_space() -> pf.ArchitectureSpace:
    """The 29,360 chips of the published space, all with one HBM capacity."""
    return pf.ArchitectureSpace.tpuv4_area()


@cache
def published_space() -> pf.ArchitectureSpace:
    """The same with three HBM capacities each: 88,080 chips."""
    return pf.ArchitectureSpace.published()


def some_chips(seed: int, count: int = 60) -> pf.ArchitectureSpace:
    """Draw chips of the published space."""
    space = published_space()
    return space[np.sort(np.random.default_rng(seed).choice(len(space), count, replace=False))]


def some_with_every_hbm(seed: int, count: int) -> pf.ArchitectureSpace:
    """Draw chips of the published space, each with its three HBM capacities."""
    space, rng = published_space(), np.random.default_rng(seed)
    first = 3 * rng.choice(len(space) // 3, count, replace=False)
    return space[np.sort((first[:, None] + np.arange(3)).reshape(-1))]


def few_groups(count: int = 6, sizes: tuple[float, ...] = (8, 16), seed: int = 1) -> ChipGroups:
    """Draw chip groups with the same capacities each, in GiB; fractions are allowed."""
    drawn = some_with_every_hbm(seed, count)
    records = drawn.chips[::3].repeat(len(sizes))
    records["hbm_bytes"] = np.tile(np.array(sizes) * GIB, count)
    return ChipGroups.of_records(records, np.arange(len(records)) + 100.0, drawn.spec.like)


def few_chips_file(folder: Path) -> Path:
    """Write a space of four chips to a file."""
    axes = {"tensor_core.count": (4.0, 8.0), "buffer.capacity_bytes": (2.0**23, 2.0**27)}
    spec = published_space().spec.replace(name="few", axes=axes, ties={}, area=None)
    file = folder / "few.yaml"
    file.write_text(spec.to_yaml())
    return file


# ---- random cases ----


class Case(NamedTuple):
    rng: np.random.Generator
    model: TransformerModel
    cluster: pf.Cluster
    training: pf.Training
    capacities: tuple[int, ...]

    @property
    def problem(self) -> SearchProblem:
        like = tpuv4_space().spec.base
        return SearchProblem(self.model, self.cluster, self.training, like, self.capacities)


def _some(rng: np.random.Generator, values: Any, most: int) -> tuple[Any, ...]:
    count = int(rng.integers(1, most + 1))
    return tuple(rng.choice(values, size=count, replace=False).tolist())


def _invented(rng: np.random.Generator, most_layers: int = 24) -> TransformerModel:
    heads = int(rng.choice([2, 4, 8]))
    hidden = heads * int(rng.choice([32, 64, 128]))
    choices = [n for n in (1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 24) if n <= most_layers]
    layers, encoder = int(rng.choice(choices)), int(rng.choice([0, 0, 0, 1, 3, 5]))
    moe = None
    if not encoder and rng.random() < 0.3:
        moe = MixtureOfExperts(
            experts=int(rng.choice([2, 4, 8])),
            top_k=int(rng.choice([1, 2])),
            expert_ffn=hidden,
            dense_layers=int(rng.integers(0, layers)),
        )
    return TransformerModel(
        name="invented",
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=hidden * int(rng.choice([1, 2, 4])),
        vocab=int(rng.choice([128, 32000, 250000])),
        seq=int(rng.choice([128, 512, 1024])),
        max_positions=4096,
        encoder_layers=encoder,
        moe=moe,
        head=str(rng.choice(["lm", "mlm", "none"])),
        tied_embeddings=bool(rng.random() < 0.6),
        attention=str(rng.choice(["flash", "eager"])),
        dropout=bool(rng.random() < 0.3),
    )


def _training(rng: np.random.Generator, model: TransformerModel) -> pf.Training:
    free: dict[str, Any] = {}
    count = model.encoder_layers + model.layers + 2
    if rng.random() < 0.25:
        free["cp"] = _some(rng, [1, 2], 2)
    if model.moe is not None and rng.random() < 0.7:
        free["ep"] = _some(rng, [1, 2], 2)
    if rng.random() < 0.2:
        free["pp"] = tuple(sorted(_some(rng, [1, 2, 3, 4, 6, 8], 3)))
    if rng.random() < 0.2:
        free["dp"] = tuple(sorted(_some(rng, [1, 2, 4], 2)))
    if rng.random() < 0.15:
        free["uncut"] = (int(rng.integers(1, count)),)
    if rng.random() < 0.15:
        free["tied"] = (tuple(sorted(rng.choice(count, 2, replace=False).tolist())),)
    return pf.Training(
        global_batch=int(rng.choice([4, 6, 8, 12, 16, 24, 32, 64])),
        micro_batch=_some(rng, [1, 2, 3, 4, 8], 2),
        tp=_some(rng, [1, 2], 2),
        schedule=_some(rng, SCHEDULES, 3),
        zero=_some(rng, [0, 1, 2, 3], 2),
        recompute=str(rng.choice(["auto", "auto", "auto", "none", "selective", "full"])),
        rank_order=str(rng.choice(["auto", "replicas-inside", "stages-inside"])),
        vpp=_some(rng, [2, 3, 4], 2),
        reserved_bytes=0,
        **free,
    )


def random_case(
    seed: int, presets: tuple[str, ...] = PRESETS, devices: int = 64, layers: int = 24
) -> Case:
    rng = np.random.default_rng(seed)
    if presets and rng.random() < 0.4:
        model = pf.models.load(str(rng.choice(presets)))
    else:
        model = _invented(rng, layers)
    fabric: Any = str(rng.choice(["tpuv4-pod", "dgx-h100"]))
    if rng.random() < 0.6:
        rate, latency = 10 ** rng.uniform(8.5, 11.5), rng.choice([0.0, 1e-6, 1e-4])
        fabric = FlatFabric(
            name="flat", bandwidth_bytes_per_s=float(rate), latency_s=float(latency)
        )
    many = [n for n in (2, 3, 4, 6, 8, 12, 16, 32, 64) if n <= devices]
    cluster = pf.Cluster(devices=int(rng.choice(many)), fabric=fabric)
    state = 16.0 * model.parameters()
    sizes = {int(max(state * 10 ** rng.uniform(-2.2, 0.7), 2**20)) for _ in range(3)}
    return Case(rng, model, cluster, _training(rng, model), tuple(sorted(sizes)))
