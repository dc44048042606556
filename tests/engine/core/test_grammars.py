# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers follow a grammar, beside free ones, through whole cores."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
import torch

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.request.core_messages import INVALID_GRAMMAR, AddRequest, TokenOutput
from stratakv.engine.request.structured_params import GrammarSpec, StructuredOutputsParams
from stratakv.engine.structured.base import Backend, Grammar, GrammarError, Matcher, Words
from stratakv.engine.structured.compiler import POLL_SECONDS
from stratakv.engine.structured.manager import GrammarManager
from stratakv.engine.structured.processes.limited_thread import Limit
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.kernels.cpu.library import Missing, cpu_library

from .conftest import (
    VOCAB,
    MakeCore,
    Reference,
    config_of,
    finish,
    prompt_of,
    request,
    run,
)

END = VOCAB - 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "é"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
ALL_BYTES = tuple((token,) for token in range(END))
REGEX = "[a-f]{5,9}-[0-9]{2}"


def following(
    request_id: str, prompt: list[int], asked: dict[str, Any], **fields: Any
) -> AddRequest:
    params = StructuredOutputsParams(**asked)
    defaults = {"max_tokens": 40, "ignore_eos": False, "structured_outputs": params}
    return request(request_id, prompt, **(defaults | fields))


@pytest.fixture
def text_of(tiny_model: Path) -> Any:
    tokenizer = Tokenizer.load(tiny_model)
    return lambda output: tokenizer.decode(output.new_token_ids)


def mixed(core: EngineCore) -> dict[str, TokenOutput]:
    """Free, greedy and seeded requests, some with prompts of several chunks, a few at a time."""
    asked: list[AddRequest] = []
    for number in range(12):
        prompt = prompt_of(10 + 23 * (number % 5), number)
        name = f"{number}"
        draws = {"temperature": 0.9, "seed": number} if number % 2 else {}
        if number % 3 == 0:
            asked.append(request(f"free-{name}", prompt))
        elif number % 3 == 1:
            asked.append(following(f"regex-{name}", prompt, {"regex": REGEX}, **draws))
        else:
            asked.append(following(
                f"json-{name}", prompt,
                {"json": SCHEMA, "disable_any_whitespace": True}, logprobs=1, **draws,
            ))  # fmt: skip
    outputs: list[TokenOutput] = []
    for each in asked:
        outputs += core.add(each)
        outputs += core.step() if core.has_work() else []
    return finish(core, outputs, len(asked))


def test_answers_follow_and_others_are_untouched(
    make_core: MakeCore, greedy_reference: Reference, text_of: Any, no_thread_gives_way: None
) -> None:
    """In float64, one step at a time, with steps that overlap, with too little room for all, and
    with the model in a process of its own: the same answers."""
    wishes: list[dict[str, Any]] = [
        {},
        {"num_blocks": 26, "max_model_len": 150, "admit_below": 1.0, "preempt_above": 1.0},
        {"distributed_executor_backend": "mp"},
    ]
    found = []
    for options in wishes:
        core = make_core(structured_outputs_backend="guidance", **options)
        merged = mixed(core)
        found.append({name: text_of(output) for name, output in merged.items()})
        for name, output in merged.items():
            kind, number = name.split("-")
            if kind == "free":
                prompt = prompt_of(10 + 23 * (int(number) % 5), int(number))
                assert output.new_token_ids == greedy_reference(prompt, 6)
                continue
            assert output.finish_reason == "stop" and output.new_token_ids[-1] == END
            text = found[-1][name].removesuffix("<end>")
            if kind == "regex":
                assert re.fullmatch(REGEX, text)
            else:
                jsonschema.validate(json.loads(text), SCHEMA)
        assert (core.scheduler.counts["preemptions"] > 0) == ("num_blocks" in options)
        assert core.call("stats", "")["grammar"]["compiled"] == 2
    assert found[0] == found[1] == found[2]


def overlapping(model: Path, **options: Any) -> Iterator[EngineCore]:
    config = config_of(model, structured_outputs_backend="guidance", **options)
    for depth in (1, 2):
        core = EngineCore(config, max_steps_in_flight=depth)
        try:
            yield core
        finally:
            core.shutdown(5.0)


def test_steps_that_overlap_make_the_masks_of_all_tokens(tiny_model: Path) -> None:
    found = [
        {name: output.new_token_ids for name, output in mixed(core).items()}
        for core in overlapping(tiny_model)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("logprobs", [None, 3])
def test_logits_that_no_grammar_allows_are_computed_only_for_log_probabilities(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """Whole panels of the output matrix are left out, and nobody sees it."""
    if isinstance(cpu_library(), Missing):
        pytest.skip("without the compiled library all logits are computed")
    wanted: list[npt.NDArray[np.uint32] | None] = []
    left_out: list[int] = []
    compute, is_possible = Decoder.logits, Decoder.can_leave_logits_out

    def record(
        self: Decoder, hidden: torch.Tensor, asked: npt.NDArray[np.uint32] | None = None
    ) -> torch.Tensor:
        wanted.append(asked)
        logits = compute(self, hidden, asked)
        left_out.append(int((logits == 0).all(dim=0).sum()))
        return logits

    monkeypatch.setattr(Decoder, "logits", record)
    found = []
    for can in (True, False):
        monkeypatch.setattr(Decoder, "can_leave_logits_out", is_possible if can else False)
        wanted.clear()
        left_out.clear()
        core = make_core(structured_outputs_backend="guidance")
        both = [
            following("a", prompt_of(9), {"regex": REGEX}, logprobs=logprobs),
            following("b", prompt_of(20), {"regex": "[0-9]{20}"}, temperature=0.8, seed=3),
        ]
        merged = finish(core, [output for each in both for output in core.add(each)], 2)
        found.append({
            name: (output.new_token_ids, output.logprobs) for name, output in merged.items()
        })  # fmt: skip
        narrow = [words for words in wanted if words is not None and words.any()]
        told = 0 if logprobs is None else len(merged["a"].new_token_ids)
        assert len(narrow) == (len(wanted) - told if can else 0)
        assert sum(count > 0 for count in left_out) == len(narrow)
    assert found[0] == found[1]


def test_more_steps_at_once_than_masks_can_follow_are_refused(tiny_model: Path) -> None:
    core = EngineCore(config_of(tiny_model), max_steps_in_flight=3)
    try:
        (output,) = core.add(following("r", prompt_of(5), {"regex": "a"}))
        assert "in flight" in (output.error or "")
    finally:
        core.shutdown(5.0)


def test_its_own_stop_ids_end_it_only_where_the_grammar_may_end(
    make_core: MakeCore, text_of: Any
) -> None:
    core = make_core(structured_outputs_backend="guidance")
    stops = [ord("Z"), 70]  # ids, not letters: what they say is of no account
    answers = run(core, *(
        following(f"r{i}", prompt_of(9, i), {"regex": "[0-9]{3}[0-9]*"}, stop_token_ids=stops,
                  temperature=1.0, seed=i, ignore_eos=i % 2 == 0)
        for i in range(10)
    ))  # fmt: skip
    for output in answers.values():
        assert len(output.new_token_ids) >= 4
        if output.finish_reason == "stop":
            assert output.new_token_ids[-1] in (*stops, END)
            text = text_of(output)[:3]
            assert text.isdigit()
    by_own = {
        output.new_token_ids[-1]
        for i in range(0, 10, 2)
        if (output := answers[f"r{i}"]).finish_reason == "stop"
    }
    assert by_own and by_own <= {*stops}, "where the model's own end does not count"


def test_an_answer_that_no_token_may_end_ends_with_its_grammar(
    make_core: MakeCore, text_of: Any
) -> None:
    core = make_core(structured_outputs_backend="guidance")
    answers = run(core, following("r", prompt_of(9), {"choice": ["yes", "no"]}, ignore_eos=True))
    assert answers["r"].finish_reason == "stop" and answers["r"].ends_without_token
    assert text_of(answers["r"]) in ("yes", "no")


def test_a_minimum_beyond_the_grammar_is_told(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    core = make_core(structured_outputs_backend="guidance")
    answers = run(
        core,
        following("r", prompt_of(9), {"choice": ["yes"]}, min_tokens=9),
        following("banned", prompt_of(9), {"choice": ["a"]}, bad_words_token_ids=ALL_BYTES),
        request("free", prompt_of(30)),
    )
    assert answers["r"].finish_reason == "error"
    assert "min_tokens is 9" in (answers["r"].error or "")
    assert "the grammar of this request allows only tokens" in (answers["banned"].error or "")
    assert answers["free"].new_token_ids == greedy_reference(prompt_of(30), 6)


def test_a_grammar_that_does_not_compile_is_its_request_s_error(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    core = make_core(structured_outputs_backend="guidance")
    outputs = core.add(following("wrong", prompt_of(9), {"regex": "a[b"}))
    outputs += core.add(request("free", prompt_of(30)))
    answers = finish(core, outputs, 2)
    assert "this request's schema or grammar cannot be used" in (answers["wrong"].error or "")
    assert "unclosed" in (answers["wrong"].error or "")
    assert answers["free"].new_token_ids == greedy_reference(prompt_of(30), 6)
    (again,) = core.add(following("again", prompt_of(9), {"regex": "a[b"}))
    assert again.error_code == INVALID_GRAMMAR  # known, so nobody waits


class _Stubborn(Backend):
    """Grammars that allow everything; those named `dies` for three tokens only, `raises` break,
    `slow` waits for `slow_rows` behind its first token."""

    slow_rows = threading.Event()

    def __init__(self, gate: Any = None) -> None:
        self._gate = gate

    def compile(self, spec: GrammarSpec) -> Grammar:
        if self._gate is not None:
            assert self._gate.wait(60)
        return _AnyGrammar(spec.text)


class _AnyGrammar(Grammar):
    def __init__(self, text: str) -> None:
        self.num_bytes, self.text = 1, text

    def matcher(self) -> Matcher:
        return _AnyMatcher(self.text)


class _AnyMatcher(Matcher):
    may_end = False

    def __init__(self, text: str) -> None:
        self.text, self.count = text, 0

    def accept(self, token_id: int) -> bool:
        self.count += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens

    def fill(self, words: Words) -> None:
        if self.count == 3 and self.text == "dies":
            raise GrammarError("there is a limit")
        if self.count == 1 and self.text == "slow":
            assert _Stubborn.slow_rows.wait(60)
        if self.count == 2 and self.text == "raises":
            raise RuntimeError("out of luck")
        words[:] = -1


def with_backend(core: EngineCore, model: Path, backend: Backend, **settings: Any) -> None:
    core._grammars.close()
    grammars = GrammarManager(
        model, VOCAB, [END], opener=lambda: backend, **({"most_waiting": 9} | settings)
    )
    core._grammars = core._adder.grammars = core._calls.grammars = core.steps.grammars = grammars


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_grammar_that_dies_is_nobody_else_s_error(
    make_core: MakeCore, tiny_model: Path, greedy_reference: Reference
) -> None:
    core = make_core()
    with_backend(core, tiny_model, _Stubborn())
    prompt = prompt_of(20)
    answers = run(
        core,
        *(
            following(name, prompt, {"regex": name}, max_tokens=6)
            for name in ("dies", "raises", "ok")
        ),
        request("free", prompt),
    )
    assert "further: there is a limit" in (answers["dies"].error or "")
    assert answers["dies"].new_token_ids == greedy_reference(prompt, 6)[:3]
    assert "out of luck" in (answers["raises"].error or "")
    for name in ("ok", "free"):
        assert answers[name].new_token_ids == greedy_reference(prompt, 6)
        assert answers[name].finish_reason == "length"
    assert core.call("stats", "")["grammar"]["failed"] == 2


def test_requests_wait_for_their_grammar_and_may_leave(
    make_core: MakeCore, tiny_model: Path, greedy_reference: Reference
) -> None:
    core, gate = make_core(), threading.Event()
    with_backend(core, tiny_model, _Stubborn(gate))
    woken = threading.Event()
    core.set_wakeup(woken.set)
    try:
        for name in ("stays", "leaves"):
            assert core.add(following(name, prompt_of(20), {"regex": name}, max_tokens=6)) == []
        (refused,) = core.add(request("stays", prompt_of(3)))
        assert "in use" in (refused.error or "")
        answers = run(core, request("free", prompt_of(30)))
        assert answers["free"].new_token_ids == greedy_reference(prompt_of(30), 6)
        assert core.call("stats", "")["grammar"]["num_waiting"] == 2
        assert not core.has_work() and core.idle_seconds() < 1.0
        core.abort_requests(["leaves"])
    finally:
        gate.set()
    assert woken.wait(60)
    answers = finish(core, [], 1)
    assert answers["stays"].new_token_ids == greedy_reference(prompt_of(20), 6)
    assert not core.has_work()


START_MARK, END_MARK = 1, 2  # bytes that no text has
THINKS: dict[str, Any] = {
    "reasoning_start_token_ids": (START_MARK,),
    "reasoning_end_token_ids": (END_MARK,),
    "thinking_token_budget": 4,
    # It would rather end at once.
    "logit_bias": {END: 50.0},
}


@pytest.mark.parametrize("behind", [(), (ord("\n"),)])
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_grammar_begins_behind_the_thought_that_the_prompt_opens(
    make_core: MakeCore, text_of: Any, behind: tuple[int, ...], executor: str
) -> None:
    core = make_core(structured_outputs_backend="guidance", distributed_executor_backend=executor)
    prompt = [*prompt_of(20), START_MARK, *behind]
    answers = run(core, following("r", prompt, {"choice": ["yes", "no"]}, **THINKS))
    tokens = answers["r"].new_token_ids
    at = tokens.index(END_MARK)
    assert at == 4 - len(behind) and END not in tokens[:at]
    tail = TokenOutput("r", tokens[at + 1 :])
    assert text_of(tail).removesuffix("<end>") in ("yes", "no")
    assert answers["r"].finish_reason == "stop"


def test_a_model_may_open_a_thought_itself(make_core: MakeCore, text_of: Any) -> None:
    core = make_core(structured_outputs_backend="guidance")
    opens = THINKS | {"logit_bias": {START_MARK: 90.0}}
    answers = run(core, following("r", prompt_of(20), {"choice": ["yes", "no"]}, **opens))
    tokens = answers["r"].new_token_ids
    assert tokens[0] == START_MARK and tokens.index(END_MARK) == 5
    assert text_of(TokenOutput("r", tokens[6:])).removesuffix("<end>") in ("yes", "no")


def test_a_mark_further_back_in_the_prompt_opens_nothing(make_core: MakeCore, text_of: Any) -> None:
    """It may be somebody's words, who would be rid of the grammar by it."""
    core = make_core(structured_outputs_backend="guidance")
    prompt = [*prompt_of(20), START_MARK, *prompt_of(2)]
    marks = {name: THINKS[name] for name in THINKS if name.startswith("reasoning")}
    marks["logit_bias"] = {START_MARK: -100.0}  # nor does the model
    answers = run(core, following("r", prompt, {"choice": ["yes", "no"]}, **marks))
    assert text_of(answers["r"]).removesuffix("<end>") in ("yes", "no")


def test_the_death_of_a_process_of_grammars_is_told_and_others_go_on(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    core = make_core(structured_outputs_backend="guidance")
    processes = core._grammars._compiler._processes
    assert processes is not None
    # While another grammar is compiled for ever.
    endless = {"patternProperties": {f"^(a?){{{n}}}b{n}$": {} for n in range(1, 300)}}
    assert core.add(following("r", prompt_of(20), {"json": {"type": "object"} | endless})) == []
    wait_for(lambda: bool(processes.process_ids))
    os.kill(processes.process_ids[0], signal.SIGKILL)
    answers = finish(core, core.add(request("free", prompt_of(30))), 2)
    assert answers["free"].new_token_ids == greedy_reference(prompt_of(30), 6)
    failed = answers["r"]
    assert "ended by signal 9" in (failed.error or "")
    assert not core._grammars._compiler.num_cached  # it is compiled when it is asked for again


def test_y03_an_answer_that_a_process_follows_is_as_it_would_be(make_core: MakeCore) -> None:
    """Beside others, step by step, with tokens that are taken back nowhere."""
    core = make_core(structured_outputs_backend="guidance")
    asked = [
        following(f"{number}", prompt_of(10 + number, number), {"regex": REGEX})
        for number in range(3)
    ]
    here = finish(core, [each for one in asked for each in core.add(one)], len(asked))
    core._grammars._compiler.stop_taking_over()
    there = finish(core, [each for one in asked for each in core.add(one)], len(asked))
    for name, answer in here.items():
        assert there[name].new_token_ids == answer.new_token_ids and not there[name].error
    assert core.call("stats", "")["grammar"]["compiled"] == 2


def test_y03_the_requests_of_one_client_do_not_keep_others_from_waiting(
    make_core: MakeCore, tiny_model: Path
) -> None:
    core, gate = make_core(), threading.Event()
    with_backend(core, tiny_model, _Stubborn(gate), most_waiting=3)

    def add(name: str, tenant: str) -> list[TokenOutput]:
        asked = following(name, prompt_of(20), {"regex": f"{name}"}, max_tokens=2)
        asked.tenant = tenant
        return core.add(asked)

    try:
        assert [add(f"g{number}", "greedy") for number in range(3)] == [[]] * 3
        (refused,) = add("g3", "greedy")
        assert "3 requests of this client wait" in (refused.error or "")
        assert add("mine", "honest") == []
    finally:
        gate.set()
    answers = finish(core, [], 4)
    assert "too many requests of this client" in (answers["g2"].error or "")
    assert [answers[name].error for name in ("g0", "g1", "mine")] == [None] * 3
    assert core._grammars._shares.who_gives_way() is None


def test_x06_white_space_without_end_is_an_error(make_core: MakeCore, tiny_model: Path) -> None:
    """Where a schema contradicts itself nothing else can follow."""
    contradiction = {"properties": {"s": {"const": 1}}, "patternProperties": {"^s$": {"const": 1}}}
    schema = {"type": "object", "required": ["s"], "additionalProperties": False} | contradiction
    core = make_core(structured_outputs_backend="guidance")
    comma, closing = (Tokenizer.load(tiny_model).encode(each)[-1] for each in ",}")
    asked = {"bounded": {}, "free": {"whitespace_pattern": "[ \n]*"}}
    answers = run(core, *(
        following(name, prompt_of(20), {"json": schema, **fields}, max_tokens=200,
                  logit_bias={comma: 80.0, closing: -80.0})
        for name, fields in asked.items()
    ))  # fmt: skip
    assert "no token by which it could go on" in (answers["bounded"].error or "")
    assert "nothing but white space could follow for 64 tokens" in (answers["free"].error or "")


def test_random_aborts_leave_nothing_behind(make_core: MakeCore, rng: random.Random) -> None:
    core = make_core(structured_outputs_backend="guidance", num_blocks=40)
    outputs: list[TokenOutput] = []
    for number in range(15):
        asked = {"regex": rng.choice([REGEX, "x+", "[0-9]{1,30}"])}
        outputs += core.add(following(f"r{number}", prompt_of(1 + number, number), asked))
        if core.has_work():
            outputs += core.step()
        if rng.random() < 0.4:
            core.abort_requests([f"r{rng.randrange(number + 1)}"])
    while core.scheduler.requests or core._grammars.num_waiting:
        outputs += core.step()
    assert all(output.error is None for output in outputs)
    core.step()
    assert run(core, request("free", prompt_of(3)))["free"].finish_reason == "length"
    core._grammars.begin_masks([])
    assert not core._grammars


def test_a_request_whose_mask_takes_long_sits_out_and_holds_up_nobody(
    make_core: MakeCore, tiny_model: Path, greedy_reference: Reference
) -> None:
    core = make_core()
    with_backend(core, tiny_model, _Stubborn())
    _Stubborn.slow_rows.clear()
    outputs = core.add(following("slow", prompt_of(20), {"regex": "slow"}, max_tokens=6))

    def has_its_first_token() -> bool:  # a thread compiles its grammar
        outputs.extend(core.step() if core.has_work() else [])
        return any(each.new_token_ids for each in outputs)

    wait_for(has_its_first_token)
    others = finish(core, core.add(request("free", prompt_of(30))), 1)
    assert others["free"].new_token_ids == greedy_reference(prompt_of(30), 6)
    later = finish(core, core.add(request("later", prompt_of(40))), 1)
    assert later["later"].new_token_ids == greedy_reference(prompt_of(40), 6)
    assert [each.request_id for each in core.scheduler.requests.values()] == ["slow"]
    for _ in range(3):  # in which it turns out that there is nothing to do
        if core.has_work():
            assert core.step() == []
    assert not core.has_work()  # nobody asks again and again
    _Stubborn.slow_rows.set()
    last = finish(core, [], 1)
    assert last["slow"].finish_reason == "length"


def test_a_pause_while_a_mask_is_made_keeps_its_request_for_later(
    make_core: MakeCore, tiny_model: Path, greedy_reference: Reference
) -> None:
    core = make_core()
    with_backend(core, tiny_model, _Stubborn())
    _Stubborn.slow_rows.clear()
    outputs = core.add(following("slow", prompt_of(20), {"regex": "slow"}, max_tokens=6))
    ahead = core._grammars._ahead
    while not ahead.num_open:
        outputs += core.step()
    assert core.call("pause", "all") == {"paused": "all", "running": 1, "waiting": 0}
    while core.has_work():  # steps in flight come back, and nothing is begun
        outputs += core.step()
    _Stubborn.slow_rows.set()
    wait_for(lambda: all(each.is_done for each in ahead._open))
    for _ in range(3):  # the row is there, and still nobody may run
        outputs += core.step() if core.has_work() else []
    assert len([token for each in outputs for token in each.new_token_ids]) < 6
    core.call("resume", "")
    answer = finish(core, outputs, 1)["slow"]
    assert answer.new_token_ids == greedy_reference(prompt_of(20), 6)


@pytest.mark.parametrize("then", ["comes back", "leaves"])
def test_one_that_is_sent_back_while_its_mask_is_made_waits_for_it(
    make_core: MakeCore, tiny_model: Path, greedy_reference: Reference, then: str
) -> None:
    """Its matcher is another thread's until then."""
    core = make_core()
    with_backend(core, tiny_model, _Stubborn())
    _Stubborn.slow_rows.clear()
    outputs = core.add(following("slow", prompt_of(20), {"regex": "slow"}, max_tokens=6))
    ahead = core._grammars._ahead
    while not ahead.num_open:
        outputs += core.step()
    core.scheduler._states.preempt(core.scheduler.requests["slow"])
    others = finish(core, outputs + core.add(request("free", prompt_of(30))), 1)
    assert others["free"].new_token_ids == greedy_reference(prompt_of(30), 6)
    (waiting,) = core.scheduler.requests.values()
    assert waiting.num_computed_tokens == 0 and ahead.num_open
    if then == "leaves":
        core.abort_requests(["slow"])
    _Stubborn.slow_rows.set()
    if then == "comes back":
        (last,) = finish(core, outputs, 1).values()
        assert last.new_token_ids == greedy_reference(prompt_of(20), 6)
    while ahead.num_open or core.has_work():
        assert all(output.error is None for output in core.step())


def test_what_hangs_is_given_up_when_nobody_waits_for_it_any_more(
    make_core: MakeCore, tiny_model: Path
) -> None:
    core = make_core()
    stop = threading.Event()

    class Hanging(Backend):
        def compile(self, spec: GrammarSpec) -> Grammar:
            while not stop.is_set():
                pass
            raise GrammarError("stopped")

    with_backend(core, tiny_model, Hanging(), compile_limit=Limit(cpu_seconds=0.05))
    compiler = core._grammars._compiler
    try:
        assert core.add(following("gone", prompt_of(20), {"regex": "x"})) == []
        compilation = next(iter(compiler._waiting.values()))
        wait_for(lambda: compilation.has_begun)
        core.abort_requests(["gone"])
        assert core.idle_seconds() <= POLL_SECONDS  # it is looked at, though no request waits
        wait_for(lambda: not core.has_work() and not compiler.num_waiting)
        assert "takes more than" in compilation.error
        assert core.idle_seconds() > POLL_SECONDS
    finally:
        stop.set()
