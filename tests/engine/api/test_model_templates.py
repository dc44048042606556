# SPDX-License-Identifier: Apache-2.0
"""Conversations through templates in the shape of those of well-known models: the prompt is that of
transformers wherever that takes the conversation and loses nothing of it, and else nothing is lost
in silence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.api.chat_template import ChatTemplate
from stratakv.engine.api.openai.request.conversation import ChatOptions, ConversationRenderer
from stratakv.engine.api.openai.response.tools import template_tools_of
from stratakv.engine.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

EMBEDDED = Path(__file__).parents[3] / "engine/models/embedded"
FOLDER = Path(__file__).parent / "model_templates"
Message = dict[str, Any]


def _source(name: str) -> str | None:
    path = FOLDER / f"{name}.jinja"
    return path.read_text() if path.exists() else None


# By name, each with the template for tools where there is one of its own.
TEMPLATES: dict[str, tuple[str, str | None]] = {
    path.stem: (path.read_text(), _source(f"{path.stem}.tool_use"))
    for path in sorted(FOLDER.glob("*.jinja"))
    if "tool_use" not in path.stem
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "finds out",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "clock")
]


def said(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: Any, number: int = 1) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": f"callid00{number}", "type": "function", "function": function}


def result(content: Any, number: int = 1) -> Message:
    return said("tool", content, tool_call_id=f"callid00{number}")


NAMES = ("weather", "clock")
ASK, MORE = said("user", "first-question"), said("user", "second-question")
TOLD, ANSWER = said("system", "told-by-system"), said("assistant", "an-answer")
BONN = '{"city": "Bonn"}'
CALL = said("assistant", None, tool_calls=[call("weather", BONN)])
TWO = said("assistant", None, tool_calls=[call("weather", BONN), call("clock", "{}", 2)])

# By name: the messages, whether tools are offered, and texts that have to be in the prompt.
CONVERSATIONS: dict[str, tuple[list[Message], bool, list[str]]] = {
    "a question": ([ASK], False, ["first-question"]),
    "a short one": ([said("user", "hi")], False, ["hi"]),
    "a system's text": ([TOLD, ASK], False, ["told-by-system"]),
    "a developer's text": ([said("developer", "dev-rule"), ASK], False, ["dev-rule"]),
    "a developer behind a system": ([TOLD, said("developer", "dev-rule"), ASK], False,
                                    ["told-by-system", "dev-rule"]),
    "three turns": ([TOLD, ASK, ANSWER, MORE], False, ["an-answer", "second-question"]),
    "a late system's text": ([ASK, ANSWER, TOLD, MORE], False, ["told-by-system"]),
    "parts": ([said("user", [{"type": "text", "text": t} for t in ("part-one", "part-two")])],
              False, ["part-one\npart-two"]),
    "white space": ([said("user", "  spaced \n"), said("assistant", " so \n"), MORE], False,
                    ["spaced", "so"]),
    "a thought": ([ASK, {**ANSWER, "reasoning_content": "my-thought"}, MORE], False,
                  ["an-answer"]),
    "a thought in the text": ([ASK, said("assistant", "<think>\nhm\n</think>\n\nan-answer"), MORE],
                              False, ["an-answer"]),
    "tools": ([ASK], True, ["first-question"]),
    "a call": ([ASK, CALL, result("rain-now")], True, ["weather", "Bonn", "rain-now"]),
    "a call beside a text": ([ASK, {**CALL, "content": "let-me-see"}, result("rain-now")], True,
                             ["weather", "Bonn", "rain-now"]),
    "a call without a content": ([ASK, {k: v for k, v in CALL.items() if k != "content"},
                                  result("rain-now")], True, ["weather", "Bonn", "rain-now"]),
    "two calls": ([ASK, TWO, result("rain-now"), result("noon-now", 2)], True,
                  ["weather", "clock", "rain-now", "noon-now"]),
    "a call after a thought": ([ASK, {**CALL, "reasoning": "my-thought"}, result("rain-now")],
                               True, ["weather", "rain-now"]),
    "a call and an answer": ([TOLD, ASK, CALL, result("rain-now"), ANSWER, MORE], True,
                             ["weather", "rain-now", "an-answer"]),
    "calls without tools": ([ASK, CALL, result("rain-now"), ANSWER, MORE], False,
                            ["weather", "rain-now"]),
    "an answer that goes nowhere": ([ASK, said("assistant", None), MORE], False,
                                    ["second-question"]),
    **{
        f"arguments {json.dumps(arguments)}": (
            [ASK, said("assistant", None, tool_calls=[call("weather", arguments)]),
             result("rain-now")], True, ["weather", "rain-now"])
        for arguments in ('{"city": "Bo', "null", None, "None", "", "[1]", "so-many words",
                          {"city": "Bonn"}, '{"a": NaN, "b": 99999999999999999999}')
    },
}  # fmt: skip


class _Loop:
    """Renders one conversation after the other."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()

    def render(
        self,
        renderer: ConversationRenderer,
        messages: list[Message],
        tools: Any,
        options: ChatOptions = ChatOptions(),  # noqa: B008 - it never changes
    ) -> str:
        shown = template_tools_of(tools)
        return self.runner.run(renderer.render(messages, options, shown))


@pytest.fixture(scope="module")
def loop() -> Iterator[_Loop]:
    loop = _Loop()
    yield loop
    loop.runner.close()


def test_there_are_ten_with_twenty_conversations_each() -> None:
    assert len(TEMPLATES) >= 10 and len(CONVERSATIONS) >= 20


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED)


@cache
def renderer(name: str) -> ConversationRenderer:
    made = ConversationRenderer(EMBEDDED, tokenizer(), TEMPLATES[name][0])
    source, for_tools = TEMPLATES[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    made.template = ChatTemplate(source, tokens, name, for_tools)
    return made


@cache
def reference() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def expected(
    name: str, messages: list[Message], tools: Any, has_all: Callable[[str], bool]
) -> str | None:
    """The prompt of transformers, which is given arguments as an object or, where the template
    takes none, as a text; None where it takes neither or loses something."""
    source, for_tools = TEMPLATES[name]
    for reads in (json.loads, str):
        turns = []
        for message in messages:
            turn = dict(message)
            if isinstance(turn.get("content"), list):
                turn["content"] = "\n".join(part["text"] for part in turn["content"])
            if turn["role"] == "developer" and "developer" not in source:
                turn["role"] = "system"
            if turn.get("tool_calls"):
                turn["tool_calls"] = [_read(each, reads) for each in turn["tool_calls"]]
            turns.append(turn)
        template = for_tools if tools and for_tools else source
        try:
            prompt = reference().apply_chat_template(
                turns, tools, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # a template's own, or of what it does with what it does not know
            continue
        if has_all(prompt):
            return str(prompt)
    return None


def _read(made: Message, reads: Callable[[str], Any]) -> Message:
    arguments = made["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = reads(arguments)
        except ValueError:
            arguments = {}
    return {**made, "function": {**made["function"], "arguments": arguments}}


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_x01_x03_a_prompt_is_that_of_transformers_or_says_what_is_lost(
    loop: _Loop, name: str, case: str
) -> None:
    messages, offers, texts = CONVERSATIONS[case]
    tools = TOOLS if offers else None
    # Where tools are offered their names stand in the prompt before any call.
    offered = loop.render(renderer(name), [ASK], tools)

    def has_all(prompt: str) -> bool:
        return all(prompt.count(text) > (text in NAMES and offered.count(text)) for text in texts)

    wanted = expected(name, messages, tools, has_all)
    prompt, refusal = "", ""
    try:
        prompt = loop.render(renderer(name), messages, tools)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert wanted is None, f"refused although transformers takes it: {refusal}"
        assert "chat template refused" in refusal or "no trace" in refusal
        return
    assert has_all(prompt), prompt
    if wanted is not None and not case.startswith("arguments"):
        assert prompt == wanted


@pytest.mark.parametrize("text", ["The answer is: \n", "so", "  so ", "x\n\n"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_x01_a_message_that_goes_on_ends_as_with_transformers(
    loop: _Loop, name: str, text: str
) -> None:
    turns, fields = [ASK, said("assistant", text)], {"continue_final_message": True}
    wanted = reference().apply_chat_template(
        turns, chat_template=TEMPLATES[name][0], tokenize=False, **fields
    )
    assert loop.render(renderer(name), turns, None, ChatOptions(**fields)) == wanted
