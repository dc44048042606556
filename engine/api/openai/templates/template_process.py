# SPDX-License-Identifier: Apache-2.0
"""Processes that compile and render chat templates, and the pool of idle processes.

A process is started when no process is idle, for example after a template has made a process end.
All processes end when the server's process ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from .....tiers.processes.python_command import python_command
from .sandbox import TemplateRefused
from .template_worker import LENGTH, MEMORY

MAX_IDLE = 4  # most idle processes, equal to the most renderings of one template at once
# Limit of a rendering's elapsed time as a multiple of its processor time, for busy machines.
MAX_WAIT = 10
# The time limit for starting Python on a busy machine.
START_SECONDS = 60.0
_END_SECONDS = 10.0
_MODULE = f"{__package__}.template_worker"
_MAX_BYTES_A_CHARACTER = 12  # most bytes of one character in JSON: two \u escapes
_MAX_OTHER_BYTES = 1024**2


class Broken(ValueError):
    """The source of a template is invalid."""


class Limits(NamedTuple):
    """The limits of one rendering: processor time in seconds, and characters of the text."""

    seconds: float
    max_characters: int


class TemplateProcess:
    """A process of `template_worker`. Any thread may kill the process; one at a time may `ask`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                python_command("-m", _MODULE, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C must reach only the server
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._has_answered = False
        self._known: set[str] = set()
        self.owner = os.getpid()

    def ask(
        self, key: str, source: str, context: Mapping[str, object] | None, limits: Limits
    ) -> str:
        """Return the rendered text. Without a context, only compile the template, and return "".
        Raises TemplateRefused, Broken, and EOFError if the process ended within its limits."""
        question = {
            "key": key,
            "source": source,
            "context": context,
            "seconds": limits.seconds,
            "max_characters": limits.max_characters,
        }
        try:
            body = json.dumps(question).encode()
        except RecursionError:
            words = "the conversation nests lists or objects too deeply; send a flat one"
            raise TemplateRefused(words) from None
        give_up = time.monotonic() + MAX_WAIT * limits.seconds
        give_up += 0.0 if self._has_answered else START_SECONDS
        try:
            self._wait_until(give_up)
            self._connection.sendall(LENGTH.pack(len(body)) + body)
            most = limits.max_characters * _MAX_BYTES_A_CHARACTER + _MAX_OTHER_BYTES
            answer = json.loads(self._read_reply_frame(give_up, most))
        except TimeoutError:
            self.kill_process()
            raise TemplateRefused(self._too_long(limits)) from None
        except OSError:
            self.kill_process()
            if self._process.returncode == -signal.SIGPROF:
                raise TemplateRefused(self._too_long(limits)) from None
            if self._process.returncode == -signal.SIGKILL and self._has_answered:
                raise TemplateRefused(MEMORY) from None
            raise EOFError(f"it ended with status {self._process.returncode}") from None
        self._has_answered = True
        if "broken" in answer:
            raise Broken(answer["broken"])
        if "refused" in answer:
            if answer["refused"] == MEMORY:
                self.kill_process()  # the process might not free the memory that it has taken
            raise TemplateRefused(answer["refused"])
        return str(answer["text"])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill_process(self) -> None:
        """Kill the process, and wait for its end. Idempotent."""
        if self.owner == os.getpid():
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        with suppress(OSError):  # the shutdown wakes a thread that reads from the socket
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @staticmethod
    def _too_long(limits: Limits) -> str:
        return (
            f"the chat template took longer than {limits.seconds:g} seconds and was stopped; send "
            "a shorter conversation"
        )

    def _wait_until(self, give_up: float) -> None:
        left = give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)

    def _read_reply_frame(self, give_up: float, most: int) -> bytes:
        (size,) = LENGTH.unpack(self._read_exactly(LENGTH.size, give_up))
        if size > most:
            raise ConnectionError("the answer is longer than any may be")
        return self._read_exactly(size, give_up)

    def _read_exactly(self, size: int, give_up: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_until(give_up)
            piece = self._connection.recv(min(size - len(data), 1024**2))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)


_lock = threading.Lock()
_idle: list[TemplateProcess] = []


def take() -> TemplateProcess:
    """Take an idle process, or start a new process. Raises OSError if no process can be started."""
    while True:
        with _lock:
            found = _idle.pop() if _idle else None
        if found is None:
            return TemplateProcess()
        if found.owner == os.getpid() and found.is_alive:
            return found
        found.kill_process()  # the process has ended, or belongs to this process's parent


def give_back(process: TemplateProcess) -> None:
    """Add a process to the idle processes; kill it if it has ended or if MAX_IDLE are idle."""
    with _lock:
        if process.is_alive and len(_idle) < MAX_IDLE:
            _idle.append(process)
            return
    process.kill_process()


class Asking:
    """A question to a worker process. One thread calls `run`; another thread may call `cancel`."""

    def __init__(
        self, key: str, source: str, context: Mapping[str, object] | None, limits: Limits
    ) -> None:
        self._question = key, source, context, limits
        self._process: TemplateProcess | None = None
        self._is_cancelled = False

    def run(self) -> str:
        """Return the result of `TemplateProcess.ask` in an idle or a new process. Raises
        TemplateRefused, Broken, and OSError if no process answers."""
        process = take()
        try:
            with _lock:
                self._process = process
                if self._is_cancelled:
                    return ""
            return process.ask(*self._question)
        except EOFError as error:
            raise OSError(f"the process that renders chat templates is gone: {error}") from None
        finally:
            with _lock:
                self._process = None
            give_back(process)

    def cancel(self) -> None:
        """Kill the process that works on this question, because no caller waits for the answer."""
        with _lock:
            self._is_cancelled = True
            process = self._process
        if process is not None:
            process.kill_process()
