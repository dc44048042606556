# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a schema or a grammar, in every spelling that clients use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from stratakv.engine.api.openai.request import structured

from ....nursery_site.nursery_client import Nursery

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello world"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["S", "M"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
RULES = 'root ::= "x" [0-9] [0-9] ";"'


@pytest.fixture(autouse=True, scope="module")
def _processes_start_soon(worker_nursery: Nursery) -> None:
    """What grammars are compiled in is forked from the nursery: not within a client's time."""
    assert worker_nursery.pid


def of_schema(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value["ok"], bool) and value["size"] in ("S", "M") and len(value) == 2


def is_choice(text: str) -> bool:
    return text in ("yes", "no")


def of_rules(text: str) -> bool:
    return re.fullmatch("x[0-9]{2};", text) is not None


def of_schema_in_short(text: str) -> bool:
    return of_schema(text) and re.search(r"\s\s|[\n\t]", text) is None


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
COMPACT = {"disable_any_whitespace": True}
SPELLINGS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": SCHEMA_FORMAT}, of_schema),
    ({"structured_outputs": {"json": SCHEMA, **COMPACT}}, of_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), **COMPACT}}, of_schema),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, of_schema_in_short),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "[ ]?"}, of_schema_in_short),
    ({"structured_outputs": {"regex": "x[0-9]{2};"}}, of_rules),
    ({"guided_regex": "x[0-9]{2};"}, of_rules),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, is_choice),
    ({"guided_choice": ["yes", "no"]}, is_choice),
    ({"structured_outputs": {"grammar": RULES}}, of_rules),
    ({"guided_grammar": RULES}, of_rules),
]


@pytest.mark.parametrize(("fields", "is_right"), SPELLINGS)
def test_each_spelling_is_followed(
    http: httpx.Client, fields: dict[str, Any], is_right: Any
) -> None:
    """By two answers to one request, in a chat, and in a stream, which the seed makes the same."""
    body = {"max_tokens": 200, "temperature": 0.3, "seed": 5, "n": 2, **fields}
    answer = http.post(COMPLETIONS, json={"prompt": "a", **body}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert all(map(is_right, texts))
    chat = http.post(CHAT, json={"messages": HELLO, **body, "n": 1, "logprobs": True}).json()
    assert all(is_right(choice["message"]["content"]) for choice in chat["choices"])
    stream = http.post(COMPLETIONS, json={"prompt": "a", **body, "n": 1, "stream": True})
    events = [
        json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == texts[0]


def test_any_object(http: httpx.Client) -> None:
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 60}
    for seed in range(3):
        choice = http.post(CHAT, json={**body, "seed": seed}).json()["choices"][0]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_text_is_free(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0}
    free = http.post(COMPLETIONS, json=body).json()["choices"]
    asked = {"response_format": {"type": "text"}, "guided_json_object": False}
    assert http.post(COMPLETIONS, json=body | asked).json()["choices"] == free


class Item(pydantic.BaseModel):
    kind: Literal["red", "green"]
    count: int = pydantic.Field(ge=0, le=9)


class Order(pydantic.BaseModel):
    items: list[Item] = pydantic.Field(max_length=2)
    note: Literal["none", "gift"] | None


def test_the_library_parses_models(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Order, temperature=0.0, max_tokens=400
    )
    order = chat.choices[0].message.parsed
    assert isinstance(order, Order) and len(order.items) <= 2
    assert chat.choices[0].finish_reason == "stop"


def test_the_library_parses_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Item, seed=1, max_tokens=400, temperature=0.0
    ) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Item) and 0 <= parsed.count <= 9


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "invalid_value", "text, json_object, json_schema"),
    ({"response_format": "json"}, "invalid_value", "must be an object"),
    ({"response_format": {"type": "json_schema"}}, "invalid_value", "with a `schema`"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "invalid_value",
     "must be a JSON schema"),
    ({"response_format": {"type": "json_object", "x": 1}}, "invalid_value", "unknown field 'x'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
     "invalid_value", "true, false or null"),
    ({"response_format": SCHEMA_FORMAT, "guided_regex": "a"}, "invalid_value",
     "`response_format` and `guided_regex` both say"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "invalid_value", "send one"),
    ({"structured_outputs": {}}, "invalid_value", "got none of them"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "and choice"),
    ({"structured_outputs": {"regexp": "a"}}, "invalid_value", "regexp"),
    ({"guided_json": "{"}, "invalid_value", "line 1, column 2"),
    ({"guided_choice": []}, "invalid_value", "1 to 4096 different texts"),
    ({"guided_whitespace_pattern": " "}, "invalid_value", "send both"),
    ({"guided_regex": "a[b"}, "invalid_grammar", "unclosed character class"),
    ({"guided_grammar": "root ::= x"}, "invalid_grammar", "'x' not found"),
    ({"guided_json": {"type": "strin"}}, "invalid_grammar", "strin"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "invalid_grammar", "uniqueItems"),
    ({"guided_regex": "a", "min_tokens": 9}, "invalid_grammar", "min_tokens is 9"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "words"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_refused(
    http: httpx.Client, fields: dict[str, Any], code: str, words: str, stream: bool
) -> None:
    body = {"prompt": "a", "stream": stream, "max_tokens": 20, **fields}
    response = http.post(COMPLETIONS, json=body)
    if response.status_code == 200:  # the stream had begun
        assert stream and "min_tokens" in fields
        line = next(line for line in response.text.splitlines() if '"error"' in line)
        error = json.loads(line.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["code"] == code and error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.regression
def test_x07_a_format_that_no_answer_is_held_to_is_said_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pydantic's paths, secrets and bytes have it, and what OpenAPI says of numbers."""
    monkeypatch.setattr(structured, "_told", set())

    class Answer(pydantic.BaseModel):
        path: Path
        key: pydantic.SecretStr = pydantic.SecretStr("")

    schema = Answer.model_json_schema()
    answer = {"const": "a", "format": "path"}
    schema["properties"] = {"path": answer, "key": {"enum": ["b"], "format": "password"}}
    for _ in range(2):
        fields = {"structured_outputs": {"json": schema, **COMPACT}}
        # A draw in a hundred has properties of its own for 200 tokens.
        body = {"prompt": "hello", "max_tokens": 200, "temperature": 0, **fields}
        told = http.post(COMPLETIONS, json=body)
        assert told.status_code == 200, told.text
        assert json.loads(told.json()["choices"][0]["text"])["path"] == "a"
    said = [each.getMessage() for each in caplog.records if "annotation" in each.getMessage()]
    assert len(said) == 2 and "'path'" in said[0] and "'password'" in said[1]
