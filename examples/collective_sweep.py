"""Where a ring overtakes a tree: all-reduce times over message sizes on three fabrics."""

import numpy as np

import phaze_fast as pf

sizes = 2.0 ** np.arange(10, 34)
names = ["dgx-a100", "dgx-h100", "tpuv4-pod"]
fabrics = [pf.presets.fabric(name) for name in names]
grid_sizes, grid_fabrics = np.meshgrid(sizes, np.arange(len(fabrics)))
times = pf.collective_batch(
    fabrics, "all-reduce", grid_sizes.ravel(), ranks=64, fabric=grid_fabrics.ravel()
)
time_s = times.time_s.reshape(grid_sizes.shape)
chosen = times.algorithm.reshape(grid_sizes.shape)

print(f"{'all-reduce, 64 ranks':>22}" + "".join(f"{name:>28}" for name in names))
for column, size in enumerate(sizes):
    cells = []
    for row in range(len(fabrics)):
        algorithm = times.algorithm_names[chosen[row, column]]
        cells.append(f"{pf.units.format_time(time_s[row, column])} {algorithm:>12}")
    print(f"{pf.units.format_bytes(size):>22}" + "".join(f"{cell:>28}" for cell in cells))
