# SPDX-License-Identifier: Apache-2.0
"""Grammars that would take for ever: they end within limits, and other requests go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.structured_params import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    Kind,
    StructuredOutputsParams,
)
from stratakv.engine.structured.backends import open_backend, why_missing
from stratakv.engine.structured.base import (
    Backend,
    Form,
    Grammar,
    GrammarError,
    Matcher,
    NotNow,
    Words,
)
from stratakv.engine.structured.compiler import (
    MOST_BYTES,
    MOST_PROCESSES,
    MOST_WAITING,
    Compilation,
    GrammarCompiler,
    TooManyGrammars,
)
from stratakv.engine.structured.processes.fair_queue import FairQueue, Shares
from stratakv.engine.structured.processes.grammar_processes import (
    GrammarProcesses,
    TooLate,
    TooSlow,
    Tried,
)
from stratakv.engine.structured.processes.limited_thread import Limit
from stratakv.tiers.settings.values import ConfigError

from ..conftest import Reference
from ..core.conftest import config_of, finish, prompt_of, request
from .waiting import SHORT, WAIT_SECONDS, wait_for


class Spinner(Backend):
    """Takes the processor for every grammar that is called `spin`, until `stop` is set; compiling
    it, or at its first token."""

    def __init__(self, *, compiles: bool) -> None:
        self.stop = threading.Event()
        self.compiles = compiles

    def spin(self, text: str) -> None:
        while text == "spin" and not self.stop.is_set():
            pass

    def compile(self, spec: GrammarSpec) -> Grammar:
        if not self.compiles:
            self.spin(spec.text)
        if spec.text.startswith("wrong"):
            raise GrammarError("wrong")
        return SpinningGrammar(self, spec.text)


class SpinningGrammar(Grammar):
    num_bytes = 1000

    def __init__(self, backend: Spinner, text: str) -> None:
        self.backend, self.text = backend, text
        if text == "large":
            self.num_bytes = MOST_BYTES + 1

    def matcher(self) -> Matcher:
        return SpinningMatcher(self)


class SpinningMatcher(Matcher):
    may_end = False

    def __init__(self, grammar: SpinningGrammar) -> None:
        self._grammar = grammar

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, words: Words) -> None:
        self._grammar.backend.spin(self._grammar.text)
        words[:] = 7


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(Kind.REGEX, text)


def test_one_that_does_not_stop_compiling_here_is_given_up(threads_end: None) -> None:
    """As only what the engine's own people open may, since nothing else is compiled here."""
    backend, woken = Spinner(compiles=False), threading.Event()
    compiler = GrammarCompiler(lambda: backend, woken.set, limit=SHORT, vocab_size=40)
    try:
        for number in range(5):
            hanging = compiler.ask(
                GrammarSpec(Kind.GRAMMAR, "spin", whitespace_pattern=f"{number}")
            )
            behind = compiler.ask(spec(f"b{number}"))
            wait_for(
                lambda h=hanging, b=behind: (compiler.poll_compilations(), h.is_done and b.is_done)[
                    1
                ]
            )
            assert "more than 0.05 s" in hanging.error
            assert behind.grammar is not None  # however many hang before
        compiler.poll_compilations()
        assert compiler.ask(hanging.spec) is hanging  # known, and not tried again
        assert (compiler.num_compiled, compiler.num_failed, compiler.num_found) == (5, 5, 1)
    finally:
        backend.stop.set()
        compiler.close()


class FakeProcesses(GrammarProcesses):
    """Stands where processes compile, each grammar until `go` is set; one called `slow…` takes
    longer than a moment, and one called `hangs…` than any limit."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []
        self.error: GrammarError | None = None
        self.trusts_threads = True

    def try_out(self, spec: GrammarSpec, limit: Limit, *, is_second: bool = False) -> Tried:
        self.asked.append(spec.text + " again" * is_second)
        assert self.go.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        if spec.text.startswith("hangs") or (spec.text.startswith("slow") and not is_second):
            raise TooSlow(f"more than {limit.cpu_seconds:g} s")
        if spec.text == "late":
            raise TooLate("the machine is busy")
        return Tried(Form("spinner", is_bounded=True), bytes(8), 0.0, None)

    def start_first_process(self) -> None:
        pass

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def fake(threads_end: None) -> Iterator[tuple[GrammarCompiler, FakeProcesses]]:
    backend, processes = Spinner(compiles=True), FakeProcesses()
    backend.build = lambda spec, form: backend.compile(spec)
    compiler = GrammarCompiler(
        lambda: backend, lambda: None, vocab_size=40, processes=processes, num_processes=1
    )
    yield compiler, processes
    compiler.close()


def until_done(compiler: GrammarCompiler, *compilations: Compilation) -> None:
    wait_for(lambda: (compiler.poll_compilations(), all(each.is_done for each in compilations))[1])
    compiler.poll_compilations()


def begun(compiler: GrammarCompiler, processes: FakeProcesses) -> Compilation:
    """One that is being tried out, so that others wait."""
    first = compiler.ask(spec("first"), "first")
    wait_for(lambda: processes.asked == ["first"])
    return first


def test_what_failed_for_another_reason_is_compiled_when_asked_for_again(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    compiler, processes = fake
    processes.go.set()
    for error, is_kept in ((NotNow("the machine is busy"), False), (GrammarError("no"), True)):
        processes.error, asked = error, spec(str(error))
        failed = compiler.ask(asked)
        until_done(compiler, failed)
        assert failed.error == str(error) and failed.may_be_later is not is_kept
        processes.error = None
        again = compiler.ask(asked)
        assert (again is failed) is is_kept
        until_done(compiler, again)
    assert sorted(processes.asked) == ["no", "the machine is busy", "the machine is busy"]


@pytest.mark.regression
def test_y03_what_takes_longer_than_a_moment_holds_up_nobody(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    """It is begun anew behind what nobody has tried yet, also of its own tenant."""
    compiler, processes = fake
    first = begun(compiler, processes)
    asked = [compiler.ask(spec(name), "a") for name in ("slow 0", "hangs 0", "slow 1", "honest")]
    processes.go.set()
    until_done(compiler, first, *asked)
    assert [each.grammar is not None for each in asked] == [True, False, True, True]
    assert "more than 10 s" in asked[1].error and not asked[1].may_be_later
    quick = [name for name in processes.asked if not name.endswith("again")]
    assert quick == ["first", "slow 0", "hangs 0", "slow 1", "honest"]
    assert [name for name in processes.asked if name.endswith("again")] == [
        "slow 0 again", "hangs 0 again", "slow 1 again",
    ]  # fmt: skip


@pytest.mark.regression
def test_y03_tenants_have_their_turns(fake: tuple[GrammarCompiler, FakeProcesses]) -> None:
    compiler, processes = fake
    first = begun(compiler, processes)
    asked = [compiler.ask(spec(f"hangs {number}"), "greedy") for number in range(4)]
    asked += [compiler.ask(spec("mine"), "honest"), compiler.ask(spec("mine"), "third")]
    processes.go.set()
    until_done(compiler, first, *asked)
    quick = [name for name in processes.asked if not name.endswith("again")]
    assert quick == ["first", "hangs 0", "mine", "mine", "hangs 1", "hangs 2", "hangs 3"]
    # Nobody learns from the time what others have asked for.
    assert asked[-1] is not asked[-2]


@pytest.mark.regression
def test_y03_who_has_used_least_is_taken_over_next(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    compiler, processes = fake
    processes.go.set()
    backend, built, gate = compiler._open_backend(), list[str](), threading.Event()

    def build(asked: GrammarSpec, form: Form) -> Grammar:
        built.append(asked.text)
        assert asked.text != "gate" or gate.wait(WAIT_SECONDS)
        return backend.compile(asked)

    backend.build = build
    asked = [compiler.ask(spec("gate"), "greedy")]
    wait_for(lambda: built == ["gate"])
    asked += [compiler.ask(spec(name), "greedy") for name in ("a", "b")]
    wait_for(lambda: len(compiler._builder.jobs) == 2)
    asked.append(compiler.ask(spec("mine"), "honest"))
    wait_for(lambda: len(compiler._builder.jobs) == 3)
    gate.set()
    until_done(compiler, *asked)
    assert built == ["gate", "mine", "a", "b"]


@pytest.mark.regression
def test_y03_whoever_has_used_least_is_next() -> None:
    queue: FairQueue[str] = FairQueue()

    def put(*jobs: str) -> None:
        for job in jobs:
            queue.put(job[0], job)

    put("a0", "a1", "b0", "b1", "c0")
    assert [queue.get() for _ in range(3)] == ["a0", "b0", "c0"]
    for tenant, seconds in (("a", 10.0), ("b", 5.0), ("c", 0.5)):
        queue.charge(tenant, seconds)
    put("c1", "c2", "d0")
    assert [queue.get(), queue.get()] == ["d0", "c1"]  # a new one before all
    queue.charge("c", 20.0)
    assert [queue.get() for _ in range(3)] == ["b1", "a1", "c2"]
    put("a2", "n0", "n1")
    assert queue.get() == "n0"  # it has saved up a little, however much others have used
    queue.charge("n", 2.0)
    assert [queue.get(), queue.get()] == ["a2", "n1"] and len(queue) == 0
    queue.stop_threads(1)
    assert queue.get() is None


@pytest.mark.regression
def test_y03_many_that_hang_or_are_late_disable_nothing(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    compiler, processes = fake
    processes.go.set()
    for number in range(12):
        failed = [compiler.ask(spec(f"hangs {number}")), compiler.ask(spec("late"))]
        until_done(compiler, *failed)
        assert failed[1].may_be_later and not failed[0].may_be_later
    honest = compiler.ask(spec("honest"))
    until_done(compiler, honest)
    assert honest.grammar is not None and processes.trusts_threads


@pytest.mark.regression
def test_y03_only_who_asks_for_most_is_refused(
    fake: tuple[GrammarCompiler, FakeProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, processes = fake
    compiler._shares = Shares(6)
    begun(compiler, processes)
    greedy = [compiler.ask(spec(f"g{number}"), "greedy") for number in range(5)]
    with pytest.raises(TooManyGrammars, match="5 grammars of this client wait"):
        compiler.ask(spec("g5"), "greedy")
    honest = [compiler.ask(spec(f"h{number}"), "honest") for number in range(2)]
    assert [bool(each.error) for each in greedy] == [False] * 3 + [True] * 2
    assert all("too many grammars of this client" in each.error for each in greedy[3:])
    assert all(each.may_be_later for each in greedy[3:])
    assert compiler.ask(spec("g0"), "greedy") is greedy[0]  # nothing new
    processes.go.set()
    until_done(compiler, *greedy, *honest)
    assert all(each.grammar is not None for each in (*greedy[:3], *honest))
    assert compiler._shares.who_gives_way() is None


@pytest.mark.regression
def test_y03_a_hang_here_has_processes_follow_and_refuses_nothing(threads_end: None) -> None:
    """Though what is taken over is bounded, and should not."""
    backend, processes = Spinner(compiles=False), FakeProcesses()
    backend.build = lambda spec, form: backend.compile(spec)
    processes.go.set()
    compiler = GrammarCompiler(
        lambda: backend, lambda: None, vocab_size=40, processes=processes, limit=SHORT
    )
    try:
        known, hanging = compiler.ask(spec("known")), compiler.ask(spec("spin"))
        other = compiler.ask(spec("other"))
        until_done(compiler, known, hanging, other)
        assert "more than 0.05 s" in hanging.error
        assert other.grammar is not None and not processes.trusts_threads
    finally:
        backend.stop.set()
        compiler.close()


def test_processes_leave_a_processor_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, expected in ((1, 1), (2, 1), (3, 2), (64, MOST_PROCESSES)):
        monkeypatch.setattr(
            "os.sched_getaffinity", lambda _, n=processors: set(range(n)), raising=False
        )
        made = GrammarCompiler(lambda: Spinner(compiles=True), lambda: None, vocab_size=40)
        assert made._num_long == expected
        made.close()


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    compiler, processes = fake
    first = begun(compiler, processes)
    gone, wanted = compiler.ask(spec("gone")), compiler.ask(spec("wanted"))
    for each in (first, gone):
        compiler.give_up(each)
    again = compiler.ask(spec("gone"))
    assert again is not gone
    compiler.give_up(again)
    assert compiler.num_waiting == 2  # what has begun goes on, for who asks again
    processes.go.set()
    until_done(compiler, wanted, first)
    assert wanted.grammar is not None and compiler.ask(spec("first"), "first") is first
    assert sorted(processes.asked) == ["first", "wanted"]


def test_those_that_nobody_waits_for_do_not_heap_up(
    fake: tuple[GrammarCompiler, FakeProcesses],
) -> None:
    compiler, processes = fake
    begun(compiler, processes)
    for number in range(MOST_WAITING + 5):
        compiler.give_up(compiler.ask(spec(f"{number}")))
    assert len(compiler._quick) == 0 and compiler.num_waiting == 1


def test_whoever_asks_for_most_loses_what_is_kept(threads_end: None) -> None:
    backend = Spinner(compiles=True)
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=40, cache_bytes=3500)
    try:
        for text, tenant in (("mine", "honest"), *((f"g{n}", "greedy") for n in range(6))):
            until_done(compiler, compiler.ask(spec(text), tenant))
        kept = {tenant: list(each.known) for tenant, each in compiler._kept.items()}
        assert kept == {"honest": [spec("mine")], "greedy": [spec("g4"), spec("g5")]}
    finally:
        compiler.close()


def test_grammars_are_kept_up_to_a_size(threads_end: None) -> None:
    backend = Spinner(compiles=True)
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=40, cache_bytes=2500)
    try:
        for text in "abacad":
            compilation = compiler.ask(spec(text))
            wait_for(lambda it=compilation: (compiler.poll_compilations(), it.is_done)[1])
            compiler.poll_compilations()
            assert compiler.num_cached_bytes <= 2000
        assert compiler.num_compiled == 4 and compiler.num_found == 2  # a was always used last
        large = compiler.ask(spec("large"))
        wait_for(lambda: (compiler.poll_compilations(), large.is_done)[1])
        assert large.grammar is None and f"takes {MOST_BYTES + 1} bytes" in large.error
        for text in "xy":  # texts that do not compile take memory too
            failed = compiler.ask(spec(f"wrong {text}" * 200))
            wait_for(lambda it=failed: (compiler.poll_compilations(), it.is_done)[1])
            compiler.poll_compilations()
        assert compiler.num_cached_bytes == 1400
    finally:
        compiler.close()


QUICK: dict[str, dict[str, Any]] = {
    "counts in counts": {"regex": "((a{1,100}){1,100}){1,100}"},
    "plus of plus": {"regex": "((a+)+)+b"},
    "optional ones": {"regex": "(a?){200}a{200}"},
    "ambiguous rules": {"grammar": 'root ::= "a" root "a" | root root | ""'},
    "counted recursion": {"grammar": 'root ::= x{1,1000}\nx ::= ("a" | x){1,1000}'},
    "only itself": {"json": {"$ref": "#"}},
    "arrays of arrays": {"json": {"type": "array", "maxItems": 10**6, "items": {
        "type": "array", "items": {"$ref": "#"}, "maxItems": 10**6}}},
    "pattern": {"json": {"type": "string", "pattern": "^((a|b?)*c{0,1000}){0,1000}$"}},
    "every choice": {"json": {"$defs": {"n": {"anyOf": [
        {"type": "array", "items": {"$ref": "#/$defs/n"}}] * 30}}, "$ref": "#/$defs/n"}},
    "properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(300)}}},
}  # fmt: skip
HUGE: dict[str, dict[str, Any]] = {
    "properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    "alternatives": {"grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(20000))},
    "choices": {"choice": [f"{i}" for i in range(4096)]},
    "an enum": {"json": {"enum": [f"value {i}" for i in range(15000)]}},
}


def test_hostile_grammars_end_while_another_request_goes_on(
    tiny_model: Path, greedy_reference: Reference, scale: str
) -> None:
    hostile = QUICK if scale == "ci" else QUICK | {f"huge {k}": v for k, v in HUGE.items()}
    core = EngineCore(config_of(tiny_model, structured_outputs_backend="guidance"))
    try:
        outputs = []
        for name, asked in hostile.items():
            params = StructuredOutputsParams(**asked)
            prompt = prompt_of(5, len(outputs))
            outputs += core.add(
                request(name, prompt, structured_outputs=params, max_tokens=60, ignore_eos=False)
            )
        outputs += core.add(request("free", prompt_of(20), max_tokens=40))
        answers = finish(core, outputs, len(hostile) + 1)
        assert answers["free"].new_token_ids == greedy_reference(prompt_of(20), 40)
        for name in hostile:
            answer = answers[name]
            assert answer.finish_reason in ("stop", "length", "error"), name
            if answer.finish_reason == "error":
                assert "grammar" in (answer.error or "") or "structured" in (answer.error or "")
    finally:
        core.shutdown(5.0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "at most 262144 bytes"),
        ({"json": {"enum": ["a" * MAX_GRAMMAR_BYTES]}}, "at most 262144 bytes"),
        ({"json": '{"a": ' * 40000}, "at most 100 deep"),
        ({"json": '{"not":' * 200 + "{}" + "}" * 200}, "at most 100 deep"),
        ({"json": '{"type": "string"'}, "line 1, column 18"),
        ({"json": "[1]"}, "must be a JSON object, got list"),
        ({"json": {"enum": [float("nan")]}}, "cannot be written as JSON"),
        ({"choice": []}, "1 to 4096 different texts"),
        ({"choice": ["a", "a"]}, "1 to 4096 different texts"),
        ({"choice": "yes"}, "a list of texts"),
        ({"choice": ["a", 1]}, "int in it"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": "\ud800"}, "valid Unicode"),
        ({"regex": "a", "json": {}}, "json and regex"),
        ({}, "none of them"),
        ({"json_object": False}, "none of them"),
        ({"json_object": 1}, "True or False"),
    ],
)
def test_what_can_be_told_at_once_is(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        StructuredOutputsParams(**fields)
    assert str(raised.value).startswith("structured_outputs")


def test_missing_packages_are_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tiny_model, structured_outputs_backend="xgrammar")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, packages in (("auto", "xgrammar or llguidance"), ("guidance", "llguidance")):
        assert f"need the package {packages}" in why_missing(name)
        with pytest.raises(ValueError, match=r"pip install '\.\[grammar\]'"):
            open_backend(name, lambda: pytest.fail("nothing is read"))
    with pytest.raises(
        ConfigError, match=r"--structured-outputs-backend xgrammar: .* not installed"
    ):
        EngineCore(config)
