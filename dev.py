#!/usr/bin/env python3
"""Every task of this repository, each in a virtual environment that it makes itself.

Usage: python3 dev.py TASK [ARGUMENT...]

It needs Python 3.11 or newer, a C++ compiler and git; everything else it installs into ``.venv``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
NEWEST_FIRST = ("python3.14", "python3.13", "python3.12", "python3.11")
LEAST = (3, 11)


def say(message: str) -> None:
    """Tell the person at the terminal what happens next."""
    print(f"== {message}", flush=True)


def run(
    *command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a command with the virtual environment's programs first, or stop if it fails."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, **env}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"== failed ({done.returncode}): {' '.join(words)}")


def use_a_new_enough_python() -> None:
    """Start again under a newer interpreter where this one is too old."""
    if sys.version_info >= LEAST:
        return
    for name in NEWEST_FIRST:
        found = shutil.which(name)
        if found:
            os.execv(found, [found, *sys.argv])
    sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")


def make_venv(folder: Path) -> None:
    """Make a virtual environment with pip in it, also where ensurepip was split off."""
    for arguments in (["-m", "venv"], ["-m", "virtualenv", "-q"]):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, *arguments, str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(
        "this Python cannot make a virtual environment; install its venv module "
        "(Debian and Ubuntu: apt-get install python3-venv)"
    )


def require_a_compiler() -> None:
    """Stop early, and say so, where nothing can compile the core."""
    wanted = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([wanted] if wanted else ["c++", "g++", "clang++"])):
        sys.exit("a C++ compiler is needed (g++ or clang++, or the one that CXX names)")


def fingerprint() -> str:
    """Hash of everything the installed extension is built from."""
    files = [
        ROOT / "pyproject.toml",
        ROOT / "CMakeLists.txt",
        *sorted((ROOT / "cpp").rglob("*.?pp")),
    ]
    seen = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for file in files:
        seen.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return seen.hexdigest()


def install() -> None:
    """Bring ``.venv`` up to date: quick where nothing changed."""
    stamp = VENV / "phaze-fast.stamp"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == fingerprint():
        return
    require_a_compiler()
    if not PYTHON.exists():
        say("making a virtual environment in .venv")
        make_venv(VENV)
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    say("installing what the build needs")
    run(*pip, *build, "cmake>=3.20", "ninja>=1.11")
    say("compiling the C++ core and installing phaze-fast (about half a minute)")
    run(*pip, "--no-build-isolation", "--editable", ".[dev]")
    stamp.write_text(fingerprint())


def survey(arguments: list[str]) -> None:
    """Bound every chip of the published space: the main job, for now."""
    install()
    say("phaze-fast survey")
    run(BIN / "phaze-fast", "survey", *arguments)


def test(arguments: list[str]) -> None:
    """Run the tests (the quick ones; CI runs the slow ones too)."""
    install()
    say("running the tests")
    run(PYTHON, "-m", "pytest", "-m", "not slow", *arguments)


def slow(arguments: list[str]) -> None:
    """Run the slow tests, which only CI does by default."""
    install()
    run(PYTHON, "-m", "pytest", "-m", "slow", *arguments)


def torch(arguments: list[str]) -> None:
    """Test the PyTorch import, with torch and transformers, which are large and installed here."""
    install()
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    say("installing torch and transformers")
    run(*pip, "torch==2.13.0", "transformers")
    run(PYTHON, "-m", "pytest", "tests/test_torch.py", "-q", *arguments)


def lint(_: list[str]) -> None:
    """Check style, types, stubs and C++ format."""
    install()
    sources = sorted(str(f) for f in (ROOT / "cpp").rglob("*.?pp"))
    for words in (
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        ["-m", "mypy"],
        [
            "-m",
            "mypy.stubtest",
            "phaze_fast._core",
            "--allowlist",
            "cpp/bindings/stubtest-allow.txt",
        ],
    ):
        say(" ".join(words[1:]))
        run(PYTHON, *words)
    say("clang-format")
    run(BIN / "clang-format", "--dry-run", "--Werror", *sources)


def cpp(_: list[str]) -> None:
    """Build and run the C++ tests, without Python, under ASan and UBSan."""
    install()
    folder = ROOT / "build" / "sanitized"
    options = ["-DPHAZE_BUILD_PYTHON=OFF", "-DPHAZE_BUILD_TESTS=ON", "-DPHAZE_SANITIZE=ON"]
    run(BIN / "cmake", "-S", ".", "-B", folder, "-G", "Ninja", *options)
    run(BIN / "cmake", "--build", folder)
    strict = {"UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_leaks=1"}
    run(BIN / "ctest", "--test-dir", folder, "--output-on-failure", env=strict)


def bench(arguments: list[str]) -> None:
    """Run the benchmarks, print a table, write JSON; ``--smoke`` runs each once, untimed."""
    install()
    if "--smoke" in arguments:
        run(PYTHON, "-m", "pytest", "bench", "-q", "--benchmark-disable")
        return
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    latest = results / "latest.json"
    quiet = ["-q", "--benchmark-quiet", f"--benchmark-json={latest}"]
    run(PYTHON, "-m", "pytest", "bench", *quiet, *arguments)
    run(PYTHON, "bench/report.py", latest)
    say(f"wrote {latest.relative_to(ROOT)}")


def examples(_: list[str]) -> None:
    """Run every example."""
    install()
    for file in sorted((ROOT / "examples").glob("*.py")):
        say(file.name)
        run(PYTHON, file)


def package(_: list[str]) -> None:
    """Build the sdist, a wheel from it, and use the wheel in a clean environment."""
    install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("building the sdist, and the wheel from the sdist")
        run(PYTHON, "-m", "build", "--outdir", folder / "dist", ".")
        wheel = next((folder / "dist").glob("*.whl"))
        say(f"installing {wheel.name} into a clean environment")
        make_venv(folder / "clean")
        python = folder / "clean" / PYTHON.relative_to(VENV)
        quiet = ["-qq", "--disable-pip-version-check"]
        run(python, "-m", "pip", "install", *quiet, f"{wheel}[test]")
        say("testing what is installed there, away from the checkout")
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        run(python, "-m", "pytest", "-q", "-m", "not slow and not checkout", "tests", cwd=folder)
        run(python.with_name("phaze-fast"), "survey", "--limit", "3", cwd=folder)


def clean(_: list[str]) -> None:
    """Remove everything that was made here."""
    for name in (".venv", "build", "dist", "bench/results"):
        shutil.rmtree(ROOT / name, ignore_errors=True)


TASKS = {
    f.__name__: f for f in (survey, test, slow, torch, lint, cpp, bench, examples, package, clean)
}


def main() -> None:
    """Run the task that the first word names."""
    use_a_new_enough_python()
    words = sys.argv[1:]
    if not words or words[0] not in TASKS:
        print((__doc__ or "").strip(), "\n\nTasks:")
        for name, task in TASKS.items():
            print(f"  {name:9} {(task.__doc__ or '').splitlines()[0]}")
        sys.exit(0 if words in ([], ["-h"], ["--help"]) else 2)
    TASKS[words[0]](words[1:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
