# SPDX-License-Identifier: Apache-2.0
"""Decides which grammars xgrammar may get. This module does not import xgrammar, since the import
takes seconds.

xgrammar has no time limit, neither for compiling nor for a mask. So `auto` gives xgrammar only
grammars that are known to be fast (`why_untamed`). No setting gives xgrammar a grammar of which it
would ignore a part (`why_unsupported`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ..json_schemas import ANNOTATIONS, FORMATS
from ..request.structured_params import GrammarSpec, Kind
from .structural_tags import as_format, schemas_in

# The time of compiling grows with the square of the optional properties, and by 0.1 ms for each
# text of an enumeration.
MOST_BYTES = 64 * 1024
MOST_PROPERTIES = 64
MOST_OPTIONAL = 24  # optional properties; with 64 compiling takes two seconds
MOST_SCHEMAS = 1000  # schemas inside one schema
MOST_REPEATS = 256
MOST_REGEX = 128  # characters; compile time grows with the cube of optional parts
# Keywords that xgrammar accepts and ignores, and a string's length and pattern, with which xgrammar
# allows control characters and quotes that a JSON string must not hold.
_UNSUPPORTED = frozenset({
    "minLength", "maxLength", "pattern",
    "multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then",
    "else", "oneOf", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties",
    "format", "$dynamicRef", "$anchor", "additionalItems", "contentEncoding",
})  # fmt: skip
# The keywords whose value has further schemas: an object of schemas, a list, or one schema.
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")
_BOUNDS = ("minItems", "maxItems")
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# Beside a $ref, a choice or a constant, xgrammar ignores all other keywords.
_BESIDE = ANNOTATIONS | {"$defs", "$id", "definitions", "format"}
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/(?P<name>[^/~%]+))?")
_NAMES = {  # JSON's names of Python's types
    "string": ("str",), "integer": ("int",), "number": ("int", "float"), "boolean": ("bool",),
    "null": ("NoneType",), "object": ("dict",), "array": ("list",),
}  # fmt: skip
_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")


def text_of(spec: GrammarSpec) -> str:
    """Return the grammar as xgrammar expects it: a JSON schema, a regex, EBNF rules or a structural
    tag. Raises GrammarError for an invalid structural tag."""
    if spec.kind is Kind.JSON_OBJECT:
        return '{"type": "object"}'
    if spec.kind is Kind.REGEX:
        return spec.text.removeprefix("^").removesuffix("$")
    if spec.kind is Kind.CHOICE:
        texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)]
        return "root ::= " + " | ".join(texts)
    return as_format(spec.text) if spec.kind is Kind.STRUCTURAL_TAG else spec.text


def why_unsupported(spec: GrammarSpec) -> str:
    """Return the part of a grammar that xgrammar would accept but not enforce; "" without such a
    part."""
    if spec.whitespace_pattern:
        return "a whitespace_pattern"
    for place, schema in enumerate(_schemas_of(spec)):
        for name, value in schema.items():
            if name == "format" and value not in FORMATS:
                continue
            if name in _UNSUPPORTED and value not in (False, None):
                return f"the keyword {name} of a JSON schema"
        if "$id" in schema and place and spec.kind is Kind.JSON:
            return "an $id within a JSON schema"
        if why := _why_left_aside(schema):
            return why
    return ""


def _why_left_aside(schema: dict[str, Any]) -> str:
    """Return the part of one schema that xgrammar would ignore; "" without such a part."""
    if _count(schema.get("allOf")) > 1:
        return "an allOf of several JSON schemas"
    if "$ref" in schema and _target(schema["$ref"]) is None:
        return f"the $ref {str(schema['$ref'])[:64]!r}, which leads elsewhere than to #/$defs"
    for name in ("$ref", "anyOf", "allOf", "const", "enum"):
        beside = set(schema) - _BESIDE - {name}
        if name in schema and name in ("const", "enum"):
            values = [schema["const"]] if name == "const" else schema["enum"]
            if beside == {"type"} and isinstance(values, list) and _are_of(values, schema["type"]):
                continue
        if name in schema and beside:
            return f"{name} with {min(beside)} beside it in a JSON schema"
    if "type" not in schema and (bounds := _OF_NUMBERS & set(schema)):
        return f"{min(bounds)} without a type in a JSON schema"
    required, there = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and not set(map(str, required)) <= set(
        there if isinstance(there, dict) else ()
    ):
        return "required properties that a JSON schema does not describe"
    return ""


def _are_of(values: list[Any], kinds: Any) -> bool:
    """Whether every value has one of the JSON types `kinds` (one name or a list of names)."""
    names = {name for each in ([kinds] if isinstance(kinds, str) else kinds or ())
             for name in _NAMES.get(str(each), ())}  # fmt: skip
    return all(type(value).__name__ in names for value in values)


def _target(reference: Any) -> str | None:
    """Return the name of the definition to which a $ref points: "" for the whole schema, None for
    another kind of reference."""
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    return None if found is None else found["name"] or ""


def why_untamed(spec: GrammarSpec) -> str:
    """Return why xgrammar might be slow to compile or follow a grammar; "" if it is always fast."""
    if spec.kind is Kind.GRAMMAR:
        return "rules that may be ambiguous"
    if len(spec.text) > MOST_BYTES:
        return f"more than {MOST_BYTES} letters"
    if spec.kind is Kind.REGEX:
        return _why_untamed_regex(spec.text)
    if spec.kind is Kind.JSON and _is_recursive(json.loads(spec.text)):
        return "a JSON schema within itself"
    for count, schema in enumerate(_schemas_of(spec)):
        if count >= MOST_SCHEMAS:
            return f"more than {MOST_SCHEMAS} schemas in one"
        for name in _MAPS[:1]:
            if _count(schema.get(name)) > MOST_PROPERTIES:
                return f"more than {MOST_PROPERTIES} properties in one object"
            if _count(schema.get(name)) - _count(schema.get("required")) > MOST_OPTIONAL:
                return f"more than {MOST_OPTIONAL} optional properties in one object"
        for name in _BOUNDS:
            value = schema.get(name)
            if isinstance(value, int | float) and value > MOST_REPEATS:
                return f"{name} above {MOST_REPEATS}"
    return ""


def _count(value: Any) -> int:
    """Return the number of entries of an object or a list; 0 for any other value."""
    return len(value) if isinstance(value, dict | list) else 0


def _is_recursive(schema: Any) -> bool:
    """Whether a $ref points back to a schema that contains it."""
    if not isinstance(schema, dict):
        return False
    parts: dict[str, Any] = {}
    for name in ("$defs", "definitions"):
        if isinstance(named := schema.get(name), dict):
            parts |= named
    leads = {
        name: {_target(each["$ref"]) for each in _all_in(part) if "$ref" in each}
        for name, part in (*parts.items(), ("", schema))
    }
    if any("" in targets for targets in leads.values()):
        return True
    try:
        TopologicalSorter(leads).prepare()
    except CycleError:
        return True
    return False


def _why_untamed_regex(pattern: str) -> str:
    if len(pattern) > MOST_REGEX:
        return f"more than {MOST_REGEX} letters"
    if _QUANTIFIED_GROUP.search(pattern):
        return "a group that is repeated"
    for counts in _COUNTS.findall(pattern):
        if any(len(count) > 3 or int(count or 0) > MOST_REPEATS for count in counts):
            return f"more than {MOST_REPEATS} repetitions"
    return ""


def _schemas_of(spec: GrammarSpec) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas of a grammar and all schemas inside these schemas."""
    if spec.kind is Kind.JSON:
        yield from _all_in(json.loads(spec.text))
    elif spec.kind is Kind.STRUCTURAL_TAG:
        for schema in schemas_in(spec.text):
            yield from _all_in(schema)


def _all_in(whole: Any) -> Iterator[dict[str, Any]]:
    left = [whole]
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
