"""A script that measures a user's own GPU, as text."""

from __future__ import annotations

from importlib import resources

__all__ = ["benchmark_script"]


def benchmark_script() -> str:
    """Give the text of a Python script that needs PyTorch alone.

    It measures products, attention, vector operators and, started by torchrun, collectives, and
    writes files that `phaze_fast.validate` and `phaze-fast study calibrate` read.

    Examples
    --------
    >>> "torch.distributed" in benchmark_script()
    True
    """
    file = resources.files(__package__) / "data" / "gpu_benchmark.txt"
    return file.read_text("utf-8")
