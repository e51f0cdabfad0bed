"""What `import phaze_fast` costs and offers."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

import phaze_fast as pf


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_loads_nothing_heavy():
    loaded = fresh("import json, sys; import phaze_fast; print(json.dumps(sorted(sys.modules)))")
    heavy = {"numpy", "pydantic", "yaml", "typer", "rich", "numba", "highspy", "phaze_fast._core"}
    assert heavy.isdisjoint(loaded)


def test_using_hardware_does_not_load_the_command_line():
    code = "import json, sys; import phaze_fast as pf; pf.presets; print(json.dumps(sorted(sys.modules)))"
    assert {"typer", "rich", "phaze_fast.cli"}.isdisjoint(fresh(code))


def test_every_public_name_resolves_and_is_listed():
    subpackages = [name for name in pf.__all__ if isinstance(getattr(pf, name), ModuleType)]
    assert 35 <= len(pf.__all__) - len(subpackages) <= 45
    for name in pf.__all__:
        assert getattr(pf, name) is not None
    assert dir(pf) == sorted(pf.__all__)


def test_search_is_the_function_whatever_is_imported_first():
    import phaze_fast.explore.find
    import phaze_fast.pipeline

    assert pf.search is phaze_fast.pipeline.search
    code = "import json, phaze_fast.explore.find; from phaze_fast import search; "
    assert fresh(code + "print(json.dumps(callable(search)))")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        _ = pf.serach


def test_the_installed_version_is_the_packages():
    from importlib.metadata import version

    assert pf.__version__ == version("phaze-fast")
