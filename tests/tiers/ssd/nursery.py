# SPDX-License-Identifier: Apache-2.0
"""Children for crash tests, several a second: forked from a process that has imported everything.

The parent's side is `Nursery`; `python -m tests.tiers.ssd.nursery` is the other side. A child runs
one job of `churn.py` and may be killed at any moment; none of them outlives its time limit.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CHILD_SECONDS = 300  # after which a child that nobody killed ends by SIGALRM


class Nursery:
    """Starts children, one at a time, and tells how they ended."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "children.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tiers.ssd.nursery"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def start(self, **job: object) -> int:
        """The process id of a child that runs `churn.JOBS[job["kind"]]`."""
        return int(self._ask({"job": job}))

    def wait(self, pid: int, seconds: float = 60.0) -> int:
        """Its exit status, negative for a signal."""
        status = self._ask({"wait": pid, "seconds": seconds})
        assert status is not None, f"a child did not end in {seconds} seconds"
        return int(status)

    def kill(self, pid: int) -> None:
        """End a child that is still running by SIGKILL."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL, self.errors()

    def errors(self) -> str:
        """What the children wrote to their standard error, from the end."""
        return self._errors.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the nursery and whatever child is left."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20)
            finally:
                process.kill()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery has ended: {self.errors()}"
        return json.loads(answer)


def main() -> None:
    from .churn import JOBS

    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "job" in request:
            pid = os.fork()
            if not pid:
                _run(JOBS, request["job"])
            alive.add(pid)
            answer: int | None = pid
        else:
            answer = _wait(request["wait"], request["seconds"])
            if answer is not None:
                alive.discard(request["wait"])
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # it is ours until it is waited for
        os.waitpid(pid, 0)


def _run(jobs: dict[str, Any], job: dict[str, Any]) -> None:
    """In a child: never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        signal.alarm(CHILD_SECONDS)
        jobs[job["kind"]](job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _wait(pid: int, seconds: float) -> int | None:
    end = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([end], [], [], seconds)
    finally:
        os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


if __name__ == "__main__":
    main()
