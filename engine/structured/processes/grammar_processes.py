# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars in processes, which can be killed, so that no grammar blocks an engine thread.

    spec ──► try_out ──► a process compiles it ──► Tried: a form, built in the engine process, or
                               │                          the process, which then makes the masks
                               └─ too slow, too much memory, crashed: killed, and a new process is
                                  forked; the grammar is refused, or tried again with more time

The first process opens the backend and forks all other processes (`grammar_process.py`), so a
killed process is replaced within milliseconds. The first process starts with the first grammar. The
forked processes run only on CPUs that are otherwise idle (SCHED_IDLE), so steps and their masks
find a CPU at once. If a forked process gets almost no CPU time, processes with a low `os.nice`
priority instead of SCHED_IDLE are forked for a while."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ....tiers.processes.python_command import python_command
from ...request.structured_params import GrammarSpec
from ..base import Form, GrammarError, NotNow
from ..xgrammar_scope import why_untamed
from .grammar_messages import (
    Answer,
    Ask,
    Fork,
    Forked,
    Leave,
    Reap,
    Reaped,
    Row,
    RowAnswer,
    Start,
    Started,
    receive,
    receive_packet,
    send,
    send_packet,
)
from .limited_thread import Limit

logger = logging.getLogger(__name__)

MEMORY_BYTES = 1024**3
START_SECONDS = 300.0  # ample for a large vocabulary at low priority
# A process that gets less than _STARVED_SHARE of a processor for STARVED_SECONDS is replaced by a
# process with a niceness. New processes of the next _BUSY_SECONDS have a niceness too.
STARVED_SECONDS = 0.5
_STARVED_SHARE = 0.05
_BUSY_SECONDS = 30.0
_CONTROL_SECONDS = 60.0  # time limit of a fork or a reap
_END_SECONDS = 5.0
_MOST_IDLE = 2
_COMMAND = python_command("-m", "stratakv.engine.structured.processes.grammar_process")
_CPU_CLOCK = 2  # low three bits of a clock id on Linux, below the inverted process id
# Environment variables that keep libraries from starting threads, which a fork does not copy.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
# Limits of grammars that the engine takes over: the seconds of the work that `build` repeats, and
# the size of the form. Masks of other grammars are made by the process that compiled the grammar.
BUILD_SECONDS = 0.5
MOST_FORM_BYTES = 8 * 1024**2

_ENDS = "the engine ends"

GONE = "the process that followed this grammar has ended; ask again"


class TooSlow(GrammarError):
    """The grammar took too much CPU time, or (TooLate) too much wall-clock time."""


class Tried(NamedTuple):
    """A compiled grammar, its first mask row, and the CPU time of that row."""

    form: Form
    first_words: bytes
    first_seconds: float
    process: FollowingProcess | None  # makes the masks; None: the engine builds the grammar


class GrammarProcesses:
    """The grammar processes for one model and one named backend: one process for each thread in
    `try_out`, and one for each grammar that stays in its process."""

    def __init__(
        self,
        backend: str,
        model_path: Path,
        vocab_size: int,
        end_ids: tuple[int, ...],
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._start = Start(backend, str(model_path), vocab_size, list(end_ids), memory_bytes)
        self._end_ids = frozenset(end_ids)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._first: _FirstProcess | None = None
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []
        self._is_closed = False
        self._busy_until = 0.0 if hasattr(os, "SCHED_IDLE") else float("inf")
        self.trusts_threads = True  # False: no more grammars are built in the engine process

    def try_out(self, spec: GrammarSpec, limit: Limit, *, is_second: bool = False) -> Tried:
        """Compile a grammar in a process, and wait for the result. Thread-safe. Raises GrammarError
        for a grammar that cannot be compiled, TooSlow if it takes longer than the limit, and NotNow
        if the cause may lie outside the grammar."""
        # A process that may have to make the grammar's masks is never SCHED_IDLE.
        may_follow = self._start.backend == "xgrammar" and bool(why_untamed(spec))
        process = self._acquire_process(is_last=self._are_last and not may_follow)
        try:
            answer = process.compile(spec, limit, is_second=is_second)
        except GrammarError as error:
            if isinstance(error, TooSlow):
                self._end_process(process)
            else:
                self._put_back(process)
            raise
        except _Starved:
            self._end_process(process)
            self._busy_until = time.monotonic() + _BUSY_SECONDS
            return self.try_out(spec, limit, is_second=is_second)
        except BaseException as error:
            status = self._end_process(process)
            if isinstance(error, EOFError | OSError):
                raise NotNow(self._words(status)) from None
            raise
        form = answer.form
        assert form is not None
        if self._is_taken_over(form):
            self._put_back(process)
            return Tried(form, answer.first_words, answer.first_seconds, None)
        following = FollowingProcess(self, process)
        return Tried(form, answer.first_words, answer.first_seconds, following)

    def start_first_process(self) -> None:
        """Start the first process, unless it runs already, and wait until it can fork. Raises
        NotNow, and GrammarError if the backend cannot be opened."""
        self._open_first()

    def close(self) -> None:
        """End the processes; a thread that waits for a process gets a GrammarError. A second call
        does nothing."""
        with self._lock:
            self._is_closed = True
            processes = self._idle + self._busy
            self._idle, self._busy = [], []
            first, self._first = self._first, None
        for process in processes:
            process.kill_and_reap()
        if first is not None:
            first.kill_and_wait()

    @property
    def process_ids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._idle + self._busy]

    @property
    def first_process_id(self) -> int | None:
        first = self._first
        return None if first is None else first.pid

    @property
    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @property
    def _are_last(self) -> bool:
        """Whether new processes are forked with SCHED_IDLE. False for a while after a SCHED_IDLE
        process got almost no CPU time."""
        return time.monotonic() >= self._busy_until

    def _is_taken_over(self, form: Form) -> bool:
        return (
            self.trusts_threads
            and form.is_bounded
            and form.seconds <= BUILD_SECONDS
            and len(form.text) <= MOST_FORM_BYTES
        )

    def _acquire_process(self, *, is_last: bool) -> _Process:
        """Take an idle process or fork a new process, and count it as busy. Raises NotNow, and
        GrammarError if the backend cannot be opened."""
        while (process := self._take_idle()) is not None:
            # Replace a process killed from outside, or a SCHED_IDLE process that would starve.
            if not (process.has_ended or (process.is_last and not is_last)):
                return process
            self._end_process(process)
        try:
            process = self._fork(is_last=is_last)
        except (EOFError, OSError):  # the first process was killed; try a new first process
            try:
                process = self._fork(is_last=is_last)
            except (EOFError, OSError) as error:
                raise NotNow(f"no process can be started to compile it: {error}") from None
        with self._lock:
            if not self._is_closed:
                self._busy.append(process)
                return process
        process.kill_and_reap()
        raise NotNow(_ENDS)

    def _fork(self, *, is_last: bool) -> _Process:
        """Fork a new process. Raises EOFError or OSError if the first process has ended (the next
        call replaces it), and the errors of `_open_first`."""
        first = self._open_first()
        try:
            return first.fork(is_last=is_last)
        except (EOFError, OSError):
            self._drop_first(first)
            if self._is_closed:
                raise NotNow(_ENDS) from None
            raise

    def _take_idle(self) -> _Process | None:
        with self._lock:
            if self._is_closed:
                raise NotNow(_ENDS)
            if not self._idle:
                return None
            process = self._idle.pop()
            self._busy.append(process)
            return process

    def _open_first(self) -> _FirstProcess:
        """Return the first process, which forks the others; start it if it does not run. Raises
        NotNow, and GrammarError if the backend cannot be opened."""
        with self._starting:
            with self._lock:
                if self._is_closed:
                    raise NotNow(_ENDS)
                if self._first is not None:
                    return self._first
                try:
                    first = self._first = _FirstProcess()
                except OSError as error:
                    text = f"no process can be started to compile it: {error}"
                    raise NotNow(text) from None
            try:
                first.wait_until_ready(self._start)
            except BaseException as error:
                self._drop_first(first)
                if isinstance(error, EOFError | OSError):
                    text = f"no process to compile it came up: {error}"
                    raise NotNow(_ENDS if self._is_closed else text) from None
                raise
            return first

    def _drop_first(self, first: _FirstProcess) -> None:
        """Kill a first process that has failed; its children end too."""
        with self._lock:
            if self._first is first:
                self._first = None
        first.kill_and_wait()

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            if process in self._busy and len(self._idle) < _MOST_IDLE:
                self._busy.remove(process)
                self._idle.append(process)
                return
        self._end_process(process)

    def _end_process(self, process: _Process) -> int | None:
        """Kill a process. Return its exit status (a signal's is negative), or None if unknown."""
        status = process.kill_and_reap()
        with self._lock:
            if process in self._busy:
                self._busy.remove(process)
        return status

    def _words(self, status: int | None) -> str:
        if self._is_closed:
            return _ENDS
        if status is None:
            return "the process that compiled it has ended; ask again"
        how = f" by signal {-status}" if status < 0 else f" with status {status}"
        text = (
            f"the process that compiled it ended{how}, as it does beyond "
            f"{self._start.memory_bytes} bytes of memory; make it simpler"
        )
        logger.warning("a grammar was refused: %s", text)
        return text


class FollowingProcess:
    """A process that makes mask rows of the grammar that it compiled. Any thread may call it."""

    def __init__(self, processes: GrammarProcesses, process: _Process) -> None:
        self._processes = processes
        self._process = process
        self._turn = threading.Lock()
        self.is_gone = False
        self.end_ids = processes.end_ids

    def fetch_row(self, asked: Row, limit: Limit) -> RowAnswer:
        """Return the process's answer to `asked`. Raises GrammarError. A process that takes too
        long is killed, and its grammar fails."""
        with self._turn:
            if self.is_gone:
                raise GrammarError(GONE)
            try:
                return self._process.request_row(asked, limit)
            except TooSlow:
                self.discard_process()
                raise
            except (EOFError, OSError):
                self.discard_process()
                raise GrammarError(GONE) from None

    def release_matcher(self, matcher: int) -> None:
        """Make the process drop a matcher, without waiting."""
        # No message is sent while another thread calls the process. The matcher then keeps its
        # memory until the process ends.
        if self._turn.acquire(blocking=False):
            try:
                if not self.is_gone:
                    self._process.send_leave(matcher)
            except OSError:
                self.discard_process()
            finally:
                self._turn.release()

    def discard_process(self) -> None:
        """End the process. A second call does nothing."""
        self.is_gone = True
        self._processes._end_process(self._process)


class _Starved(Exception):
    """Raised if a process gets almost no CPU time."""


class _FirstProcess:
    """The process that forks the other processes. Calls are served one at a time."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the process prints is diagnostics
                env={**os.environ, **_ENVIRONMENT},
                # A new process group, so that Ctrl-C reaches only the engine, which then ends the
                # child. The session is not new, since SCHED_IDLE ranks last only within a session.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours
        self.pid = self._process.pid

    def wait_until_ready(self, start: Start) -> None:
        """Wait until the process can fork. Raises GrammarError if the backend cannot be opened,
        EOFError or OSError if the process has ended or does not answer."""
        send_packet(self._control, start)
        deadline = time.monotonic() + START_SECONDS
        answer: Started = receive_packet(self._control, Started, _until(deadline))[0]
        if answer.error:
            raise GrammarError(answer.error)

    def fork(self, *, is_last: bool) -> _Process:
        """Fork a process. Raises EOFError or OSError."""
        ours, theirs = socket.socketpair()
        try:
            forked, descriptors = self._exchange_packets(Fork(is_last), Forked, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        os.set_inheritable(descriptors[0], False)
        return _Process(self, forked.pid, descriptors[0], ours, is_last=is_last)

    def reap(self, pid: int) -> int | None:
        """Return the exit status of a child; None if unknown. Called once for each child."""
        with suppress(EOFError, OSError):  # the first process has ended too
            reaped: Reaped = self._exchange_packets(Reap(pid), Reaped)[0]
            return reaped.status
        return None

    def kill_and_wait(self) -> None:
        """Kill the process, and wait for its end. A second call does nothing."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(OSError):  # wakes a thread that reads the socket
            self._control.shutdown(socket.SHUT_RDWR)
        with self._asking:
            self._control.close()

    def _exchange_packets(
        self, message: Any, kind: Any, descriptors: list[int] | None = None
    ) -> Any:
        with self._asking:
            send_packet(self._control, message, descriptors or [])
            return receive_packet(self._control, kind, _until(time.monotonic() + _CONTROL_SECONDS))


class _Process:
    """A forked process. Only one thread at a time may use a process."""

    def __init__(
        self, first: _FirstProcess, pid: int, descriptor: int, ours: socket.socket, *, is_last: bool
    ) -> None:
        """`descriptor` is the process's pidfd, and `ours` the engine's end of its socket pair."""
        self.is_last = is_last
        self.pid = pid
        self._first = first
        self._descriptor = descriptor
        self._connection = ours
        self._ending = threading.Lock()
        self._has_ended = False

    def compile(self, spec: GrammarSpec, limit: Limit, *, is_second: bool) -> Answer:
        """Compile a grammar, and wait for the answer. Raises GrammarError for a refused grammar,
        TooSlow, _Starved, and EOFError or OSError if the process has ended."""
        send(self._connection, Ask(*spec, is_second, limit.cpu_seconds))
        answer: Answer = receive(self._connection, Answer, self._make_watchdog(limit, "compile"))
        if answer.form is None:
            raise GrammarError(answer.error)
        return answer

    def request_row(self, asked: Row, limit: Limit) -> RowAnswer:
        """Request a mask row, and wait for it. Raises the errors of `compile` except _Starved."""
        send(self._connection, asked)
        answer: RowAnswer = receive(
            self._connection, RowAnswer, self._make_watchdog(limit, "follow")
        )
        if answer.error:
            raise GrammarError(answer.error)
        return answer

    def send_leave(self, matcher: int) -> None:
        """Make the process drop a matcher. Raises OSError."""
        send(self._connection, Leave(matcher))

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def kill_and_reap(self) -> int | None:
        """Kill the process, wait for its end, and return its exit status. A second call does
        nothing."""
        with self._ending:
            if self._has_ended:
                return None
            self._has_ended = True
            with suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            status = self._first.reap(self.pid)
            os.close(self._descriptor)
            with suppress(OSError):  # wakes a thread that reads the socket
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            return status

    def _make_watchdog(self, limit: Limit, what: str) -> Callable[[], None]:
        began, cpu = time.monotonic(), self._cpu_seconds()

        def look() -> None:
            seconds, had = time.monotonic() - began, self._cpu_seconds() - cpu
            if self.is_last and seconds > STARVED_SECONDS and had < _STARVED_SHARE * seconds:
                if what == "compile":
                    raise _Starved
            if had > limit.cpu_seconds:
                raise TooSlow(
                    f"it takes more than {limit.cpu_seconds:g} s to {what}; make it simpler"
                )
            if seconds > limit.seconds:
                raise TooLate(
                    f"it took more than {limit.seconds:g} s to {what} it beside other work; make "
                    "it simpler, or try later"
                )

        return look

    def _cpu_seconds(self) -> float:
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)
        except OSError:
            return 0.0


class TooLate(TooSlow, NotNow):
    """The grammar took too much wall-clock time; the machine may be busy."""


def _until(deadline: float) -> Callable[[], None]:
    def look() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("it does not answer")

    return look
