# SPDX-License-Identifier: Apache-2.0
"""What asks `tests/scan_nursery.py` for scans of indexes, from any process of a test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Its value is the path of another nursery, beside which this one lies.
VARIABLE = "TESTS_NURSERY"
NAME = "scans"
MOST_BYTES = 1 << 16
SCAN_FOLDER = str(Path(__file__).resolve().parents[2] / "tiers" / "ssd" / "folder")
PYTHON = sys.executable  # which a test may replace


class Scan:
    """What `subprocess.Popen` is of a scan that the nursery has forked."""

    def __init__(self, path: str, arguments: Sequence[str]) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends: list[int] = []
        try:
            for _ in range(2):
                ends += os.pipe()
            self._connection.connect(path)
            job = {"folder": os.getcwd(), "arguments": arguments}
            socket.send_fds(self._connection, [json.dumps(job).encode()], ends[1::2])
        except BaseException:
            self._connection.close()
            for number in ends[::2]:
                os.close(number)
            raise
        finally:
            for number in ends[1::2]:
                os.close(number)
        self.stdout, self.stderr = (os.fdopen(number, "rb") for number in ends[::2])

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()
        self._connection.close()

    def wait(self) -> int:
        if self.returncode is None:
            answer = self._connection.recv(MOST_BYTES)
            assert answer, "the nursery of scans has ended"
            self.returncode = int(json.loads(answer))
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._connection.shutdown(socket.SHUT_WR)


def popen(command: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen`, as `guard.py` calls it."""
    path = os.environ.get(VARIABLE)
    if not path or command[0] != PYTHON or os.path.realpath(command[5]) != SCAN_FOLDER:
        return subprocess.Popen(command, **options)
    return Scan(str(Path(path).with_name(NAME)), command[6:])
