# SPDX-License-Identifier: Apache-2.0
"""What xgrammar can be trusted with; told without it, which takes long to import.

Nothing in it ends a grammar that takes too long, neither while it compiles nor in a step. So `auto`
gives it what is known to stay quick (`why_untamed`); and nobody gives it what it would accept and
not keep to (`why_unsupported`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..structured_params import GrammarSpec, Kind
from .structural_tags import as_format, schemas_in

# Compiling takes time with the square of the optional properties, and 0.1 ms for each text of an
# enumeration.
MOST_BYTES = 64 * 1024
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


def text_of(spec: GrammarSpec) -> str:
    """The grammar as xgrammar takes it: a schema, a regex, rules or a structural tag. Raises
    GrammarError for a structural tag that is none."""
    if spec.kind is Kind.JSON_OBJECT:
        return '{"type": "object"}'
    if spec.kind is Kind.REGEX:
        return spec.text.removeprefix("^").removesuffix("$")
    if spec.kind is Kind.CHOICE:
        texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)]
        return "root ::= " + " | ".join(texts)
    return as_format(spec.text) if spec.kind is Kind.STRUCTURAL_TAG else spec.text


def why_unsupported(spec: GrammarSpec) -> str:
    """What of it xgrammar would read and not keep to; empty: nothing."""
    if spec.whitespace_pattern:
        return "a whitespace_pattern"
    for schema in _schemas_of(spec):
        for name, value in schema.items():
            if name in _UNSUPPORTED and value not in (False, None):
                return f"the keyword {name} of a JSON schema"
        if _count(schema.get("allOf")) > 1:
            return "an allOf of several JSON schemas"
    return ""


def why_untamed(spec: GrammarSpec) -> str:
    """Why it might take xgrammar long to compile or to follow; empty: it will not."""
    if spec.kind is Kind.GRAMMAR:
        return "rules that may be ambiguous"
    if len(spec.text) > MOST_BYTES:
        return f"more than {MOST_BYTES} letters"
    if spec.kind is Kind.REGEX:
        return _why_untamed_regex(spec.text)
    for count, schema in enumerate(_schemas_of(spec)):
        if count >= MOST_SCHEMAS:
            return f"more than {MOST_SCHEMAS} schemas in one"
        for name in _MAPS[:1]:
            if _count(schema.get(name)) > MOST_PROPERTIES:
                return f"more than {MOST_PROPERTIES} properties in one object"
        for name in _BOUNDS:
            value = schema.get(name)
            if isinstance(value, int | float) and value > MOST_REPEATS:
                return f"{name} above {MOST_REPEATS}"
    return ""


def _count(value: Any) -> int:
    """Of what an object or a list holds; 0 for what a client wrote in its place."""
    return len(value) if isinstance(value, dict | list) else 0


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
