# SPDX-License-Identifier: Apache-2.0
"""`LLM.chat`, several answers to a prompt, and the line that counts answers on a terminal."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from stratakv.engine.offline import outputs
from stratakv.engine.request.sampling_params import MAX_N

from ..tiers.store_contract import wait_until

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<{{ voice | default('assistant') }}>{% endif %}"
)
THINKING = TEMPLATE.replace("</{{", "{{").replace("{% endif %}", "<think>{% endif %}")
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
PROMPT = random.Random(3).choices(range(256), k=30)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        tiny_model,
        num_blocks=100,
        max_num_seqs=8,
        num_threads=1,
        dtype="float64",
        scheduling_policy="priority",
        reasoning_start="<think>",
        reasoning_end="</think>",
        structured_outputs_backend="guidance",  # the other one takes seconds to import
    ) as made:
        yield made


# Conversations


def test_tools_are_for_the_template(llm: LLM) -> None:
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    made, without = (
        llm.chat(HELLO, GREEDY, chat_template=template, tools=tools)[0].prompt
        for tools in ([tool], None)
    )
    assert made == "[look_up]<user>hello\n<assistant>"
    assert without == "<user>hello\n<assistant>"
    for tools, words in (
        ([{"type": "function"}], "tools cannot be used: .*function"),
        ([tool, tool], "names must differ"),
        ("look_up", "tools cannot be used: Expected `array`"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat(HELLO, GREEDY, chat_template=template, tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        (HELLO, {}, "<user>hello\n<assistant>"),
        (HELLO, {"add_generation_prompt": False}, "<user>hello\n"),
        (HELLO, {"chat_template_kwargs": {"voice": "poet"}}, "<user>hello\n<poet>"),
        (
            [*HELLO, {"role": "assistant", "content": "Well, "}],
            {"continue_final_message": True},
            "<user>hello\n<assistant>Well, ",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            {},
            "<user>a\nb\n<assistant>",
        ),
    ],
)
def test_a_chat_continues_what_the_template_makes(
    llm: LLM, messages: Any, options: dict[str, Any], text: str
) -> None:
    [answer] = llm.chat(messages, GREEDY, chat_template=TEMPLATE, **options)
    [expected] = llm.generate(text, GREEDY)
    assert answer.prompt == text
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert answer.outputs[0].reasoning == ""


def test_several_conversations_with_parameters_of_their_own(llm: LLM) -> None:
    other = [{"role": "system", "content": "be brief"}, *HELLO]
    params = [GREEDY, msgspec.structs.replace(GREEDY, max_tokens=3)]
    answers = llm.chat([HELLO, other], params, chat_template=TEMPLATE)
    assert [len(answer.token_ids) for answer in answers] == [10, 3]
    assert answers[1].prompt == "<system>be brief\n<user>hello\n<assistant>"
    assert [answer.token_ids for answer in answers] == [
        llm.chat(each, own, chat_template=TEMPLATE)[0].token_ids
        for each, own in zip([HELLO, other], params, strict=True)
    ]
    assert llm.chat([], chat_template=TEMPLATE) == []


def test_the_embedded_models_own_template() -> None:
    with LLM(num_blocks=60, num_threads=1) as llm:
        [answer] = llm.chat(HELLO, GREEDY)
    assert answer.prompt == "<|user|>hello<|endoftext|><|assistant|>"
    assert llm.tokenizer is not None and answer.prompt_token_ids == llm.tokenizer.encode(
        answer.prompt, add_special_tokens=False
    )
    assert answer.text


def test_thoughts_are_split_off(llm: LLM) -> None:
    """The template opens one, and the budget ends it."""
    params = msgspec.structs.replace(GREEDY, max_tokens=30, thinking_token_budget=5)
    [answer] = llm.chat(HELLO, params, chat_template=THINKING)
    [plain] = llm.generate(answer.prompt or "", params)
    choice = answer.outputs[0]
    assert choice.token_ids == plain.token_ids
    thought, mark, rest = plain.text.partition("</think>")
    assert mark and (choice.reasoning, choice.text) == (thought, rest)
    assert choice.reasoning and choice.num_reasoning_tokens == 5


def test_a_grammar_begins_behind_the_thought(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=30, seed=1, thinking_token_budget=4, structured_outputs={"choice": ["ab", "cd"]}
    )  # type: ignore[arg-type]
    answers = llm.chat([HELLO, HELLO], params, chat_template=THINKING)
    for answer in answers:
        assert answer.text in ("ab", "cd"), answer.error
        assert answer.outputs[0].num_reasoning_tokens == 4
        assert answer.finish_reason == "stop"
    [plain] = llm.generate("hello<think>", msgspec.structs.replace(params, max_tokens=20))
    assert "</think>" in plain.text, "with a budget it begins behind the thought there too"


REFUSED = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ("hello", {}, "messages are a list of dicts.*not 'hello'"),
        ([HELLO, HELLO[0]], {}, "messages are a list of dicts"),
        ([HELLO, []], {}, "conversation 1: `messages` must hold 1 to 4096 messages, not 0"),
        ([{"role": "user"}], {}, r"conversation 0: `messages\[0\]` has no `content`"),
        ([{"role": "king", "content": "x"}], {}, r"conversation 0: messages cannot be used.*king"),
        ([{"role": "user", "content": 5}], {}, r"conversation 0: messages .* `\$\[0\]\.content`"),
        ([HELLO, [{"role": "user", "content": "no"}]], {"chat_template": REFUSED},
         "conversation 1: the chat template refused this conversation: not that"),
        (HELLO, {"chat_template": "{% if %}"}, "chat_template cannot be compiled"),
        (HELLO, {"chat_template": 5}, "chat_template takes a Jinja template, not 5"),
        (HELLO, {"chat_template": None}, "has no chat template; give one as chat_template"),
        (HELLO, {"add_generation_prompt": "yes"}, "add_generation_prompt takes True or False"),
        (HELLO, {"continue_final_message": 1}, "continue_final_message takes True or False"),
        (HELLO, {"continue_final_message": True, "add_generation_prompt": True},
         "send one of them"),
        (HELLO, {"chat_template_kwargs": []}, "chat_template_kwargs takes a dict"),
        (HELLO, {"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs takes a dict"),
        (HELLO, {"chat_template_kwargs": {"messages": []}}, "may not hold messages"),
        (HELLO, {"use_tqdm": 1}, "use_tqdm takes True or False, not 1"),
        ([{"role": "user", "content": "x" * 300}], {}, "conversation 0: the prompt has .* tokens"),
        ([HELLO] * 3, {"sampling_params": [GREEDY] * 2},
         "3 conversations need one or 3 sampling parameters, not 2"),
        ([HELLO] * 2, {"priority": [1]}, "priority has 1 numbers for 2 conversations"),
        (HELLO, {"priority": 3}, "priority is a list of whole numbers, not int"),
        (HELLO, {"priority": ["high"]}, "a list of whole numbers, and holds str"),
        (HELLO, {"priority": [2**31 + 1]}, "conversation 0: priority must be from"),
    ],
)  # fmt: skip
def test_chats_that_cannot_be(llm: LLM, messages: Any, options: dict[str, Any], words: str) -> None:
    """Nothing has run by then."""
    before = llm.stats()["scheduler"]["generated_tokens"]
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, **{"chat_template": TEMPLATE, **options})
    assert llm.stats()["scheduler"]["generated_tokens"] == before


def test_conversations_have_priorities(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = llm._run

    def noting(checked: Sequence[Any], use_tqdm: bool) -> list[Any]:
        asked.extend(each.request.priority for each in checked)
        return run(checked, use_tqdm)

    monkeypatch.setattr(llm, "_run", noting)
    answers = llm.chat([HELLO] * 2, GREEDY, priority=[5, -1], chat_template=TEMPLATE)
    assert asked == [5, -1]
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [10, 10]


# Choices


def test_each_choice_draws_with_a_seed_of_its_own(llm: LLM) -> None:
    """Choice `i` as with the seed plus `i`, as over HTTP."""
    params = msgspec.structs.replace(DRAWN, n=3, prompt_logprobs=0)
    first, second = llm.generate([PROMPT, "other"], [params, DRAWN])
    alone = [
        llm.generate([PROMPT], msgspec.structs.replace(DRAWN, seed=5 + child))[0]
        for child in range(3)
    ]
    assert [choice.token_ids for choice in first.outputs] == [each.token_ids for each in alone]
    assert [choice.text for choice in first.outputs] == [each.text for each in alone]
    assert len({each.text for each in alone}) == 3
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert all(isinstance(choice, CompletionOutput) for choice in first.outputs)
    assert {choice.finish_reason for choice in first.outputs} == {"length"}
    assert first.finished and all(choice.finished() for choice in first.outputs)
    assert (first.text, first.token_ids) == (first.outputs[0].text, first.outputs[0].token_ids)
    assert (first.prompt_token_ids, first.prompt) == (PROMPT, None)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(PROMPT)
    assert len(second.outputs) == 1
    assert first.request_id != second.request_id


def test_log_probabilities_by_token(llm: LLM) -> None:
    [answer] = llm.generate("hello", msgspec.structs.replace(GREEDY, logprobs=2))
    choice = answer.outputs[0]
    assert choice.logprobs is not None and llm.tokenizer is not None
    for token, entry, given in zip(choice.token_ids, choice.logprobs, answer.logprobs, strict=True):
        assert list(entry) == list(dict.fromkeys(given.token_ids))
        assert next(iter(entry)) == token and entry[token].logprob == given.logprobs[0]
        assert [entry[each].rank for each in given.token_ids[1:]] == [1, 2]
        assert entry[token].decoded_token == llm.tokenizer.decode(
            [token], skip_special_tokens=False
        )
    total = sum(entry.logprobs[0] for entry in answer.logprobs)
    assert choice.cumulative_logprob == pytest.approx(total)
    plain = llm.generate("hello", GREEDY)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("n", [0, MAX_N + 1, 1.5, True, None, "2"])
def test_numbers_of_choices_that_cannot_be(n: Any) -> None:
    with pytest.raises(ValueError, match=r"^n must be"):
        SamplingParams(n=n)


def test_a_stream_has_one_choice(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n must be 1 in a stream, got 2; use generate"):
        llm.stream("hello", SamplingParams(n=2))


# What fails alone


def test_a_prompt_that_fails_loses_no_other(llm: LLM) -> None:
    """A grammar that is wrong is known after the others have begun."""
    wrong = SamplingParams(n=2, structured_outputs={"regex": "(("})  # type: ignore[arg-type]
    good, bad, also = llm.generate([PROMPT, PROMPT, "hello"], [GREEDY, wrong, GREEDY])
    assert (good.error, also.error) == (None, None)
    assert len(good.token_ids) == len(also.token_ids) == 10
    assert bad.error and [choice.finish_reason for choice in bad.outputs] == ["error"] * 2


def test_a_tokenizer_that_fails_loses_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert llm.tokenizer is not None
    [whole] = llm.generate([PROMPT], GREEDY)
    [other] = llm.generate("hello", GREEDY)
    [culprit, *_] = set(whole.token_ids) - set(other.token_ids)
    decode = llm.tokenizer.decode

    def failing(token_ids: list[int], **options: bool) -> str:
        if culprit in token_ids:
            raise RuntimeError("cannot decode this")
        return decode(token_ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", failing)
    bad, good = llm.generate([PROMPT, llm.tokenizer.encode("hello")], GREEDY)
    assert (bad.finish_reason, bad.error) == ("error", "cannot decode this")
    assert bad.finished and "failed" in caplog.text
    assert (good.token_ids, good.error) == (other.token_ids, None)
    wait_until(lambda: llm.stats()["scheduler"]["num_running"] == 0)


def test_the_error_of_an_answer_is_that_of_a_choice() -> None:
    answer = RequestOutput("llm-1", None, [1], [CompletionOutput(0), CompletionOutput(1)])
    assert answer.error is None and not answer.finished
    answer.outputs[1].fail("no room")
    assert (answer.error, answer.finish_reason, answer.finished) == ("no room", None, False)


# The line on a terminal


class Terminal(io.StringIO):
    """Standard error as it would be on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(outputs, "PROGRESS_SECONDS", 0.001)
    return Terminal()


def test_the_line_counts_answers(llm: LLM, terminal: Terminal) -> None:
    llm.pause("all")
    with redirect_stderr(terminal), ThreadPoolExecutor(1) as pool:
        params = [msgspec.structs.replace(GREEDY, n=2), GREEDY]
        waiting = pool.submit(llm.generate, [PROMPT, "hello"], params)
        try:
            wait_until(lambda: "0 of 3 answers, 0 tokens/s" in terminal.getvalue())
        finally:
            llm.resume()
        assert len(waiting.result(30.0)) == 2
    *_, last = terminal.getvalue().split("\r")
    assert last.startswith("3 of 3 answers, ") and last.endswith("\n")


def test_a_call_that_needs_no_line_writes_none(
    llm: LLM, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was switched off, there is one prompt, or there is no terminal."""
    many = msgspec.structs.replace(GREEDY, max_tokens=100)
    with redirect_stderr(terminal):
        llm.generate([PROMPT] * 2, many, use_tqdm=False)
        llm.generate([PROMPT], many)
    assert terminal.getvalue() == ""
    with redirect_stderr(plain := io.StringIO()):
        llm.generate([PROMPT] * 2, many)
    assert plain.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate([PROMPT] * 2, many)) == 2


def test_a_terminal_that_goes_away_loses_no_answer(llm: LLM, terminal: Terminal) -> None:
    llm.pause("all")
    with redirect_stderr(terminal), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, [PROMPT, "hello"], GREEDY)
        try:
            wait_until(lambda: terminal.getvalue() != "")
        finally:
            terminal.close()
            llm.resume()
        assert [len(answer.token_ids) for answer in waiting.result(30.0)] == [10, 10]
