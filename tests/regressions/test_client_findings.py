# SPDX-License-Identifier: Apache-2.0
"""What clients met in chats and what was mended: answers that could not be sent back, fields of
other servers, stop strings in JSON, words that led nowhere.

One server runs, over a model that writes what it is told, with a template that is given as a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest
from tokenizers import Tokenizer as FastTokenizer

from ..engine.api.conftest import MAX_MODEL_LEN, LiveServer, model_path
from ..processor_package import MODULE, SOURCE, packages_in

pytestmark = pytest.mark.regression

__all__ = ["model_path"]  # a fixture

CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parents[1] / "engine/api/model_templates"
HELLO: dict[str, Any] = {"role": "user", "content": "hello world"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Kiel"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
BONN = '{"city": "Bonn"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {BONN}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("client-llama")
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        (directory / name).symlink_to(model_path / name)
    fast = FastTokenizer.from_file(str(model_path / "tokenizer.json"))
    fast.add_tokens(["<think>", "</think>"])
    fast.save(str(directory / "tokenizer.json"))
    (directory / f"{MODULE}.py").write_text(SOURCE)
    with packages_in(directory):
        live = LiveServer(
            directory,
            logits_processors=(f"{MODULE}:Writes",),
            chat_template=TEMPLATES / "qwen-3.jinja",
        )
        live.fast = fast  # type: ignore[attr-defined]
        yield live
        live.stop()


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, verify=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    web = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=web
    ) as client:
        yield client


def writes(server: LiveServer, text: str) -> dict[str, Any]:
    """Fields that have the model write a text."""
    ids = server.fast.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    return {"vllm_xargs": {"write": ids}}


def prompt_of(http: httpx.Client, **body: Any) -> str:
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def post(http: httpx.Client, **body: Any) -> Any:
    answer = http.post(CHAT, json={"messages": [HELLO], "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


# What we send we take back. Each kind of answer: what the model writes, other fields of the
# request, and what of it has to be in the next prompt.
ANSWERS: dict[str, tuple[str | None, dict[str, Any], list[str]]] = {
    "plain": ("so it is", {}, ["so it is"]),
    "cut": ("so it is", {"max_tokens": 3}, ["so"]),
    "nothing": ("", {}, []),
    "a call": (CALL, {"tools": [WEATHER]}, ["weather", "Bonn"]),
    "a call beside a text": (f"Look: {CALL}", {"tools": [WEATHER]}, ["Look:", "weather", "Bonn"]),
    "two calls": (CALL + CALL, {"tools": [WEATHER]}, ["weather", "Bonn"]),
    "arguments that are none": (CALL.replace(BONN, "null"), {"tools": [WEATHER]}, ["weather"]),
    "arguments that are no JSON": (CALL.replace(BONN, "{a"), {"tools": [WEATHER]}, ["weather"]),
    **{
        f"a call cut at {limit}": (CALL, {"tools": [WEATHER], "max_tokens": limit}, [])
        for limit in (20, 40, 52, 60)
    },
    "a required call": (None, {"tools": [WEATHER], "tool_choice": "required"}, ["weather"]),
    "a named call": (None, {"tools": [WEATHER], "tool_choice": NAMED}, ["weather"]),
    "a named call, cut": (None, {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 5}, []),
    "a thought": ("<think>hm</think>so it is", {}, ["so it is"]),
    "a thought alone": ("<think>hm", {}, []),
    "a thought before a call": (f"<think>hm</think>{CALL}", {"tools": [WEATHER]}, ["weather"]),
    "log-probabilities": ("so it is", {"logprobs": True, "top_logprobs": 2}, ["so it is"]),
    "JSON": (None, {"guided_choice": ["yes", "no"]}, []),
}  # fmt: skip


def answered(http: httpx.Client, body: dict[str, Any], *, streams: bool) -> dict[str, Any]:
    """The message, whole or merged from a stream's pieces as OpenAI's library merges them."""
    if not streams:
        return dict(http.post(CHAT, json=body).json()["choices"][0]["message"])
    merged: dict[str, Any] = {}
    with http.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                merged = merge(merged, json.loads(line[6:])["choices"][0]["delta"])
    return merged


def merge(so_far: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Texts are joined, objects merged, and entries of lists by their `index`, which stays."""
    for name, value in delta.items():
        known = so_far.get(name)
        if known is None or name in ("index", "type", "role"):
            so_far[name] = value
        elif isinstance(value, str):
            so_far[name] = known + value
        elif isinstance(value, dict):
            so_far[name] = merge(known, value)
        elif isinstance(value, list):
            for entry in value:
                place = entry["index"]
                known[place : place + 1] = [
                    merge(known[place] if place < len(known) else {}, entry)
                ]
    return so_far


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_x02_what_we_send_we_take_back(
    server: LiveServer, http: httpx.Client, kind: str, streams: bool
) -> None:
    text, fields, traces = ANSWERS[kind]
    body: dict[str, Any] = {"messages": [HELLO], "max_tokens": 120, "temperature": 0, **fields}
    # A thought that the tiny model begins would never end.
    body |= {"logit_bias": {"300": -100}} if text is None else writes(server, text)
    message = answered(http, body, streams=streams)
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        for call in message.get("tool_calls") or ()
    ]
    turns = [HELLO, message, *answers, {"role": "user", "content": "and then?"}]
    tools = fields.get("tools")
    post(http, messages=turns, **({"tools": tools} if tools else {}))
    prompt = prompt_of(http, messages=turns)
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    for trace in [*traces, *calls, message.get("content") or "", "and then?"]:
        assert trace in prompt
    assert prompt.count("weather") >= len(calls)


@pytest.mark.parametrize("arguments", ["null", "None", "", None, "[1]", '{"a', "text", 5, {"a": 1}])
def test_x02_arguments_of_any_kind_are_taken(http: httpx.Client, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ring", "arguments": arguments}}
    turns = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c", "content": "rung"})
    post(http, messages=turns)
    assert '"name": "ring", "arguments": ' in prompt_of(http, messages=turns)


class Place(pydantic.BaseModel):
    """Where somebody is."""

    city: str = pydantic.Field(pattern="^[a-z]{1,5}$")
    floor: int | None = pydantic.Field(default=None, ge=0, le=9)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of `parsed`, by the library
def test_x04_five_turns_of_the_library_without_a_refusal(
    server: LiveServer, client: openai.OpenAI
) -> None:
    """Tools, streams, developer's messages and schemas, each answer sent back as the library has
    it."""
    turns: list[Any] = [{"role": "developer", "content": "be brief"}, HELLO]
    tool = openai.pydantic_function_tool(Place)
    free: Any = {"model": "tiny", "max_tokens": 100}
    calls: Any = {**free, "tools": [tool], "extra_body": writes(server, CALL)}

    first = client.chat.completions.create(messages=turns, **calls).choices[0].message
    assert first.tool_calls
    turns += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]

    with client.chat.completions.stream(
        messages=turns, stream_options={"include_usage": True}, **calls
    ) as stream:
        second = stream.get_final_completion().choices[0].message
    assert second.tool_calls
    turns += [second, {"role": "tool", "tool_call_id": second.tool_calls[0].id, "content": "sun"}]
    turns.append({"role": "developer", "content": "now as JSON"})

    text = '{"city": "bonn", "floor": null}'
    third = client.chat.completions.parse(
        messages=turns, response_format=Place, **free, extra_body=writes(server, text)
    )
    assert third.choices[0].message.parsed == Place(city="bonn")
    turns += [
        third.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]

    fourth = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            messages=turns, stream=True, **free, extra_body=writes(server, "<think>hm</think>yes"),
            stream_options={"include_usage": False, "include_obfuscation": False},
        )
    )  # fmt: skip
    turns += [{"role": "assistant", "content": fourth, "refusal": None}, HELLO]
    fifth = client.chat.completions.create(
        messages=turns, reasoning_effort="low", **free, extra_body=writes(server, "the end")
    )
    assert (fourth, fifth.choices[0].message.content) == ("yes", "the end")


# Bodies of conversations in which litellm, langchain and the AI SDK talked with a server: tools and
# their results, answers sent back, streams, developers' messages, schemas of pydantic and zod. To
# record them anew, put a proxy that writes bodies down between such a client and `stratakv serve`.
RECORDED = [
    json.loads(line) for line in (TEMPLATES.parent / "client_bodies.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    "recorded",
    RECORDED,
    ids=[f"{i}-{each['client'].split()[0]}" for i, each in enumerate(RECORDED)],
)
def test_x04_bodies_of_other_clients(http: httpx.Client, recorded: dict[str, Any]) -> None:
    body = {**recorded["body"], "model": "tiny"}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body:
            body[name] = 1
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


def test_x04_all_of_them_are_recorded() -> None:
    clients = {each["client"].split()[0] for each in RECORDED}
    assert clients == {
        "litellm", "langchain-openai", "@ai-sdk/openai", "@ai-sdk/openai-compatible",
    }  # fmt: skip


MORE: list[tuple[str, dict[str, Any]]] = [
    ("noise", {"stream": True, "stream_options": {"include_obfuscation": False}}),
    ("options", {"stream": True, "stream_options": {"include_usage": None, "other": {"a": 1}}}),
    ("effort", {"reasoning_effort": "low"}),
    ("no model", {"model": ""}),
    ("a part", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]}),
    ("newer parts", {"messages": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]}]}),
    ("a refusal", {"messages": [HELLO, {"role": "assistant", "content": [
        {"type": "refusal", "refusal": "no"}]}, HELLO]}),
    ("a refusal beside", {"messages": [HELLO, {"role": "assistant", "refusal": "no"}, HELLO]}),
    ("a thought as a part", {"messages": [HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "no"}]}, HELLO]}),
    ("what others gave", {"messages": [HELLO, {
        "role": "assistant", "content": "b", "id": "msg_1", "provider_specific_fields": {"x": 1},
        "reasoning_details": [], "thinking_blocks": [], "annotations": [{"type": "url"}],
        "tool_calls": None, "function_call": None, "audio": None}, HELLO]}),
    ("a call with more", {"messages": [HELLO, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": None, "index": 0, "extra_content": {},
         "function": {"name": "f", "arguments": "{}", "thought_signature": "x"}}]}, HELLO]}),
    ("tools with more", {"tool_choice": "none", "tools": [
        {**WEATHER, "cache_control": {}, "function": {**WEATHER["function"], "returns": {}}}]}),
    ("names with dots", {"tools": [
        {"type": "function", "function": {"name": "maps.find/v2:city"}}]}),
    ("nulls in a schema", {"tool_choice": "required", "max_tokens": 40, "tools": [
        {"type": "function", "function": {"name": "f", "strict": None, "description": None,
         "parameters": {"type": "object", "properties": {"a": {
             "type": "object", "properties": None, "required": None}}, "required": None}}}]}),
    ("no parameters", {"tools": [
        {"type": "function", "function": {"name": "f", "parameters": None}}]}),
    ("a whole number", {"max_tokens": 2.0, "top_k": 3.0, "seed": 5.0, "n": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body"), MORE, ids=[name for name, _ in MORE])
def test_x04_fields_that_clients_send(http: httpx.Client, name: str, body: dict[str, Any]) -> None:
    answer = http.post(CHAT, json={"messages": [HELLO], "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text


def figure(http: httpx.Client) -> float:
    name = "stratakv:request_fields_dropped_total{"
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def test_x04_dropped_fields_are_counted_and_told_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    part = {"type": "text", "text": "a", "new_in_parts": 1}
    call = {"function": {"name": "f", "of_function": 1}, "of_call": 1}
    told = {"role": "user", "content": [part, part], "new_in_messages": {"deep": {"er": 1}}}
    body = {
        "messages": [told, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"function": {"name": "f", "of_definition": 1}, "of_tool": 1}],
        "stream": True, "stream_options": {"of_options": 1}, "max_tokens": 1,
    }  # fmt: skip
    before = figure(http)
    with caplog.at_level(logging.INFO, "stratakv.engine.api.openai.dropped"):
        for _ in range(2):
            assert http.post(CHAT, json=body).status_code == 200
    assert figure(http) - before == 2 * 8
    names = [record.args[0] for record in caplog.records if record.args]  # type: ignore[index]
    assert names == [
        "stream_options.of_options", "messages.new_in_messages", "messages.content.new_in_parts",
        "messages.tool_calls.of_call", "messages.tool_calls.function.of_function",
        "tools.of_tool", "tools.function.of_definition",
    ]  # fmt: skip
    many = {"role": "user", "content": "a", **{f"made_up_{i}": 1 for i in range(200)}}
    with caplog.at_level(logging.INFO, "stratakv.engine.api.openai.dropped"):
        post(http, messages=[many])
    assert len(caplog.records) <= 64


def test_x04_at_the_top_unknown_fields_are_refused(http: httpx.Client) -> None:
    error = http.post(CHAT, json={"messages": [HELLO], "temprature": 1}).json()["error"]
    assert error["message"].endswith("did you mean temperature?")


# Stop strings


def test_x08_a_stop_string_does_not_cut_json(server: LiveServer, http: httpx.Client) -> None:
    thoughtless = {"logit_bias": {"300": -100}, "temperature": 0}
    asked = {"tools": [WEATHER], "stop": ["city", '"'], "max_tokens": 90, **thoughtless}
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        [answer] = post(http, tool_choice=choice, parallel_tool_calls=False, **asked)["choices"]
        [call] = answer["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"city"}
        assert answer["finish_reason"] == reason
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {"response_format": form, "stop": "city", "max_tokens": 90, **thoughtless}
    assert "city" in json.loads(post(http, **asked)["choices"][0]["message"]["content"])
    pattern = {"guided_regex": "ab+\n", "stop": "\n", "max_tokens": 9, **thoughtless}
    [answer] = post(http, **pattern)["choices"]
    assert (
        answer["finish_reason"] in ("stop", "length") and "\n" not in answer["message"]["content"]
    )


@pytest.mark.parametrize(("stop", "reason"), [("city", "stop"), ("</tool_call>", "tool_calls")])
def test_x08_a_free_call_that_is_cut_says_stop(
    server: LiveServer, http: httpx.Client, stop: str, reason: str
) -> None:
    asked = {"tools": [WEATHER], "stop": stop, "max_tokens": 90, **writes(server, CALL)}
    assert post(http, **asked)["choices"][0]["finish_reason"] == reason


# Thoughts


@pytest.mark.parametrize("fields", [
    {"tools": [WEATHER], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
])  # fmt: skip
def test_z08_a_limit_that_went_into_the_thought_is_said(
    server: LiveServer, http: httpx.Client, fields: dict[str, Any]
) -> None:
    asked = {**fields, "max_tokens": 8, **writes(server, "<think>" + "hello " * 9)}
    [answer] = post(http, **asked)["choices"]
    assert answer["finish_reason"] == "length"
    assert "thinking_token_budget" in answer["warning"]
    with http.stream("POST", CHAT, json={"messages": [HELLO], "stream": True, **asked}) as lines:
        events = [json.loads(x[6:]) for x in lines.iter_lines() if x.startswith("data: {")]
    warned = ["warning" in event["choices"][0] for event in events]
    assert warned == [False] * (len(events) - 1) + [True]
    plain = post(http, **{**asked, **writes(server, "hello"), "max_tokens": 90, "tools": None,
                          "tool_choice": None, "response_format": None})  # fmt: skip
    assert "warning" not in plain["choices"][0]


# Words


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1", "there is no route /v1; it is the base of /v1/chat/completions"),
        ("/", "it is the base of"),
        ("/v1/responses", "OpenAI's API of responses is not built here; chats are at"),
        ("/v1/responses/resp_1/cancel", "OpenAI's API of responses"),
        ("/v1/messages", "Anthropic's API is not built here"),
        ("/v1/audio/speech", "OpenAI's API of speech"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/api/chat", "Ollama's API"),
        ("/other", "the API lies under /v1"),
    ],
)
def test_z05_a_route_that_is_not_there(http: httpx.Client, path: str, words: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404 and words in answer.json()["error"]["message"]


def test_z05_a_picture_is_named(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {}}]
    turns = [{"role": "user", "content": parts}]
    error = http.post(CHAT, json={"messages": turns}).json()["error"]
    assert (error["param"], error["code"]) == (
        "messages[0].content[1].type", "unsupported_content_part",
    )  # fmt: skip
    assert "a part of the type image_url; models read text here, no pictures" in error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 4.5}, "Expected `int | null`, got `float`"),
        ({"max_tokens": "4"}, "Expected `int | null`, got `str`"),
        ({"max_tokens": MAX_MODEL_LEN + 1}, "ask for less"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_x13_numbers_that_cannot_be(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    """As vLLM refuses them."""
    answer = http.post(CHAT, json={"messages": [HELLO], **fields})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_x13_more_tokens_than_the_context_has_left_are_cut(http: httpx.Client) -> None:
    body = {"prompt": [4] * (MAX_MODEL_LEN - 3), "max_tokens": MAX_MODEL_LEN, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_x13_a_token_beyond_the_model_is_no_message(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.client, "ready", msgspec.structs.replace(
        server.client.ready, vocab_size=60
    ))  # fmt: skip
    for path, body in ((CHAT, {"messages": [HELLO]}), ("/v1/completions", {"prompt": "hello"})):
        error = http.post(path, json=body).json()["error"]
        assert error["message"].startswith("the tokenizer makes ")
        assert error["message"].endswith("the model's token ids run from 0 to 59")


# Models that know no calls, and none of texts


def test_z01_a_tools_result_goes_on_as_text(model_path: Path) -> None:
    live = LiveServer(model_path)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        asked = {"tools": [WEATHER], "max_tokens": 60, "temperature": 0}
        message = post(http, tool_choice="required", **asked)["choices"][0]["message"]
        [call, *_] = message["tool_calls"]
        turns = [HELLO, message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        for choice in (None, "auto"):
            post(http, messages=turns, tool_choice=choice, **asked)
        prompt = prompt_of(http, messages=turns, tools=[WEATHER])
        assert '{"name": "weather", "arguments": ' in prompt and "sunny" in prompt
    live.stop()


def test_x10_a_server_without_a_tokenizer_says_so(model_path: Path) -> None:
    live = LiveServer(model_path, has_tokenizer=False)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        error = http.post(CHAT, json={"messages": [HELLO]}).json()["error"]
        assert error["code"] == "no_chat_template"
        assert "send token ids as `prompt` to /v1/completions" in error["message"]
        error = http.post("/v1/completions", json={"prompt": "hello"}).json()["error"]
        assert "chat" not in error["message"] and "token ids" in error["message"]
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).is_success
    live.stop()
