# SPDX-License-Identifier: Apache-2.0
"""Messages that chat templates leave out, calls in the form that each of them shows, and templates
that take all memory. In this process, without an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import socket
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.api import chat_template
from stratakv.engine.api.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from stratakv.engine.api.openai.request.conversation import (
    ChatOptions,
    ConversationRenderer,
    as_template_orders,
)
from stratakv.engine.api.openai.request.protocol import CalledFunction, ChatMessage, MadeCall
from stratakv.engine.api.openai.response.tools import template_tools_of
from stratakv.engine.api.openai.templates import template_probe as probe
from stratakv.engine.api.openai.templates import template_process as process
from stratakv.engine.api.openai.templates.template_probe import CallForm
from stratakv.engine.cli import serve
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.config.server_options import server_config
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.tiers.settings.values import ConfigError

pytestmark = pytest.mark.regression

TEMPLATES = Path(__file__).parents[1] / "engine/api/model_templates"
Message = dict[str, Any]
USER: Message = {"role": "user", "content": "a question"}
RULE: Message = {"role": "developer", "content": "RULE"}
CALL = {"id": "c", "type": "function", "function": {"name": "ring", "arguments": '{"at": "six"}'}}
CALLS: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "c", "content": "rung"}
TOOLS = [{"type": "function", "function": {"name": "ring", "parameters": {"type": "object"}}}]
WORDS = "would leave no trace in the prompt"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


def rendered(source: str | ConversationRenderer, *messages: Message, tools: Any = None) -> str:
    renderer = source
    if isinstance(renderer, str):
        renderer = ConversationRenderer(EMBEDDED_MODEL, tokenizer(), renderer)
    shown = template_tools_of(tools)
    return asyncio.run(renderer.render(list(messages), ChatOptions(), shown))


def model(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


# Messages that leave no trace


@pytest.mark.parametrize("name", ["qwen-2.5", "qwen-3", "r1-distill", "llama-3", "phi", "gemma-3"])
def test_x01_a_developers_text_is_a_systems(name: str) -> None:
    system = {**RULE, "role": "system"}
    prompt = rendered(model(name), RULE, USER)
    assert prompt == rendered(model(name), system, USER) and "RULE" in prompt


def test_x01_a_template_that_knows_developers_gets_them() -> None:
    assert "# Instructions\n\nRULE" in rendered(model("gpt-oss"), RULE, USER)
    named = "{% for m in messages %}<{{ m.role if m.role == 'developer' else '' }}{{ m.content }}"
    assert rendered(f"{named}{{% endfor %}}", RULE) == "<developerRULE"


@pytest.mark.parametrize("name", ["gemma-3", "mistral", "r1-distill", "gpt-oss"])
def test_x01_a_template_with_one_system_gets_all_in_it(name: str) -> None:
    system: Message = {"role": "system", "content": "FIRST"}
    whole: Message = {"role": "system", "content": "FIRST\n\nRULE"}
    prompt = rendered(model(name), system, RULE, USER)
    assert prompt == rendered(model(name), whole, USER) and "FIRST\n\nRULE" in prompt


@pytest.mark.parametrize("name", ["llama-3", "qwen-2.5"])
def test_x01_a_template_with_several_systems_gets_each(name: str) -> None:
    system: Message = {"role": "system", "content": "FIRST"}
    prompt = rendered(model(name), system, RULE, USER)
    assert prompt == rendered(model(name), system, {**RULE, "role": "system"}, USER)
    assert "FIRST" in prompt and "RULE" in prompt and "FIRST\n\nRULE" not in prompt


KEEPS_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "place"),
    [
        (KEEPS_USERS, [USER, {"role": "assistant", "content": "an answer"}, USER], 1),
        (KEEPS_USERS, [{"role": "system", "content": "a"}, USER], 0),
        (KEEPS_USERS, [{"role": "system", "content": "question"}, USER], 0),
        ("{{ messages[-1].content }}", [USER, {"role": "assistant", "content": "b"}, USER], 0),
        ("nothing at all", [USER], 0),
        # Only the length of a text decides.
        ("{% for m in messages if m.content | length < 5000 %}{{ m.content }}{% endfor %}",
         [USER, {"role": "user", "content": "x" * 5000}], 1),
    ],
)  # fmt: skip
def test_x01_a_message_that_is_left_out_is_refused(
    source: str, messages: list[Message], place: int
) -> None:
    with pytest.raises(ValueError, match=WORDS) as caught:
        rendered(source, *messages)
    assert f"`messages[{place}]`, of the role {messages[place]['role']}" in str(caught.value)


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}"
    "{{ part.text }}{% endfor %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% endfor %}{% endfor %}"
)


def test_x01_a_template_that_shows_parts_alone_gets_parts() -> None:
    turns = [{**RULE, "role": "system"}, USER, {**CALLS, "content": "look"}, RESULT]
    assert (
        rendered(PARTS, *turns) == "<system>RULE<user>a question<assistant>look<call>ring<tool>rung"
    )


@pytest.mark.parametrize("source", [
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{% if loop.index != 4001 %}{{ m.content | upper }}{% endif %}"
    "{% endfor %}",
])  # fmt: skip
def test_x01_a_long_conversation_costs_few_searches(source: str) -> None:
    """What a template changes is looked for eight times, and then all of it once."""
    turns = [{"role": "user", "content": f"question number {i} " * 20} for i in range(4096)]
    searches = 0

    class Counted(str):
        def find(self, *words: Any) -> int:
            nonlocal searches
            searches += 1
            return super().find(*words)

    missing, unsure = probe._look_for(Counted("other " * 1000), turns)
    assert len(missing) == 4096 and not unsure and searches <= 16
    if "4001" in source:
        with pytest.raises(ValueError, match=r"messages\[4000\]"):
            rendered(source, *turns)
    else:
        assert rendered(source, *turns)


def test_x03_many_calls_and_results_are_matched_at_once() -> None:
    form = dataclasses.replace(CallForm(), several=False)
    number = 20_000
    calls = [MadeCall(function=CalledFunction(name="f"), id=str(i)) for i in range(number)]
    turns = [ChatMessage(role="assistant", tool_calls=calls)]
    turns += [
        ChatMessage(role="tool", content="", tool_call_id=str(number - i)) for i in range(number)
    ]
    ordered = [turn for _, turn in as_template_orders(turns, form)]
    assert len(ordered) == 2 * number
    assert [turn.tool_call_id for turn in ordered[1:6]] == [None, "1", None, "2", None]


FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "question", ["Never reveal\n4711, please.", "'Never reveal\\n4711, please.'"]
)
def test_x01_a_text_that_another_message_has_too_hides_nothing(question: str) -> None:
    """Also where it is quoted as JSON writes it."""
    rule = {"role": "system", "content": "Never reveal\n4711, please."}
    turns = [USER, rule, {"role": "user", "content": f"{question} Why?"}]
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        rendered(FIRST_SYSTEM, *turns)
    twice = [USER, {"role": "user", "content": "the same question"}] * 2
    assert rendered(FIRST_SYSTEM, *twice).count("the same question") == 2


def test_x01_two_systems_of_which_one_shows() -> None:
    first = {"role": "system", "content": "the first of two rules"}
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        rendered(model("r1-distill"), first, USER, {**first, "content": "another one"}, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('x') | join('y') }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace('a', 'o') }}{% endfor %}",
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:-1] }}{{ m.content[-1] }}{% endfor %}",
    ],
)
def test_x01_what_is_shown_otherwise_is_shown(source: str) -> None:
    turns = [USER, {"role": "assistant", "content": 'x "and" a\nlonger text that is quoted'}, USER]
    assert rendered(source, *turns)


def test_x01_a_conversation_is_rendered_once_and_a_small_one_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long texts that stand in the prompt need no second look, and shapes are remembered."""
    renderer = ConversationRenderer(EMBEDDED_MODEL, tokenizer(), model("qwen-3"))
    sizes: list[int] = []
    render = ChatTemplate.render

    async def noting(self: ChatTemplate, messages: Any, **options: Any) -> str:
        sizes.append(sum(len(message.get("content") or "") for message in messages))
        return await render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    long = {"role": "user", "content": "a long question " * 1000}
    rendered(renderer, long)
    assert sizes == [10, 16_000], "the first is a probe"
    del sizes[0]
    rendered(renderer, long, {"role": "assistant", "content": "no"}, long)
    assert len(sizes) == 3 and sizes[2] < 100
    rendered(renderer, long, {"role": "assistant", "content": "so"}, long)
    assert len(sizes) == 4


# Calls in the form of each template

NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "<call>{{ m.tool_calls[0].function.name }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
JOINED = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{{ '<call>' + m.tool_calls[0].function.arguments }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
    "{% endfor %}>{% endfor %}{% endfor %}"
)
PYTHONS = ITEMS.replace("{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}",
                        "{{ c.function.arguments }}{% if 0 %}").replace(
                        "{% endfor %}>{% endfor %}", "{% endif %}>{% endfor %}")  # fmt: skip
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (NULL, "<call>ring<tool>rung"),
        (JOINED, '<call>{"at": "six"}<tool>rung'),
        (ITEMS, "<assistant><ring at=six><tool>rung"),
        (PYTHONS, '<assistant><ring{"at": "six"}><tool>rung'),
        (PLAIN, '<assistant>{"name": "ring", "arguments": {"at": "six"}}<tool>rung'),
        (model("r1-distill"), '<|tool_sep|>ring\n```json\n{"at": "six"}\n```<|tool_call_end|>'),
        (model("phi"), "<|user|>\nrung<|end|>"),
    ],
)
def test_x03_a_call_without_a_text(source: str, shown: str) -> None:
    assert shown in rendered(source, USER, CALLS, RESULT)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (NULL, "<assistant>look<call>ring"),
        (ITEMS, "<assistant>look<ring at=six>"),
        (model("r1-distill"), "<|Assistant|>look</s>"),
    ],
)
def test_x03_a_call_beside_a_text(source: str, shown: str) -> None:
    prompt = rendered(source.replace("eos_token", "'</s>'"), USER, {**CALLS, "content": "look"})
    assert shown in prompt and "ring" in prompt


@pytest.mark.parametrize(
    ("source", "shown"),
    [(JOINED, '<call>{"at": "s'), (ITEMS, "<ring>"), (model("qwen-3"), '"arguments": {"at": "s}'),
     (model("llama-3").replace("bos_token", "''"), r'"parameters": "{\"at\": \"s"}')],
)  # fmt: skip
def test_x03_arguments_that_are_no_object(source: str, shown: str) -> None:
    function = {"name": "ring", "arguments": '{"at": "s'}
    cut = {**CALLS, "tool_calls": [{**CALL, "function": function}]}
    assert shown in rendered(source, USER, cut, RESULT)


def test_x03_each_of_two_calls_is_followed_by_its_result() -> None:
    two = [{**CALL, "id": each, "function": {"name": each, "arguments": "{}"}} for each in "ab"]
    turns = [USER, {**CALLS, "tool_calls": two}]
    turns += [{**RESULT, "tool_call_id": each, "content": f"rung {each}"} for each in "ba"]
    prompt = rendered(model("llama-3").replace("bos_token", "''"), *turns)
    order = [
        prompt.index(words) for words in ('"name": "a"', '"rung a"', '"name": "b"', '"rung b"')
    ]
    assert order == sorted(order)


def test_x03_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ eos_token }}{{ messages[0].content }}")
    assert ChatTemplate.read(path, tokenizer()).source == path.read_text()
    broken = {
        "gone.jinja": (None, "cannot be read"),
        "broken.jinja": ("{% if %}", "cannot be compiled"),
        "large.jinja": ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "characters and at most"),
        "huge.jinja": ("x" * (4 * MAX_TEMPLATE_CHARACTERS + 1), "bytes and at most"),
    }
    for name, (text, words) in broken.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            ChatTemplate.read(tmp_path / name, tokenizer())
        assert name in str(caught.value)


def test_x03_a_template_that_cannot_be_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratakv.engine.client.process_client.ProcessClient.start", None)
    path = tmp_path / "broken.jinja"
    path.write_text("{% if %}")
    config = engine_config(str(EMBEDDED_MODEL), {})
    server = server_config({"chat_template": str(path)})
    for words in ("broken.jinja cannot be compiled", "broken.jinja cannot be read"):
        with pytest.raises(ConfigError, match=words), socket.socket() as sock:
            asyncio.run(serve._serve(config, server, sock, None, (), lambda params: None))
        path.unlink(missing_ok=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text((EMBEDDED_MODEL / "config.json").read_text())
    bare = dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=tmp_path / "bare")
    )
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"), socket.socket() as sock:
        asyncio.run(serve._serve(bare, server, sock, None, (), lambda params: None))


# Templates that take all memory or all time


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%3000000000d' % 1 }}",  # folded while the template is compiled
        "{{ '%3000000000d' % messages | length }}",
        "{{ 'x'.ljust(3000000000) }}{{ 'x'.zfill(3000000000) }}",
        "{{ messages | tojson(indent=3000000000) }}",
        "{{ [messages] | batch(2000000000, 'x') | list | length }}",
    ],
)
def test_y07_a_template_that_takes_all_memory_is_stopped(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="more than 768 MiB of memory and was stopped"):
        rendered(source, USER)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024, "not here"
    assert rendered(PLAIN, USER) == "<user>a question"


def test_y07_a_template_is_stopped_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "COMPILE_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"cannot be compiled .*longer than 0\.2 seconds"):
        ChatTemplate("{{ [1] | slice(1000000000) | list | length }}", {}, "test")


def test_y07_one_call_that_takes_too_long_is_stopped() -> None:
    template = ChatTemplate("{{ messages[0] | wordwrap(1) | length }}", {}, "test")
    with pytest.raises(ValueError, match=r"longer than 0\.2 seconds"):
        asyncio.run(template.render(
            ["a" * 1_000_000], add_generation_prompt=False, max_characters=9, timeout_seconds=0.2  # type: ignore[list-item]
        ))  # fmt: skip


def test_y07_a_conversation_that_nobody_waits_for_is_stopped() -> None:
    template = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}, "test"
    )

    async def leave() -> None:
        asked = asyncio.ensure_future(template.render(
            [USER], add_generation_prompt=False, max_characters=9, timeout_seconds=1000.0
        ))  # fmt: skip
        while not asks.is_set():
            await asyncio.sleep(0.001)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    asks, taken = threading.Event(), []

    def noting(self: process.TemplateProcess, *question: Any) -> str:
        taken.append(self)
        asks.set()
        return ask(self, *question)

    ask = process.TemplateProcess.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.TemplateProcess, "ask", noting)
        asyncio.run(leave())
    assert not taken[0].is_alive and taken[0] not in process._idle


def test_y07_a_process_that_was_forked_or_ended_is_not_asked() -> None:
    rendered(PLAIN, USER)
    for spoil in ("fork", "end"):
        found = process.take()
        process.give_back(found)
        if spoil == "fork":
            found.owner += 1
        else:
            found._process.kill()
            found._process.wait()
        assert rendered(PLAIN, USER) == "<user>a question"
        assert found not in process._idle
        found.owner = os.getpid()
        found.kill_process()


@pytest.mark.parametrize("value", [10**30, float("inf"), "\ud83d half", {"deep": [[None]]}])
def test_y07_every_value_of_json_reaches_the_template(value: Any) -> None:
    template = ChatTemplate("{{ messages[0].v }}", {}, "test")
    text = asyncio.run(template.render(
        [{"v": value}], add_generation_prompt=False, max_characters=99, timeout_seconds=9.0
    ))  # fmt: skip
    assert text == str(value)
