"""Coverage-guided fuzzing of the C++ entry points under AddressSanitizer and UBSan; needs clang.

    python3 dev.py fuzz kernels --minutes 10            # each target for so long
    python3 dev.py fuzz kernels --minutes 10 --only plan --keep

Inputs start from cpp/fuzz/corpus; ``--keep`` writes back a few of those found that reach most. What
crashes is left in build/fuzz/findings, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD, KEPT = ROOT / "build" / "fuzz", ROOT / "cpp" / "fuzz" / "corpus"
FINDINGS = BUILD / "findings"
TARGETS = ("placement", "layer", "product", "mapping", "plan", "nest", "collective")
MOST_KEPT, MOST_BYTES = 60, 400
BIN = str(Path(sys.executable).parent)
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def run(*words: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    return done.stdout + done.stderr + f"\nexit {done.returncode}"


def build() -> None:
    if shutil.which("clang++") is None:
        sys.exit("clang++ is needed, with its libFuzzer (Debian: apt-get install clang)")
    options = ("-DPHAZE_BUILD_PYTHON=OFF", "-DPHAZE_SANITIZE=ON", "-DPHAZE_FUZZ=ON")
    compiler = "-DCMAKE_CXX_COMPILER=clang++"
    for words in (
        ("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", compiler, *options),
        ("cmake", "--build", BUILD),
    ):
        said = run(*words)
        if not said.endswith("exit 0"):
            sys.exit(said)


def fuzzed(target: str, seconds: float, seed: int, keep: bool) -> bool:
    """Fuzz one target; whether nothing was found."""
    FINDINGS.mkdir(exist_ok=True)
    inputs = BUILD / "corpus" / target
    inputs.mkdir(parents=True, exist_ok=True)
    own = KEPT / target
    own.mkdir(parents=True, exist_ok=True)
    limits = (f"-max_len={MOST_BYTES}", "-timeout=20", "-rss_limit_mb=4096")
    said = run(
        BUILD / f"fuzz_{target}", inputs, own, f"-max_total_time={round(seconds)}",
        f"-seed={seed}", *limits, f"-artifact_prefix={FINDINGS / target}-", "-print_final_stats=1",
    )  # fmt: skip
    good = said.endswith("exit 0")
    runs = re.search(r"number_of_executed_units: (\d+)", said)
    cover = re.findall(r"cov: (\d+)", said)
    sys.stdout.write(
        f"{target:10} {runs[1] if runs else '?':>9} inputs in {seconds:.0f} s, "
        f"{cover[-1] if cover else '?'} edges: {'nothing found' if good else 'FOUND'}\n"
    )
    if not good:
        sys.stdout.write(said[-4000:] + "\n")
    sys.stdout.flush()
    if keep and good:
        keep_some(target, inputs, own)
    return good


def keep_some(target: str, inputs: Path, own: Path) -> None:
    """Few short inputs that together reach as much as all."""
    with tempfile.TemporaryDirectory() as name:
        merged = Path(name)
        run(BUILD / f"fuzz_{target}", "-merge=1", merged, inputs, own)
        smallest = sorted(merged.iterdir(), key=lambda file: (file.stat().st_size, file.name))
        chosen = smallest[:: max(1, len(smallest) // MOST_KEPT)][:MOST_KEPT]
        for file in own.iterdir():
            if not file.name.startswith("found-"):  # what was once found stays
                file.unlink()
        for file in chosen:
            shutil.copy(file, own / file.name[:12])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="Of each target.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--keep", action="store_true", help="Write inputs into cpp/fuzz/corpus.")
    asked = parser.parse_args()
    build()
    chosen = [asked.only] if asked.only else TARGETS
    good = [fuzzed(t, 60 * asked.minutes, asked.seed, asked.keep) for t in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
