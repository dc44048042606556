# SPDX-License-Identifier: Apache-2.0
"""Grammars by xgrammar, which is the quickest at masks; and which of them it can be trusted with.

Nothing in it ends a grammar that takes too long, neither while it compiles nor in a step. So `auto`
gives it what is known to stay quick (`why_untamed`); and nobody gives it what it would accept and
not keep to (`why_unsupported`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import xgrammar

from ..structured_params import GrammarSpec, Kind
from .base import Backend, Grammar, GrammarError, Matcher, Words
from .structural_tags import as_format, schemas_in
from .vocabulary import Vocabulary

# Compiling takes time with the square of the optional properties.
MOST_PROPERTIES = 64
MOST_SCHEMAS = 1000  # parts of one schema that are schemas
MOST_REPEATS = 256
# It reads these and leaves them aside; or, of a string's length and pattern, lets the string hold
# control characters and quotes that JSON does not allow in it.
_UNSUPPORTED = frozenset({
    "minLength", "maxLength", "pattern",
    "multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then",
    "else", "oneOf", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties",
    "format", "$dynamicRef", "$anchor", "additionalItems", "contentEncoding",
})  # fmt: skip
# Where a schema holds others: by name, as a list, or one.
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")
_BOUNDS = ("minItems", "maxItems")
_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")
_PLACE = re.compile(r"^\[[^\]]*\] \S+: ")


class XGrammarBackend(Backend):
    """Compiles on the caller's thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Without any, it would take some by their names.
        ends = list(vocabulary.end_ids)
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=ends,
        )
        self._end_ids = frozenset(ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> Grammar:
        if why := why_unsupported(spec):
            raise GrammarError(f"xgrammar does not keep to {why}; --structured-outputs-backend auto"
                               " takes what does")  # fmt: skip
        try:
            return _XGrammar(self._compile(spec), self._end_ids)
        except RuntimeError as error:
            raise GrammarError(_plain(error)) from None

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if spec.kind is Kind.JSON_OBJECT:
            return compiler.compile_json_schema(
                '{"type": "object"}', any_whitespace=spec.any_whitespace
            )
        if spec.kind is Kind.JSON:
            return compiler.compile_json_schema(spec.text, any_whitespace=spec.any_whitespace)
        if spec.kind is Kind.REGEX:
            return compiler.compile_regex(spec.text.removeprefix("^").removesuffix("$"))
        if spec.kind is Kind.CHOICE:
            texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)]
            return compiler.compile_grammar("root ::= " + " | ".join(texts))
        if spec.kind is Kind.GRAMMAR:
            return compiler.compile_grammar(spec.text)
        return compiler.compile_structural_tag(as_format(spec.text))


class _XGrammar(Grammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar, end_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._end_ids = end_ids
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return _XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._end_ids)


class _XGrammarMatcher(Matcher):
    def __init__(self, matcher: xgrammar.GrammarMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def accept(self, token_id: int) -> bool:
        return token_id not in self._end_ids and bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill(self, words: Words) -> None:
        self._matcher.fill_next_token_bitmask(words.reshape(1, -1))


def why_unsupported(spec: GrammarSpec) -> str:
    """What of it xgrammar would read and not keep to; empty: nothing."""
    if spec.whitespace_pattern:
        return "a whitespace_pattern"
    for schema in _schemas_of(spec):
        for name, value in schema.items():
            if name in _UNSUPPORTED and value not in (False, None):
                return f"the keyword {name} of a JSON schema"
        if len(schema.get("allOf") or ()) > 1:
            return "an allOf of several JSON schemas"
    return ""


def why_untamed(spec: GrammarSpec) -> str:
    """Why it might take xgrammar long to compile or to follow; empty: it will not."""
    if spec.kind is Kind.GRAMMAR:
        return "rules that may be ambiguous"
    if spec.kind is Kind.REGEX:
        return _why_untamed_regex(spec.text)
    for count, schema in enumerate(_schemas_of(spec)):
        if count >= MOST_SCHEMAS:
            return f"more than {MOST_SCHEMAS} schemas in one"
        for name in _MAPS[:1]:
            if len(schema.get(name) or ()) > MOST_PROPERTIES:
                return f"more than {MOST_PROPERTIES} properties in one object"
        for name in _BOUNDS:
            value = schema.get(name)
            if isinstance(value, int | float) and value > MOST_REPEATS:
                return f"{name} above {MOST_REPEATS}"
    return ""


def _why_untamed_regex(pattern: str) -> str:
    if _QUANTIFIED_GROUP.search(pattern):
        return "a group that is repeated"
    for counts in _COUNTS.findall(pattern):
        if any(len(count) > 3 or int(count or 0) > MOST_REPEATS for count in counts):
            return f"more than {MOST_REPEATS} repetitions"
    return ""


def _schemas_of(spec: GrammarSpec) -> Iterator[dict[str, Any]]:
    """A JSON schema and all inside it."""
    left: list[Any] = []
    if spec.kind is Kind.JSON:
        left.append(json.loads(spec.text))
    elif spec.kind is Kind.STRUCTURAL_TAG:
        left += schemas_in(spec.text)
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for name in _MAPS:
            inner = schema.get(name)
            left += inner.values() if isinstance(inner, dict) else ()
        for name in _LISTS:
            inner = schema.get(name)
            left += inner if isinstance(inner, list) else ()
        left += [schema.get(name) for name in _ONES]


def _plain(error: RuntimeError) -> str:
    """Without the date and the line of its own source."""
    return _PLACE.sub("", " ".join(str(error).split()))
