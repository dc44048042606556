# SPDX-License-Identifier: Apache-2.0
"""Tools in chats, with OpenAI's client: calls that a parser finds in what the tiny model is made to
write, and calls that a grammar has it write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import jsonschema
import openai
import pydantic
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from stratakv.engine.api.openai.response.tools import CallReader
from stratakv.engine.text.output_processor import TextOutput
from stratakv.engine.text.tool_calls.json_calls import HermesParser

from ....processor_package import MODULE, SOURCE, packages_in
from ..conftest import LiveServer

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello world"}]
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
THINK_ID = 304
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments.city }}</tool_call>{{ call.id }}"
    "{% endfor %}{{ message.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Bonn", "Kiel"]}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}
BONN = '{"city": "Bonn"}'


class Script:
    """What makes the model write a text: the marks are special tokens of its vocabulary."""

    def __init__(self, path: Path) -> None:
        self._fast = FastTokenizer.from_file(str(path / "tokenizer.json"))

    def __call__(self, text: str) -> dict[str, Any]:
        ids = self._fast.encode(text, add_special_tokens=False).ids
        return {"vllm_xargs": {"write": ids}}


class Told(NamedTuple):
    """One answer."""

    content: str | None
    calls: list[tuple[str, str]]
    finish_reason: str | None
    ids: list[str]


@pytest.fixture(scope="module")
def calling_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calling-llama")
    for name in ("model.safetensors", "config.json"):
        (directory / name).symlink_to(model_path / name)
    fast = FastTokenizer.from_file(str(model_path / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    fast.add_tokens(["<think>", "</think>"])
    assert fast.token_to_id("<think>") == THINK_ID
    fast.save(str(directory / "tokenizer.json"))
    config = json.loads((model_path / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str]]:
    folder = tmp_path_factory.mktemp("site")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    with packages_in(folder):
        yield (f"{MODULE}:Writes",)


@pytest.fixture(scope="module")
def server(calling_path: Path, processors: tuple[str]) -> Iterator[LiveServer]:
    live = LiveServer(calling_path, logits_processors=processors)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def script(calling_path: Path) -> Script:
    return Script(calling_path)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 200, **fields}


def made_by_grammar(**fields: Any) -> dict[str, Any]:
    """Without a thought before it, which the tiny model would never end."""
    return {"logit_bias": {str(THINK_ID): -100}, **fields}


def whole(client: openai.OpenAI, **fields: Any) -> list[Told]:
    answer = client.chat.completions.create(**asked(**fields))
    told = []
    for choice in answer.choices:
        calls: Any = choice.message.tool_calls or []
        pairs = [(call.function.name, call.function.arguments) for call in calls]
        ids = [call.id for call in calls]
        told.append(Told(choice.message.content, pairs, choice.finish_reason, ids))
    return told


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Told, list[str]]:
    """The joined answer, and the pieces of its arguments."""
    content, names, arguments, ids = [], [], [], []
    reason, pieces = None, []
    for chunk in client.chat.completions.create(stream=True, **asked(**fields)):
        [choice] = chunk.choices
        reason = choice.finish_reason or reason
        content.append(choice.delta.content or "")
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(names):
                assert call.id and call.type == "function" and call.function.name
                names.append(call.function.name)
                ids.append(call.id)
                arguments.append("")
            else:
                assert call.index == len(names) - 1
                assert call.id is None and call.function.name is None
            arguments[-1] += call.function.arguments or ""
            pieces.append(call.function.arguments or "")
    told = Told("".join(content), list(zip(names, arguments, strict=True)), reason, ids)
    return told, pieces


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER_TEXT, CLOCK_TEXT = call_text("weather", BONN), call_text("clock", "{}")
WRITTEN: list[tuple[str, str | None, list[tuple[str, str]], str]] = [
    (WEATHER_TEXT, None, [("weather", BONN)], "tool_calls"),
    (f"Let me see.\n{WEATHER_TEXT}\n{CLOCK_TEXT}", "Let me see.",
     [("weather", BONN), ("clock", "{}")], "tool_calls"),
    (f"<think>hello\n</think>\n\n{CLOCK_TEXT}", None, [("clock", "{}")], "tool_calls"),
    (call_text("clock", "{no: json}"), None, [("clock", "{no: json}")], "tool_calls"),
    ("<tool_call>hello</tool_call> world", "hello world", [], "stop"),
    ("hello < world", "hello < world", [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls", "reason"), WRITTEN)
def test_calls_that_a_model_writes(
    client: openai.OpenAI, script: Script, text: str, content: str | None,
    calls: list[tuple[str, str]], reason: str,
) -> None:  # fmt: skip
    """The form is the one that the template shows. Whole and streamed, by default and by `auto`."""
    [told] = whole(client, extra_body=script(text))
    assert told[:3] == (content, calls, reason)
    assert len(set(told.ids)) == len(calls) and all(each.startswith("call_") for each in told.ids)
    told, pieces = streamed(client, extra_body=script(text), tool_choice="auto")
    assert told[:3] == (content or "", calls, reason)
    if calls and calls[0][1] == BONN:
        assert len(pieces) > 4, "arguments come as they are written"


def test_thoughts_before_calls(client: openai.OpenAI, script: Script) -> None:
    answer = client.chat.completions.create(
        **asked(extra_body=script(f"<think>hello {CLOCK_TEXT}</think>{WEATHER_TEXT}"))
    )
    message = answer.choices[0].message
    assert (message.model_extra or {})["reasoning"] == f"hello {CLOCK_TEXT}"
    assert message.tool_calls is not None and len(message.tool_calls) == 1


def test_a_call_that_is_cut(client: openai.OpenAI, script: Script) -> None:
    """What there is of it, whole and streamed, for each length."""
    for limit in (2, 11, 20, 29):
        fields = {"extra_body": script(WEATHER_TEXT), "max_tokens": limit}
        [told] = whole(client, **fields)
        assert told.finish_reason == "length"
        assert "<tool" not in (told.content or "")
        assert all(name == "weather" and BONN.startswith(part) for name, part in told.calls)
        again, _ = streamed(client, **fields)
        assert again[:3] == (told.content or "", told.calls, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_several_are_not_wanted(
    client: openai.OpenAI, script: Script, stream: bool
) -> None:
    fields = {"extra_body": script(WEATHER_TEXT + CLOCK_TEXT), "parallel_tool_calls": False}
    told = streamed(client, **fields)[0] if stream else whole(client, **fields)[0]
    assert told.calls == [("weather", BONN)]


def test_several_answers_have_calls_of_their_own(client: openai.OpenAI, script: Script) -> None:
    told = whole(client, n=3, extra_body=script(WEATHER_TEXT))
    assert [each.calls for each in told] == [[("weather", BONN)]] * 3
    assert len({each.ids[0] for each in told}) == 3


def test_none_shows_and_finds_no_tools(client: openai.OpenAI, script: Script) -> None:
    body = {"model": "tiny", "messages": HELLO, "extra_body": script(WEATHER_TEXT)}
    plain: Any = client.chat.completions.create(**body)
    none: Any = client.chat.completions.create(**body, tools=TOOLS, tool_choice="none")
    shown: Any = client.chat.completions.create(**body, tools=TOOLS)
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < shown.usage.prompt_tokens


def test_a_named_tool_is_called_as_its_schema_says(client: openai.OpenAI) -> None:
    schema = WEATHER["function"]["parameters"]
    for seed in range(2):
        fields = made_by_grammar(tool_choice=NAMED, seed=seed)
        [told] = whole(client, **fields)
        [(name, arguments)] = told.calls
        assert (told.content, name, told.finish_reason) == (None, "weather", "stop")
        jsonschema.validate(json.loads(arguments), schema)
        again, _ = streamed(client, **fields)
        assert again[:3] == ("", told.calls, "stop")


@pytest.mark.parametrize("parallel", [False, None])
def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, parallel: bool | None) -> None:
    switch: dict[str, Any] = {"properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    switch["additionalProperties"] = False
    tools = [WEATHER, {"type": "function", "function": {"name": "set", "parameters": switch}}]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    fields = made_by_grammar(tool_choice="required", tools=tools, seed=1, temperature=3.0)
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    answers = whole(client, n=8, **fields)
    ended = [told for told in answers if told.finish_reason == "tool_calls"]
    for told in answers:
        assert told.content is None and told.calls
        assert parallel is None or len(told.calls) == 1
    for name, arguments in (call for told in ended for call in told.calls):
        jsonschema.validate(json.loads(arguments), schemas[name])
    assert {name for told in ended for name, _ in told.calls} == {"weather", "set"}
    assert parallel is False or max(len(told.calls) for told in ended) > 1
    assert streamed(client, **fields)[0][1:3] == answers[0][1:3]


class Place(pydantic.BaseModel):
    """Where somebody is."""

    city: Literal["Bonn", "Kiel"]
    floor: int = pydantic.Field(ge=0, le=9)


def test_the_library_parses_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Place)
    fields: Any = asked(
        **made_by_grammar(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    )
    chat = client.chat.completions.parse(**fields)
    [call] = chat.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Place)
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert isinstance((message.tool_calls or [])[0].function.parsed_arguments, Place)


def test_calls_and_results_reach_the_template(
    client: openai.OpenAI, http: httpx.Client, script: Script
) -> None:
    answer = client.chat.completions.create(**asked(extra_body=script(WEATHER_TEXT)))
    message = answer.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    turns: Any = [*HELLO, message.model_dump(exclude_none=True), result]
    body = {"messages": turns, "tools": TOOLS}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    shown = [json.dumps(tool, ensure_ascii=False) for tool in TOOLS]
    assert prompt == (
        f"<s>{shown[0]}\n{shown[1]}\n<user>hello world\n"
        f"<assistant><tool_call>weatherBonn</tool_call>{call.id}\n<tool>sun{call.id}\n"
        "<assistant>"
    )
    again = client.chat.completions.create(**asked(messages=turns, extra_body=script("sun")))
    assert again.usage is not None and again.usage.prompt_tokens == len(tokens)
    assert again.choices[0].message.content == "sun"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {BONN}}}]'),
        ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {BONN}}}'),
        ("pythonic", '[weather(city="Bonn")]'),
    ],
)
def test_other_forms_by_name(
    calling_path: Path, processors: tuple[str], script: Script, name: str, text: str
) -> None:
    live = LiveServer(calling_path, logits_processors=processors, tool_call_parser=name)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        body = {"messages": HELLO, "tools": TOOLS, **script(text)}
        choice = http.post(CHAT, json=body).json()["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert call["function"] == {"name": "weather", "arguments": BONN}
        if name == "mistral":
            assert len(call["id"]) == 9
    live.stop()


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool("a b")]}, "tools[0].function.name", "1 to 128 letters, digits and _ - . : /"),
    ({"tools": [tool(), tool("x" * 129)]}, "tools[1].function.name", "got 'xxx"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "names must differ"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "129 tools and at most 128"),
    ({"tools": [tool(description="x" * 300_000)]}, "tools", "at most 262144"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type",
     "must be object, since arguments are one, got 'array'"),
    ({"tools": [tool(parameters={"properties": ["a"]})]},
     "tools[0].function.parameters.properties", "an object of JSON schemas, got ['a']"),
    ({"tools": [tool(parameters={"required": "a"})]},
     "tools[0].function.parameters.required", "a list of names, got 'a'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing required field"),
    ({"tools": [{**tool(), "type": "custom"}]}, "tools[0].type", "send function"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters", "object"),
    ({"tools": [tool(strict="x")]}, "tools[0].function.strict", "Expected `bool | null`"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "auto, none, required or {"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wether"}}},
     "tool_choice", "none of `tools`; did you mean weather?"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "not {'type'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "there are no `tools`"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "response_format",
     "no tool could be called"),
    ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "or send `tool_choice` none"),
    ({"tools": [tool(parameters={"properties": {"a": {"type": "strin"}}})],
      "tool_choice": "required"}, "", "strin"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id",
     "has no `tool_call_id`; add the `id`"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
     "messages[0].tool_call_id", "for messages of the role tool, not user"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [tool(arguments="")]}]},
     "messages[0].tool_calls", "for messages of the role assistant, not user"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**tool(), "type": "custom"}]}]},
     "messages[0].tool_calls[0].type", "send function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
     "messages[0].tool_calls[0].function", "missing required field"),
    ({"messages": [{"role": "function", "name": "f", "content": "a"}]}, "messages[0].role",
     "older form of tool; send tool"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_cannot_be_called_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(CHAT, json={"messages": HELLO, "max_tokens": 9, **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert words in error["message"]
    assert (error["param"] or "") == param


def test_a_server_that_knows_no_form_says_which_flag(model_path: Path) -> None:
    live = LiveServer(model_path)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 60}
        error = http.post(CHAT, json=body).json()["error"]
        assert error["code"] == "no_tool_parser" and "--tool-call-parser hermes" in error["message"]
        named = http.post(CHAT, json={**body, "tool_choice": NAMED}).json()["choices"][0]
        assert json.loads(named["message"]["tool_calls"][0]["function"]["arguments"])["city"]
        free = http.post(CHAT, json={**body, "tool_choice": "none"}).json()["choices"][0]
        assert "tool_calls" not in free["message"]
    live.stop()


@pytest.mark.parametrize(("last", "reason"), [("{}", "tool_calls"), ('{"a": 1', "stop")])
def test_only_the_last_call_tells_whether_a_stop_string_cut_it(last: str, reason: str) -> None:
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}'
        for name, arguments in (("weather", BONN + "}</tool_call>"), ("clock", last))
    )
    reader = CallReader(HermesParser(["weather", "clock"]), only_first=False, ends_with_calls=True)
    output = TextOutput(text=text, finish_reason="stop", stop_reason="END")
    reader.read(output)
    assert [call.name for call in output.tool_calls] == ["weather", "clock"]
    assert output.finish_reason == reason
