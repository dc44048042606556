# SPDX-License-Identifier: Apache-2.0
"""Run the tests of the CPU's compiled kernels with a library that watches itself.

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer into `build/sanitized`,
beside links to everything else of the package, and the tests run on that. Memory that torch
allocates has guarded ends then, so reading past a tensor ends the run, as undefined behaviour does.
Needs GCC with its sanitizers.

    python tools/sanitize_cpu_kernels.py                     all tests, some minutes
    python tools/sanitize_cpu_kernels.py -k network          options are pytest's
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "sanitized"
LIBRARY_FOLDER = Path("kernels") / "cpu"
TESTS = ("test_cpu_kernels.py", "test_cpu_network.py")
SANITIZERS = "-fsanitize=address,undefined"
FLAGS = f"-g {SANITIZERS} -fno-sanitize-recover=all -fno-omit-frame-pointer"
BUILD_SECONDS, TEST_SECONDS = 1800, 3600
# Lays down a matrix of twice the rows that there are, which must end the process.
PLANTED = """
import ctypes, torch
from stratakv.kernels.cpu.library import Matrix, cpu_library
weight, packed = torch.ones(16, 64), torch.empty(32 * 64)
matrix = Matrix(packed.data_ptr(), None, 64, 32, 0)
cpu_library().pack(weight.data_ptr(), 64, ctypes.addressof(matrix), 0, 0)
"""


def build() -> Path:
    """The folder that has the package with the watched library."""
    flags = {"CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": SANITIZERS}
    kept = {"KEEP_OBJECTS_IN": str(ROOT / "build" / "objects")}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(PLACE / "lib"), "--build-temp", str(PLACE / "temp")]
    shutil.rmtree(PLACE, ignore_errors=True)
    subprocess.run(
        command, cwd=ROOT, check=True, timeout=BUILD_SECONDS, env={**kept, **os.environ, **flags}
    )
    package = PLACE / "path" / "stratakv"
    for folder in (Path(), LIBRARY_FOLDER.parent, LIBRARY_FOLDER):
        (package / folder).mkdir(parents=True)
    for folder in (Path(), LIBRARY_FOLDER.parent, LIBRARY_FOLDER):
        for entry in (ROOT / folder).iterdir():
            if entry.suffix != ".so" and not (package / folder / entry.name).exists():
                (package / folder / entry.name).symlink_to(entry)
    (made,) = (PLACE / "lib").rglob("*.so")
    made.rename(package / LIBRARY_FOLDER / made.name)
    return package.parent


def environment(path: Path) -> dict[str, str]:
    asan = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {
        **os.environ,
        "PYTHONPATH": str(path),
        "LD_PRELOAD": asan,
        # Python and torch keep what they have allocated to the end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test(path: Path, options: list[str]) -> int:
    """pytest's status; before it, that the library watches itself is tried."""
    given = environment(path)
    planted = subprocess.run(
        [sys.executable, "-c", PLANTED],
        cwd=path, check=False, timeout=TEST_SECONDS, env=given, capture_output=True, text=True,
    )  # fmt: skip
    if planted.returncode == 0 or "heap-buffer-overflow" not in planted.stderr:
        print(f"expected a planted fault to be found, got {planted.stderr!r}", file=sys.stderr)
        return 1
    tests = [str(ROOT / "tests" / "kernels" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    # Run elsewhere: `-m` puts the folder it is run in on the path.
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *tests, *options]
    return subprocess.run(
        command, cwd=path, check=False, timeout=TEST_SECONDS, env=given
    ).returncode


if __name__ == "__main__":
    sys.exit(test(build(), sys.argv[1:]))
