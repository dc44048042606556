# SPDX-License-Identifier: Apache-2.0
"""PeftTargets: the modules and parameters that an adapter_config.json targets.

PEFT computes no other tensors of an adapter's file."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import NamedTuple

from ....tiers.settings.format import format_value
from ..checkpoint.json_fields import JsonFields
from .module_patterns import MOST_TRIES, compile_pattern, ends_of

# PEFT's suffix for the first of two wrapped parameters of one module, such as experts.
INNER = ".base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_PARAMETERS = (GATE_UP, DOWN, "weight")
_FIELDS = (
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern",
)  # fmt: skip
# The number of a layer: the first number, or the first after a name of `layers_pattern`.
_ANY_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
_NUMBER_AFTER = (r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\.")


class _Modules(NamedTuple):
    """The value of `target_modules` or `exclude_modules`."""

    names: frozenset[str]  # whole names of modules, or their ends after a dot
    pattern: re.Pattern[str] | None = None  # a pattern of whole names instead

    def include_module(self, module: str) -> bool:
        if self.pattern is not None:
            return self.pattern.fullmatch(module) is not None
        return any(end in self.names for end in ends_of(module))


class PeftTargets:
    """The targets of one adapter_config.json.

    Without target_modules and target_parameters, all tensors count as targets, and so do they with
    a pattern whose matching may take for ever: some trainers write such patterns."""

    def __init__(self, fields: JsonFields) -> None:
        """Raises ConfigError for a field of another type."""
        self._num_ways: float = 1  # to match one module; infinite for a pattern without a bound
        values = ((name, fields.values.get(name)) for name in _FIELDS)
        self._words = " and ".join(
            f"{name} {format_value(each)}" for name, each in values if each is not None
        )
        self._modules = self._read_modules(fields, "target_modules")
        self._excluded = self._read_modules(fields, "exclude_modules")
        self._parameters = frozenset(_texts(fields, "target_parameters"))
        self._layers = _read_layers(fields)
        patterns = fields.values.get("layers_pattern")
        texts = [patterns] if isinstance(patterns, str) else _texts(fields, "layers_pattern")
        found = [self._compile(each, *_NUMBER_AFTER) for each in texts if patterns]
        self._numbers = [each for each in found if each is not None] or [_ANY_NUMBER]

    def __str__(self) -> str:
        return self._words

    def find_ignored(self, modules: Collection[str]) -> str | None:
        """Return the first of the modules that PEFT does not compute, or None."""
        if self._modules is None and not self._parameters:
            return None
        if self._num_ways * len(modules) > MOST_TRIES:
            return None
        return next((each for each in modules if not self._is_target(each)), None)

    def parts_of(self, module: str) -> list[str]:
        """Return the targeted parameters of a module, which may be wrapped once."""
        bare = module.removesuffix(INNER)
        return [
            part
            for part in _PARAMETERS
            if any(end in self._parameters for end in ends_of(f"{bare}.{part}"))
        ]

    def _is_target(self, module: str) -> bool:
        # PEFT wraps a module with two targeted parameters twice.
        return self._has_module(module) or len(self.parts_of(module)) > module.endswith(INNER)

    def _has_module(self, module: str) -> bool:
        if self._modules is None or (
            self._excluded is not None and self._excluded.include_module(module)
        ):
            return False
        is_found = self._modules.include_module(module)
        is_whole = self._modules.pattern is not None or module in self._modules.names
        if not is_found or is_whole or self._layers is None:
            return is_found
        matches = (each.match(module) for each in self._numbers)
        number = next((each["idx"] for each in matches if each is not None), None)
        return number is not None and int(number) in self._layers

    def _read_modules(self, fields: JsonFields, name: str) -> _Modules | None:
        value = fields.values.get(name)
        if value is None or (not value and name == "exclude_modules"):
            return None
        if not isinstance(value, str):
            return _Modules(frozenset(_texts(fields, name)))
        key = ".*" if value.lower() == "all-linear" and name == "target_modules" else value
        return _Modules(frozenset(), self._compile(key))

    def _compile(self, key: str, before: str = "", after: str = "") -> re.Pattern[str] | None:
        try:
            pattern, num_ways = compile_pattern(key, before, after)
        except ValueError:
            self._num_ways = math.inf
            return None
        self._num_ways += num_ways
        return pattern


def _read_layers(fields: JsonFields) -> frozenset[int] | None:
    value = fields.values.get("layers_to_transform")
    layers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in layers):
        raise fields.fault("layers_to_transform", "whole numbers", value)
    return frozenset(layers) or None


def _texts(fields: JsonFields, name: str) -> list[str]:
    values = fields.values.get(name) or []
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise fields.fault(name, "a list of strings", values)
    return values
