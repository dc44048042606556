# SPDX-License-Identifier: Apache-2.0
"""The form that a client requires of an answer: a schema, a regex, a choice or a grammar.

The field names are vLLM's. This module makes only the checks that need no grammar compiler; the
compiler finds the faults in a grammar."""

from __future__ import annotations

import enum
import json as std_json
from typing import Any, NamedTuple

import msgspec

from ..json_schemas import prepared, with_schemas

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 100
MAX_CHOICES = 4096
# The default limit of white space between parts of JSON, which a model could write without end.
MOST_WHITESPACE = 32


class Kind(enum.StrEnum):
    """The kind of a grammar, named after the field of `StructuredOutputsParams` that holds it."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class GrammarSpec(NamedTuple):
    """A grammar to compile. Equal specs accept the same texts."""

    kind: Kind
    text: str  # a choice has a JSON list of its strings; a JSON object has ""
    any_whitespace: bool = True  # any white space between parts of JSON; False: at most one space
    whitespace_pattern: str = ""  # a regex for the white space; overrides `any_whitespace`


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form that an answer must have. Exactly one of these fields sets the form: `json`, a
    schema as a dict or as text; `regex`; `choice`, a list of texts; `grammar`, as EBNF (GBNF) or
    Lark; `json_object`, any JSON object; `structural_tag`, a dict or text, for free text in which
    tags begin parts that follow a schema.

    `disable_any_whitespace` and `whitespace_pattern` set which white space JSON may have. Raises
    ValueError, which names the field, if no field or several are given, for a wrong type, and for a
    text that is too long, too deep or no JSON."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        choice: Any = self.choice
        if isinstance(choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(choice))
        self._check_types()
        given = [kind for kind in Kind if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(kind.value for kind in Kind)
            came = "none of them" if not given else " and ".join(given)
            raise ValueError(f"structured_outputs must have one of {names}, got {came}")
        for name in (Kind.JSON, Kind.STRUCTURAL_TAG):
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, _checked_json(name, value))
        self._check_texts()

    @property
    def spec(self) -> GrammarSpec:
        kind = next(kind for kind in Kind if getattr(self, kind) not in (None, False))
        text = "" if kind is Kind.JSON_OBJECT else getattr(self, kind)
        if kind is Kind.CHOICE:
            text = std_json.dumps(text, ensure_ascii=False)
        is_json = kind in (Kind.JSON, Kind.JSON_OBJECT)
        return GrammarSpec(
            kind,
            text,
            not (is_json and self.disable_any_whitespace),
            (self.whitespace_pattern or "") if is_json else "",
        )

    def _check_types(self) -> None:
        for name in (Kind.REGEX, Kind.GRAMMAR, "whitespace_pattern"):
            _check(getattr(self, name), str, name, "a text")
        for name in (Kind.JSON_OBJECT, "disable_any_whitespace"):
            _check(getattr(self, name), bool, name, "True or False")
        for name in (Kind.JSON, Kind.STRUCTURAL_TAG):
            _check(getattr(self, name), str | dict, name, "an object, or one as JSON text")
        _check(self.choice, tuple, Kind.CHOICE, "a list of texts")
        for each in self.choice or ():
            _check(each, str, Kind.CHOICE, "a list of texts", "{} in it")

    def _check_texts(self) -> None:
        if self.choice is not None:
            count = len(set(self.choice))
            if count != len(self.choice) or not 1 <= count <= MAX_CHOICES or "" in self.choice:
                raise ValueError(
                    f"structured_outputs.choice must be 1 to {MAX_CHOICES} different texts, none "
                    f"of them empty, got {len(self.choice)}, of which {count} differ"
                )
        for text in (*self.spec[1:2], self.whitespace_pattern or ""):
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise ValueError("structured_outputs must be valid Unicode") from None
            if size > MAX_GRAMMAR_BYTES:
                raise ValueError(
                    f"structured_outputs.{self.spec.kind} must have at most {MAX_GRAMMAR_BYTES} "
                    f"bytes, got {size}; send a smaller one"
                )
        for name in (Kind.REGEX, Kind.GRAMMAR):
            if getattr(self, name) == "":
                raise ValueError(f"structured_outputs.{name} must not be empty; leave it out")


def _check(value: Any, kind: Any, name: str, expected: str, form: str = "{}") -> None:
    if value is not None and not isinstance(value, kind):
        got = form.format(type(value).__name__)
        raise ValueError(f"structured_outputs.{name} must be {expected}, got {got}")


def _checked_json(name: str, value: str | dict[str, Any]) -> str:
    """Return the JSON text of an object. Raises ValueError."""
    what = f"structured_outputs.{name}"
    try:
        if isinstance(value, str):
            if len(value) > MAX_GRAMMAR_BYTES:  # another check refuses its length
                return value
            text, decoded = value, std_json.loads(value)
        else:
            text, decoded = std_json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except std_json.JSONDecodeError as error:
        raise ValueError(
            f"{what} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(_too_deep(what)) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(decoded).__name__}")
    _check_depth(what, decoded)
    made = prepared(decoded) if name == Kind.JSON else with_schemas(decoded, prepared)
    return text if made == decoded else std_json.dumps(made, ensure_ascii=False)


def _check_depth(what: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(_too_deep(what))


def _too_deep(what: str) -> str:
    return f"{what} must nest at most {MAX_SCHEMA_DEPTH} deep; it is deeper, use $defs and $ref"
