# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of the CPU under AddressSanitizer and UndefinedBehaviorSanitizer, in parts:
each has the whole of its time, and what was built stays built."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sanitize_cpu_kernels.py"
# In this order: the others need what the first one makes.
PARTS = (
    "build", "planted", "test_cpu_kernels.py", "test_cpu_network.py", "test_cpu_products.py",
    "test_cpu_thresholds.py", "test_pool_memory.py",
)  # fmt: skip
LIMIT_SECONDS = 4 * 3600


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="needs GCC on x86-64"
)
@pytest.mark.parametrize("part", PARTS)
def test_sanitizers_find_what_is_planted_and_nothing_else(part: str, scale: str) -> None:
    if scale != "long":
        pytest.skip("compiles for minutes of processor time: run with --scale long")
    done = subprocess.run(
        [sys.executable, str(TOOL), "--part", part],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
