# SPDX-License-Identifier: Apache-2.0
"""Runs tools/compile_kernels.py in a process of its own, where the interpreter is off.

A process that imported triton to interpret cannot compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools" / "compile_kernels.py"
TABLE = ROOT / "kernels" / "resources.json"
START_SECONDS = 60  # to import torch and triton on a busy machine
CONFIGURATION_SECONDS = 30  # to compile one for every target


class Report(NamedTuple):
    status: int
    triton: str
    resources: dict[str, dict[str, dict[str, int]]]  # name -> target -> what it takes
    faults: list[str]


def run_tool(*options: str, count: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the tool; `count` says how many configurations it may take time for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(TOOL), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + CONFIGURATION_SECONDS * count,
        env=environment,
        cwd=ROOT,
    )


def names() -> list[str]:
    """Every shipped configuration, sorted."""
    done = run_tool("--list")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def compile_some(wanted: list[str], *options: str) -> Report:
    done = run_tool("--print", *options, "--only", *wanted, count=len(wanted))
    assert done.stdout, done.stderr
    table: dict[str, Any] = json.loads(done.stdout)
    faults = done.stderr.splitlines()
    return Report(done.returncode, table["triton"], table["configurations"], faults)
