# SPDX-License-Identifier: Apache-2.0
"""Processes of engines, several a second: forked from a process that has imported torch.

The parent's side is `Nursery`; `python -m tests.worker_nursery FD PATH` is the other side. Each
child is a process of its own, with a number that can be stopped and killed: a worker that runs
`faulty_worker.run`, or whatever `python -m MODULE` runs. For tests that are not about the start
itself: the environment that only a new program reads, such as the linker's, is the nursery's.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from stratakv.engine.client.launcher import CORE_ENVIRONMENT

from .faulty_worker import Plan, run

ROOT = Path(__file__).resolve().parents[1]
CHILD_SECONDS = 600  # after which one that nobody ended ends by SIGALRM
# What `stratakv serve` and its core import, so that no child has to.
ENGINE_MODULES = ("api.app", "api.http.server", "cli.serve", "client.process", "core.engine_core",
                  "core.process", "core.worker_process", "text.tokenizer")  # fmt: skip
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8
# Where descriptors lie that are not yet where they belong.
_FIRST_FREE = 200


class Child:
    """What `subprocess.Popen` is of a process that the nursery has started. `communicate` reads
    standard output alone."""

    def __init__(self, asker: Asker, pid: int, pipes: Mapping[str, Any]) -> None:
        self._asker = asker
        self._lock = threading.Lock()
        self._end = os.pidfd_open(pid)  # the nursery leaves it a zombie until it is asked
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = pipes.get("stdin"), pipes.get("stdout")

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = self._asker.ask({"poll": self.pid})
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


class Asker:
    """Has the nursery at `path` start processes; from any process and thread."""

    def __init__(self, path: str) -> None:
        self._path = path

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
        plan: Plan | None = None,
    ) -> Any:
        """`subprocess.Popen`, as the product and tests call it, of `python -m stratakv.MODULE`,
        which gets a session of its own; another program is started by `subprocess` itself. With a
        plan it is a worker that goes wrong so."""
        options: dict[str, Any] = {"env": env, "cwd": cwd, "text": text, "pass_fds": pass_fds}
        words = [word for word in command[1:3] if word != "-P"]
        if command[0] != sys.executable or words[0] != "-m":
            options |= {"start_new_session": start_new_session}
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, **options)
        module, *arguments = command[command.index("-m") + 1 :]
        job = {
            "module": module,
            "arguments": arguments,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "descriptors": list(pass_fds),
            "plan": None if plan is None else msgspec.to_builtins(plan),
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
                given[place] = wanted
        try:
            return Child(self, self.ask(job, [*given, *pass_fds]), pipes)
        finally:
            for number in theirs:
                os.close(number)

    def module(self, plan: Plan | None = None) -> SimpleNamespace:
        """Stands in for the module `subprocess`."""
        given = {
            name: getattr(subprocess, name)
            for name in ("PIPE", "DEVNULL", "STDOUT", "TimeoutExpired")
        }
        return SimpleNamespace(Popen=partial(self.popen, plan=plan), **given)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._path)
            socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
            answer = connection.recv(_MOST_BYTES)
        assert answer, "the nursery has ended"
        return json.loads(answer)


class Nursery(Asker):
    """The nursery's process; it ends with this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "nursery"))
        self._errors = folder / "children.err"
        self._socket, theirs = socket.socketpair()
        with self._errors.open("wb") as errors, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker_nursery", str(theirs.fileno()), self._path],
                cwd=ROOT,
                env={**CORE_ENVIRONMENT, **os.environ},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        assert self._socket.recv(1), f"the nursery did not start: {self.errors()}"

    @property
    def pid(self) -> int:
        """The process of which all children are."""
        return self._process.pid

    def errors(self) -> str:
        """What the nursery wrote to its standard error, from the end."""
        return self._errors.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the nursery and whatever child is left."""
        self._socket.close()
        with self._process as process:
            try:
                process.wait(20)
            finally:
                process.kill()


class Job(NamedTuple):
    """A child's: what it was asked for, and the descriptors that came with it."""

    request: dict[str, Any]
    received: Sequence[int]


def main(descriptor: int, path: str) -> None:
    gc.collect()
    gc.freeze()  # a child collects only what is its own
    alive: set[int] = set()
    with (
        socket.socket(fileno=descriptor) as parent,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.bind(path)
        listener.listen(64)
        selector.register(parent, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        parent.send(b"\0")
        job = None
        while job is None and all(key.fileobj is listener for key, _ in selector.select()):
            job = _answer(listener, alive)
    if job is not None:
        _leave(_run(job, path))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # it is ours until it is waited for
        os.waitpid(pid, 0)


def _answer(listener: socket.socket, alive: set[int]) -> Job | None:
    """One question. A job in the child that was asked for."""
    connection, _ = listener.accept()
    with connection:
        text, received, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not text:
            return None
        request = json.loads(text)
        answer: int | None
        if "module" in request:
            if request["plan"] is None:
                _import_engine()
            answer = os.fork()
            if not answer:
                return Job(request, received)
            alive.add(answer)
        else:
            answer = _status(request["poll"])
            if answer is not None:
                alive.discard(request["poll"])
        for number in received:
            os.close(number)
        connection.send(json.dumps(answer).encode())
    return None


@cache
def _import_engine() -> None:
    for name in ENGINE_MODULES:
        importlib.import_module(f"stratakv.engine.{name}")
    gc.collect()
    gc.freeze()


def _run(job: Job, path: str) -> int:
    """In a child: its whole life; the exit status."""
    request, received = job
    try:
        os.setsid()
        signal.alarm(CHILD_SECONDS)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _place(received, [0, 1, 2, *request["descriptors"]])
        if request["plan"] is not None:
            return run(msgspec.convert(request["plan"], Plan))
        sys.path = [each for each in sys.path if each != str(ROOT)]
        sys.argv = [request["module"], *request["arguments"]]
        _start_others_through(path)
        status: int = importlib.import_module(request["module"]).main()
        return status
    except BaseException:
        traceback.print_exc()
        return 1


def _place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the descriptors received under the numbers that they had."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _FIRST_FREE) for number in received]
    os.closerange(3, _FIRST_FREE)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _start_others_through(path: str) -> None:
    """What this child starts comes from the nursery too."""
    from stratakv.engine.client import launcher
    from stratakv.engine.core import process_executor

    launcher.subprocess = process_executor.subprocess = Asker(path).module()  # type: ignore[attr-defined]


def _leave(status: int) -> None:
    """As an interpreter does, but for taking it down piece by piece."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _status(pid: int) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
