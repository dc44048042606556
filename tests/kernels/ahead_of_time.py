# SPDX-License-Identifier: Apache-2.0
"""Runs tools/compile_kernels.py in a process of its own, where the interpreter is off: a process
that imported triton to interpret cannot compile. It runs the tool several times, since importing
torch and triton takes longer than most of what it is asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "tools"
TABLE = ROOT / "kernels" / "resources.json"
# Folders of other versions of Triton, each as `pip install --target FOLDER --no-deps triton==...`
# makes it; what is compiled by these is compared with their own tables.
OTHER_TRITONS = [path for path in os.environ.get("OTHER_TRITONS", "").split(os.pathsep) if path]
START_SECONDS = 100  # to import torch and triton on a busy machine
CONFIGURATION_SECONDS = 30  # to compile one for every target

# A line of JSON has the options of a run, and a line answers what the command line would give.
_LOOP = """
import contextlib, io, json, os, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    sys.argv[1:] = json.loads(line)
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = compile_kernels.main()
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
    print(json.dumps([status, said.getvalue(), errors.getvalue()]), file=answers, flush=True)
"""


class Done(NamedTuple):
    """What a run of the tool came to."""

    returncode: int
    stdout: str
    stderr: str


class Report(NamedTuple):
    """What the tool says of some configurations."""

    status: int
    triton: str
    resources: dict[str, dict[str, dict[str, Any]]]  # name -> target -> what it takes
    faults: list[str]


def tables() -> dict[str, dict[str, Any]]:
    """The tables that are checked in, by the version of Triton that they are of."""
    found = [json.loads(path.read_text()) for path in sorted(TABLE.parent.glob("resources*.json"))]
    return {table["triton"]: table["configurations"] for table in found}


class Tool:
    """The process, with the Triton of this environment or that in `folder`; a context manager."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if folder:
            if not (Path(folder) / "triton").is_dir():
                raise ValueError(f"OTHER_TRITONS names {folder}, which has no triton in it")
            paths = (folder, environment.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", _LOOP, str(TOOLS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.kill()

    def run(self, *options: str, count: int = 0) -> Done:
        """Run the tool; `count` says how many configurations it may take time for."""
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Timer(START_SECONDS + CONFIGURATION_SECONDS * count, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps(options) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"the tool ended over {options}, or took too long"
        return Done(*json.loads(answer))

    def names(self) -> list[str]:
        """Every shipped configuration, sorted."""
        done = self.run("--list")
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def compile_some(self, wanted: list[str], *options: str) -> Report:
        """Compile those that match."""
        done = self.run("--print", *options, "--only", *wanted, count=len(wanted))
        assert done.stdout, done.stderr
        table: dict[str, Any] = json.loads(done.stdout)
        faults = done.stderr.splitlines()
        return Report(done.returncode, table["triton"], table["configurations"], faults)
