# SPDX-License-Identifier: Apache-2.0
"""How threads of grammars are scheduled, and which of them frees what is dropped."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator

import pytest

from stratakv.engine.structured import limited_thread
from stratakv.engine.structured.base import Backend, Grammar, Matcher
from stratakv.engine.structured.compiler import GrammarCompiler
from stratakv.engine.structured.limited_thread import Job, Limit, LimitedThread
from stratakv.engine.structured_params import GrammarSpec

from .test_limits import Spinner, spec
from .waiting import WAIT_SECONDS, wait_for

LONG = Limit(cpu_seconds=WAIT_SECONDS)
needs_linux = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")


@pytest.fixture
def jobs() -> Iterator[queue.SimpleQueue[Job | None]]:
    made: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    thread = LimitedThread("gives way", made)
    made.put(lambda given: given.give_way())
    yield made
    made.put(None)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive


def policy_of(jobs: queue.SimpleQueue[Job | None]) -> int:
    """That of the thread, once it has done what is before."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    jobs.put(lambda _: told.put(os.sched_getscheduler(0)))
    return told.get(timeout=WAIT_SECONDS)


@needs_linux
def test_a_thread_that_gives_way_does_so_until_it_has_no_processor(
    jobs: queue.SimpleQueue[Job | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert policy_of(jobs) == os.SCHED_IDLE
    begun, end, threads = threading.Event(), threading.Event(), []

    def wait(thread: LimitedThread) -> None:
        """As one at which the thread is not run."""
        threads.append(thread)
        begun.set()
        assert end.wait(WAIT_SECONDS)
        thread.give_way()  # not a second time

    jobs.put(wait)
    assert begun.wait(WAIT_SECONDS)
    assert not threads[0].is_over(LONG)
    try:
        assert os.sched_getscheduler(threads[0]._thread.native_id or 0) == os.SCHED_IDLE
        monkeypatch.setattr(limited_thread, "STARVED_SECONDS", 0.0)
        monkeypatch.setattr(limited_thread, "_STARVED_SHARE", 2.0)  # more than there is
        assert not threads[0].is_over(LONG)
    finally:
        end.set()
    assert policy_of(jobs) == os.SCHED_OTHER


class FreedGrammar(Grammar):
    num_bytes, is_bounded = 2000, True

    def __init__(self, freed: list[str]) -> None:
        weakref.finalize(self, lambda: freed.append(threading.current_thread().name))

    def matcher(self) -> Matcher:
        return Spinner(compiles=True).compile(spec("any")).matcher()


class Freed(Backend):
    def __init__(self) -> None:
        self.freed: list[str] = []
        self.policies: list[int] = []

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.policies.append(os.sched_getscheduler(0))
        return FreedGrammar(self.freed)


@needs_linux
def test_grammars_are_compiled_and_freed_where_no_step_waits() -> None:
    """To free a large one takes ten milliseconds."""
    backend, opened = Freed(), []

    def open_backend() -> Backend:
        opened.append(os.sched_getscheduler(0))
        return backend

    compiler = GrammarCompiler(open_backend, lambda: None, vocab_size=40, cache_bytes=2500)
    try:
        for text in "abc":
            compilation = compiler.ask(spec(text))
            wait_for(lambda it=compilation: (compiler.collect(), it.is_done)[1])
            compiler.collect()
        del compilation
        wait_for(lambda: len(backend.freed) == 2)
        assert set(backend.freed) == {"stratakv-grammar"}
        # What it imports is not held up by others.
        assert opened == [os.SCHED_OTHER] and set(backend.policies) == {os.SCHED_IDLE}
    finally:
        compiler.close()
