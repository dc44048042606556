# SPDX-License-Identifier: Apache-2.0
"""ExpertSpec: the mixture of experts in a model's layers, from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.json_fields import JsonFields

MAX_EXPERTS = 4096
# Two keys for the number of experts: transformers may write either key for the same family.
COUNT_KEYS = ("num_experts", "num_local_experts")
EXPERT_KEYS = (*COUNT_KEYS, "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts: a router chooses `num_per_token` of `num_experts` MLPs for each token,
    and weighs the results of these MLPs by the softmax of the router's scores."""

    num_experts: int
    num_per_token: int
    size: int  # rows of an expert's gate
    normalises: bool  # whether the weights of the chosen experts are divided by their sum
    layers: tuple[int, ...]  # layers with experts; other layers have an MLP
    shared_size: int = 0  # rows of the shared expert's gate; 0: no shared expert


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """The experts of a model family: constants of its code in transformers, and defaults for keys
    that config.json lacks."""

    default_count: int
    default_per_token: int
    size_key: str = "moe_intermediate_size"
    default_size: int | None = None  # None: config.json must have it
    normalises: bool | None = None  # None: config.json's norm_topk_prob decides
    default_normalises: bool = False  # default of norm_topk_prob
    default_shared_size: int = 0  # 0: the family has no shared expert
    shared_size_key: str = "shared_expert_intermediate_size"
    gates_shared: bool = True  # whether a gate multiplies the shared expert's result
    may_lack: bool = False  # whether a model of the family may have no experts
    mixes_dense: bool = False  # whether mlp_only_layers and decoder_sparse_step are read


def parse_experts(config: JsonFields, family: ExpertFamily, num_layers: int) -> ExpertSpec | None:
    """Read the `ExpertSpec` of a model; return None if no layer has experts. Raises ConfigError
    with the key that has an unusable value."""
    count_key = next((key for key in COUNT_KEYS if config.has(key)), COUNT_KEYS[0])
    least = 0 if family.may_lack else 1
    count = config.integer(count_key, family.default_count, minimum=least, maximum=MAX_EXPERTS)
    for key in COUNT_KEYS:
        if config.has(key) and config.values[key] != count:
            raise config.fault(key, f"{count}, as {count_key} says", config.values[key])
    if not count:
        return None
    per_token = config.integer(
        "num_experts_per_tok", min(count, family.default_per_token), maximum=count
    )
    layers = _sparse_layers(config, family, num_layers)
    if not layers:
        return None
    shared = 0
    if family.default_shared_size:
        shared = config.integer(family.shared_size_key, family.default_shared_size)
    size = family.size_key
    normalises = family.normalises
    if normalises is None:
        normalises = config.boolean("norm_topk_prob", family.default_normalises)
    return ExpertSpec(
        num_experts=count,
        num_per_token=per_token,
        size=config.integer(size) if family.default_size is None
        else config.integer(size, family.default_size),
        normalises=normalises,
        layers=layers,
        shared_size=shared,
    )  # fmt: skip


def _sparse_layers(config: JsonFields, family: ExpertFamily, num_layers: int) -> tuple[int, ...]:
    if not family.mixes_dense:
        return tuple(range(num_layers))
    given = config.values.get("mlp_only_layers") or []
    dense = given if isinstance(given, list) else [given]
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in dense):
        raise config.fault("mlp_only_layers", f"a list of layers below {num_layers}", given)
    step = config.integer("decoder_sparse_step", 1, maximum=num_layers)
    return tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
