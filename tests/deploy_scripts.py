# SPDX-License-Identifier: Apache-2.0
"""The scripts of deploy/ as processes, and the processes that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
SECONDS = 240.0


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A script to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A script that runs. Whatever is left of it and its children at the end is killed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        if process.poll() is None:
            for pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """The signal ends it with code 0, and all that it started."""
    children = children_of(process.pid)
    everybody = children + [child for pid in children for child in children_of(pid)]
    process.send_signal(number)
    assert process.wait(60) == 0
    deadline = time.monotonic() + 10
    while any(map(is_running, everybody)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, everybody))


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
