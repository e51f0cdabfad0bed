"""Accelerator, operator schedule and device placement for training, searched together.

The names of ``__init__.pyi`` load on first use, so that importing the package stays light::

    import phaze_fast as pf

    space = pf.ArchitectureSpace.tpuv4_area()
    cluster = pf.Cluster(devices=1024, fabric=pf.presets.fabric("tpuv4-pod"))
    print(pf.collective(cluster, "all-reduce", 2**30, ranks=1024))
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module that defines each public name; None for a subpackage."""

__all__ = [*sorted(_MODULES), "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("phaze-fast")
    if name not in _MODULES:
        raise AttributeError(f"module 'phaze_fast' has no attribute {name!r}")
    module = _MODULES[name]
    if module is None:
        return import_module(f"phaze_fast.{name}")
    value = globals()[name] = getattr(import_module(f"phaze_fast.{module}"), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
