# SPDX-License-Identifier: Apache-2.0
"""JSON schemas by chance, of the kinds that clients send; small enough that answers end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "city", "tags", "ö", 'a"b', "x y", "id")


def schema_of(rng: random.Random, depth: int = 2) -> Schema:
    """One with an object, an array or a choice of schemas at its root."""
    made = rng.choice((_object, _object, _array, _any_of, _recursive))(rng, depth)
    if rng.random() < 0.2:
        made["title"] = "Answer"
    return made


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_scalar, _scalar, _enum]
    if depth > 0:
        kinds += [_object, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        parts = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    schema: Schema = {"type": "array", "items": _any(rng, depth), "maxItems": rng.randint(1, 3)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 1)
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _recursive(rng: random.Random, depth: int) -> Schema:
    after: Schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}
    node: Schema = {
        "type": "object",
        "properties": {"v": _any(rng, 0), "next": after},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"n": node}, "$ref": "#/$defs/n"}


def _enum(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["red", "grün", 'with "quotes"', "a\\b", 3, -1.5, None, True, [1, "x"]]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _scalar(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-200, 200)
    high = low + rng.randint(0, 500)
    return rng.choice((
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
        {"type": "integer", "minimum": low},
        {"type": "integer", "minimum": 0, "multipleOf": rng.randint(2, 9)},
        {"type": "number"},
        {"type": "number", "minimum": low, "maximum": high},
        {"type": "number", "exclusiveMinimum": low / 4},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"type": "string"},
        {"type": "string", "maxLength": rng.randint(1, 6)},
        {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 6)},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        {"type": "string", "pattern": "^[^a]{1,4}$"},
        {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
    ))  # fmt: skip
