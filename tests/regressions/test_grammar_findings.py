# SPDX-License-Identifier: Apache-2.0
"""Findings about answers that follow a schema or a grammar: what is taken, and what is kept to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.json_schemas import ignored_formats, prepared
from stratakv.engine.request.structured_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MOST_WHITESPACE,
    StructuredOutputsParams,
)
from stratakv.engine.structured.answers import MOST_WHITE, White
from stratakv.engine.structured.backends import open_backend
from stratakv.engine.structured.base import Backend, GrammarError
from stratakv.engine.structured.mask_jobs import Follower
from stratakv.engine.structured.xgrammar_scope import why_unsupported, why_untamed

from ..engine.structured.vocabularies import embedded, say, words

pytestmark = pytest.mark.regression
CLOSED = {"type": "object", "additionalProperties": False}
WHITE = White(embedded())
A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module", params=["auto", "guidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param, embedded)


def takes(backend: Backend, schema: dict[str, Any], text: str) -> bool | None:
    """Whether an answer may be this text; None: the schema is refused."""
    try:
        matcher = backend.compile(StructuredOutputsParams(json=schema).spec).matcher()
    except GrammarError:
        return None
    return say(matcher, text) and matcher.may_end


# What stands beside a reference, a choice or a constant was left aside by xgrammar, and references
# to other documents were any JSON.
NOT_KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "another document": ({"$ref": "http://example.com/x.json"}, "1"),
    "a file": ({"$ref": "file:///etc/passwd"}, "1"),
    "a name of one": ({"$ref": "other.json"}, "1"),
    "within one that has a name": (
        {"$defs": {"w": {"$id": "http://e/w", "$defs": {"a": {"type": "string"}},
                         "$ref": "#/$defs/a"}, "a": {"type": "integer"}}, "$ref": "#/$defs/w"},
        "1",
    ),
    "required beside a reference": ({"$defs": {"A": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}}}, "$ref": "#/$defs/A",
        "required": ["b"]}, '{"a":1}'),
    "required beside a choice": ({"type": "object", **A, "anyOf": [{"required": ["a"]}]}, "{}"),
    "a type beside a choice": ({"type": "integer", "anyOf": [{"type": "string"}, {}]}, '"x"'),
    "a bound beside a choice": ({"minimum": 5, "anyOf": [{"type": "integer"}]}, "3"),
    "another part": ({**CLOSED, "properties": {"b": {"type": "integer"}}, "required": ["b"],
                      "allOf": [CLOSED | A]}, '{"a":1}'),
    "a value of another type": ({"type": "integer", "enum": ["a", 1]}, '"a"'),
    "a constant of another type": ({"type": "integer", "const": "a"}, '"a"'),
    "a constant beside values": ({"const": 1, "enum": [2, 3]}, "1"),
    "a value beyond a bound": ({"enum": [1, 2, 30], "maximum": 5}, "30"),
    "a value of no type": ({"type": ["integer", "null"], "enum": [1, None, "a"]}, '"a"'),
    "required and not described": ({"type": "object", "required": ["b"]}, "{}"),
    "required and not allowed": ({**CLOSED, "properties": {"a": {"type": "integer"}},
                                  "required": ["b"]}, "{}"),
    "a bound without a type": ({"minimum": 5}, "3"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_KEPT)
def test_y05_a_schema_is_kept_to_or_refused(backend: Backend, name: str) -> None:
    schema, text = NOT_KEPT[name]
    assert not takes(backend, schema, text)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "http://example.com/x.json"}, r"'http://example.com/x.json',? .*leads"),
        ({"$ref": "other.json#/a"}, r"'other.json.*',? .*leads"),
        ({**CLOSED, "properties": {"a": {}}, "required": ["b"]}, r"'?b'? is unsatis|required prop"),
        ({"type": "integer", "const": "a"}, "incompatible types|const with type beside it"),
    ],
)
def test_y05_what_is_not_kept_to_is_named(
    backend: Backend, schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(GrammarError, match=said):
        backend.compile(StructuredOutputsParams(json=schema).spec)


def test_y05_what_xgrammar_keeps_to_it_still_gets() -> None:
    schemas: list[dict[str, Any]] = [
        CLOSED | A,
        {"$defs": {"A": CLOSED | A}, "$ref": "#/$defs/A", "title": "T", "description": "d"},
        {"anyOf": [CLOSED | A, {"type": "null"}], "default": None},
        {"type": "string", "enum": ["a", "b"], "title": "T"},
        {"type": ["integer", "null"], "minimum": 5},
    ]
    for schema in schemas:
        spec = StructuredOutputsParams(json=schema).spec
        assert not why_unsupported(spec) and not why_untamed(spec)


@pytest.mark.parametrize(
    ("schema", "is_recursive"),
    [
        ({"$ref": "#"}, True),
        ({"items": {"$ref": "#"}}, True),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#/$defs/a"}}}}, True),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}, "$ref": "#/$defs/a"},
            False,
        ),
    ],
)
def test_y03_only_llguidance_follows_what_is_within_itself(
    schema: dict[str, Any], is_recursive: bool
) -> None:
    """How many places of a grammar an answer can be at, at once, has no bound there."""
    assert bool(why_untamed(StructuredOutputsParams(json=schema).spec)) == is_recursive


def test_y03_long_chains_of_definitions_are_looked_at_once() -> None:
    """In the engine too: without recursion, and not anew for each of them."""
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1500)}
    for last, said in (({}, "schemas in one"), ({"$ref": "#/$defs/d3"}, "within itself")):
        chain["d1500"] = last
        asked = StructuredOutputsParams(json={"$defs": chain, "$ref": "#/$defs/d0"}).spec
        assert said in why_untamed(asked)


@pytest.mark.parametrize("backend", ["guidance", "auto"], indirect=True)
def test_y06_as_many_choices_as_are_told_may_be_sent(backend: Backend) -> None:
    most = [f"{number:04}".ljust(MAX_GRAMMAR_BYTES // MAX_CHOICES - 10, "x")
            for number in range(MAX_CHOICES)]  # fmt: skip
    for texts in (most, [f"{number}" for number in range(MAX_CHOICES)]):
        grammar = backend.compile(StructuredOutputsParams(choice=texts).spec)
        for text in (texts[0], texts[2500], texts[-1]):
            matcher = grammar.matcher()
            assert say(matcher, text) and matcher.may_end
        assert not say(grammar.matcher(), "y")


@pytest.mark.parametrize("backend", ["guidance", "auto"], indirect=True)
def test_y06_choices_may_be_any_texts(backend: Backend) -> None:
    texts = ["a", "ab", '"quoted" \\ /x/', "line\nbreak\t", "ü€😀", " ", "a|b", "\u0001", "%ignore"]
    grammar = backend.compile(StructuredOutputsParams(choice=texts).spec)
    for text in texts:
        matcher = grammar.matcher()
        assert say(matcher, text) and matcher.may_end, text
    assert not say(grammar.matcher(), "b")


def test_x07_what_others_call_formats_says_nothing_of_an_answer(backend: Backend) -> None:
    for name in ("int64", "byte", "binary", "password", "uri-reference", "base64", "regex", "path",
                 "file-path", "json-pointer", "made-up"):  # fmt: skip
        schema = {**CLOSED, "properties": {"a": {"type": "string", "format": name}}}
        assert takes(backend, schema, '{"a":"any text"}'), name
        assert ignored_formats(schema) == [name]
    kept = {
        "type": "object",
        "properties": {"format": {"const": {"format": "x"}, "format": "uuid"}},
    }
    assert prepared(kept) == kept and ignored_formats(kept) == []  # a name, data, and a known one
    tag = {"structures": [{"begin": "<f>", "schema": {"format": "path"}, "end": "</f>"}],
           "triggers": ["<f"]}  # fmt: skip
    assert "path" not in StructuredOutputsParams(structural_tag=tag).spec.text


def test_x07_one_of_some_constants_is_one_of_some_values(backend: Backend) -> None:
    options = [{"const": 1, "title": "one"}, {"const": 2}, {"enum": ["a", 2.5]}, {"const": 1}]
    schema = {"oneOf": options, "description": "which"}
    taken = {text: takes(backend, schema, text) for text in ("2", '"a"', "2.5", "1", "3")}
    assert taken == {"2": True, '"a"': True, "2.5": True, "1": False, "3": False}
    beside = {"oneOf": [{"const": 1}, {"const": 2}], "enum": [2, 3]}  # left to the backend
    assert takes(backend, beside, "3") in (False, None)


def test_x07_a_one_of_that_is_not_kept_to_is_named() -> None:
    spec = StructuredOutputsParams(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}).spec
    with pytest.raises(GrammarError, match=r"options of a oneOf may hold at once.*use anyOf"):
        open_backend("auto", embedded).compile(spec)


def test_z02_white_space_is_bounded_where_nothing_else_is_said(backend: Backend) -> None:
    schema = CLOSED | A
    for before, behind in (("{", '"a":1}'), ('{"a":', "1}"), ('{"a":1', "}")):
        for space in (" ", "\n"):
            assert takes(backend, schema, before + space * MOST_WHITESPACE + behind)
            assert not takes(backend, schema, before + space * (MOST_WHITESPACE + 1) + behind)
    told = StructuredOutputsParams(json=schema, disable_any_whitespace=True).spec
    matcher = backend.compile(told).matcher()
    assert not say(matcher, "{  ")


def test_x07_prepared_schemas_keep_what_they_say() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [{"format": "x", "oneOf": []}]}}}
    assert prepared(schema) == schema
    text = json.dumps(schema, indent=3)
    assert StructuredOutputsParams(json=text).json == text  # as it was sent


def test_x06_white_space_without_end_is_given_up() -> None:
    """`test_grammars.py` has it through a whole engine."""
    backend = open_backend("guidance", embedded)
    both = {"properties": {"s": {"const": 1}}, "patternProperties": {"^s$": {"const": 1}}}
    schema = CLOSED | both | {"required": ["s"]}

    def follow(**fields: Any) -> tuple[int, str | None]:
        """How many tokens of white space may stand behind the comma, and what is said then."""
        grammar = backend.compile(StructuredOutputsParams(json=schema, **fields).spec)
        follower, row = Follower(grammar), words()
        assert say(follower.matcher, '{"s":1,')
        [space] = embedded().spell(b"\n")
        for count in range(200):
            try:
                follower.matcher.fill(row)
            except GrammarError as error:
                return count, str(error)
            told = WHITE.why_given_up(follower, [space], row.view(np.uint32))
            if told is not None or not row.any():
                return count, told
            assert follower.matcher.accept(space)
        return 200, None

    count, told = follow()
    assert count == MOST_WHITESPACE and told in (None, "there is no token by which it could go on")
    count, told = follow(whitespace_pattern="[ \n]*")
    assert count == MOST_WHITE - 1 and "nothing but white space could follow" in (told or "")
    grammar = backend.compile(StructuredOutputsParams(json=CLOSED | A).spec)
    follower, row = Follower(grammar), words()
    follower.matcher.fill(row)  # where other tokens may come, nobody counts
    space = embedded().spell(b" ")
    assert all(WHITE.why_given_up(follower, space, row.view(np.uint32)) is None for _ in range(99))


def test_z02_the_first_example_prints_what_parses() -> None:
    """`test_docs_pages.py` runs it, and compares what it prints with what stands below it."""
    page = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
    example, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    assert "print(json.loads(" in example and printed == "{'city': 'Bonn'}\n"
