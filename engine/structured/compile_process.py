# SPDX-License-Identifier: Apache-2.0
"""The entry of a process that tries grammars out: `python -m … DESCRIPTOR [last]`, which has the
processor only while nobody else wants it where it is to be the last.

It compiles one after the other and says what came of it. Whoever started it measures and ends it;
the limits that it sets itself, on memory and on the processor's time, hold also where nobody does.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from ..structured_params import GrammarSpec, Kind
from .backends import open_backend
from .base import Backend, GrammarError
from .compile_messages import LAST, Answer, Ask, Start, receive, send
from .vocabulary import Vocabulary

# A tenth of a busy processor, where it is not the last.
_NICENESS = 10
_ASIDE_SECONDS = 0.001
_MORE_SECONDS = 5  # after which it ends by itself
_FIRST = GrammarSpec(Kind.GRAMMAR, 'root ::= "a"')


def main() -> int:
    """Until the other end is closed."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # of a terminal that stops who writes behind
    os.nice(_NICENESS)
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    if sys.argv[2:] == [LAST]:
        aside = _standing_aside
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        start = receive(connection, Start)
        try:
            with aside():
                backend = _open(start)
        except (ValueError, ImportError) as error:  # GrammarError, NoVocabulary
            send(connection, Answer(error=str(error)))
            return 1
        _limit_memory(start.memory_bytes)
        send(connection, Answer())
        while True:
            ask = receive(connection, Ask)
            _limit_time(start.cpu_seconds)
            spec = GrammarSpec(ask.kind, ask.text, ask.any_whitespace, ask.whitespace_pattern)
            with aside():
                answer = _try_out(backend, spec)
            send(connection, answer)
    except (EOFError, BrokenPipeError):
        return 0


@contextmanager
def _standing_aside() -> Iterator[None]:
    """Sleep for 0.06 ms after each that it runs for, behind which it is put on a processor that is
    free. To be SCHED_IDLE is not enough: a process that has waited behind another one on its
    processor is owed time, and gets it from one tick of the clock to the next: the other waits for
    4 ms then, be another processor idle or not. This one sleeps before anything else instead, at a
    signal that has come meanwhile.

    The handler is a function of the C library's, since none of Python's is called before a backend
    returns. What it takes for microseconds is the signal's number.
    """
    library = ctypes.CDLL(None)
    library.signal(int(signal.SIGALRM), library.usleep)
    signal.setitimer(signal.ITIMER_REAL, _ASIDE_SECONDS, _ASIDE_SECONDS)
    try:
        yield
    finally:  # who waits for the next grammar is not to be woken
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _open(start: Start) -> Backend:
    backend = open_backend(
        start.backend,
        lambda: Vocabulary.load(Path(start.model_path), start.vocab_size, start.end_ids),
    )
    backend.try_out(_FIRST)  # which opens what the next ones are then not charged for
    return backend


def _try_out(backend: Backend, spec: GrammarSpec) -> Answer:
    try:
        return Answer(backend.try_out(spec))
    except (GrammarError, MemoryError, RecursionError) as error:
        return Answer(error=str(error) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 - it is told
        return Answer(error=f"{type(error).__name__}: {error}")


def _limit_memory(more_bytes: int) -> None:
    """Of address space, beside what it has now."""
    _lower(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # only Linux says
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + more_bytes
        _lower(resource.RLIMIT_AS, most)


def _limit_time(cpu_seconds: float) -> None:
    most = math.ceil(time.process_time() + cpu_seconds + _MORE_SECONDS)
    _lower(resource.RLIMIT_CPU, most)


def _lower(limit: int, most: int) -> None:
    """Whoever runs the engine may have set a limit that nobody may raise."""
    hard = resource.getrlimit(limit)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
