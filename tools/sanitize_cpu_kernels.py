# SPDX-License-Identifier: Apache-2.0
"""Run the tests of the CPU's compiled kernels with a library built with sanitizers.

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer into `build/sanitized`,
which also has links to all other files of the package, and the tests import that package. A read
beyond the end of a tensor, or undefined behaviour, ends the process, because AddressSanitizer
guards the memory that torch allocates. The tool needs GCC with its sanitizers.

    python tools/sanitize_cpu_kernels.py                     all parts, some minutes
    python tools/sanitize_cpu_kernels.py --part build        the build; objects are kept
    python tools/sanitize_cpu_kernels.py --part planted      a fault made on purpose must be found
    python tools/sanitize_cpu_kernels.py --part test_cpu_network.py -k pass    options are pytest's

The build takes some 300 processor seconds, a third for each variant of the library. Compiled
objects are kept for the next build, so the parts can run one by one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "sanitized"
LIBRARY_FOLDER = Path("kernels") / "cpu"
TESTS = {
    "test_cpu_kernels.py": "kernels",
    "test_cpu_network.py": "kernels",
    "test_cpu_products.py": "kernels",
    "test_cpu_thresholds.py": "kernels",
    "test_pool_memory.py": "engine/worker",
}  # file → its folder below tests/
SANITIZERS = "-fsanitize=address,undefined"
FLAGS = f"-g {SANITIZERS} -fno-sanitize-recover=all -fno-omit-frame-pointer"
PARTS = ("build", "planted", *TESTS)
PART_SECONDS = 4 * 3600  # wall-clock limit, for a machine with an eighth of a core
# A planted fault that must end the process: a matrix is packed with twice the rows of its memory.
PLANTED = """
import ctypes, torch
from stratakv.kernels.cpu.library import Matrix, cpu_library
weight, packed = torch.ones(16, 64), torch.empty(32 * 64)
matrix = Matrix(packed.data_ptr(), None, 64, 32, 0)
cpu_library().pack(weight.data_ptr(), 64, ctypes.addressof(matrix), 0, 0)
"""


def build() -> Path:
    """Build the library; return the folder with the package that contains it."""
    flags = {"CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": SANITIZERS}
    kept = {"KEEP_OBJECTS_IN": str(ROOT / "build" / "objects")}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(PLACE / "lib"), "--build-temp", str(PLACE / "temp")]
    shutil.rmtree(PLACE, ignore_errors=True)
    subprocess.run(
        command, cwd=ROOT, check=True, timeout=PART_SECONDS, env={**kept, **os.environ, **flags}
    )
    package = package_path() / "stratakv"
    for folder in (Path(), LIBRARY_FOLDER.parent, LIBRARY_FOLDER):
        (package / folder).mkdir(parents=True)
    for folder in (Path(), LIBRARY_FOLDER.parent, LIBRARY_FOLDER):
        for entry in (ROOT / folder).iterdir():
            if entry.suffix != ".so" and not (package / folder / entry.name).exists():
                (package / folder / entry.name).symlink_to(entry)
    (made,) = (PLACE / "lib" / "stratakv" / LIBRARY_FOLDER).glob("*.so")
    made.rename(package / LIBRARY_FOLDER / made.name)
    return package.parent


def package_path() -> Path:
    return PLACE / "path"


def environment(path: Path) -> dict[str, str]:
    asan = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {
        **os.environ,
        "PYTHONPATH": str(path),
        "LD_PRELOAD": asan,
        # Leaks are not reported, because Python and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def find_planted(path: Path) -> int:
    """Return 0 if the sanitizer works, that is, finds the planted fault, otherwise 1."""
    planted = subprocess.run(
        [sys.executable, "-P", "-c", PLANTED],
        cwd=path, check=False, timeout=PART_SECONDS, env=environment(path), capture_output=True,
        text=True,
    )  # fmt: skip
    if planted.returncode != 0 and "heap-buffer-overflow" in planted.stderr:
        return 0
    print(f"expected a planted fault to be found, got {planted.stderr!r}", file=sys.stderr)
    return 1


def test(path: Path, name: str, options: list[str]) -> int:
    """Run one test file; return pytest's exit status."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    # pytest runs in another folder, because `python -m` adds the working folder to the path.
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += [str(ROOT / "tests" / TESTS[name] / name), *options]
    return subprocess.run(
        command, cwd=path, check=False, timeout=PART_SECONDS, env=environment(path)
    ).returncode


def main() -> int:
    """Run the chosen parts; return the first exit status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="only this; `build` comes first")
    given, options = parser.parse_known_args()
    path = build() if given.part in (None, "build") else package_path()
    if not any(path.rglob("*.so")):
        raise SystemExit("there is no library that watches itself; run it with --part build first")
    status = find_planted(path) if given.part in (None, "planted") else 0
    for name in TESTS:
        if given.part in (None, name):
            status = status or test(path, name, options)
    return status


if __name__ == "__main__":
    sys.exit(main())
