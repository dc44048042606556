# SPDX-License-Identifier: Apache-2.0
"""Readers for the JSON files of a model directory, with a size limit and a type check for each
field.

Every error is a ConfigError that names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....tiers.settings.format import format_value
from ....tiers.settings.values import ConfigError
from .files import is_there

MAX_CONFIG_BYTES = 1024**2
MAX_COUNT = 2**24  # far above the dimensions, ids and lengths of known models

_MISSING = object()


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> JsonFields:
    """Read the JSON object in `path`. Raise ConfigError if the file is missing, too large, or not a
    JSON object."""
    if not is_there(path):
        raise ConfigError(f"{path} is missing; the model must be a Hugging Face directory")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); change its mode or download it again"
        ) from error
    if len(raw) > max_bytes:
        raise ConfigError(
            f"{path} must have at most {max_bytes} bytes and has more; download it again"
        )
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a JSON object, not {type(values).__name__}; download it again"
        )
    return JsonFields(values, str(path))


class JsonFields:
    """A JSON object with the name of the file from which it was read. A null counts as an absent
    key, since Hugging Face's files write null for a missing value."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: object = _MISSING, *, minimum: int = 1, maximum: int = MAX_COUNT
    ) -> int:
        """Read a whole number from `minimum` to `maximum`, both included."""
        value = self._get(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not minimum <= value <= maximum:  # type: ignore[operator]
            raise self.fault(name, f"a whole number from {minimum} to {maximum}", value)
        return value  # type: ignore[return-value]

    def number(
        self,
        name: str,
        default: object = _MISSING,
        *,
        above: float = 0.0,
        at_most: float | None = None,
    ) -> float:
        """Read a finite number greater than `above` and not greater than `at_most`."""
        value = self._get(name, default)
        good = _is_number(value) and value > above  # type: ignore[operator]
        if not good or (at_most is not None and value > at_most):  # type: ignore[operator]
            limit = "" if at_most is None else f" and at most {at_most:g}"
            raise self.fault(name, f"a number above {above:g}{limit}", value)
        return float(value)  # type: ignore[arg-type]

    def number_from(self, name: str, low: float, high: float) -> float:
        """Read a number from `low` to `high`, both included."""
        value = self._get(name, _MISSING)
        if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
            raise self.fault(name, f"a number from {low:g} to {high:g}", value)
        return float(value)  # type: ignore[arg-type]

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Read a list of exactly `count` numbers above zero."""
        value = self._get(name, _MISSING)
        ok = isinstance(value, list) and all(_is_number(v) and v > 0 for v in value)
        if not ok or len(value) != count:  # type: ignore[arg-type]
            raise self.fault(name, f"a list of {count} numbers above 0", value)
        return tuple(float(v) for v in value)  # type: ignore[attr-defined]

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false", value)
        return value

    def text(self, name: str, default: object = _MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fault(name, "a string", value)
        return value

    def inner(self, name: str) -> JsonFields:
        """Return the object under `name`; an absent key gives an empty object."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.fault(name, "an object", value)
        return JsonFields(value, f"{self.where}: {name}")

    def layer_kinds(self, name: str, known: Sequence[str], num_layers: int) -> list[str]:
        """Read a list that gives each layer a kind, one of `known`. The result is empty if the key
        is absent."""
        kinds = self.values.get(name)
        if kinds is None:
            return []
        expected = f"a list of {' or '.join(known)} for each of the {num_layers} layers"
        if not isinstance(kinds, list):
            raise self.fault(name, expected, kinds)
        if len(kinds) != num_layers:
            raise ConfigError(f"{self.where}: {name} must be {expected}, not of {len(kinds)}")
        for layer, kind in enumerate(kinds):
            if kind not in known:
                found = f"not {format_value(kind)} for layer {layer}"
                raise ConfigError(f"{self.where}: {name} must be {expected}, {found}")
        return kinds

    def fault(self, name: str, expected: str, got: object) -> ConfigError:
        """Return the error for an unusable value; its text has the file, the key and the expected
        form."""
        return ConfigError(f"{self.where}: {name} must be {expected}, not {format_value(got)}")

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigError(f"{self.where}: the key {name} is missing; download the file again")
        return default


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
