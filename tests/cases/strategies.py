"""Random fabrics and groups for property tests."""

from hypothesis import strategies as st

from phaze_fast.hardware import FlatFabric, MeshFabric, Tier, TieredFabric, TorusFabric

bandwidths = st.floats(1e8, 1e13, allow_nan=False)
latencies = st.one_of(st.just(0.0), st.floats(1e-9, 1e-4))
payloads = st.floats(1.0, 1e13)


@st.composite
def flat_fabrics(draw):
    return FlatFabric(
        name="flat", bandwidth_bytes_per_s=draw(bandwidths), latency_s=draw(latencies)
    )


@st.composite
def tiered_fabrics(draw, min_tiers=1):
    count = draw(st.integers(min_tiers, 4))
    tiers = [
        Tier(
            name=f"tier{i}",
            size=draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
            bandwidth_bytes_per_s=draw(bandwidths),
            latency_s=draw(latencies),
        )
        for i in range(count)
    ]
    if draw(st.booleans()):
        tiers[-1] = tiers[-1].replace(size=None)
    return TieredFabric(name="tiered", tiers=tuple(tiers))


@st.composite
def grid_fabrics(draw, kinds=(TorusFabric, MeshFabric)):
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), min_size=1, max_size=3))
    kind = draw(st.sampled_from(kinds))
    return kind(
        name=kind.what,
        dims=tuple(dims),
        link_bandwidth_bytes_per_s=draw(bandwidths),
        hop_latency_s=draw(latencies),
    )


fabrics = st.one_of(flat_fabrics(), tiered_fabrics(), grid_fabrics())


@st.composite
def groups_on(draw, fabric, min_ranks=1, most=4096):
    """(ranks, stride) that fits the fabric."""
    held = fabric.capacity or 4096
    ranks = draw(st.integers(min(min_ranks, held), min(held, most)))
    stride = draw(st.integers(1, max(1, (held - 1) // max(ranks - 1, 1)))) if ranks > 1 else 1
    return ranks, stride
