# SPDX-License-Identifier: Apache-2.0
"""Large grammars are tried out in a process: what it finds out, and how it ends without harm."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stratakv.engine.options import EMBEDDED_MODEL
from stratakv.engine.structured import compile_messages, compile_pool, compile_process
from stratakv.engine.structured.backends import open_backend
from stratakv.engine.structured.base import GrammarError, NotNow
from stratakv.engine.structured.compile_pool import CompilePool
from stratakv.engine.structured.compiler import COMPILE_LIMIT, Compilation, GrammarCompiler
from stratakv.engine.structured.limited_thread import Limit
from stratakv.engine.structured_params import GrammarSpec, Kind, StructuredOutputsParams

from .vocabularies import END, VOCAB, embedded

WAIT_SECONDS = 120.0
MANY_RULES = GrammarSpec(
    Kind.GRAMMAR, "root ::= " + " | ".join(f'"{number}"' for number in range(4000))
)


def object_of(num_properties: int) -> GrammarSpec:
    properties = {f"property {number}": {"type": "integer"} for number in range(num_properties)}
    return StructuredOutputsParams(json={"type": "object", "properties": properties}).spec


FEW_RULES = GrammarSpec(Kind.GRAMMAR, "root ::= " + " | ".join(f'"{n}"' for n in range(90)))


def pool_of(**fields: Any) -> CompilePool:
    limit = fields.pop("limit", COMPILE_LIMIT)
    made = CompilePool(
        fields.pop("backend", "auto"), EMBEDDED_MODEL, VOCAB, (END,), limit, **fields
    )
    made._are_last = False  # other tests may have all processors
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    made = pool_of()
    yield made
    made.close()


def test_only_what_may_take_long_is_tried_out(pool: CompilePool) -> None:
    assert not pool.is_needed(object_of(20))
    assert not pool.is_needed(GrammarSpec(Kind.REGEX, "((a+)+)+b"))  # llguidance counts
    assert pool.is_needed(MANY_RULES) and pool.is_needed(object_of(200))
    xgrammar = pool_of(backend="xgrammar")
    assert xgrammar.is_needed(GrammarSpec(Kind.REGEX, "((a+)+)+b"))
    assert not xgrammar.is_needed(object_of(20))
    for text in ('{"properties": 5}', '{"items": {"properties": true}}', '{"allOf": 3}'):
        assert not xgrammar.is_needed(GrammarSpec(Kind.JSON, text))  # xgrammar says what is wrong


def test_a_large_grammar_is_compiled_here_after_its_trial_as_without(
    pool: CompilePool, request: pytest.FixtureRequest
) -> None:
    backend = open_backend("auto", embedded)
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=VOCAB, pool=pool)
    request.addfinalizer(compiler.close)

    def compiled(spec: GrammarSpec) -> Compilation:
        compilation = compiler.ask(spec)
        wait_for(lambda: (compiler.collect(), compilation.is_done)[1])
        return compilation

    small = compiled(object_of(20))
    assert small.grammar is not None and not pool.process_ids
    for spec in (MANY_RULES, object_of(200), object_of(64)):
        tried = compiled(spec)
        assert tried.grammar is not None and tried.first_words is not None, tried.error
        row = np.zeros_like(tried.first_words)
        direct = backend.compile(spec)
        direct.matcher().fill(row)
        assert (row == tried.first_words).all()
        assert tried.grammar.is_bounded and type(tried.grammar) is type(direct)
    [pid] = pool.process_ids
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 10)
    # Linux divides processors among sessions first: in another one it would give no way to this
    # one. The group is for Ctrl-C.
    assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)
    wrong = GrammarSpec(Kind.GRAMMAR, MANY_RULES.text + " | nobody")
    assert "nobody" in compiled(wrong).error
    assert pool.process_ids == [pid]  # a grammar that is wrong does it no harm
    compiler.close()
    assert is_gone(pid) and not pool.process_ids


def test_what_takes_too_long_or_too_much_memory_is_refused_and_the_next_is_not() -> None:
    for limits, said in (
        ({"limit": Limit(cpu_seconds=0.2)}, "more than 0.2 s to compile"),
        ({"memory_bytes": 16 * 1024**2}, "16777216 bytes of memory"),
    ):
        pool = pool_of(**limits)
        try:
            with pytest.raises(GrammarError, match=said) as raised:
                pool.try_out(object_of(5000))
            # Who killed a process, its limit on memory or somebody else, nobody can tell.
            assert isinstance(raised.value, NotNow) == ("memory" in said)
            assert not pool.process_ids
            assert pool.try_out(FEW_RULES).text
        finally:
            pool.close()


def test_a_process_that_is_killed_fails_the_grammar_that_it_is_at_alone() -> None:
    pool, errors = pool_of(), []

    def try_out() -> None:
        with pytest.raises(GrammarError) as raised:
            pool.try_out(MANY_RULES)
        errors.append(str(raised.value))

    try:
        first = pool.try_out(MANY_RULES)
        [pid] = pool.process_ids
        os.kill(pid, signal.SIGSTOP)
        asking = threading.Thread(target=try_out)
        asking.start()
        wait_for(lambda: bool(pool._busy))
        os.kill(pid, signal.SIGKILL)
        asking.join(WAIT_SECONDS)
        assert "ended by signal 9" in errors[0]
        assert pool.try_out(MANY_RULES).text == first.text  # by another one
        [pid] = pool.process_ids
        os.kill(pid, signal.SIGSTOP)
        asking = threading.Thread(target=try_out)
        asking.start()
        wait_for(lambda: bool(pool._busy))
        pool.close()  # while one waits
        asking.join(WAIT_SECONDS)
        assert errors[1] == "the engine ends" and is_gone(pid)
        with pytest.raises(GrammarError, match="the engine ends"):
            pool.try_out(MANY_RULES)
    finally:
        pool.close()


def test_a_process_that_was_killed_between_two_grammars_fails_none() -> None:
    pool = pool_of()
    try:
        first = pool.try_out(FEW_RULES)
        [pid] = pool.process_ids
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pool._idle[0].has_ended)
        assert pool.try_out(FEW_RULES).text == first.text
        assert pid not in pool.process_ids and len(pool.process_ids) == 1
    finally:
        pool.close()


def test_processes_that_end_leave_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_COMMAND", ("true",))
    pool, before = pool_of(), len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(5):
            with pytest.raises(NotNow, match=r"ended with status 0|ended by signal 9"):
                pool.try_out(FEW_RULES)
        assert len(os.listdir("/proc/self/fd")) == before and not pool.process_ids
    finally:
        pool.close()


def test_limits_of_whoever_runs_the_engine_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = 10**6  # seconds: below infinity, where a process that asks for that is refused
    command = ("bash", "-c", f'ulimit -t {hard}; ulimit -v {2**33}; exec "$@"', "-")
    monkeypatch.setattr(compile_pool, "_COMMAND", (*command, *compile_pool._COMMAND))
    pool = pool_of()
    try:
        assert pool.try_out(FEW_RULES).text
        [pid] = pool.process_ids
        soft, kept = resource.prlimit(pid, resource.RLIMIT_CPU)
        assert soft < 100 and kept == hard
    finally:
        pool.close()


def test_a_model_without_a_tokenizer_is_said_to_be_one(tmp_path: Any) -> None:
    pool = CompilePool("auto", tmp_path, VOCAB, (END,), COMPILE_LIMIT)
    try:
        with pytest.raises(GrammarError, match=r"holds no tokenizer\.json"):
            pool.try_out(MANY_RULES)
        assert not pool.process_ids
    finally:
        pool.close()


def test_what_nothing_can_follow_is_refused_by_the_trial() -> None:
    """Here compiling such a grammar again would take seconds beside the steps."""
    pool = pool_of()
    try:
        with pytest.raises(GrammarError, match="Current row has"):
            pool.try_out(object_of(1500))
        # What only some answers come to may be asked for.
        assert pool.try_out(MANY_RULES).num_bytes > 2**20
    finally:
        pool.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")
def test_a_process_without_a_processor_gives_way_to_one_with_a_niceness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, seen = pool_of(), []
    pool._are_last = True
    monkeypatch.setattr(compile_messages, "LOOK_SECONDS", 0.0)  # looked at before it answers
    monkeypatch.setattr(compile_pool, "STARVED_SECONDS", 0.0)
    monkeypatch.setattr(compile_pool, "_STARVED_SHARE", 10.0)  # more than there is of one
    is_starved = compile_pool._Process._look_at_share

    def look(process: Any, began: float, cpu: float) -> None:
        seen.append(process.pid)
        is_starved(process, began, cpu)

    monkeypatch.setattr(compile_pool._Process, "_look_at_share", look)
    try:
        assert pool.try_out(FEW_RULES).text
        [pid] = pool.process_ids
        assert seen[0] != pid and is_gone(seen[0])
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        assert pool.try_out(FEW_RULES).text and pool.process_ids == [pid]
    finally:
        pool.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")
def test_a_process_takes_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("sys.argv", ["", str(theirs.detach()), "last"])
    ours.close()  # so that it ends at once
    asked: list[Any] = []
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *each: asked.append(each[:2]))
    assert compile_process.main() == 0
    assert asked == [10, (0, os.SCHED_IDLE)]


def test_whoever_is_last_sleeps_in_between_while_it_computes() -> None:
    """Also in a call that comes back to Python at its end only."""

    def sleeps(rounds: int) -> tuple[int, float]:
        """In one call, and the processor's seconds that it took."""
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.process_time()
        hashlib.pbkdf2_hmac("sha256", b"any", b"any", rounds)
        seconds = time.process_time() - began
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, seconds

    before = signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        with compile_process._standing_aside():
            rounds, seconds = 1000, 0.0
            while seconds < 0.02:
                rounds *= 2
                count, seconds = sleeps(rounds)
        assert count >= 5
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        signal.setitimer(signal.ITIMER_REAL, *before)
