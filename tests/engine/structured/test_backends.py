# SPDX-License-Identifier: Apache-2.0
"""The contract of a grammar backend, run over both."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdate
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.structured_params import (
    GrammarSpec,
    Kind,
    StructuredOutputsParams,
)
from stratakv.engine.sampling.sampler import Sampler
from stratakv.engine.sampling.token_mask import TokenMask, banned_on, banned_on_host
from stratakv.engine.structured import guidance_backend
from stratakv.engine.structured.backends import open_backend
from stratakv.engine.structured.base import BITS, Backend, GrammarError, fill_drafts
from stratakv.engine.structured.xgrammar_scope import why_unsupported, why_untamed

from .vocabularies import END, VOCAB, allowed, embedded, say, walk, words

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}
CHOICES = ("yes", "no", "yes, é", 'a "quoted" \\ one', "two\nlines", "日本 😀")


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param, embedded)


def spec(**fields: Any) -> GrammarSpec:
    return StructuredOutputsParams(**fields).spec


def test_random_texts_are_those_of_a_regex(backend: Backend, rng: random.Random) -> None:
    pattern = r"^(cat|dog|bird)-\d{2,3}[a-f]?$"
    grammar = backend.compile(spec(regex=pattern))
    for _ in range(15):
        text = walk(grammar, rng)
        assert text is not None and re.fullmatch(pattern, text)


def test_random_texts_are_choices(backend: Backend, rng: random.Random) -> None:
    grammar = backend.compile(spec(choice=CHOICES))
    assert {walk(grammar, rng) for _ in range(60)} <= set(CHOICES)
    for choice in CHOICES:
        matcher = grammar.matcher()
        assert say(matcher, choice) and matcher.may_end, choice
    assert not say(grammar.matcher(), "yess")


def test_random_texts_validate(backend: Backend, rng: random.Random) -> None:
    for any_whitespace in (True, False):
        grammar = backend.compile(spec(json=PERSON, disable_any_whitespace=not any_whitespace))
        texts = [text for text in (walk(grammar, rng) for _ in range(15)) if text is not None]
        assert texts
        for text in texts:
            jsonschema.validate(json.loads(text), PERSON)
            assert any_whitespace or "\n" not in text


def test_any_object_is_an_object(backend: Backend) -> None:
    grammar = backend.compile(spec(json_object=True))
    matcher = grammar.matcher()
    assert say(matcher, '{"a": [1, {"b": null}], "c": "d"}') and allowed(matcher) == [END]
    for wrong in ("[1]", "3", '{"a" 1}'):
        assert not say(grammar.matcher(), wrong)


def test_rules_may_be_recursive(backend: Backend) -> None:
    rules = 'root ::= sum\nsum ::= [0-9]+ ("+" sum)? | "(" sum ")"\n'
    grammar = backend.compile(spec(grammar=rules))
    matcher = grammar.matcher()
    assert say(matcher, "((1+22))") and matcher.may_end
    assert not say(grammar.matcher(), "(1+)")


@pytest.mark.parametrize("form", ["older", "newer"])
def test_tags_begin_what_follows_a_schema(backend: Backend, form: str) -> None:
    tags: dict[str, Any] = TAGS
    if form == "newer":
        content = {"type": "json_schema", "json_schema": {"type": "integer"}}
        inner = {"begin": "<f>", "content": content, "end": "</f>"}
        tags = {"type": "triggered_tags", "triggers": TAGS["triggers"], "tags": [inner]}
        tags = {"type": "structural_tag", "format": tags}
    grammar = backend.compile(spec(structural_tag=tags))
    matcher = grammar.matcher()
    assert say(matcher, "Let me see: <f>12</f> and so on") and matcher.may_end
    matcher = grammar.matcher()
    assert say(matcher, "Let me see: <f>") and not matcher.may_end
    assert not say(matcher, "x")


def test_a_refused_token_changes_nothing(backend: Backend) -> None:
    matcher = backend.compile(spec(regex="ab{2,4}c")).matcher()
    assert say(matcher, "ab")
    before = allowed(matcher)
    for token in (*embedded().spell(b"x"), END, VOCAB - 1):
        assert token not in before
        assert not matcher.accept(token)
        assert allowed(matcher) == before
    assert say(matcher, "bc") and allowed(matcher) == [END]
    assert not matcher.accept(END)


def test_a_rollback_leads_to_where_it_was(backend: Backend, rng: random.Random) -> None:
    matcher = backend.compile(spec(json=PERSON)).matcher()
    seen = []
    for _ in range(12):
        tokens = allowed(matcher)
        seen.append((tokens, matcher.may_end))
        assert matcher.accept(rng.choice([token for token in tokens if token != END]))
    matcher.rollback(5)
    assert (allowed(matcher), matcher.may_end) == seen[7]
    matcher.rollback(7)
    assert (allowed(matcher), matcher.may_end) == seen[0]


def test_rows_of_drafts_are_those_of_the_tokens(backend: Backend) -> None:
    grammar = backend.compile(spec(regex="a[bc][de]{3}"))
    drafts = [token for letter in "abdxd" for token in embedded().spell(letter.encode())]
    rows = np.stack([words() for _ in range(1 + len(drafts))])
    matcher = grammar.matcher()
    assert fill_drafts(matcher, drafts, rows) == [False] * 4  # the x is refused
    for count in range(4):
        other, row = grammar.matcher(), words()
        assert all(other.accept(draft) for draft in drafts[:count])
        other.fill(row)
        assert (rows[count] == row).all()
    assert say(matcher, "acded") and allowed(matcher) == [END]


def test_the_sampler_keeps_to_the_rows_of_drafts(backend: Backend) -> None:
    """A row of logits behind draft tokens is masked as if they were the output."""
    drafts = [token for letter in "ab" for token in embedded().spell(letter.encode())]
    rows = np.stack([words() for _ in range(3)])
    fill_drafts(backend.compile(spec(regex="a[bc]{2}")).matcher(), drafts, rows)
    sampler = Sampler(2, VOCAB, (END,))
    params = SamplingParams(temperature=0.0)
    sampler.apply_batch_update(
        BatchUpdate(1, [], [AddedRow(0, params, np.array([1], np.int32), [])], [])
    )
    mask = TokenMask(["r"] * 3, rows.view(np.uint32))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampled = sampler.sample(
        logits, np.zeros(3, np.int64), mask, [0, 1, 2],
        offsets=np.arange(3), drafts=[drafts] * 3,
    )  # fmt: skip
    spelt = [embedded().tokens[token] for token in sampled.token_ids]
    assert spelt[0].startswith(b"a") and spelt[1][:1] in b"bc" and spelt[2] in (b"b", b"c")


WRONG = [
    ({"regex": "[ab"}, r"position 4|unclosed"),
    ({"regex": "(?=a)b"}, r"[Ll]ook"),
    ({"grammar": 'root ::= "a'}, r"line 1"),
    ({"grammar": "root ::= x"}, r"not (defined|found)"),
    ({"json": {"type": "nonsense"}}, r"nonsense"),
    ({"json": {"$ref": "#/no"}}, r"no"),
    ({"json": {"enum": []}}, r"empty"),
    ({"json": {"type": "array", "uniqueItems": True}}, r"uniqueItems"),
    ({"json": {"not": {"type": "string"}}}, r"not"),
    ({"json": {"type": "string", "minLength": 9, "maxLength": 8}}, r"maxLength|minLength"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "x"}}}, r"x"),
    ({"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<f"]}}, "schema"),
    ({"structural_tag": {"structures": [], "triggers": ["<f"]}}, "at least one tag"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_what_does_not_compile_says_why(
    backend: Backend, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(GrammarError, match=said):
        backend.compile(spec(**fields))


def test_auto_has_what_either_can_do() -> None:
    auto = open_backend("auto", embedded)
    matcher = auto.compile(spec(json={"type": "integer", "multipleOf": 7})).matcher()
    assert say(matcher, "1") and not matcher.may_end and say(matcher, "4") and matcher.may_end
    only_xgrammar = {"type": "structural_tag", "format": {"type": "const_string", "value": "hm"}}
    matcher = auto.compile(spec(structural_tag=only_xgrammar)).matcher()
    assert say(matcher, "hm") and allowed(matcher) == [END]


@pytest.mark.parametrize(
    ("fields", "is_untamed"),
    [
        ({"json": PERSON}, False),
        ({"regex": r"\d{3}-\d{4}"}, False),
        ({"choice": ["a", "b"]}, False),
        ({"regex": "(a{1,100}){1,100}"}, True),
        ({"regex": "(a+)+b"}, True),
        ({"regex": "a{1,100000}"}, True),
        ({"grammar": 'root ::= root root | "a"'}, True),
        ({"json": {"properties": {str(i): {} for i in range(100)}}}, True),
        ({"json": {"properties": {str(i): {} for i in range(25)}}}, True),
        ({"json": {"type": "object", "properties": {str(i): {} for i in range(60)},
                   "required": [str(i) for i in range(40)]}}, False),
        ({"json": {"items": {"type": "array", "maxItems": 100000}}}, True),
        ({"structural_tag": {"structures": [{"begin": "<f>", "end": "",
          "schema": {"maxItems": 1e9}}], "triggers": ["<f"]}}, True),
    ],
)  # fmt: skip
def test_xgrammar_is_trusted_with_what_stays_quick(
    fields: dict[str, Any], is_untamed: bool
) -> None:
    assert bool(why_untamed(spec(**fields))) == is_untamed
    assert not why_unsupported(spec(**fields))


def test_bits_are_spread_alike_on_host_and_device(rng: random.Random) -> None:
    octets = np.frombuffer(rng.randbytes(3 * 40), np.uint8).reshape(3, 40).copy()
    for num_tokens in (320, 300, 333):
        spread = banned_on(octets, num_tokens, torch.device("cpu"))
        assert (spread.numpy() == banned_on_host(octets, num_tokens)).all()
        assert spread[0, 0] == (not octets[0, 0] & 1)
    assert BITS == 32 and Kind("json") is Kind.JSON


def test_keys_that_are_not_built_come_with_what_to_do() -> None:
    words = guidance_backend._plain('Unimplemented keys: ["not"]')
    assert words == 'its schema has the keys ["not"], which are not built; leave them out'
