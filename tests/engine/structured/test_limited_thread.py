# SPDX-License-Identifier: Apache-2.0
"""How threads of grammars are scheduled, and which of them frees what is dropped."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.request import Request, RequestStatus, pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.structured_params import GrammarSpec, StructuredOutputsParams
from stratakv.engine.structured.base import LARGE_BYTES, Backend, Form, Grammar, Matcher
from stratakv.engine.structured.compiler import GrammarCompiler
from stratakv.engine.structured.guidance_backend import (
    GuidanceBackend,
    _GuidanceGrammar,
    heap_bytes,
)
from stratakv.engine.structured.manager import GrammarManager
from stratakv.engine.structured.processes import limited_thread
from stratakv.engine.structured.processes.grammar_processes import GrammarProcesses, Tried
from stratakv.engine.structured.processes.limited_thread import Job, Limit, LimitedThread

from .test_limits import Spinner, spec
from .vocabularies import allowed, embedded
from .waiting import WAIT_SECONDS, wait_for

LONG = Limit(cpu_seconds=WAIT_SECONDS)
needs_linux = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")


@pytest.fixture
def comes_back() -> None:
    """Skips where no thread may, as in most containers."""
    if not limited_thread._may_come_back():
        pytest.skip("threads that are SCHED_IDLE stay so: it takes CAP_SYS_NICE or RLIMIT_NICE")


@pytest.fixture
def jobs() -> Iterator[queue.SimpleQueue[Job | None]]:
    made: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    thread = LimitedThread("gives way", made)
    yield made
    made.put(None)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive


def policy_of(jobs: queue.SimpleQueue[Job | None], *, gives_way: bool) -> int:
    """That of the thread, once it has done what is before."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def tell(thread: LimitedThread) -> None:
        if gives_way:
            thread.give_way()
        told.put(os.sched_getscheduler(0))

    jobs.put(tell)
    return told.get(timeout=WAIT_SECONDS)


@needs_linux
def test_a_thread_that_gives_way_does_so_until_it_has_no_processor(
    jobs: queue.SimpleQueue[Job | None], monkeypatch: pytest.MonkeyPatch, comes_back: None
) -> None:
    assert policy_of(jobs, gives_way=True) == os.SCHED_IDLE
    assert policy_of(jobs, gives_way=False) == os.SCHED_OTHER  # it did so for one job
    begun, end, threads = threading.Event(), threading.Event(), []

    def wait(thread: LimitedThread) -> None:
        """As one at which the thread is not run."""
        threads.append(thread)
        thread.give_way()
        begun.set()
        assert end.wait(WAIT_SECONDS)

    jobs.put(wait)
    assert begun.wait(WAIT_SECONDS)
    own = threads[0]._thread.native_id or 0
    assert not threads[0].is_over(LONG)
    try:
        assert os.sched_getscheduler(own) == os.SCHED_IDLE
        monkeypatch.setattr(limited_thread, "STARVED_SECONDS", 0.0)
        monkeypatch.setattr(limited_thread, "_STARVED_SHARE", 2.0)  # more than there is
        assert not threads[0].is_over(LONG)
        assert os.sched_getscheduler(own) == os.SCHED_OTHER
    finally:
        end.set()
    assert policy_of(jobs, gives_way=True) == os.SCHED_OTHER


class Clocks:
    """In the place of `time`, for a thread that is run for a part of the time."""

    def __init__(self) -> None:
        self.cpu = self.now = 0.0

    def thread_time(self) -> float:
        return self.cpu

    def clock_gettime(self, clock: int) -> float:
        return self.cpu

    def monotonic(self) -> float:
        return self.now

    def pthread_getcpuclockid(self, thread: int) -> int:
        return 0


@needs_linux
@pytest.mark.parametrize(("cpu", "policy"), [(0.07, "SCHED_OTHER"), (0.1, "SCHED_IDLE")])
def test_many_short_jobs_of_a_thread_without_a_processor_are_found(
    jobs: queue.SimpleQueue[Job | None],
    monkeypatch: pytest.MonkeyPatch,
    comes_back: None,
    cpu: float,
    policy: str,
) -> None:
    """Of which none takes so long that it would be found by itself, behind one that had all it
    wanted, and between which there is nothing to do."""
    clocks = Clocks()
    policy_of(jobs, gives_way=True)
    policy_of(jobs, gives_way=False)  # the one before has read the clocks for the last time
    monkeypatch.setattr(limited_thread, "time", clocks)

    def take(thread: LimitedThread, seconds: float, cpu: float) -> None:
        thread.give_way()
        clocks.now += seconds
        clocks.cpu += cpu

    jobs.put(partial(take, seconds=100.0, cpu=100.0))
    for _ in range(4):
        jobs.put(partial(take, seconds=1.5, cpu=cpu))
        policy_of(jobs, gives_way=False)
        clocks.now += 10.0
    assert policy_of(jobs, gives_way=True) == getattr(os, policy)


@needs_linux
def test_no_thread_gives_way_that_could_not_come_back(
    jobs: queue.SimpleQueue[Job | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux has it for whoever has neither CAP_SYS_NICE nor a large RLIMIT_NICE."""
    scheduled, setscheduler = [], os.sched_setscheduler

    def refuse(thread_id: int, policy: int, param: os.sched_param) -> None:
        if policy == os.SCHED_OTHER:
            raise PermissionError
        scheduled.append(thread_id)
        setscheduler(thread_id, policy, param)

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    limited_thread._may_come_back.cache_clear()
    try:
        assert policy_of(jobs, gives_way=True) == os.SCHED_OTHER
        assert len(scheduled) == 1  # by a thread that ended then
    finally:
        limited_thread._may_come_back.cache_clear()


class FreedGrammar(Grammar):
    num_bytes, is_bounded = 2000, True

    def __init__(self, freed: list[str]) -> None:
        weakref.finalize(self, lambda: freed.append(threading.current_thread().name))

    def matcher(self) -> Matcher:
        return Spinner(compiles=True).compile(spec("any")).matcher()


class Freed(Backend):
    """Its grammars note which thread freed them."""

    def __init__(self) -> None:
        self.freed: list[str] = []
        self.policies: list[int] = []

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.policies.append(os.sched_getscheduler(0))
        return FreedGrammar(self.freed)

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        return self.compile(spec)


class NoProcesses(GrammarProcesses):
    """All grammars are taken over; a process that is started would inherit the policy."""

    def __init__(self) -> None:
        self.policies: list[int] = []

    def try_out(self, spec: GrammarSpec, limit: Limit, *, is_second: bool = False) -> Tried:
        self.policies.append(os.sched_getscheduler(0))
        return Tried(Form("any", spec.text, is_bounded=True), bytes(8), 0.0, None)

    def start_first_process(self) -> None:
        pass

    def close(self) -> None:
        pass


@needs_linux
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_grammars_are_compiled_and_freed_where_no_step_waits(is_taken_over: bool) -> None:
    """To free a large one takes ten milliseconds."""
    policy = os.SCHED_IDLE if limited_thread._may_come_back() else os.SCHED_OTHER
    backend, opened = Freed(), []

    def open_backend() -> Backend:
        opened.append(os.sched_getscheduler(0))
        return backend

    trials = NoProcesses() if is_taken_over else None
    compiler = GrammarCompiler(
        open_backend, lambda: None, vocab_size=40, cache_bytes=2500, processes=trials
    )
    try:
        for text in "abc":
            compilation = compiler.ask(spec(text))
            wait_for(lambda it=compilation: (compiler.poll_compilations(), it.is_done)[1])
            compiler.poll_compilations()
        del compilation
        wait_for(lambda: len(backend.freed) == 2)
        assert set(backend.freed) == {"stratakv-grammar"}
        # What it imports is not held up by others.
        assert opened == [os.SCHED_OTHER] and set(backend.policies) == {policy}
        assert trials is None or trials.policies == [os.SCHED_OTHER] * 3
    finally:
        compiler.close()


def test_the_grammar_of_a_request_that_ends_is_freed_where_no_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody else has it any more."""
    monkeypatch.setattr(FreedGrammar, "num_bytes", LARGE_BYTES)
    backend = Freed()
    manager = GrammarManager(Path(), 40, (), most_waiting=1, opener=lambda: backend)
    manager._compiler._cache_bytes = 0
    try:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        request = Request("r", [5], params)
        manager.ask(AddRequest("r", pack_token_ids([5]), params), request)
        wait_for(lambda: manager.is_due)
        manager.activate_grammar(*manager.take_compiled())
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        let_go = threading.Event()  # of all that the cache dropped
        manager._compiler._builder.put("", lambda _: let_go.set())
        assert let_go.wait(WAIT_SECONDS) and not backend.freed
        manager.begin_masks([])
        wait_for(lambda: backend.freed)
        assert backend.freed == ["stratakv-grammar"]
    finally:
        manager.close()


def test_a_large_grammar_of_guidance_is_freed_before_its_object_is() -> None:
    """For that holds the interpreter's lock all the while."""
    backend = GuidanceBackend(embedded())
    wanted = StructuredOutputsParams(choice=[str(number) for number in range(2000)]).spec
    text = backend.try_out(wanted)[0].text
    small = backend.build(wanted, Form("guidance", text, num_bytes=LARGE_BYTES - 1))
    before = heap_bytes()
    grammar = backend.build(wanted, Form("guidance", text, num_bytes=LARGE_BYTES))
    matcher = grammar.matcher()
    assert isinstance(grammar, _GuidanceGrammar) and isinstance(small, _GuidanceGrammar)
    objects, taken = (small._prototype, grammar._prototype), heap_bytes() - before
    del grammar, small
    assert allowed(matcher) and not any(each.is_error() for each in objects)
    del matcher
    assert [each.is_error() for each in objects] == [False, True]
    assert heap_bytes() - before < taken / 2
