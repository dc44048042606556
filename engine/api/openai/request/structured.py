# SPDX-License-Identifier: Apache-2.0
"""Reads the required form of an answer from a request's fields: OpenAI's `response_format`, vLLM's
`structured_outputs`, and vLLM's older `guided_` fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from ....json_schemas import FORMATS, ignored_formats
from ....request.structured_params import StructuredOutputsParams
from ...api_errors import ApiError
from ...front import Front
from .protocol import SamplingFields

logger = logging.getLogger(__name__)

_MOST_TOLD = 64  # limit of logged `format` names, because clients choose the names
_told: set[str] = set()
# vLLM's older fields, each with its name in `structured_outputs`.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_WHITESPACE = "guided_whitespace_pattern"
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# The fields of OpenAI's `json_schema`, of which only `schema` has an effect.
_SCHEMA_FIELDS = {"name", "schema", "strict", "description"}


def structured_outputs_of(front: Front, request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the answer's required form; None for an answer of any form. Raises ApiError, with the
    field's name, for an invalid value and for a request with two fields that set a form."""
    asked: dict[str, Mapping[str, Any]] = {}
    if request.response_format is not None:
        found = _of_response_format(request.response_format)
        if found:
            asked["response_format"] = found
    if request.structured_outputs is not None:
        asked["structured_outputs"] = request.structured_outputs
    for name, today in _GUIDED.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            asked[name] = {today: value}
    pattern = request.guided_whitespace_pattern
    if not asked:
        if pattern is not None:
            message = f"`{_WHITESPACE}` is about the white space of `guided_json`; send both"
            raise _invalid(_WHITESPACE, message)
        return None
    if len(asked) > 1:
        first, second, *_ = asked
        message = (
            f"`{first}` and `{second}` both say what the answer has to look like; send one of them"
        )
        raise _invalid(second, message)
    [(name, fields)] = asked.items()
    if pattern is not None:
        fields = {**fields, "whitespace_pattern": pattern}
    front.need_tokenizer(name, f"leave out `{name}`")
    try:
        params = msgspec.convert(dict(fields), StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise _invalid(name, f"`{name}` cannot be used: {error}") from None
    if params.json is not None:
        _tell_ignored(fields["json"])
    return params


def _tell_ignored(schema: Any) -> None:
    """Log each `format` of the schema that the server does not enforce, once for each format."""
    whole = json.loads(schema) if isinstance(schema, str) else schema
    for name in ignored_formats(whole):
        if name not in _told and len(_told) < _MOST_TOLD:
            _told.add(name)
            logger.warning(
                "the format %r in a JSON schema is taken for an annotation, and no answer is held "
                "to it; those that are kept to are %s. Said once",
                name[:64],
                ", ".join(sorted(FORMATS - {"unknown"})),
            )


def _of_response_format(given: Any) -> dict[str, Any]:
    """Return the fields of StructuredOutputsParams for a `response_format`; {} for plain text."""
    name = "response_format"
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        message = f"`{name}` must be an object whose `type` is one of {known}"
        raise _invalid(name, message)
    if kind == "structural_tag":  # the whole `response_format` object is the structural tag
        return {"structural_tag": given}
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _refuse_others(name, given, allowed)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    inner = given.get("json_schema")
    if not isinstance(inner, dict):
        message = f"`{name}.json_schema` must be an object with a `schema`"
        raise _invalid(name, message)
    _refuse_others(f"{name}.json_schema", inner, _SCHEMA_FIELDS)
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        message = f"`{name}.json_schema.schema` must be a JSON schema, which is an object"
        raise _invalid(name, message)
    if not isinstance(inner.get("strict"), bool | None):
        message = f"`{name}.json_schema.strict` must be true, false or null"
        raise _invalid(name, message)
    return {"json": schema}


def _refuse_others(place: str, given: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(set(given) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed))
        message = f"`{place}` has the unknown field {unknown[0][:64]!r}; it takes {known}"
        raise _invalid("response_format", message)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")
