# SPDX-License-Identifier: Apache-2.0
"""Grammars are compiled in processes: what comes of that, and how they end without harm."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.request.structured_params import (
    GrammarSpec,
    Kind,
    StructuredOutputsParams,
)
from stratakv.engine.structured import compiler as compiler_module
from stratakv.engine.structured.backends import open_backend
from stratakv.engine.structured.base import GrammarError, NotNow
from stratakv.engine.structured.compiler import COMPILE_LIMIT, Compilation, GrammarCompiler
from stratakv.engine.structured.processes import grammar_messages as messages
from stratakv.engine.structured.processes import grammar_process, grammar_processes
from stratakv.engine.structured.processes.followed_apart import GrammarApart
from stratakv.engine.structured.processes.grammar_processes import GrammarProcesses, TooSlow
from stratakv.engine.structured.processes.limited_thread import Limit
from stratakv.tiers.processes.python_command import python_command

from .vocabularies import END, VOCAB, allowed, embedded, walk

WAIT_SECONDS = 120.0
FOLLOW = Limit(cpu_seconds=5.0)
MANY_RULES = GrammarSpec(
    Kind.GRAMMAR, "root ::= " + " | ".join(f'"{number}"' for number in range(1500))
)
FEW_RULES = GrammarSpec(Kind.GRAMMAR, "root ::= " + " | ".join(f'"{n}"' for n in range(90)))
# Many seconds of a processor, in whichever version.
ENDLESS = StructuredOutputsParams(
    json={
        "type": "object",
        "patternProperties": {f"^(a?){{{n}}}b{n}$": {"type": "string"} for n in range(1, 300)},
    }
).spec


def object_of(num_properties: int) -> GrammarSpec:
    properties = {f"property {number}": {"type": "integer"} for number in range(num_properties)}
    return StructuredOutputsParams(json={"type": "object", "properties": properties}).spec


def processes_of(backend: str = "guidance", **fields: Any) -> GrammarProcesses:
    made = GrammarProcesses(backend, EMBEDDED_MODEL, VOCAB, (END,), **fields)
    made._busy_until = float("inf")  # other tests may have all processors
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    made = processes_of()
    yield made
    made.close()


@pytest.fixture(scope="module")
def auto() -> Iterator[GrammarProcesses]:
    made = processes_of("auto")
    yield made
    made.close()


def test_what_a_process_compiles_is_taken_over_as_it_would_be_compiled_here(
    auto: GrammarProcesses, request: pytest.FixtureRequest
) -> None:
    backend = open_backend("auto", embedded)
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=VOCAB, processes=auto)

    def compiled(spec: GrammarSpec) -> Compilation:
        compilation = compiler.ask(spec)
        wait_for(lambda: (compiler.poll_compilations(), compilation.is_done)[1])
        return compilation

    for spec in (MANY_RULES, object_of(20), object_of(80), GrammarSpec(Kind.REGEX, "[ab]{2,9}c")):
        tried = compiled(spec)
        assert tried.grammar is not None and tried.first_words is not None, tried.error
        row = np.zeros_like(tried.first_words)
        direct = backend.compile(spec)
        direct.matcher().fill(row)
        assert (row == tried.first_words).all()
        own = np.zeros_like(tried.first_words)
        tried.grammar.matcher().fill(own)
        assert (row == own).all()
        assert tried.grammar.is_bounded and type(tried.grammar) is type(direct)
    [pid] = auto.process_ids
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own_niceness + 10)
    wrong = GrammarSpec(Kind.GRAMMAR, MANY_RULES.text + " | nobody")
    assert "nobody" in compiled(wrong).error
    assert auto.process_ids == [pid]  # a grammar that is wrong does it no harm
    first = auto.first_process_id
    compiler.close()
    assert is_gone(pid) and is_gone(first) and not auto.process_ids


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_y03_no_small_regex_is_compiled_in_the_engine(backend: str) -> None:
    """3.9 KB of it took 18 seconds on the engine's own thread, and a thread for ever."""
    made = processes_of(backend)
    compiler = GrammarCompiler(
        lambda: open_backend(backend, embedded), lambda: None, vocab_size=VOCAB, processes=made,
        limit=Limit(cpu_seconds=0.4),
    )  # fmt: skip
    try:
        threads = set(threading.enumerate())
        asked = [
            compiler.ask(GrammarSpec(Kind.REGEX, "a?" * count + "a" * count), "hostile")
            for count in (600, 601)
        ]
        honest = compiler.ask(GrammarSpec(Kind.REGEX, "[0-9]{3}"), "honest")
        wait_for(lambda: (compiler.poll_compilations(), honest.is_done)[1])
        wait_for(lambda: (compiler.poll_compilations(), all(each.is_done for each in asked))[1])
        assert honest.grammar is not None, honest.error
        assert all(each.error for each in asked)
        later = compiler.ask(GrammarSpec(Kind.REGEX, "[a-f]{3}"), "hostile")
        wait_for(lambda: (compiler.poll_compilations(), later.is_done)[1])
        assert later.grammar is not None and made.trusts_threads
    finally:
        compiler.close()
    assert not set(threading.enumerate()) - threads and not made.process_ids


def test_what_takes_too_long_or_too_much_memory_is_refused_and_the_next_is_not() -> None:
    for wanted, limit, memory, said in (
        (ENDLESS, Limit(cpu_seconds=0.1), 2**30, r"more than 0\.1 s to compile"),
        (object_of(3000), COMPILE_LIMIT, 4 * 1024**2, "4194304 bytes of memory"),
    ):
        made = processes_of(memory_bytes=memory)
        try:
            made.try_out(FEW_RULES, COMPILE_LIMIT)
            with pytest.raises(GrammarError, match=said) as raised:
                made.try_out(wanted, limit)
            # Who killed a process, its limit on memory or somebody else, nobody can tell.
            assert isinstance(raised.value, NotNow) == ("memory" in said)
            assert isinstance(raised.value, TooSlow) != ("memory" in said)
            assert not made.process_ids
            first = made.first_process_id
            assert made.try_out(FEW_RULES, COMPILE_LIMIT).form.text
            assert made.first_process_id == first  # which forks another one at once
        finally:
            made.close()


def test_a_process_that_is_killed_fails_the_grammar_that_it_is_at_alone() -> None:
    made, errors = processes_of(), []

    def try_out() -> None:
        with pytest.raises(GrammarError) as raised:
            made.try_out(MANY_RULES, COMPILE_LIMIT)
        errors.append(str(raised.value))

    def asking_of_one_that_sleeps() -> tuple[threading.Thread, int]:
        [pid] = made.process_ids
        os.kill(pid, signal.SIGSTOP)
        asking = threading.Thread(target=try_out)
        asking.start()
        wait_for(lambda: bool(made._busy))
        return asking, pid

    try:
        first = made.try_out(MANY_RULES, COMPILE_LIMIT)
        asking, pid = asking_of_one_that_sleeps()
        os.kill(pid, signal.SIGKILL)
        asking.join(WAIT_SECONDS)
        assert "ended by signal 9" in errors[0]
        assert made.try_out(MANY_RULES, COMPILE_LIMIT).form.text == first.form.text  # by another
        asking, pid = asking_of_one_that_sleeps()
        made.close()  # while one waits
        asking.join(WAIT_SECONDS)
        assert errors[1] == "the engine ends" and is_gone(pid)
        with pytest.raises(GrammarError, match="the engine ends"):
            made.try_out(MANY_RULES, COMPILE_LIMIT)
    finally:
        made.close()


@pytest.mark.parametrize("which", ["the one that compiles", "the first"])
def test_a_process_that_was_killed_between_two_grammars_fails_none(which: str) -> None:
    made = processes_of()
    try:
        first = made.try_out(FEW_RULES, COMPILE_LIMIT)
        [pid] = made.process_ids
        killed = pid if which != "the first" else made.first_process_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)  # with the first one its children end
        wait_for(lambda: made._idle[0].has_ended)
        assert made.try_out(FEW_RULES, COMPILE_LIMIT).form.text == first.form.text
        assert pid not in made.process_ids and len(made.process_ids) == 1
    finally:
        made.close()


def test_processes_that_end_leave_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = processes_of()
    try:
        made.try_out(FEW_RULES, COMPILE_LIMIT)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            made._idle[0].kill_and_reap()
            made.try_out(FEW_RULES, COMPILE_LIMIT)
        assert len(os.listdir("/proc/self/fd")) == before and len(made.process_ids) == 1
        made.close()
        assert len(os.listdir("/proc/self/fd")) <= before - 3
    finally:
        made.close()
    monkeypatch.setattr(grammar_processes, "_COMMAND", ("true",))
    made, before = processes_of(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NotNow, match="came up"):
            made.try_out(FEW_RULES, COMPILE_LIMIT)
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_limits_of_whoever_runs_the_engine_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = 10**6  # seconds: below infinity, where a process that asks for that is refused
    command = ("bash", "-c", f'ulimit -t {hard}; ulimit -v {2**33}; exec "$@"', "-")
    monkeypatch.setattr(grammar_processes, "_COMMAND", (*command, *grammar_processes._COMMAND))
    made = processes_of()
    try:
        assert made.try_out(FEW_RULES, COMPILE_LIMIT).form.text
        [pid] = made.process_ids
        soft, kept = resource.prlimit(pid, resource.RLIMIT_CPU)
        assert soft < 100 and kept == hard
    finally:
        made.close()


def test_a_model_without_a_tokenizer_is_said_to_be_one(tmp_path: Any) -> None:
    made = GrammarProcesses("guidance", tmp_path, VOCAB, (END,))
    try:
        with pytest.raises(GrammarError, match=r"holds no tokenizer\.json"):
            made.try_out(MANY_RULES, COMPILE_LIMIT)
        assert not made.process_ids and made.first_process_id is None
    finally:
        made.close()


def test_what_nothing_can_follow_is_refused_by_the_process(processes: GrammarProcesses) -> None:
    """Else the first answer would find out, in the engine."""
    with pytest.raises(GrammarError, match="Current row has"):
        processes.try_out(object_of(600), COMPILE_LIMIT)
    # What only some answers come to may be asked for.
    assert processes.try_out(MANY_RULES, COMPILE_LIMIT).form.num_bytes > 2**18


def apart(processes: GrammarProcesses, spec: GrammarSpec, limit: Limit = FOLLOW) -> GrammarApart:
    """Followed by a process."""
    processes.trusts_threads = False
    try:
        tried = processes.try_out(spec, COMPILE_LIMIT)
    finally:
        processes.trusts_threads = True
    assert tried.process is not None
    return GrammarApart(tried.process, limit, "")


def test_y03_what_a_process_follows_is_followed_as_here(processes: GrammarProcesses) -> None:
    spec = StructuredOutputsParams(regex="(ab|cd){2,3}e?").spec
    there, here = apart(processes, spec), open_backend("guidance", embedded).compile(spec)
    matchers = [each.matcher() for each in (there, here, there)]
    for token in embedded().spell(b"ab"):
        assert [allowed(each) for each in matchers[:2]] == [allowed(matchers[1])] * 2
        assert all(each.accept(token) for each in matchers[:2])
    for each in matchers[:2]:  # also without a row in between
        for token in embedded().spell(b"cd"):
            assert each.accept(token)
        assert each.may_end and not each.accept(END)
        assert not each.accept(embedded().spell(b"x")[0])
        each.rollback(len(embedded().spell(b"cd")))
        assert not each.may_end
    assert allowed(matchers[0]) == allowed(matchers[1]) and allowed(matchers[2])
    assert there.num_matchers == 2 and not there.is_idle(0.0)
    matchers.clear()
    del each
    assert there.num_matchers == 0 and there.is_idle(-1.0)
    [pid] = [each for each in processes.process_ids if each == there.process._process.pid]
    del there
    assert is_gone(pid) and pid not in processes.process_ids


def test_y03_what_hangs_in_a_process_is_killed_with_it(processes: GrammarProcesses) -> None:
    spec = StructuredOutputsParams(regex="[ab]+c").spec
    hanging, other = apart(processes, spec, Limit(0.05)), apart(processes, spec)
    matcher, beside = hanging.matcher(), other.matcher()
    assert allowed(matcher) == allowed(beside)
    pid = hanging.process._process.pid
    spun = GrammarApart(hanging.process, Limit(-1.0), "")  # at the first look it is over
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TooSlow, match="to follow; make it simpler"):
        spun.matcher().fill(np.zeros(-(-VOCAB // 32), np.int32))
    assert hanging.is_gone and is_gone(pid)
    with pytest.raises(GrammarError, match="has ended; ask again"):
        matcher.rollback(0) or allowed(matcher)
    assert allowed(beside) and not other.is_gone


def test_y03_few_grammars_are_followed_apart(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch, threads_end: None
) -> None:
    """Of each tenant: each has a process. One that nobody follows gives way."""
    own = processes_of()
    own.trusts_threads = False
    compiler = GrammarCompiler(
        lambda: open_backend("guidance", embedded), lambda: None, vocab_size=VOCAB, processes=own
    )
    monkeypatch.setattr(compiler_module, "MOST_APART_OF_TENANT", 1)
    monkeypatch.setattr(compiler_module, "_UNUSED_SECONDS", -1.0)

    def compiled(text: str, tenant: str) -> Compilation:
        compilation = compiler.ask(GrammarSpec(Kind.REGEX, text), tenant)
        wait_for(lambda: (compiler.poll_compilations(), compilation.is_done)[1])
        compiler.poll_compilations()
        return compilation

    try:
        first = compiled("a+b", "x")
        assert isinstance(first.grammar, GrammarApart)
        matcher = first.grammar.matcher()
        refused = compiled("a+c", "x")
        assert refused.may_be_later and "are followed already" in refused.error
        assert compiled("a+c", "y").grammar is not None  # another tenant's
        del matcher
        second = compiled("a+c", "x")
        assert second.grammar is not None and first.grammar.is_gone
        again = compiled("a+b", "x")  # not the one that is gone
        assert again is not first and again.grammar is not None
    finally:
        compiler.close()


def test_random_answers_by_a_process_are_those_of_their_grammar(
    processes: GrammarProcesses, rng: Any
) -> None:
    there = apart(processes, StructuredOutputsParams(regex="[a-f]{1,4}-[0-9]{2}").spec)
    for _ in range(3):
        text = walk(there, rng)
        assert text is not None and text[-3] == "-"


def test_xgrammar_is_imported_by_the_first_process_without_torch() -> None:
    """Which takes seven seconds of a processor, and which it does not use."""
    code = (
        "import sys; from stratakv.engine.structured.processes "
        "import grammar_process as g; g._stand_in(); "
        "print('xgrammar' in sys.modules, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        python_command("-c", code), capture_output=True, text=True, check=True,
        timeout=WAIT_SECONDS, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")
def test_a_process_without_a_processor_gives_way_to_one_with_a_niceness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = processes_of(), []
    made._busy_until = 0.0
    monkeypatch.setattr(messages, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(grammar_processes, "STARVED_SECONDS", 0.0)
    monkeypatch.setattr(grammar_processes, "_STARVED_SHARE", 10.0)  # more than there is of one
    compile_it = grammar_processes._Process.compile

    def compile_and_note(process: Any, *asked: Any, **fields: Any) -> Any:
        seen.append((process.pid, os.sched_getscheduler(process.pid)))
        os.kill(process.pid, signal.SIGSTOP if process.is_last else signal.SIGCONT)
        return compile_it(process, *asked, **fields)

    monkeypatch.setattr(grammar_processes._Process, "compile", compile_and_note)
    try:
        assert made.try_out(FEW_RULES, COMPILE_LIMIT).form.text
        [pid] = made.process_ids
        assert seen[0][0] != pid and is_gone(seen[0][0])
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        assert made.try_out(FEW_RULES, COMPILE_LIMIT).form.text and made.process_ids == [pid]
        made._busy_until = 0.0  # later there are processors again
        assert made._are_last
    finally:
        made.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has it")
def test_a_process_takes_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.close()  # so that it ends at once
    asked: list[Any] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *each: asked.append(each[:2]))
    monkeypatch.setattr(grammar_process, "_limit_memory", asked.append)
    start = messages.Start("guidance", "", VOCAB, [], 5)
    with theirs, pytest.raises(EOFError):
        grammar_process._serve(theirs, open_backend("guidance", embedded), start, is_last=True)
    assert asked == [(0, os.SCHED_IDLE), 5]


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
        with grammar_process._standing_aside():
            rounds, seconds = 1000, 0.0
            while seconds < 0.02:
                rounds *= 2
                count, seconds = sleeps(rounds)
        assert count >= 5
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        signal.setitimer(signal.ITIMER_REAL, *before)
