# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars on a few threads, within limits, and keeps them for those who ask again.

Called by the engine's step thread, but for the threads of its own; nothing here waits for them but
`close`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..structured_params import GrammarSpec
from .base import Backend, Grammar
from .limited_thread import LeftBehind, Limit, LimitedThread

logger = logging.getLogger(__name__)

NUM_THREADS = 2
COMPILE_LIMIT = Limit(cpu_seconds=10.0)
MOST_BYTES = 64 * 1024**2  # of one grammar
CACHE_BYTES = 256 * 1024**2
CACHE_ENTRIES = 1024
MOST_WAITING = 1024
POLL_SECONDS = 0.05  # for a thread that is over its limit
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class Compilation:
    """A grammar that was asked for. Until `is_done` it has neither a grammar nor an error."""

    spec: GrammarSpec
    grammar: Grammar | None = None
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.grammar is not None or bool(self.error)


class TooManyGrammars(RuntimeError):
    """So many wait to be compiled that no more may."""


class GrammarCompiler:
    """`open_backend` is called once, by the thread that first needs it; `wake` is called by any
    thread that has done one. Threads begin with the first grammar."""

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        wake: Callable[[], None],
        *,
        limit: Limit = COMPILE_LIMIT,
        num_threads: int = NUM_THREADS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._open_backend = open_backend
        self._wake = wake
        self._limit = limit
        self._num_threads = num_threads
        self._cache_bytes = cache_bytes
        self._known: OrderedDict[GrammarSpec, Compilation] = OrderedDict()  # used last at the end
        self._waiting: dict[GrammarSpec, Compilation] = {}
        self._jobs: queue.SimpleQueue[Callable[[LimitedThread], None] | None] = queue.SimpleQueue()
        self._threads: list[tuple[LimitedThread, list[Compilation]]] = []
        self._left = LeftBehind()
        self._opening = threading.Lock()
        self._backend: Backend | None = None
        self.num_compiled = self.num_failed = self.num_found = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_cached_bytes(self) -> int:
        """Of the grammars that are kept."""
        kept = (each.grammar for each in self._known.values())
        return sum(grammar.num_bytes for grammar in kept if grammar is not None)

    def ask(self, spec: GrammarSpec) -> Compilation:
        """The grammar, which may be done already. Raises TooManyGrammars."""
        found = self._known.get(spec)
        if found is not None:
            self._known.move_to_end(spec)
            self.num_found += 1
            return found
        if spec in self._waiting:
            return self._waiting[spec]
        if len(self._waiting) >= MOST_WAITING:
            raise TooManyGrammars(f"{len(self._waiting)} grammars wait to be compiled; try later")
        compilation = Compilation(spec)
        if self._left.are_too_many:
            compilation.error = (
                "too many grammars before it hang, so none is compiled any more; restart the "
                "engine, with --structured-outputs-backend guidance"
            )
            return compilation
        self._waiting[spec] = compilation
        while len(self._threads) < self._num_threads:
            self._start_thread()
        self._jobs.put(lambda thread: self._compile(thread, compilation))
        return compilation

    def collect(self) -> None:
        """Take note of what was done, and fail what takes too long."""
        if not self._waiting:
            return
        for index, (thread, at) in enumerate(list(self._threads)):
            if at and thread.leave(self._limit):
                at[
                    0
                ].error = (
                    f"it takes more than {self._limit.cpu_seconds:g} s to compile; make it simpler"
                )
                self._left.add(thread)
                del self._threads[index]
                self._start_thread()
                break  # the others are looked at next time
        for spec, compilation in list(self._waiting.items()):
            if compilation.is_done:
                del self._waiting[spec]
                self.num_compiled += compilation.grammar is not None
                self.num_failed += compilation.grammar is None
                self._known[spec] = compilation
        while len(self._known) > CACHE_ENTRIES or (
            self._known and self.num_cached_bytes > self._cache_bytes
        ):
            self._known.popitem(last=False)

    def close(self) -> None:
        """End the threads; those that hang are left behind. Idempotent."""
        while not self._jobs.empty():
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._jobs.put(None)
        for thread, _ in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._threads = []

    def _start_thread(self) -> None:
        at: list[Compilation] = []
        self._threads.append((LimitedThread("stratakv-grammar", self._jobs), at))

    def _compile(self, thread: LimitedThread, compilation: Compilation) -> None:
        """On one of the threads."""
        at = next((at for each, at in list(self._threads) if each is thread), [])
        grammar, error = None, ""
        try:
            with self._opening:  # reading a vocabulary and importing counts for nobody
                if self._backend is None:
                    self._backend = self._open_backend()
            if not thread.next_piece(lambda: at.append(compilation)):
                return
            grammar = self._backend.compile(compilation.spec)
            if grammar.num_bytes > MOST_BYTES:
                error = (
                    f"compiled, it takes {grammar.num_bytes} bytes, and at most {MOST_BYTES} may "
                    "be; make it simpler"
                )
        except (ValueError, ImportError) as caught:  # GrammarError, NoVocabulary
            error = str(caught) or type(caught).__name__
        except Exception as caught:
            logger.exception("a grammar's backend failed")
            error = f"{type(caught).__name__}: {caught}"
        if thread.next_piece(at.clear):
            if error:
                compilation.error = error
            else:
                compilation.grammar = grammar
            self._wake()
