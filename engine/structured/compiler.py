# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars on a few threads, within limits, and keeps them for those who ask again.

    ask ──► small: a thread of their own ───────────────────────────► compiled, first mask made
        └─► large: other threads ──► tried out in a process (`compile_pool.py`) ──► one at a time ─┘

Called by the engine's step thread, but for the threads of its own; nothing here waits for them but
`close`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..structured_params import GrammarSpec
from .base import BITS, Backend, Grammar, GrammarError, NotNow, Words
from .compile_pool import CompilePool
from .limited_thread import Job, LeftBehind, Limit, LimitedThread

logger = logging.getLogger(__name__)

NUM_THREADS = 1
MOST_PROCESSES = 2  # at once
COMPILE_LIMIT = Limit(cpu_seconds=10.0)
MOST_BYTES = 64 * 1024**2  # of one grammar
CACHE_BYTES = 256 * 1024**2
CACHE_ENTRIES = 1024
MOST_WAITING = 1024
POLL_SECONDS = 0.05  # for a thread that is over its limit
_TURN_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_TOO_MANY_HANG = (
    "too many grammars before it hang, so none is compiled any more; restart the engine, with "
    "--structured-outputs-backend guidance"
)


@dataclass(slots=True)
class Compilation:
    """A grammar that was asked for. Until `is_done` it has neither a grammar nor an error.
    `first_words` is the row of an answer that begins: often the one that takes longest.
    `may_be_later`: the error says nothing of the grammar, and it is compiled when asked for again.
    """

    spec: GrammarSpec
    grammar: Grammar | None = None
    error: str = ""
    first_words: Words | None = None
    may_be_later: bool = False
    first_seconds: float = 0.0  # of the processor, that this row took
    has_begun: bool = False

    @property
    def is_done(self) -> bool:
        return self.grammar is not None or bool(self.error)

    @property
    def num_bytes(self) -> int:
        """That it takes while it is kept."""
        return len(self.spec.text) if self.grammar is None else self.grammar.num_bytes


class TooManyGrammars(RuntimeError):
    """So many wait to be compiled that no more may."""


def _num_processes() -> int:
    """As `GrammarCompiler` takes them: what is tried out is compiled here next by the same thread,
    and with more at once than there are processors beside the steps', steps wait their turn."""
    on_linux = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, processors - 1))


class _Lane:
    """Grammars that wait for the same threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads: list[LimitedThread] = []
        self._at: dict[LimitedThread, list[Compilation]] = {}

    def start_threads(self) -> None:
        """Those that are missing."""
        while len(self.threads) < self.num_threads:
            self.threads.append(LimitedThread("stratakv-grammar", self.jobs))

    def at(self, thread: LimitedThread) -> list[Compilation]:
        """The compilation that this one is at, while that takes the processor's time. The same list
        for whoever asks first: a thread that finds a job may ask before it is in `threads`."""
        return self._at.setdefault(thread, [])

    def leave(self, thread: LimitedThread) -> None:
        """It is one of these no more."""
        self.threads.remove(thread)
        self._at.pop(thread, None)


def _free(dropped: list[Any], _: LimitedThread) -> None:
    dropped.clear()


class GrammarCompiler:
    """For a vocabulary of `vocab_size` tokens. `open_backend` is called once, by the thread that
    first needs it; `wake` is called by any thread that has done one. Threads begin with the first
    grammar. Without `pool` all are compiled at once. So many processes of it as `num_processes` try
    out at once; None: as many as leave a processor to the steps."""

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        wake: Callable[[], None],
        *,
        vocab_size: int,
        pool: CompilePool | None = None,
        limit: Limit = COMPILE_LIMIT,
        num_threads: int = NUM_THREADS,
        num_processes: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._open_backend = open_backend
        self._wake = wake
        self._limit = limit
        self._num_words = -(-vocab_size // BITS)
        self._pool = pool
        self._cache_bytes = cache_bytes
        self._known: OrderedDict[GrammarSpec, Compilation] = OrderedDict()  # used last at the end
        self.num_cached_bytes = 0  # of the grammars that are kept, with texts of those that failed
        self._waiting: dict[GrammarSpec, Compilation] = {}
        self._small, self._large = (
            _Lane(num_threads),
            _Lane(num_processes or _num_processes()),
        )
        self._left = LeftBehind()
        self._beginning = threading.Lock()  # between a thread that begins and who gives up
        self._opening = threading.Lock()
        # Held by the thread that compiles what was tried out: with more of them, the engine's own
        # threads would have no processor left.
        self._building = threading.Lock()
        self._backend: Backend | None = None
        self.num_compiled = self.num_failed = self.num_found = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ask(self, spec: GrammarSpec) -> Compilation:
        """The grammar, which may be done already. Raises TooManyGrammars."""
        found = self._known.get(spec)
        if found is not None:
            self._known.move_to_end(spec)
            self.num_found += 1
            return found
        if spec in self._waiting:
            return self._waiting[spec]
        is_large = self._pool is not None and self._pool.is_needed(spec)
        lane = self._large if is_large else self._small
        # Those that nobody waits for are in the lane until their turn, and in memory.
        num_before = max(len(self._waiting), lane.jobs.qsize())
        if num_before >= MOST_WAITING:
            raise TooManyGrammars(f"{num_before} grammars wait to be compiled; try later")
        compilation = Compilation(spec)
        if self._left.are_too_many:
            compilation.error = _TOO_MANY_HANG
            return compilation
        self._waiting[spec] = compilation
        lane.start_threads()
        lane.jobs.put(lambda thread: self._run(thread, lane.at(thread), compilation))
        return compilation

    def give_up(self, compilation: Compilation) -> None:
        """Nobody waits for it any more: it is compiled only if that has begun."""
        with self._beginning:
            if compilation.has_begun or compilation.is_done:
                return
            compilation.error = "nobody waits for it any more"
        self._waiting.pop(compilation.spec, None)

    def collect(self) -> None:
        """Take note of what was done, and fail what takes too long."""
        if not self._waiting:
            return
        for lane in (self._small, self._large):
            self._leave_hung(lane)
        for spec, compilation in list(self._waiting.items()):
            if compilation.is_done:
                del self._waiting[spec]
                self.num_compiled += compilation.grammar is not None
                self.num_failed += compilation.grammar is None
                if not compilation.may_be_later:
                    self._known[spec] = compilation
                    self.num_cached_bytes += compilation.num_bytes
        dropped: list[Compilation] = []
        while len(self._known) > CACHE_ENTRIES or (
            self._known and self.num_cached_bytes > self._cache_bytes
        ):
            dropped.append(self._known.popitem(last=False)[1])
            self.num_cached_bytes -= dropped[-1].num_bytes
        if dropped:
            self.free(dropped)

    def free(self, dropped: list[Any]) -> None:
        """On one of the threads: to free a large grammar takes milliseconds, which no step is to
        wait for. The caller keeps none of these."""
        self._small.start_threads()
        self._small.jobs.put(partial(_free, dropped))

    def close(self) -> None:
        """End the threads and processes; threads that hang are left behind. Idempotent."""
        if self._pool is not None:
            self._pool.close()
        for lane in (self._small, self._large):
            while not lane.jobs.empty():
                try:
                    lane.jobs.get_nowait()
                except queue.Empty:
                    break
            for _ in lane.threads:
                lane.jobs.put(None)
        for lane in (self._small, self._large):
            for thread in lane.threads:
                thread.join(_CLOSE_SECONDS)
            lane.threads = []

    def _leave_hung(self, lane: _Lane) -> None:
        """At most one; the others are looked at next time."""
        for thread in list(lane.threads):
            at = lane.at(thread)
            if at and thread.leave(self._limit):
                at[
                    0
                ].error = (
                    f"it takes more than {self._limit.cpu_seconds:g} s to compile; make it simpler"
                )
                self._left.add(thread)
                if lane is self._large:  # it may hold that
                    self._building = threading.Lock()
                lane.leave(thread)
                if self._left.are_too_many:
                    self._refuse_waiting()
                lane.start_threads()
                break

    def _refuse_waiting(self) -> None:
        """Fail those that no thread has begun: each might hang as well."""
        with self._beginning:
            for compilation in self._waiting.values():
                if not (compilation.has_begun or compilation.is_done):
                    compilation.may_be_later = True
                    compilation.error = _TOO_MANY_HANG

    def _run(self, thread: LimitedThread, at: list[Compilation], compilation: Compilation) -> None:
        """On one of the threads."""
        made, error, may_be_later = None, "", False
        with self._beginning:
            if compilation.is_done:
                return
            compilation.has_begun = True
        try:
            made = self._compile(thread, at, compilation)
            if made is None:
                return
        except (ValueError, ImportError) as caught:  # GrammarError, NoVocabulary
            error = str(caught) or type(caught).__name__
            may_be_later = isinstance(caught, NotNow)
        except Exception as caught:
            logger.exception("a grammar's backend failed")
            error = f"{type(caught).__name__}: {caught}"
        if thread.next_piece(at.clear):
            if made is None:
                compilation.may_be_later = may_be_later
                compilation.error = error
            else:
                compilation.first_words, compilation.first_seconds = made[1:]
                compilation.grammar = made[0]
            self._wake()

    def _compile(
        self, thread: LimitedThread, at: list[Compilation], compilation: Compilation
    ) -> tuple[Grammar, Words, float] | None:
        """The grammar, its first row and the seconds of that; None where nobody waits any more.
        Raises GrammarError, and what a backend may."""
        spec, form = compilation.spec, None
        if self._pool is not None and self._pool.is_needed(spec):
            form = self._pool.try_out(spec)
        with self._opening:  # reading a vocabulary and importing counts for nobody
            if self._backend is None:
                self._backend = self._open_backend()
        if form is None:
            return self._build(thread, at, compilation, partial(self._backend.compile, spec))
        building = self._begin_building()
        try:
            return self._build(thread, at, compilation, partial(self._backend.build, spec, form))
        finally:
            building.release()

    def _begin_building(self) -> threading.Lock:
        """The lock, held. Raises NotNow where its turn does not come."""
        deadline = time.monotonic() + self._limit.seconds
        while time.monotonic() < deadline:
            building = self._building  # another one, once whoever held it was left behind
            if building.acquire(timeout=_TURN_SECONDS):
                return building
        raise NotNow("the grammars before it take too long to compile; try later")

    def _build(
        self,
        thread: LimitedThread,
        at: list[Compilation],
        compilation: Compilation,
        compile_it: Callable[[], Grammar],
    ) -> tuple[Grammar, Words, float] | None:
        """As `_compile`: within the limit."""
        if not thread.next_piece(lambda: at.append(compilation)):
            return None
        # Not before: whoever imports holds locks that steps may want, a process that is started
        # inherits it, and who waits for a turn is not starved.
        thread.give_way()
        grammar = compile_it()
        if grammar.num_bytes > MOST_BYTES:
            raise GrammarError(
                f"compiled, it takes {grammar.num_bytes} bytes, and at most {MOST_BYTES} may be; "
                "make it simpler"
            )
        words = np.zeros(self._num_words, np.int32)
        began = time.thread_time()
        grammar.matcher().fill(words)
        return grammar, words, time.thread_time() - began
