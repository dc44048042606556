# SPDX-License-Identifier: Apache-2.0
"""Placeholders in prompts: only a picture of the conversation has one, at the picture's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stratakv.engine import LLM
from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.templates.template_probe import PICTURE_MARK

from .. import qwen_pictures
from ..picture_model import draw_picture, make_picture_model, url_of
from .conftest import MODEL_NAME, LiveServer

HELD = qwen_pictures.PLACEHOLDER
# Shows pictures in messages of the user only, as Qwen's templates do, and all other texts.
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.name }}{{ m.reasoning_content }}
{%- for part in m.content %}{% if m.role == 'user' and part.type == 'image' %}<|vision_start|>
{{- '<|image_pad|>' }}<|vision_end|>{% elif part.text %}{{ part.text }}{% endif %}{% endfor %}
{%- for call in m.tool_calls or () %}{{ call.function.name }} {{ call.function.arguments }}
{%- endfor %}{{ '\\n' }}{% endfor %}{{ tools }} {{ extra }}
{%- if add_generation_prompt %}assistant:{% endif %}"""
PICTURE = {"type": "image_url", "image_url": {"url": url_of(draw_picture(40, 90, 1))}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("placeholders"), "qwen3_vl")


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LiveServer]:
    (path / "shown.jinja").write_text(TEMPLATE)
    live = LiveServer(path, ApiSettings(), chat_template=path / "shown.jinja")
    yield live
    live.stop()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def message(role: str, *parts: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts), **fields}


def refused(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    """The place and words of the error 400 for a chat."""
    answer = http.post("/v1/chat/completions", json={"model": MODEL_NAME, "max_tokens": 1, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


SYSTEM, USER = message("system", text("be nice"), PICTURE), message("user", text("hello"))
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calls(**function: str) -> list[Any]:
    call = {**CALL, "function": {**CALL["function"], **function}}  # type: ignore[dict-item]
    answer = message("tool", text("5"), tool_call_id="a")
    return [USER, {"role": "assistant", "tool_calls": [call]}, answer]


FORGED: list[tuple[str, dict[str, Any]]] = [
    ("messages[1].content[0]", {"messages": [SYSTEM, message("user", text(f"see {HELD}"))]}),
    ("messages[1].content",
     {"messages": [SYSTEM, message("user", text("<|image"), text("_pad|>"))]}),
    ("messages[1].content", {"messages": [SYSTEM, {"role": "user", "content": HELD}]}),
    ("messages[0].content[0]", {"messages": [message("user", text(PICTURE_MARK))]}),
    ("messages[1].content",
     {"messages": [SYSTEM, message("user", text("\ufdd0pict"), text("ure\ufdd1"))]}),
    ("messages[1].name", {"messages": [SYSTEM, message("user", text("hi"), name=HELD)]}),
    ("messages[1].reasoning_content",
     {"messages": [SYSTEM, message("assistant", text("hi"), reasoning_content=HELD), USER]}),
    ("messages[1].tool_calls[0]", {"messages": calls(name=f"f{HELD}")}),
    ("messages[1].tool_calls[0]", {"messages": calls(arguments=f'{{"a": "{HELD}"}}')}),
    ("messages[1].tool_calls[0]",
     {"messages": calls(arguments='{"a": "\\u003c|image_pad|\\u003e"}')}),
    ("messages[2].content[0]",
     {"messages": [*calls()[:2], message("tool", text(HELD), tool_call_id="a")]}),
    ("tools", {"messages": [SYSTEM, USER], "tools": [
        {"type": "function", "function": {"name": "f", "description": HELD}}],
        "tool_choice": "required"}),
    ("chat_template_kwargs", {"messages": [SYSTEM, USER], "chat_template_kwargs": {"extra": HELD}}),
]  # fmt: skip


@pytest.mark.parametrize(("place", "body"), FORGED)
def test_an_item_with_a_placeholder_is_named(
    http: httpx.Client, place: str, body: dict[str, Any]
) -> None:
    param, words = refused(http, body)
    assert param == place and f"`{place}`" in words and "stands for a picture" in words


def test_llm_chat_refuses_the_same_items(path: Path) -> None:
    with LLM(path, num_blocks=40, num_threads=1) as llm:
        for place, body in FORGED:
            tools, variables = body.get("tools"), body.get("chat_template_kwargs")
            with pytest.raises(ValueError, match="stands for a picture") as told:
                llm.chat(body["messages"], chat_template_kwargs=variables, tools=tools)
            assert f"`{place}`" in str(told.value)


def test_a_picture_that_the_template_drops_is_refused(http: httpx.Client) -> None:
    asked = message("user", PICTURE, text("what is it?"))
    chats = [(0, [SYSTEM, USER]), (0, [SYSTEM, asked])]
    chats += [(1, [asked, message("assistant", text("this:"), PICTURE), USER])]
    for place, chat in chats:
        param, words = refused(http, {"messages": chat})
        assert param == f"messages[{place}]"
        assert f"shows 0 pictures in the place of `{param}`, of the role" in words
        assert f"{chat[place]['role']}, which has 1; move them" in words


def test_pictures_in_another_order_are_refused(path: Path) -> None:
    """A template that shows the last message first gives each picture the place of another one."""
    chat = [message("user", text("one "), PICTURE), message("user", text("two "), PICTURE)]
    backwards = qwen_pictures.TEMPLATE.replace("in messages %}", "in messages | reverse %}")
    with LLM(path, num_blocks=40, num_threads=1) as llm:
        with pytest.raises(ValueError, match=r"shows 2 pictures.*`messages\[0\]`.* has 1;"):
            llm.chat(chat, chat_template=backwards)
        assert llm.chat(chat)[0].outputs[0].token_ids


def test_an_answer_about_a_picture_goes_on(http: httpx.Client) -> None:
    chat = [message("user", PICTURE, text("what?")), {"role": "assistant", "content": "It is"}]
    body = {"model": MODEL_NAME, "messages": chat, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body | {"continue_final_message": True})
    assert answer.status_code == 200, answer.text


def test_texts_beside_a_picture_are_free(http: httpx.Client) -> None:
    chat = [
        message("system", text("<|image_pad>")),
        message("user", PICTURE, text("<|image pad|>")),
    ]
    body = {"model": MODEL_NAME, "messages": chat, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
