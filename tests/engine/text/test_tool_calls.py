# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls: each form, whatever the text and however it is cut."""

from __future__ import annotations

import json
import random
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from stratakv.engine.text.tool_calls import tool_formats as choice
from stratakv.engine.text.tool_calls.base import Found, ToolCallParser
from stratakv.engine.text.tool_calls.json_calls import (
    ArgumentsParser,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
)
from stratakv.engine.text.tool_calls.pythonic import PythonicParser
from stratakv.engine.text.tool_calls.tool_formats import PARSERS, find_tool_parser
from stratakv.tiers.settings.values import ConfigError

NAMES = ("f", "g.h", "get_weather")
Calls = list[tuple[str, str]]
# A brace, a bracket, quotes and a mark within arguments.
TRICKY = '{"a": "}]\\"</tool_call>[TOOL_CALLS]", "b": [1, {"c": null}]}'
HERMES, LLAMA, MISTRAL, PYTHONIC = HermesParser, Llama3Parser, MistralParser, PythonicParser

CASES: list[tuple[type[ToolCallParser], str, str, Calls]] = [
    (HERMES, "hello <b>world</b>\n", "hello <b>world</b>\n", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "",
     [("f", '{"a": 1}')]),
    (HERMES, 'Let me see.\n\n<tool_call>{"name":"f","arguments":' + TRICKY + "}</tool_call>\n"
     '<tool_call>\n{"arguments": {}, "name": "other"}\n</tool_call>\nDone.', "Let me see.\nDone.",
     [("f", TRICKY), ("other", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, 2', "", [("f", '{"a": [1, 2')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "",
     [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {a: 1,}}</tool_ca', "", [("f", "{a: 1,}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"id": 3, "x": {"name": "y"}, "name": "f", "arguments": {}}</tool_call>',
     "", [("f", "{}")]),
    (HERMES, "<tool_call>no call</tool_call> so", "no call so", []),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '{"name": 5, "arguments": {}}', []),
    (HERMES, '<tool_call>{"name": "f', '{"name": "f', []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, '<tool_call>x<tool_call>{"name": "f", "arguments": {}}</tool_call>', "x",
     [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} and so on', "and so on", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, ' <|python_tag|>{"name": "x", "parameters": {}} ; {"name": "f", "arguments": {"b":2}}',
     "", [("x", "{}"), ("f", '{"b":2}')]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {}};', "", [("f", "{}")]),
    (LLAMA, 'I look. <|python_start|>{"name": "f", "parameters": {}}<|python_end|> So.',
     "I look. So.", [("f", "{}")]),
    (LLAMA, '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}',
     []),
    (LLAMA, '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    (LLAMA, '{"name": "f"}', '{"name": "f"}', []),
    (LLAMA, '  {"answer": 42}', '  {"answer": 42}', []),
    (LLAMA, 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    (LLAMA, '<|python_tag|>print("x")', 'print("x")', []),
    (LLAMA, '{"name": "f", "parameters": {}} {"x": 1}', '{"x": 1}', [("f", "{}")]),
    (LLAMA, 'So: <|python_tag|>{"name": "f", "parameters": {}}  and  ;  so', "So: and  ;  so",
     [("f", "{}")]),
    (LLAMA, " " * 300 + '{"name": "f", "parameters": {}}',
     " " * 300 + '{"name": "f", "parameters": {}}', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL, 'So: [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g.h[ARGS]{"b": "}"}', "So:",
     [("f", '{"a": 1}'), ("g.h", '{"b": "}"}')]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
    (MISTRAL, "[TOOL_CALLS]no call", "no call", []),
    (MISTRAL, "[TOOL_CALLS] [1, 2]", "1, 2]", []),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + "{", "x" * 300 + "{", []),
    (MISTRAL, "[TOOL_", "[TOOL_", []),
    (PYTHONIC, '[f(a=1, b="x, )]", c=[1, -2.5, {"k": (True, None)}]), g.h()]', "",
     [("f", '{"a": 1, "b": "x, )]", "c": [1, -2.5, {"k": [true, null]}]}'), ("g.h", "{}")]),
    (PYTHONIC, "[f(a='it\\'s', b=true,\n c=[\n1,\n2])]\n", "",
     [("f", '{"a": "it\'s", "b": true, "c": [1, 2]}')]),
    (PYTHONIC, "[f(a=b + c, d='two\nlines', e=1e999)]", "",
     [("f", '{"a": "b + c", "d": "two\\nlines", "e": "1e999"}')]),
    (PYTHONIC, "So <|python_start|>[f(a=1)]<|python_end|> and", "So and", [("f", '{"a": 1}')]),
    (PYTHONIC, "[f(a=1, b='cut", "", [("f", '{"a": 1')]),
    (PYTHONIC, "[unknown(a=1)]", "[unknown(a=1)]", []),
    (PYTHONIC, "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    (PYTHONIC, "[f('x')]", "[f('x')]", []),
    (PYTHONIC, "  [f", "  [f", []),
    (PYTHONIC, "[f(a=1), 5]", ", 5]", [("f", '{"a": 1}')]),
    (PYTHONIC, "f(a=1)", "f(a=1)", []),
    (ListParser, '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]', "",
     [("f", '{"a": 1}'), ("f", "{}")]),
    (ListParser, '[{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
    (ListParser, '[{"name": "f", "parameters": {}}, {"name": "f", "para', "", [("f", "{}")]),
]  # fmt: skip


def joined(pieces: list[Found]) -> tuple[str, Calls]:
    """The whole of an answer, in the order that the promise gives."""
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        assert len({call.number for call in piece.calls}) == len(piece.calls)
        for call in piece.calls:
            if call.number == len(names):
                assert call.name, "the first piece of a call has its name"
                names.append(call.name)
                arguments.append(call.arguments)
            else:
                assert call.number == len(names) - 1, "one after the other"
                assert not call.name and call.arguments, "a later piece has arguments alone"
                arguments[-1] += call.arguments
    return "".join(p.content for p in pieces), list(zip(names, arguments, strict=True))


def parsed(parser: ToolCallParser, *pieces: str) -> tuple[str, Calls]:
    return joined([*(parser.push(piece) for piece in pieces), parser.finish()])


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_each_form_however_it_is_cut(
    kind: type[ToolCallParser], text: str, content: str, calls: Calls
) -> None:
    assert parsed(kind(NAMES), text) == (content, calls)
    assert parsed(kind(NAMES), *text) == (content, calls)
    for at in range(len(text)):
        assert parsed(kind(NAMES), text[:at], text[at:]) == (content, calls), (text[:at], text[at:])


@pytest.mark.parametrize("kind", [*dict.fromkeys(PARSERS.values()), ListParser])
def test_any_text_is_taken_and_cuts_change_nothing(kind: type[ToolCallParser], seed: int) -> None:
    """Random orders of the parts that calls are made of."""
    parts = [*HermesParser.MARKS, *Llama3Parser.MARKS, *MistralParser.MARKS, "[", "]", "{", "}",
             '"name": ', '"f"', ", ", '"arguments": ', "{}", "f", "(", ")", "a=", "1", "'", "\\",
             " ", "\n", ";", ":", '{"name": "f", "parameters": {"a": 1}}', "<tool",
             "word"]  # fmt: skip
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        whole = parsed(kind(NAMES), text)
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(kind(NAMES), *pieces) == whole == parsed(kind(NAMES), *text), text


def test_arguments_come_as_they_are_written() -> None:
    """Not once they have ended."""
    parser = HermesParser(NAMES)
    assert parser.push('<tool_call>{"name": "f", "argum') == Found("", [])
    assert parser.push('ents": {"a": ')[1] == [(0, "f", '{"a": ')]
    assert parser.push('"long')[1] == [(0, "", '"long')]
    python = PythonicParser(NAMES)
    assert python.push("[f(a=")[1] == [(0, "f", "")]
    assert python.push("[1, 2], b")[1] == [(0, "", '{"a": [1, 2]')]


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = Llama3Parser(NAMES)
    assert parser.push('{"answer"').content == '{"answer"'


def test_the_arguments_of_a_named_tool() -> None:
    parser = ArgumentsParser(["f"])
    assert parsed(parser, "", '{"a"', ": 1}") == ("", [("f", '{"a": 1}')])
    assert parsed(ArgumentsParser(["f"])) == ("", [])


def test_ids() -> None:
    first, second = HermesParser.new_id(), HermesParser.new_id()
    assert first != second and first.startswith("call_")
    mistral = MistralParser.new_id()
    assert len(mistral) == 9 and mistral.isalnum(), "what its template takes back"


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HermesParser),
        ("{{ tools }}<tool_call><function=f><parameter=a>", None),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", MistralParser),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", PythonicParser),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', Llama3Parser),
        ("{{ tools }}<|python_tag|>", Llama3Parser),
        ("no word of them: <tool_call>", None),
        ("{{ tools }}", None),
        (None, None),
    ],
)
def test_a_template_shows_the_form(template: str | None, kind: type | None) -> None:
    assert find_tool_parser("", template) is kind
    assert find_tool_parser("none", template) is None
    assert find_tool_parser("mistral", template) is MistralParser


class Shouting(ToolCallParser):
    """Of another package."""

    def push(self, text: str) -> Found:
        return Found(text.upper(), [])

    def finish(self) -> Found:
        return Found("", [])


def test_parsers_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    group = choice.ENTRY_POINTS
    points = {
        name: EntryPoint(name, value, group)
        for name, value in (
            ("shouting", f"{__name__}:Shouting"), ("abstract", f"{choice.__name__}:ToolCallParser"),
            ("wrong", "json:loads"), ("gone", "no_such_module_anywhere:Parser"),
        )
    }  # fmt: skip

    def entry_points(**asked: Any) -> list[EntryPoint]:
        assert asked["group"] == group
        return [p for p in points.values() if asked.get("name", p.name) == p.name]

    monkeypatch.setattr("stratakv.tiers.registry.entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", _load)
    found = find_tool_parser("shouting", None)
    assert found is not None and found(()).push("a").content == "A"
    for name, words in (
        ("abstract", "does not define finish, push"), ("wrong", "is no subclass"),
        ("gone", "cannot be loaded: ModuleNotFoundError"), ("hermess", "did you mean hermes"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            find_tool_parser(name, None)


def _load(point: EntryPoint) -> Any:
    """This module has no name by which it could be imported."""
    return Shouting if point.name == "shouting" else _real_load(point)


_real_load = EntryPoint.load


def test_pythonic_arguments_are_json() -> None:
    text = "[f(a='\\x41', b={'k': {'l': [(), 1_000, 0x10]}}, c=\"ü\", d=-True, e={1: 2})]"
    [(_, arguments)] = parsed(PythonicParser(NAMES), text)[1]
    assert json.loads(arguments) == {
        "a": "A", "b": {"k": {"l": [[], 1000, 16]}}, "c": "ü", "d": "-True", "e": "{1: 2}",
    }  # fmt: skip
