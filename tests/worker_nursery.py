# SPDX-License-Identifier: Apache-2.0
"""Workers' processes, several a second: forked from a process that has imported torch.

The parent's side is `Nursery`; `python -m tests.worker_nursery FD` is the other side. Each worker
is a process of its own, with a number that can be killed, and runs `faulty_worker.run`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from .faulty_worker import Plan, run

ROOT = Path(__file__).resolve().parents[1]
WORKER_SECONDS = 300  # after which a worker that nobody ended ends by SIGALRM
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8


class NurseryChild:
    """What `subprocess.Popen` is of a process that the nursery has started."""

    def __init__(self, nursery: Nursery, pid: int, stdin: Any) -> None:
        self._nursery = nursery
        self._status: int | None = None
        self.pid = pid
        self.stdin = stdin

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._nursery.ask({"poll": self.pid})
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            time.sleep(0.001)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # a zombie of the nursery's until it is polled


class Nursery:
    """Starts workers and tells how they ended. Asked by one thread."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "workers.err"
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._errors.open("wb") as errors, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker_nursery", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def module(self, plan: Plan) -> SimpleNamespace:
        """Stands in for the module `subprocess` where workers are to go wrong as planned."""

        def start(_: Sequence[str], *, pass_fds: Sequence[int], **__: Any) -> NurseryChild:
            read, write = os.pipe()
            try:
                job = {"plan": msgspec.to_builtins(plan), "descriptors": list(pass_fds)}
                pid = self.ask(job, [read, *pass_fds])
            finally:
                os.close(read)
            return NurseryChild(self, pid, os.fdopen(write, "wb"))

        return SimpleNamespace(
            Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
        )

    def errors(self) -> str:
        """What the workers wrote to their standard error, from the end."""
        return self._errors.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the nursery and whatever worker is left."""
        self._socket.close()
        with self._process as process:
            try:
                process.wait(20)
            finally:
                process.kill()

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
        answer = self._socket.recv(_MOST_BYTES)
        assert answer, f"the nursery has ended: {self.errors()}"
        return json.loads(answer)


def main(descriptor: int) -> None:
    gc.collect()
    gc.freeze()  # a worker collects only what is its own
    alive: set[int] = set()
    with socket.socket(fileno=descriptor) as parent:
        while True:
            text, received, _, _ = socket.recv_fds(parent, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not text:
                break
            request = json.loads(text)
            answer: int | None
            if "plan" in request:
                answer = os.fork()
                if not answer:
                    parent.close()
                    _run(request, received)
                alive.add(answer)
            else:
                answer = _status(request["poll"])
                if answer is not None:
                    alive.discard(request["poll"])
            for number in received:
                os.close(number)
            parent.send(json.dumps(answer).encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # it is ours until it is waited for
        os.waitpid(pid, 0)


def _run(request: dict[str, Any], received: Sequence[int]) -> None:
    """In a worker: never returns."""
    status = 1
    try:
        os.setsid()
        os.dup2(received[0], 0)
        os.close(received[0])
        signal.alarm(WORKER_SECONDS)
        descriptors = dict(zip(request["descriptors"], received[1:], strict=True))
        status = run(msgspec.convert(request["plan"], Plan), descriptors)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _status(pid: int) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
