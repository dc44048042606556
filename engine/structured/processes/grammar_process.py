# SPDX-License-Identifier: Apache-2.0
"""The entry point of the grammar processes: `python -m … DESCRIPTOR`.

    first process ── opens the backend and forks ──► a process that compiles grammars in sequence
                                                     └─► and makes the masks of its last grammar, if
                                                         the engine process does not

The first process reads no client data, so no grammar blocks it, and it replaces a killed process
within milliseconds. The engine measures the CPU time of the forked processes and kills slow ones.
Each forked process also limits its own memory and CPU time, in case the engine fails to do so."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from ...request.structured_params import GrammarSpec
from ..backends import open_backend
from ..base import BITS, Backend, Grammar, GrammarError, Matcher, follow_forced
from ..vocabulary import Vocabulary
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

Told = TypeVar("Told", Answer, RowAnswer)
# With this niceness a process gets a tenth of a busy processor (unless it has SCHED_IDLE).
_NICENESS = 10
_ASIDE_SECONDS = 0.001
_MORE_SECONDS = 5  # seconds after the limit at which the process ends itself
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# Packages that xgrammar imports and this module does not need.
_STOOD_IN = ("torch", "transformers")


def main() -> int:
    """Run the first process, and `_serve` in its children, until the engine closes its socket.
    Return the exit status."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it stops background writers
    os.nice(_NICENESS)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        start: Start = receive_packet(control, Start)[0]
        try:
            backend = _open(start)
        except (ValueError, ImportError) as error:  # GrammarError, NoVocabulary
            send_packet(control, Started(str(error)))
            return 1
        gc.collect()
        gc.freeze()  # children then collect only their own objects and copy no other pages
        send_packet(control, Started())
        connection, is_last = _fork_children(control)
    except (EOFError, OSError):
        return 0
    try:
        _serve(connection, backend, start, is_last=is_last)
    except (EOFError, OSError):
        os._exit(0)  # without clean-up, which is for the parent only
    except BaseException:  # noqa: BLE001 - the last word of this process
        traceback.print_exc()
    os._exit(1)


def _fork_children(control: socket.socket) -> tuple[socket.socket, bool]:
    """Fork and reap children in the first process. Raises EOFError when the engine has closed its
    socket. Returns only in a child: the child's socket, and whether the child has SCHED_IDLE
    (`is_last`)."""
    parent = os.getpid()
    while True:
        message: Fork | Reap
        message, descriptors = receive_packet(control, Fork | Reap)
        if isinstance(message, Reap):
            send_packet(control, Reaped(os.waitstatus_to_exitcode(os.waitpid(message.pid, 0)[1])))
            continue
        pid = os.fork()
        if not pid:
            control.close()
            ctypes.CDLL(None).prctl(_END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before prctl
                os._exit(0)
            return socket.socket(fileno=descriptors[0]), message.is_last
        os.close(descriptors[0])
        child = os.pidfd_open(pid)
        send_packet(control, Forked(pid), [child])
        os.close(child)


def _serve(connection: socket.socket, backend: Backend, start: Start, *, is_last: bool) -> None:
    """Answer messages in a child. Raises EOFError when the engine has closed its socket."""
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    if is_last:
        aside = _standing_aside
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _limit_memory(start.memory_bytes)
    follower = None
    while True:
        message = receive(connection, Ask | Row | Leave)
        if isinstance(message, Leave):
            if follower is not None:
                follower.drop_matcher(message.matcher)
            continue
        _limit_time(message.cpu_seconds)
        answer: Answer | RowAnswer
        with aside():
            if isinstance(message, Ask):
                follower = None  # free the old grammar first
                answer, grammar = _try_out(backend, message, start.vocab_size)
                follower = None if grammar is None else _Follower(grammar, start.vocab_size)
            elif follower is None:
                answer = RowAnswer(error="there is no grammar to follow")
            else:
                answer = _told(partial(follower.compute_row, message), RowAnswer)
        send(connection, answer)


class _Follower:
    """The matchers of the one grammar that this process follows."""

    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._row = np.zeros(-(-vocab_size // BITS), np.int32)
        self._matchers: dict[int, Matcher] = {}

    def compute_row(self, asked: Row) -> RowAnswer:
        """Move a matcher as `asked`, and return the `RowAnswer`. Raises GrammarError."""
        matcher = self._matchers.get(asked.matcher)
        if matcher is None:
            matcher = self._matchers[asked.matcher] = self._grammar.matcher()
        if asked.rollback:
            matcher.rollback(asked.rollback)
        for count, token in enumerate(asked.tokens):
            if not matcher.accept(token):
                return RowAnswer(count, matcher.may_end)
        words = b""
        if asked.is_wanted:
            matcher.fill(self._row)
            words = self._row.tobytes()
        return RowAnswer(len(asked.tokens), matcher.may_end, words)

    def drop_matcher(self, number: int) -> None:
        self._matchers.pop(number, None)


def _try_out(backend: Backend, ask: Ask, vocab_size: int) -> tuple[Answer, Grammar | None]:
    """Compile a grammar. Return the `Answer`, and the grammar, or None if compiling failed."""
    made: list[Grammar] = []

    def run() -> Answer:
        spec = GrammarSpec(ask.kind, ask.text, ask.any_whitespace, ask.whitespace_pattern)
        form, grammar = backend.try_out(spec, is_second=ask.is_second)
        follow_forced(grammar, -(-vocab_size // BITS))
        row = np.zeros(-(-vocab_size // BITS), np.int32)
        began = time.process_time()
        grammar.matcher().fill(row)
        made.append(grammar)
        return Answer(form, "", row.tobytes(), time.process_time() - began)

    answer = _told(run, Answer)
    return answer, made[0] if made else None


def _told(run: Callable[[], Told], kind: Callable[..., Told]) -> Told:
    """Return the result of `run`. If `run` raises, return an answer of `kind` with the error."""
    try:
        return run()
    except (GrammarError, MemoryError, RecursionError) as error:
        return kind(error=str(error) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 - it is told
        return kind(error=f"{type(error).__name__}: {error}")


@contextmanager
def _standing_aside() -> Iterator[None]:
    """Sleep for 0.06 ms after each millisecond, so that the kernel then wakes this process on a
    free CPU. SCHED_IDLE alone is not enough: the scheduler owes time to a process that has waited
    for its CPU. Such a process runs from one clock tick to the next, and another process on that
    CPU waits for 4 ms even if another CPU is idle. A signal that came while this process waited
    makes it sleep at once.

    The signal handler is the C library's `usleep`, because Python would run no handler before a
    backend returns. The argument of `usleep`, in microseconds, is the signal number."""
    library = ctypes.CDLL(None)
    library.signal(int(signal.SIGALRM), library.usleep)
    signal.setitimer(signal.ITIMER_REAL, _ASIDE_SECONDS, _ASIDE_SECONDS)
    try:
        yield
    finally:  # no signals while the process waits for the next grammar
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _open(start: Start) -> Backend:
    """Open the backend with all its imports, and without threads, which a fork does not copy."""
    _stand_in()
    return open_backend(
        start.backend,
        lambda: Vocabulary.load(Path(start.model_path), start.vocab_size, start.end_ids),
        forks=True,
    )


def _stand_in() -> None:
    """Import xgrammar with stand-ins for torch and transformers. xgrammar imports both, which takes
    8 of its 9 CPU seconds and 200 MiB, but needs neither here. The real packages are used if torch
    is loaded already, or if the import fails with the stand-ins."""
    if importlib.util.find_spec("xgrammar") is None or "torch" in sys.modules:
        return
    # tvm_ffi, through which xgrammar calls C, would use torch if torch could be imported.
    sys.modules["torch"] = None  # type: ignore[assignment]  # cannot be imported
    try:
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: _StandIn(name) for name in _STOOD_IN})
        importlib.import_module("xgrammar")
    except Exception:  # noqa: BLE001 - then it is imported with the real packages
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
    finally:
        for name in _STOOD_IN:
            sys.modules.pop(name, None)


class _StandIn(ModuleType):
    """A module that has an empty class for each name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks the module as a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space to `more_bytes` beyond its present size, and disable core dumps."""
    _lower(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # only Linux reports the size
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + more_bytes
        _lower(resource.RLIMIT_AS, most)


def _limit_time(cpu_seconds: float) -> None:
    most = math.ceil(time.process_time() + cpu_seconds + _MORE_SECONDS)
    _lower(resource.RLIMIT_CPU, most)


def _lower(limit: int, most: int) -> None:
    """Lower a resource limit of this process to `most`, or to the hard limit if that is less."""
    hard = resource.getrlimit(limit)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
