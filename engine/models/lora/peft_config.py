# SPDX-License-Identifier: Apache-2.0
"""PeftConfig: the fields of an adapter_config.json (PEFT) that decide what an adapter computes.

An adapter adds `scale * B(A(x))` to the output of a matrix. A file of a method that computes
anything else is refused; the error names the method's field. A field that this module does not list
is refused too, unless it is unset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ....tiers.settings.format import format_value
from ....tiers.settings.values import ConfigError
from ..checkpoint.files import is_there
from ..checkpoint.json_fields import JsonFields, read_json
from .module_patterns import MOST_TRIES, MOST_WAYS, PatternValues
from .peft_targets import PeftTargets

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
MAX_ALPHA = 1e6
MAX_PATTERNS = 10_000

# Initialisations that change the base model's weights when the adapter is loaded.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INITIALISED = (True, False, "gaussian", "eva", "orthogonal")
# Fields of other methods, each with the method's name for the error.
_OTHER_METHODS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias in its matrices",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "modules_to_save": "whole saved modules",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "trainable_token_indices": "trained token embeddings",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# Fields without an effect on the computation, such as how the adapter was trained.
_NO_ARITHMETIC = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
))  # fmt: skip
_READ = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
    "init_lora_weights", "target_parameters", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern",
))  # fmt: skip


class Strength(NamedTuple):
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of an adapter_config.json that decide what an adapter computes."""

    where: str  # the file's path, for error messages
    rank: int
    alpha: float
    uses_root: bool  # scale is alpha / sqrt(rank) instead of alpha / rank
    ranks: PatternValues[int]
    alphas: PatternValues[float]
    targets: PeftTargets

    def check_count(self, num_modules: int) -> None:
        """Raises ConfigError if the patterns of this many modules may take for ever to match."""
        for name, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            num_tries = patterns.num_ways * num_modules
            if num_tries > MOST_TRIES:
                raise ConfigError(
                    f"{self.where}: {name} has patterns with {patterns.num_ways} ways to match, "
                    f"times {num_modules} modules {num_tries}; at most {MOST_TRIES} are tried: "
                    "name the modules instead of patterns"
                )

    def strength_of(self, module: str) -> Strength:
        """Return a module's rank and scale, by the patterns or else by `r` and `lora_alpha`."""
        rank = self.ranks.value_of(module, self.rank)
        alpha = self.alphas.value_of(module, self.alpha)
        return Strength(rank, alpha / (math.sqrt(rank) if self.uses_root else rank))


def read_peft_config(folder: Path) -> PeftConfig:
    """Read the adapter_config.json of a folder. Raises ConfigError with an unusable field."""
    path = folder / CONFIG_FILE
    if not is_there(path):
        raise ConfigError(f"{path} is missing; give the folder in which PEFT saved the adapter")
    return parse_peft_config(read_json(path))


def parse_peft_config(fields: JsonFields) -> PeftConfig:
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise fields.fault("peft_type", "LORA", kind)
    for name, method in _OTHER_METHODS.items():
        if fields.values.get(name):
            raise ConfigError(
                f"{fields.where}: {name} is set, and adapters with {method} are not computed here; "
                "merge the adapter into its base model and serve that"
            )
    if fields.text("bias", "none") != "none":
        raise ConfigError(
            f"{fields.where}: bias is {format_value(fields.values['bias'])}, and adapters that "
            "change biases are not computed here; train it with bias none, or merge it"
        )
    _check_initialised(fields)
    for name, value in fields.values.items():
        if name not in _READ | _NO_ARITHMETIC and name not in _OTHER_METHODS and value:
            raise ConfigError(
                f"{fields.where}: {format_value(name)} is a field that this version does not know, "
                "so the adapter may compute something else; merge the adapter and serve that"
            )
    return PeftConfig(
        where=fields.where,
        rank=fields.integer("r"),
        alpha=_alpha(fields, "lora_alpha", fields.values["lora_alpha"])
        if fields.has("lora_alpha")
        else 8.0,
        uses_root=fields.boolean("use_rslora", False),
        ranks=_pattern_values(fields, "rank_pattern", JsonFields.integer),
        alphas=_pattern_values(
            fields, "alpha_pattern", lambda inner, key: _alpha(inner, key, inner.values[key])
        ),
        targets=PeftTargets(fields),
    )


def _check_initialised(fields: JsonFields) -> None:
    how = fields.values.get("init_lora_weights")
    if how is None or how in _INITIALISED:
        return
    if isinstance(how, str) and how.lower().startswith(_CHANGED_BASE):
        raise ConfigError(
            f"{fields.where}: init_lora_weights is {format_value(how)}, so the adapter belongs to "
            "a base model whose weights were changed with it; convert it with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it"
        )
    raise fields.fault("init_lora_weights", "true, false, gaussian, eva or orthogonal", how)


def _alpha(fields: JsonFields, name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_ALPHA:  # also True for NaN
        raise fields.fault(name, f"a number from -{MAX_ALPHA:g} to {MAX_ALPHA:g}", value)
    return float(value)


def _pattern_values(
    fields: JsonFields, name: str, read: Callable[[JsonFields, str], T]
) -> PatternValues[T]:
    """Read the field `name`, an object of values by patterns; `read` reads a value."""
    inner, found = fields.inner(name), PatternValues[T]()
    if len(inner.values) > MAX_PATTERNS:
        raise ConfigError(
            f"{fields.where}: {name} has {len(inner.values)} patterns and at most {MAX_PATTERNS} "
            "are read; name modules by fewer patterns"
        )
    for key in inner.values:
        value = read(inner, key)
        try:
            found.add(key, value)
        except ValueError as error:
            raise ConfigError(
                f"{fields.where}: the pattern {format_value(key)} of {name} is {error}; name the "
                "modules"
            ) from error
        if found.num_ways > MOST_WAYS:
            raise ConfigError(
                f"{fields.where}: the patterns of {name} have together more than {MOST_WAYS} ways "
                "to match, which may take for ever; name the modules"
            )
    return found
