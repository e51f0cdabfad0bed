"""A space of one's own: what the area terms the paper leaves out do to the same budget."""

import phaze_fast as pf
from phaze_fast.hardware import AreaLimit, SpaceSpec

AXES = {
    "tensor_core.count": tuple(range(4, 260, 4)),
    "tensor_core.width": (16, 32, 64, 96, 128),
    "tensor_core.depth": (16, 32, 64, 96, 128),
    "buffer.capacity_bytes": tuple(mib * 2**20 for mib in (16, 32, 48, 64)),
    "hbm.stacks": (2, 4, 6),
}
BUDGET_MM2 = 280.0

for label, terms in (
    ("published area", pf.hardware.PUBLISHED_AREA),
    ("with network, HBM", pf.hardware.FULL_AREA),
):
    spec = SpaceSpec(
        name=label,
        base=pf.presets.chip("phaze-tpuv4"),
        axes=AXES,
        ties={"vector_core.lanes": "tensor_core.width"},
        area=AreaLimit(max_mm2=BUDGET_MM2, terms=terms),
        max_power_w=300.0,
    )
    space = pf.ArchitectureSpace(spec)
    columns = [space.column(f"tensor_core.{name}") for name in ("count", "width", "depth")]
    best = int((columns[0] * columns[1] * columns[2]).argmax())
    print(f"{label:>18}: {len(space):>6,} of {space.grid_size:,} chips within {BUDGET_MM2:g} mm2")
    print(f"{'most arithmetic':>18}: {space[best]}")
    print(f"{'area':>18}: {pf.area(space[best], terms)}")
