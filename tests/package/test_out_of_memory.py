"""Memory runs out inside the kernels: Python sees MemoryError, and the process lives on."""

import subprocess
import sys
import textwrap

import pytest

SPARE_MIB = (1, 13)
"""Address space left to a call: too little for a second thread's stack, and enough for it."""

PROGRAM = """
import random, resource
from pathlib import Path

import numpy as np

import phaze_fast as pf
from phaze_fast import _core
from phaze_fast.schedule import instance_from_dict
from phaze_fast.schedule.layers import pack


def layer(rng, count=40):
    # Nearly independent operators: the search remembers states until something stops it.
    ops = []
    for i in range(count):
        single = rng.uniform(5.0, 30.0)
        kind = rng.choice(["TC", "TC", "VC"])
        ops.append({"id": i, "type": kind, "lat_single": single, "lat_all": single / 1.2})
    edges = [[i, i + 5] for i in range(0, count - 5, 7)]
    return instance_from_dict(
        {"name": "wide", "ops": ops, "edges": edges, "num_tc": 3, "num_vc": 2}
    )


rng = random.Random(1)
hard = pack([layer(rng) for _ in range(32)])
cluster = pf.Cluster(devices=64, fabric="dgx-a100")
sizes = np.full(4_000_000, 1e6)


def searched(nodes):
    return _core.schedule_layers(hard, True, nodes, 60.0, 2)


def collectives(count):
    return pf.collective_batch(cluster, "all-reduce", sizes[:count], ranks=8, threads=2)


searched(10), collectives(10)  # all that is imported late is there now
hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
refused = 0
for spare_mib in SPARE_MIB:
    for call, size in ((searched, 10**9), (collectives, len(sizes))):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare_mib * 2**20, hard_limit))
        try:
            call(size)
        except MemoryError:
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))
        call(10)
print("MemoryError", refused)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.slow
def test_running_out_of_memory_is_a_memory_error():
    program = f"SPARE_MIB = {SPARE_MIB}\n" + textwrap.dedent(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (0, f"MemoryError {2 * len(SPARE_MIB)}\n"), run.stderr
