# SPDX-License-Identifier: Apache-2.0
"""Grammars that would take for ever: they end within limits, and other requests go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.structured import compiler as compiler_module
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
from stratakv.engine.structured.limited_thread import MOST_LEFT_BEHIND, Jobs, LimitedThread
from stratakv.engine.structured_params import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    Kind,
    StructuredOutputsParams,
)
from stratakv.tiers.settings.values import ConfigError

from ..conftest import Reference
from ..core.conftest import config_of, finish, prompt_of, request
from .waiting import SHORT, WAIT_SECONDS, wait_for

NUM_PROCESSES = 2


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


def test_one_that_does_not_stop_compiling_is_given_up(threads_end: None) -> None:
    backend, woken = Spinner(compiles=False), threading.Event()
    compiler = GrammarCompiler(lambda: backend, woken.set, limit=SHORT, vocab_size=40)

    def done(compilation: Compilation) -> bool:
        compiler.collect()
        return compilation.is_done

    try:
        hanging, behind = compiler.ask(spec("spin")), compiler.ask(spec("b"))
        wait_for(lambda: done(hanging) and done(behind))
        assert "more than 0.05 s" in hanging.error
        assert behind.grammar is not None
        assert compiler.ask(spec("spin")) is hanging  # known, and not tried again
        assert (compiler.num_compiled, compiler.num_failed, compiler.num_found) == (1, 1, 1)
        for number in range(MOST_LEFT_BEHIND - 1):
            another = compiler.ask(
                GrammarSpec(Kind.GRAMMAR, "spin", whitespace_pattern=str(number))
            )
            wait_for(lambda another=another: done(another))
        assert "none is compiled any more" in compiler.ask(spec("c")).error
    finally:
        backend.stop.set()
        compiler.close()


def test_a_thread_that_begins_before_it_is_known_is_watched_too(
    threads_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Spinner(compiles=False)
    compiler = GrammarCompiler(lambda: backend, lambda: None, limit=SHORT, vocab_size=40)
    try:
        first = compiler.ask(spec("spin"))
        second = compiler.ask(GrammarSpec(Kind.GRAMMAR, "spin"))

        def started(name: str, jobs: Jobs) -> LimitedThread:
            thread = LimitedThread(name, jobs)
            wait_for(lambda: second.has_begun)
            return thread

        monkeypatch.setattr(compiler_module, "LimitedThread", started)
        wait_for(lambda: (compiler.collect(), first.is_done and second.is_done)[1])
        assert "more than 0.05 s" in second.error
    finally:
        monkeypatch.undo()
        backend.stop.set()
        compiler.close()


def test_those_asked_for_before_too_many_hang_are_not_compiled(threads_end: None) -> None:
    backend = Spinner(compiles=False)
    compiler = GrammarCompiler(lambda: backend, lambda: None, limit=SHORT, vocab_size=40)
    try:
        asked = [
            compiler.ask(GrammarSpec(Kind.REGEX, "spin", whitespace_pattern=f"{number}"))
            for number in range(MOST_LEFT_BEHIND)
        ]
        asked += [compiler.ask(spec("behind")), compiler.ask(spec("the last"))]
        wait_for(lambda: (compiler.collect(), all(each.is_done for each in asked))[1])
        told = ["more than 0.05 s" in each.error for each in asked]
        assert told == [True] * MOST_LEFT_BEHIND + [False] * 2
        assert all("none is compiled any more" in each.error for each in asked[-2:])
        backend.stop.set()
        wait_for(lambda: not compiler._left.are_too_many)
        behind = compiler.ask(spec("behind"))  # its error said nothing of it
        wait_for(lambda: (compiler.collect(), behind.is_done)[1])
        assert behind.grammar is not None, behind.error
    finally:
        backend.stop.set()
        compiler.close()


class SlowPool:
    """Stands where processes try grammars out: for as long as `go` is not set."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), []
        self.error: GrammarError | None = None

    def is_needed(self, spec: GrammarSpec) -> bool:
        if spec.text == "fault":
            raise TypeError("a schema that nobody thought of")
        return True

    def try_out(self, spec: GrammarSpec) -> Form:
        self.asked.append(spec.text)
        assert self.go.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        return Form("spinner")

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def slow_pool(threads_end: None) -> Iterator[tuple[GrammarCompiler, SlowPool]]:
    backend, pool = Spinner(compiles=True), SlowPool()
    backend.build = lambda spec, form: backend.compile(spec)
    compiler = GrammarCompiler(
        lambda: backend, lambda: None, vocab_size=40, pool=pool, num_processes=NUM_PROCESSES
    )
    yield compiler, pool
    compiler.close()


def test_what_failed_for_another_reason_is_compiled_when_asked_for_again(
    slow_pool: tuple[GrammarCompiler, SlowPool],
) -> None:
    compiler, pool = slow_pool
    pool.go.set()
    for error, is_kept in ((NotNow("the machine is busy"), False), (GrammarError("no"), True)):
        pool.error, asked = error, spec(str(error))
        failed = compiler.ask(asked)
        wait_for(lambda it=failed: (compiler.collect(), it.is_done and not compiler.num_waiting)[1])
        assert failed.error == str(error) and failed.may_be_later is not is_kept
        pool.error = None
        again = compiler.ask(asked)
        assert (again is failed) is is_kept
    wait_for(lambda: (compiler.collect(), not compiler.num_waiting)[1])
    assert sorted(pool.asked) == ["no", "the machine is busy", "the machine is busy"]


def test_a_large_one_that_hangs_when_it_is_built_holds_up_no_other(threads_end: None) -> None:
    backend, pool = Spinner(compiles=False), SlowPool()
    backend.build = lambda spec, form: backend.compile(spec)
    pool.go.set()
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=40, pool=pool, limit=SHORT)
    try:
        hanging = compiler.ask(spec("spin"))
        wait_for(lambda: (compiler.collect(), hanging.is_done)[1])
        assert "more than 0.05 s" in hanging.error
        other = compiler.ask(spec("b"))
        wait_for(lambda: (compiler.collect(), other.is_done)[1])
        assert other.grammar is not None, other.error
    finally:
        backend.stop.set()
        compiler.close()


def test_one_that_hangs_when_it_is_built_gives_its_turn_to_the_next(threads_end: None) -> None:
    backend, pool = Spinner(compiles=False), SlowPool()
    backend.build = lambda spec, form: backend.compile(spec)
    pool.go.set()
    compiler = GrammarCompiler(
        lambda: backend, lambda: None, vocab_size=40, pool=pool, limit=SHORT, num_processes=2
    )
    try:
        hanging = compiler.ask(spec("spin"))
        wait_for(compiler._building.locked)
        behind = compiler.ask(spec("b"))  # whose thread waits for that lock before it is replaced
        wait_for(lambda: len(pool.asked) == 2)
        wait_for(lambda: (compiler.collect(), hanging.is_done and behind.is_done)[1])
        assert behind.grammar is not None, behind.error
    finally:
        backend.stop.set()
        compiler.close()


def test_processes_leave_a_processor_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, expected in ((1, 1), (2, 1), (3, 2), (64, MOST_PROCESSES)):
        monkeypatch.setattr(
            "os.sched_getaffinity", lambda _, n=processors: set(range(n)), raising=False
        )
        made = GrammarCompiler(lambda: Spinner(compiles=True), lambda: None, vocab_size=40)
        assert made._large.num_threads == expected
        made.close()


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    slow_pool: tuple[GrammarCompiler, SlowPool],
) -> None:
    compiler, pool = slow_pool
    running = [compiler.ask(spec(f"{number}")) for number in range(NUM_PROCESSES)]
    wait_for(lambda: len(pool.asked) == NUM_PROCESSES)
    gone, wanted = compiler.ask(spec("gone")), compiler.ask(spec("wanted"))
    for each in (running[0], gone):
        compiler.give_up(each)
    again = compiler.ask(spec("gone"))
    assert again is not gone
    compiler.give_up(again)
    assert compiler.num_waiting == 3  # what has begun goes on, for who asks again
    pool.go.set()
    wait_for(lambda: (compiler.collect(), not compiler.num_waiting)[1])
    assert wanted.grammar is not None and compiler.ask(spec("0")) is running[0]
    assert sorted(pool.asked) == ["0", "1", "wanted"]


def test_those_that_nobody_waits_for_do_not_heap_up(
    slow_pool: tuple[GrammarCompiler, SlowPool],
) -> None:
    compiler, pool = slow_pool
    for number in range(NUM_PROCESSES):
        compiler.ask(spec(f"running {number}"))
    wait_for(lambda: len(pool.asked) == NUM_PROCESSES)  # no thread takes another one now
    for number in range(MOST_WAITING):
        compiler.give_up(compiler.ask(spec(f"{number}")))
    with pytest.raises(TooManyGrammars, match=f"{MOST_WAITING} grammars wait"):
        compiler.ask(spec("one more"))


def test_a_grammar_whose_place_cannot_be_told_leaves_nothing_behind(
    slow_pool: tuple[GrammarCompiler, SlowPool],
) -> None:
    compiler, _ = slow_pool
    for _ in range(2):  # the second would wait for the first for ever
        with pytest.raises(TypeError):
            compiler.ask(spec("fault"))
    assert not compiler.num_waiting


def test_grammars_are_kept_up_to_a_size(threads_end: None) -> None:
    backend = Spinner(compiles=True)
    compiler = GrammarCompiler(lambda: backend, lambda: None, vocab_size=40, cache_bytes=2500)
    try:
        for text in "abacad":
            compilation = compiler.ask(spec(text))
            wait_for(lambda it=compilation: (compiler.collect(), it.is_done)[1])
            compiler.collect()
            assert compiler.num_cached_bytes <= 2000
        assert compiler.num_compiled == 4 and compiler.num_found == 2  # a was always used last
        large = compiler.ask(spec("large"))
        wait_for(lambda: (compiler.collect(), large.is_done)[1])
        assert large.grammar is None and f"takes {MOST_BYTES + 1} bytes" in large.error
        for text in "xy":  # texts that do not compile take memory too
            failed = compiler.ask(spec(f"wrong {text}" * 200))
            wait_for(lambda it=failed: (compiler.collect(), it.is_done)[1])
            compiler.collect()
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
