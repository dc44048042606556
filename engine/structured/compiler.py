# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars in processes, shared fairly among tenants, and caches them for later requests.

    ask ──► quick queue: a process, up to MOMENT ──► built in the engine process, one at a time ──►
              └─► long queue: other processes,       or left in the process that compiled it ──────►
                  up to the limit

No grammar delays another by more than MOMENT: a grammar that takes longer is compiled again later,
after all untried grammars. Each of the three queues alternates between tenants. The engine's step
thread calls this module, whose own threads do the work; only `close` waits for the threads."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..request.structured_params import GrammarSpec
from .base import BITS, Backend, Grammar, GrammarError, NotNow, Words
from .processes.fair_queue import FairQueue, Shares
from .processes.followed_apart import GrammarApart
from .processes.grammar_processes import FollowingProcess, GrammarProcesses, TooSlow
from .processes.limited_thread import Job, Limit, LimitedThread

logger = logging.getLogger(__name__)

MOST_PROCESSES = 2  # that compile grammars of the long queue at once
COMPILE_LIMIT = Limit(cpu_seconds=10.0)
# The limit of a grammar's first try. A grammar over this limit waits for all untried grammars.
MOMENT = Limit(cpu_seconds=0.25, seconds=3.0)
FOLLOW_LIMIT = Limit(cpu_seconds=1.0, seconds=60.0)  # for a mask row from a process
MOST_BYTES = 64 * 1024**2  # limit of one grammar's memory
CACHE_BYTES = 256 * 1024**2
CACHE_ENTRIES = 1024
MOST_WAITING = 1024
# The most grammars that stay in processes: each may take a GiB.
MOST_APART = 8
MOST_APART_OF_TENANT = 3
_UNUSED_SECONDS = 10.0  # without use, before a grammar in a process may be replaced
POLL_SECONDS = 0.05  # time between two checks for a thread over its limit
_CLOSE_SECONDS = 5.0
_NOBODY = "no request waits for it any more"
_DISPLACED = (
    "too many grammars of this client wait to be compiled; send fewer at once, or try later"
)
Made = tuple[Grammar, Words, float]  # a grammar, its first mask row, the row's seconds


@dataclass(slots=True, eq=False)
class Compilation:
    """The compilation of a grammar. Until `is_done` there is neither a grammar nor an error.
    `first_words` is the mask row at the beginning of an answer, often the slowest of all rows.
    `may_be_later`: the grammar did not cause the error, so the next request compiles it again."""

    spec: GrammarSpec
    tenant: str = ""
    grammar: Grammar | None = None
    error: str = ""
    first_words: Words | None = None
    may_be_later: bool = False
    first_seconds: float = 0.0  # processor time of `first_words`
    has_begun: bool = False

    @property
    def is_done(self) -> bool:
        return self.grammar is not None or bool(self.error)

    @property
    def num_bytes(self) -> int:
        """The memory of a cached grammar; without a grammar, the size of its text."""
        return len(self.spec.text) if self.grammar is None else self.grammar.num_bytes


class TooManyGrammars(RuntimeError):
    """The tenant already has the maximum number of waiting grammars or requests."""


def _num_processes() -> int:
    """Return the default of `GrammarCompiler`'s `num_processes`: the number of CPUs minus one, at
    most MOST_PROCESSES. More processes would delay the steps."""
    on_linux = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, processors - 1))


@dataclass(slots=True)
class _Kept:
    """The cached grammars of one tenant, in the order of their last use."""

    known: OrderedDict[GrammarSpec, Compilation] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class _Builder:
    """A thread that builds grammars from the results of processes, and frees grammars. Both tasks
    are short; if the thread hangs nevertheless, a new thread replaces it."""

    def __init__(self) -> None:
        self.jobs: FairQueue[Job] = FairQueue()
        self.at: Compilation | None = None  # whose grammar the thread builds now
        self._thread: LimitedThread | None = None

    def set_current(self, compilation: Compilation) -> None:
        self.at = compilation

    def put(self, tenant: str, job: Job, *, is_first: bool = False) -> None:
        if self._thread is None:
            self._thread = LimitedThread("stratakv-grammar", self.jobs)
        self.jobs.put(tenant, job, is_first=is_first)

    def leave_hung(self, limit: Limit) -> Compilation | None:
        """Replace the thread if it is over the limit, and return the compilation in which it hangs;
        return None if it is not."""
        at = self.at
        if at is None or self._thread is None or not self._thread.abandon_if_over(limit):
            return None
        self.at = None
        self._thread = LimitedThread("stratakv-grammar", self.jobs)
        return at

    def close(self) -> None:
        if self._thread is not None:
            self.jobs.stop_threads(1)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None


def _free(dropped: list[Any], _: LimitedThread) -> None:
    dropped.clear()


class GrammarCompiler:
    """Compiles grammars for a vocabulary of `vocab_size` tokens. The builder's thread calls
    `open_backend` once; any thread that finishes a grammar calls `wake`. Threads start with the
    first grammar. Without `processes` the builder's thread compiles all grammars, as for a backend
    that the engine's operator supplies."""

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        wake: Callable[[], None],
        *,
        vocab_size: int,
        processes: GrammarProcesses | None = None,
        limit: Limit = COMPILE_LIMIT,
        num_processes: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`num_processes` is the number of processes that compile slow grammars at the same time;
        None means `_num_processes()`, which leaves a CPU to the steps."""
        self._open_backend = open_backend
        self._wake = wake
        self._limit = limit
        self._num_words = -(-vocab_size // BITS)
        self._processes = processes
        self._cache_bytes = cache_bytes
        self._kept: dict[str, _Kept] = {}
        self._waiting: dict[tuple[str, GrammarSpec], Compilation] = {}
        self._shares = Shares(MOST_WAITING)
        self._quick: FairQueue[Compilation] = FairQueue()
        self._long: FairQueue[Compilation] = FairQueue()
        self._num_long = num_processes or _num_processes()
        self._threads: list[threading.Thread] = []
        self._builder = _Builder()
        self._beginning = threading.Lock()  # held to begin or to give up a compilation
        self._apart: list[weakref.ref[GrammarApart]] = []
        self._making_room = threading.Lock()
        self._backend: Backend | None = None
        self.num_compiled = self.num_failed = self.num_found = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_cached_bytes(self) -> int:
        """The memory of the cached grammars, plus the size of the texts of failed grammars."""
        return sum(each.num_bytes for each in self._kept.values())

    @property
    def num_cached(self) -> int:
        return sum(len(each.known) for each in self._kept.values())

    def ask(self, spec: GrammarSpec, tenant: str = "") -> Compilation:
        """Return the compilation of a grammar, which may be done already. Raises
        TooManyGrammars."""
        kept = self._kept.get(tenant)
        found = None if kept is None else kept.known.get(spec)
        if kept is not None and found is not None:
            if found.grammar is None or not found.grammar.is_gone:
                kept.known.move_to_end(spec)
                self.num_found += 1
                return found
            self._pop_compilation(tenant, spec)
        waiting = self._waiting.get((tenant, spec))
        if waiting is not None:
            return waiting
        if self._shares.is_over(tenant):
            count = self._shares.count_of(tenant)
            raise TooManyGrammars(
                f"{count} grammars of this client wait to be compiled; send fewer at once, or try "
                "later"
            )
        if (largest := self._shares.who_gives_way()) is not None:
            self._displace(largest)
        compilation = Compilation(spec, tenant)
        self._waiting[tenant, spec] = compilation
        self._shares.add(tenant)
        if self._processes is None:
            self._builder.put(tenant, partial(self._compile_here, compilation))
        else:
            self._start_threads(spec)
            self._quick.put(tenant, compilation)
        return compilation

    def give_up(self, compilation: Compilation) -> None:
        """Drop a compilation for which no request waits any more, unless it has begun."""
        self._give_up(compilation, _NOBODY)

    def poll_compilations(self) -> None:
        """Record the finished compilations, fail one that hangs on the builder's thread, and drop
        the oldest cached grammars beyond the limits of the cache."""
        if not self._waiting:
            return
        hung = self._builder.leave_hung(self._limit)
        if hung is not None:
            hung.error = (
                f"it takes more than {self._limit.cpu_seconds:g} s to compile; make it simpler"
            )
            self.stop_taking_over()
        for key, compilation in list(self._waiting.items()):
            if compilation.is_done:
                self._take_note(key, compilation)
        dropped: list[Compilation] = []
        num_entries, num_bytes = self.num_cached, self.num_cached_bytes
        while num_entries > CACHE_ENTRIES or (num_entries and num_bytes > self._cache_bytes):
            # The tenant with most grammars loses one: a tenant's many grammars displace its own.
            many = num_entries > CACHE_ENTRIES
            tenant = max(
                self._kept,
                key=lambda name: (
                    len(self._kept[name].known) if many else self._kept[name].num_bytes
                ),
            )
            dropped.append(self._pop_compilation(tenant, next(iter(self._kept[tenant].known))))
            num_entries, num_bytes = num_entries - 1, num_bytes - dropped[-1].num_bytes
        if dropped:
            self.free(dropped)

    def free(self, dropped: list[Any]) -> None:
        """Free `dropped` on the builder's thread. Freeing a large grammar takes milliseconds, for
        which no step may wait. The caller must keep no reference to the objects."""
        self._builder.put("", partial(_free, dropped))

    def stop_taking_over(self) -> None:
        """Leave all later grammars in processes, although this is slow, and drop the cached
        grammars, which are compiled again when requests need them. Called when a thread hangs in a
        grammar that was built in the engine process, which should not happen."""
        if self._processes is None or not self._processes.trusts_threads:
            return
        self._processes.trusts_threads = False
        logger.error("a grammar hangs in the engine; from now on processes follow all of them")
        kept = [each for tenant in self._kept.values() for each in tenant.known.values()]
        self._kept.clear()
        self.free(kept)

    def close(self) -> None:
        """End the threads and processes; abandon a hanging thread. A second call does nothing."""
        if self._processes is not None:
            self._processes.close()
        self._quick.stop_threads(len(self._threads))
        self._long.stop_threads(len(self._threads))
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._threads = []
        self._builder.close()

    def _start_threads(self, spec: GrammarSpec) -> None:
        """Start the threads, unless they run already."""
        if self._threads:
            return
        # The builder's thread imports the modules of `build` while a process compiles.
        self._builder.put("", partial(self._prepare, spec), is_first=True)
        works = [partial(self._work, self._quick, MOMENT, is_second=False)]
        works += [partial(self._work, self._long, self._limit, is_second=True)] * self._num_long
        for work in works:
            thread = threading.Thread(target=work, name="stratakv-grammars", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _prepare(self, spec: GrammarSpec, _: LimitedThread) -> None:
        with suppress(ValueError, ImportError):  # the compiling process reports the error
            self._ensure_backend().load_requirements(spec)

    def _work(self, queue: FairQueue[Compilation], limit: Limit, *, is_second: bool) -> None:
        """Compile the grammars of a queue until it ends. Runs on a thread that waits for
        processes."""
        while (compilation := queue.get()) is not None:
            if not self._claim_compilation(compilation):
                continue
            began = None
            try:
                if self._processes is not None:
                    self._processes.start_first_process()  # not part of any limit
                began = time.monotonic()
                self._try_out(compilation, limit, is_second)
            except Exception as caught:  # noqa: BLE001 - it is told, and logged
                self._set_error(compilation, caught)
                self._wake()
            if began is not None:
                queue.charge(compilation.tenant, time.monotonic() - began)

    def _claim_compilation(self, compilation: Compilation) -> bool:
        """Mark a compilation as begun, so that `give_up` keeps it. False if it was given up."""
        with self._beginning:
            compilation.has_begun = not compilation.is_done
            return compilation.has_begun

    def _try_out(self, compilation: Compilation, limit: Limit, is_second: bool) -> None:
        """Compile in a process. Afterwards the builder's thread builds the grammar, or the process
        keeps it. At the limit of a first try the compilation joins the long queue. Raises
        GrammarError, and the errors of a backend."""
        assert self._processes is not None
        try:
            tried = self._processes.try_out(compilation.spec, limit, is_second=is_second)
        except TooSlow:
            if is_second:
                raise
            with self._beginning:
                compilation.has_begun = False
            self._long.put(compilation.tenant, compilation)
            return
        words = np.frombuffer(tried.first_words, np.int32)
        if tried.process is not None:
            grammar = self._follow_apart(compilation.tenant, tried.process)
            _note_made(compilation, (grammar, words, tried.first_seconds))
            self._wake()
            return

        def take_over(backend: Backend) -> Made:
            return backend.build(compilation.spec, tried.form), words, tried.first_seconds

        self._builder.put(compilation.tenant, partial(self._run_here, compilation, take_over))

    def _follow_apart(self, tenant: str, process: FollowingProcess) -> Grammar:
        """Return a grammar that stays in its process. Above MOST_APART grammars in processes, end
        the process that has been idle longest. Raises NotNow if too many are in use."""
        grammar = GrammarApart(process, FOLLOW_LIMIT, tenant)
        with self._making_room:
            there = [each for made in self._apart if (each := made()) and not each.is_gone]
            own = [each for each in there if each.tenant == tenant]
            for some, most in ((own, MOST_APART_OF_TENANT), (there, MOST_APART)):
                if len([each for each in some if not each.is_gone]) >= most:
                    idle = [each for each in some if each.is_idle(_UNUSED_SECONDS)]
                    if not idle:
                        grammar.end_process()
                        raise NotNow(
                            f"{len(some)} grammars that take long are followed already; try "
                            "later, or make it simpler"
                        )
                    min(idle, key=lambda each: each.used).end_process()
            self._apart = [weakref.ref(each) for each in (*there, grammar)]
        return grammar

    def _compile_here(self, compilation: Compilation, thread: LimitedThread) -> None:
        """Compile a grammar on the builder's thread, in an engine without grammar processes."""

        def make(backend: Backend) -> Made:
            grammar = backend.compile(compilation.spec)
            words = np.zeros(self._num_words, np.int32)
            if grammar.num_bytes <= MOST_BYTES:
                began = time.thread_time()
                grammar.matcher().fill(words)
                return grammar, words, time.thread_time() - began
            return grammar, words, 0.0

        if self._claim_compilation(compilation):
            self._run_here(compilation, make, thread)

    def _run_here(
        self, compilation: Compilation, make: Callable[[Backend], Made], thread: LimitedThread
    ) -> None:
        """Make the grammar on the builder's thread, and store it or its error."""
        made, error, began = None, None, 0.0
        try:
            backend = (
                self._ensure_backend()
            )  # time to read a vocabulary and to import counts in no limit
            if not thread.next_piece(partial(self._builder.set_current, compilation)):
                return
            began = time.monotonic()
            # The priority falls only now: an import holds locks for which steps may wait.
            thread.give_way()
            made = make(backend)
            if made[0].num_bytes > MOST_BYTES:
                raise GrammarError(
                    f"compiled, it takes {made[0].num_bytes} bytes, and at most {MOST_BYTES} may "
                    "be; make it simpler"
                )
        except Exception as caught:  # noqa: BLE001 - it is told, and logged
            error = caught

        if began:
            self._builder.jobs.charge(compilation.tenant, time.monotonic() - began)

        def note() -> None:
            self._builder.at = None
            if error is not None:
                self._set_error(compilation, error)
            elif made is not None:
                _note_made(compilation, made)

        if thread.next_piece(note):
            self._wake()

    def _ensure_backend(self) -> Backend:
        """Open the backend once, on the builder's thread."""
        if self._backend is None:
            self._backend = self._open_backend()
        return self._backend

    def _set_error(self, compilation: Compilation, caught: Exception) -> None:
        text = str(caught) or type(caught).__name__
        if not isinstance(caught, ValueError | ImportError):  # an unexpected error
            logger.error("a grammar's backend failed", exc_info=caught)
            text = f"{type(caught).__name__}: {caught}"
        compilation.may_be_later = isinstance(caught, NotNow)
        compilation.error = text

    def _give_up(self, compilation: Compilation, error: str) -> bool:
        """Fail a waiting compilation with `error`. Return False if it had begun or was done."""
        with self._beginning:
            if compilation.has_begun or compilation.is_done:
                return False
            compilation.may_be_later = True
            compilation.error = error
        for queue in (self._quick, self._long):
            queue.discard(compilation.tenant, compilation)
        del self._waiting[compilation.tenant, compilation.spec]
        self._shares.remove_tenant(compilation.tenant)
        return True

    def _displace(self, tenant: str) -> None:
        """Fail the tenant's last unbegun compilation, to make room for another tenant."""
        own = [each for each in self._waiting.values() if each.tenant == tenant]
        if any(self._give_up(each, _DISPLACED) for each in reversed(own)):
            self.num_failed += 1

    def _take_note(self, key: tuple[str, GrammarSpec], compilation: Compilation) -> None:
        """Count a finished compilation; cache it unless a later request may compile it again."""
        del self._waiting[key]
        self._shares.remove_tenant(compilation.tenant)
        self.num_compiled += compilation.grammar is not None
        self.num_failed += compilation.grammar is None
        if not compilation.may_be_later:
            kept = self._kept.setdefault(compilation.tenant, _Kept())
            kept.known[compilation.spec] = compilation
            kept.num_bytes += compilation.num_bytes

    def _pop_compilation(self, tenant: str, spec: GrammarSpec) -> Compilation:
        kept = self._kept[tenant]
        compilation = kept.known.pop(spec)
        kept.num_bytes -= compilation.num_bytes
        if not kept.known:
            del self._kept[tenant]
        return compilation


def _note_made(compilation: Compilation, made: Made) -> None:
    grammar, compilation.first_words, compilation.first_seconds = made
    compilation.grammar = grammar
