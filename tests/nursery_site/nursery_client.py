# SPDX-License-Identifier: Apache-2.0
"""What asks the nursery of `tests/worker_nursery.py` for processes, from any process of a test."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Its value is the nursery's path; a process without it starts others as ever.
VARIABLE = "TESTS_NURSERY"
LIFE = "TESTS_CHILD_SECONDS"  # set by a test whose processes live longer than the usual time
MOST_BYTES = 1 << 16
ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable  # which a test may replace
ENGINES = "tests.worker_nursery"
PROGRAM = "tests.page_program"  # runs a file, or `-c CODE`


class Child:
    """What `subprocess.Popen` is of a process that the nursery has started. `communicate` reads
    standard output alone."""

    def __init__(self, nursery: Nursery, pid: int, pipes: Mapping[str, Any]) -> None:
        self._nursery = nursery
        self._lock = threading.Lock()
        self._end = os.pidfd_open(pid)  # the nursery leaves it a zombie until it is asked
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = pipes.get("stdin"), pipes.get("stdout")

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = self._nursery.ask({"poll": self.pid})
                os.close(self._end)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a child of the nursery", timeout or 0.0)
            self._has_ended(min(left, 1.0))
        return status

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        text = None if self.stdout is None else self.stdout.read()
        self.wait(timeout)
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()
        return text, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _has_ended(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1000 * seconds))


class Nursery:
    """Has the nursery at `path` start processes; from any process and thread."""

    def __init__(self, path: str) -> None:
        self.path = path

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
        process_group: int | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> Any:
        """`subprocess.Popen`, as the product and tests call it, of `python -m MODULE` and of
        `python -c CODE`. It gets a session of its own; another program is started by
        `subprocess` itself. With a plan it is a worker that goes wrong so. `stderr` is a file, a
        descriptor or `STDOUT`."""
        options: dict[str, Any] = {"env": env, "cwd": cwd, "text": text, "pass_fds": pass_fds}
        words = [word for word in command[1:] if word != "-P"]
        if command[0] != PYTHON or words[0] not in ("-m", "-c"):
            is_new = start_new_session and process_group is None
            options |= {"start_new_session": is_new, "process_group": process_group}
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, **options)
        module, *arguments = words[1:] if words[0] == "-m" else [PROGRAM, *words]
        job = {
            "module": module,
            "arguments": arguments,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "descriptors": list(pass_fds),
            "plan": plan,
        }
        mode = "" if text else "b"
        pipes: dict[str, Any] = {}
        theirs: list[int] = []
        given = [0, 1, 2]
        for place, (name, wanted) in enumerate((("stdin", stdin), ("stdout", stdout))):
            if wanted == subprocess.PIPE:
                ours, other = os.pipe() if place else reversed(os.pipe())
                pipes[name] = os.fdopen(ours, ("r" if place else "w") + mode)
                theirs.append(other)
                given[place] = other
            elif wanted == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
                given[place] = theirs[-1]
            elif wanted is not None:
                given[place] = _descriptor(wanted)
        if stderr is not None:
            given[2] = given[1] if stderr == subprocess.STDOUT else _descriptor(stderr)
        try:
            return Child(self, self.ask(job, [*given, *pass_fds]), pipes)
        finally:
            for number in theirs:
                os.close(number)

    def module(self, plan: Any = None) -> Any:
        """Stands in for the module `subprocess`. `plan` is a `faulty_worker.Plan`."""
        if plan is not None:
            import msgspec

            plan = msgspec.to_builtins(plan)
        given = {
            name: getattr(subprocess, name)
            for name in ("PIPE", "DEVNULL", "STDOUT", "TimeoutExpired")
        }
        return SimpleNamespace(Popen=partial(self.popen, plan=plan), **given)

    @property
    def pid(self) -> int:
        """The nursery's process, of which all children are."""
        pid: int = self.ask({})
        return pid

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        answer = b""
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
            suppress(ConnectionError),
        ):
            connection.connect(self.path)
            socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
            answer = connection.recv(MOST_BYTES)
        assert answer, f"the nursery has ended: see {self.path}.err"
        return json.loads(answer)


class OwnNursery(Nursery):
    """`python -m MODULE`, listening at `path`. Starts when somebody asks for the first child, and
    ends with this process."""

    def __init__(self, path: Path, module: str = ENGINES) -> None:
        super().__init__(str(path))
        self._module = module
        self._ours, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        threading.Thread(target=self._start_when_asked, name="nursery", daemon=True).start()

    def close(self) -> None:
        """End the nursery and whatever child is left."""
        self._listener.close()
        self._ours.close()
        if self._process is not None:
            with self._process as process:
                try:
                    process.wait(20)
                finally:
                    process.kill()

    def _start_when_asked(self) -> None:
        asked = select.poll()
        asked.register(self._listener, select.POLLIN)
        asked.register(self._ours, 0)  # for its end
        ((number, _), *_) = asked.poll()
        if number != self._listener.fileno():
            return
        passed = [self._theirs.fileno(), self._listener.fileno()]
        with Path(self.path + ".err").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *map(str, passed), self.path],
                cwd=ROOT, env=self._environment(), pass_fds=passed,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip
        self._theirs.close()
        self._process.wait()
        self._listener.close()  # questions that it has not taken fail in place of waiting

    def _environment(self) -> Mapping[str, str]:
        if self._module != ENGINES:
            return os.environ
        from stratakv.engine.client.launcher import CORE_ENVIRONMENT

        return {**CORE_ENVIRONMENT, **os.environ}


def popen(command: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen` of a process that may have a nursery."""
    path = os.environ.get(VARIABLE)
    if path and importlib.util.find_spec("torch") is not None:  # the tiers are tested without
        return Nursery(path).popen(command, **options)
    return subprocess.Popen(command, **options)


def run(
    command: Sequence[str], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of such a process, to its end, with what it says and its errors as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = popen(command, stdout=out, stderr=errors, **options)
        try:
            status = child.wait(timeout)
        finally:
            child.kill()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), errors.read())


def _descriptor(file: Any) -> int:
    return file if isinstance(file, int) else file.fileno()
