# SPDX-License-Identifier: Apache-2.0
"""Grammars that may take long are tried out in a process before they are compiled here.

    spec ──► is_needed ──no──► compiled at once
                └─yes─► try_out ──► a process: compiles it ──► Form ──► compiled here, quickly
                                       └─ takes too long, too much memory, dies: ended, and the
                                          grammar is refused

The process has what others leave of the processors (SCHED_IDLE), so that steps, and whoever makes
their masks, find one at once. Where that is next to nothing, others with a niceness take its place.

So whatever a client sends, no thread of the engine hangs with it or holds the interpreter's lock,
and what is compiled here has ended within the limits before. Small grammars are not tried out.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...tiers.python_command import python_command
from ..structured_params import GrammarSpec, Kind
from .base import Form, GrammarError, NotNow
from .compile_messages import LAST, LOOK_SECONDS, Answer, Ask, Start, receive, send
from .limited_thread import Limit
from .xgrammar_scope import why_untamed

logger = logging.getLogger(__name__)

# What is smaller takes milliseconds; of rules, which are translated in Python, less so.
SMALL_BYTES = 4096
SMALL_RULES_BYTES = 512
MEMORY_BYTES = 1024**3
START_SECONDS = 300.0  # with a large vocabulary, at low priority beside other work
# A process that gets less than this of a processor in so long gives way to one with a niceness.
STARVED_SECONDS = 2.0
_STARVED_SHARE = 0.05
_END_SECONDS = 5.0
_COMMAND = python_command("-m", "stratakv.engine.structured.compile_process")
_CPU_CLOCK = 2  # of a process, with its number above the lowest three bits: Linux


class CompilePool:
    """For one model and one backend, by name. Up to as many processes as threads ask at once; they
    start with the first grammar that needs one, and one whose trial fails by its limits is ended.
    """

    def __init__(
        self,
        backend: str,
        model_path: Path,
        vocab_size: int,
        end_ids: tuple[int, ...],
        limit: Limit,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._backend = backend
        self._limit = limit
        self._start = Start(
            backend, str(model_path), vocab_size, list(end_ids), limit.cpu_seconds, memory_bytes
        )
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []
        self._is_closed = False
        self._are_last = hasattr(os, "SCHED_IDLE")  # the processes that are started from now on

    def is_needed(self, spec: GrammarSpec) -> bool:
        """Whether a grammar is to be tried out. Quick."""
        most = SMALL_RULES_BYTES if spec.kind is Kind.GRAMMAR else SMALL_BYTES
        if len(spec.text) > most:
            return True
        # llguidance counts its work, and `auto` gives xgrammar only what is tame.
        return self._backend == "xgrammar" and bool(why_untamed(spec))

    def try_out(self, spec: GrammarSpec) -> Form:
        """Called by any thread, which waits. Raises GrammarError for a grammar that cannot be
        compiled, or not within the limits, and NotNow where the fault may be another's."""
        process = self._take()
        try:
            form = process.try_out(spec, self._limit)
        except GrammarError:
            self._put_back(process)
            raise
        except _Starved:
            self._drop(process)
            self._are_last = False
            return self.try_out(spec)
        except BaseException as error:
            self._drop(process)
            if isinstance(error, _Ended | EOFError | OSError):
                text = self._words(process, error)
                kind = GrammarError if isinstance(error, _TooSlow) else NotNow
                raise kind(text) from None
            raise
        self._put_back(process)
        return form

    def close(self) -> None:
        """End the processes; who waits for one gets a GrammarError. Idempotent."""
        with self._lock:
            self._is_closed = True
            processes = self._idle + self._busy
            self._idle, self._busy = [], []
        for process in processes:
            process.end()

    @property
    def process_ids(self) -> list[int]:
        """Of those that run."""
        with self._lock:
            return [process.pid for process in self._idle + self._busy]

    def _take(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise NotNow("the engine ends")
            process = None
            while process is None and self._idle:
                process = self._idle.pop()
                # Somebody ended it, which is no grammar's fault; or it would starve.
                if process.has_ended or (process.is_last and not self._are_last):
                    process.end()
                    process = None
            if process is None:
                try:
                    process = _Process(self._start, is_last=self._are_last)
                except OSError as error:
                    raise NotNow(f"no process can be started to compile it: {error}") from None
            self._busy.append(process)
            return process

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            if process in self._busy:
                self._busy.remove(process)
                self._idle.append(process)

    def _drop(self, process: _Process) -> None:
        process.end()
        with self._lock:
            if process in self._busy:
                self._busy.remove(process)

    def _words(self, process: _Process, error: BaseException) -> str:
        if self._is_closed:
            return "the engine ends"
        if isinstance(error, _Ended):
            logger.warning("a grammar was refused: %s", error)
            return str(error)
        status = process.status
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        text = (
            f"the process that compiled it ended {how}, as it does beyond "
            f"{self._start.memory_bytes} bytes of memory; make it simpler"
        )
        logger.warning("a grammar was refused: %s", text)
        return text


class _Ended(Exception):
    """The process is of no more use, and why."""


class _Starved(Exception):
    """It has no processor."""


class _TooSlow(_Ended):
    """It took more of the processor's time than a grammar may."""


class _Process:
    """One process, of which one thread asks one thing at a time."""

    def __init__(self, start: Start, *, is_last: bool) -> None:
        self.is_last = is_last
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), *[LAST] * is_last],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # its words are for people
                # Ctrl-C is for this process, which then ends the other. In one session with it, by
                # which Linux groups what it schedules: SCHED_IDLE is the last of its group only.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(LOOK_SECONDS)
        self._connection = ours
        self._first: Start | None = start
        self.pid = self._process.pid

    def try_out(self, spec: GrammarSpec, limit: Limit) -> Form:
        """Raises GrammarError for what it answers, _Ended, and EOFError or OSError where it is
        gone."""
        if self._first is not None:
            self._send(self._first)
            self._first = None
            began = time.monotonic()

            def look() -> None:
                self._look_at_share(began, 0.0)
                if time.monotonic() - began > START_SECONDS:
                    raise _Ended(f"no process to compile it came up in {START_SECONDS:g} s")

            answer = receive(self._connection, Answer, look)
            if answer.error:
                raise _Ended(answer.error)
        began, cpu = time.monotonic(), self._cpu_seconds()

        def watch() -> None:
            self._look_at_share(began, cpu)
            if self._cpu_seconds() - cpu > limit.cpu_seconds:
                raise _TooSlow(f"it takes more than {limit.cpu_seconds:g} s to compile; make it"
                                 " simpler")  # fmt: skip
            if time.monotonic() - began > limit.seconds:
                raise _Ended(f"it was not compiled within {limit.seconds:g} s, beside other"
                                 " work; make it simpler, or try later")  # fmt: skip

        self._send(Ask(*spec))
        answer = receive(self._connection, Answer, watch)
        if answer.form is None:
            raise GrammarError(answer.error)
        return answer.form

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int:
        """How it ended; of one that has."""
        return self._process.wait(_END_SECONDS)

    def end(self) -> None:
        """At once, and wait for it. Idempotent."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(OSError):  # wakes who reads
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, message: Start | Ask) -> None:
        """It reads at once, where it is run at all."""
        self._connection.settimeout(START_SECONDS)
        send(self._connection, message)
        self._connection.settimeout(LOOK_SECONDS)

    def _look_at_share(self, began: float, cpu: float) -> None:
        """Raises _Starved where it is the last and gets nothing since then, by both clocks."""
        seconds = time.monotonic() - began
        if self.is_last and seconds > STARVED_SECONDS:
            if self._cpu_seconds() - cpu < _STARVED_SHARE * seconds:
                raise _Starved

    def _cpu_seconds(self) -> float:
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)
        except OSError:
            return 0.0
