# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in the kernels, and finds what is planted.

A device only, and the CUDA toolkit's program, in a process of its own for each case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

CASES = Path(__file__).with_name("sanitizer_cases.py")
FOUND = 9  # the exit status when the sanitizer has found something
CHILD_SECONDS = 500  # everything is slower under it by far, the compiler of the kernels too


def run(tool: str, case: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    environment = {
        **os.environ,
        # An allocation of its own for every tensor, or there would be no place out of bounds.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [
            program,
            f"--tool={tool}",
            f"--error-exitcode={FOUND}",
            "--target-processes=application-only",  # not the assembler that Triton runs
            sys.executable,
            str(CASES),
            case,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        env=environment,
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device, or not in this machine")
    return done


@pytest.mark.parametrize("case", ["decode", "prefill", "write", "layer"])
def test_no_access_out_of_bounds(case: str) -> None:
    done = run("memcheck", case)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "right" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout


def test_a_planted_access_out_of_bounds_is_found() -> None:
    done = run("memcheck", "planted")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("case", ["decode", "write", "layer"])
def test_no_race_in_shared_memory(case: str) -> None:
    done = run("racecheck", case)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "right" in done.stdout
