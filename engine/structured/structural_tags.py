# SPDX-License-Identifier: Apache-2.0
"""Structural tags in their two forms: vLLM's older list of structures and triggers, and xgrammar's
`format`, which is more general.

    {"structures": [{"begin": "<f>", "schema": {…}, "end": "</f>"}], "triggers": ["<f"]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": […], "tags": […]}}

Every backend supports the tags that `read_tags` can read; only xgrammar supports other formats."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..json_schemas import TAG_SCHEMAS
from .base import GrammarError


class Tag(NamedTuple):
    """A tagged part: the text that begins it, its JSON schema, and the text that ends it."""

    begin: str
    schema: dict[str, Any]
    end: str


class Tags(NamedTuple):
    """The tags that may occur within free text. Each tag begins with one of the triggers."""

    triggers: list[str]
    tags: list[Tag]


def read_tags(text: str) -> Tags:
    """Return the tags in the JSON `text` of a structural tag. Raises GrammarError, which names the
    position, for formats without triggered tags and for invalid tags."""
    given = json.loads(text)
    if "structures" in given:
        return _checked(given, "structures", "")
    form = given.get("format")
    if not isinstance(form, dict) or given.get("type") != "structural_tag":
        raise GrammarError(
            "a structural tag has structures and triggers, or the type structural_tag and a format"
        )
    if form.get("type") != "triggered_tags":
        raise GrammarError(
            f"a structural tag of the format {form.get('type')!r} needs xgrammar, and this backend "
            "takes triggered_tags"
        )
    return _checked(form, "tags", "format.")


def as_format(text: str) -> str:
    """Return the structural tag in xgrammar's form. Raises GrammarError, like `read_tags`, for
    errors in vLLM's form."""
    given = json.loads(text)
    if "structures" not in given:
        return text
    triggers, tags = read_tags(text)
    return json.dumps({
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": [
                {
                    "begin": tag.begin,
                    "content": {"type": "json_schema", "json_schema": tag.schema},
                    "end": tag.end,
                }
                for tag in tags
            ],
        },
    })  # fmt: skip


def schemas_in(text: str) -> list[Any]:
    """Return all JSON schemas in a structural tag of either form."""
    found, left = [], [json.loads(text)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if name in TAG_SCHEMAS:
                    found.append(inner)
                else:
                    left.append(inner)
    return found


def _checked(given: dict[str, Any], name: str, place: str) -> Tags:
    triggers, tags = given.get("triggers"), given.get(name)
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError(f"{place}triggers must be a list of texts, none of them empty")
    if not isinstance(tags, list) or not tags:
        raise GrammarError(f"{place}{name} must be a list with at least one tag")
    read = []
    for index, tag in enumerate(tags):
        where = f"{place}{name}[{index}]"
        if not isinstance(tag, dict):
            raise GrammarError(f"{where} must be an object")
        content = tag.get("content")
        schema = tag.get("schema")
        if isinstance(content, dict) and content.get("type") == "json_schema":
            schema = content.get("json_schema")
        begin, end = tag.get("begin"), tag.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(f"{where}.begin and .end must be texts")
        if not isinstance(schema, dict):
            raise GrammarError(f"{where} must have a JSON schema, which is an object")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"{where}.begin must begin with one of the triggers")
        read.append(Tag(begin, schema, end))
    return Tags(triggers, read)
