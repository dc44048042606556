# SPDX-License-Identifier: Apache-2.0
"""Prepares JSON schemas: removes annotations, and rewrites forms that no grammar backend supports.

A `format` that is not in `FORMATS` counts as an annotation, as JSON Schema allows. `prepared`
removes it before a schema is compiled, and the API server reports it to the client. A `oneOf` of
constants becomes an `enum`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
# Formats that answers follow. All other formats only inform users or other programs.
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
    "uuid",
})  # fmt: skip
# Keywords that do not restrict an answer.
ANNOTATIONS = frozenset({
    "$comment", "$schema", "default", "deprecated", "description", "example", "examples",
    "externalDocs", "readOnly", "title", "writeOnly", "xml",
})  # fmt: skip
TAG_SCHEMAS = ("schema", "json_schema")  # keys under which a structural tag holds a schema
# Keywords whose value contains schemas: a map by name, a list, or a single schema.
MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
ONES = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "additionalItems", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def prepared(schema: Any) -> Any:
    """Return the schema in the form that the grammar backends support. If nothing has to change,
    the result equals the schema."""
    return _mapped(schema, _prepared_one)


def with_schemas(tag: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structural tag in which `change` has been applied to each JSON schema."""
    if isinstance(tag, list):
        return [with_schemas(each, change) for each in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: change(inner) if name in TAG_SCHEMAS else with_schemas(inner, change)
        for name, inner in tag.items()
    }


def ignored_formats(schema: Any) -> list[str]:
    """Return the formats in a schema that have no effect on answers, once each."""
    found: dict[str, None] = {}

    def look(one: Schema) -> Schema:
        if isinstance(name := one.get("format"), str) and name not in FORMATS:
            found[name] = None
        return one

    _mapped(schema, look)
    return list(found)


def _prepared_one(schema: Schema) -> Schema:
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        schema = {key: value for key, value in schema.items() if key != "format"}
    options = schema.get("oneOf")
    if isinstance(options, list) and "enum" not in schema and "const" not in schema:
        values = _constants(options)
        if values is not None:
            schema = {key: value for key, value in schema.items() if key != "oneOf"}
            schema["enum"] = values
    return schema


def _constants(options: list[Any]) -> list[Any] | None:
    """Return the values that exactly one of these schemas allows. Return None if a schema is
    anything but a list of constants."""
    given: list[Any] = []
    for option in options:
        if not isinstance(option, dict):
            return None
        values = [option["const"]] if "const" in option else option.get("enum")
        if not isinstance(values, list) or not set(option) <= ANNOTATIONS | {"const", "enum"}:
            return None
        if "const" in option and "enum" in option:
            return None
        given += {json.dumps(each, sort_keys=True): each for each in values}.items()
    counts = Counter(text for text, _ in given)
    return [value for text, value in given if counts[text] == 1]


def _mapped(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Apply `change` to a schema and to all schemas in it, but not to data such as an `enum`."""
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        inner = value
        if key in MAPS and isinstance(value, dict):
            inner = {name: _mapped(each, change) for name, each in value.items()}
        elif key in LISTS and isinstance(value, list):
            inner = [_mapped(each, change) for each in value]
        elif key in ONES:
            inner = _mapped(value, change)
        made[key] = inner
    return change(made)
